/*
 * ledger.h: the device ledger, which divides the memory of each device among
 * jobs and predictions.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_LEDGER_H
#define TENSILE_LEDGER_H

#include "state/slot.h"

/*
 * Grants device memory to the slot; false, and no change, without room for it.
 * A job whose memory flows gets nothing, and needs nothing.  Caller holds
 * shared->lock exclusively, as that of the next.
 */
extern bool tensile_ledger_enter(TensileSlot *slot, int64 granted_bytes);

/* Removes the predictor's entries, when the predictor has ended. */
extern void tensile_ledger_forget_inference(void);

#endif
