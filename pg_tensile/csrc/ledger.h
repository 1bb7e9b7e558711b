/*
 * ledger.h: the device ledger, which divides the memory of each device among
 * jobs and predictions.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_LEDGER_H
#define TENSILE_LEDGER_H

#include "slot.h"

#define TENSILE_MAX_DEVICES 16

typedef struct TensileDevice
{
	char		name[NAMEDATALEN];	/* "": free entry */
	int64		total_bytes;	/* 0: not known yet */
	float8		out_bytes_per_s;	/* over the link to the host and back; */
	float8		in_bytes_per_s; /* 0: no job has used the device yet */
	int64		inference_bytes;	/* taken by the predictor */
	int64		inference_wanted;	/* that the predictor waits for; 0: nothing */
} TensileDevice;

/* Callers of these hold shared->lock exclusively. */

/*
 * Grants device memory to the slot; false, and no change, without room for it.
 */
extern bool tensile_ledger_enter(TensileSlot *slot, int64 granted_bytes);

/* Removes the predictor's entries, when the predictor has ended. */
extern void tensile_ledger_forget_inference(void);

#endif
