/*
 * memory_flow.h: jobs whose memory flows: they have no constant grant, but ask
 * before each group of steps.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_MEMORY_FLOW_H
#define TENSILE_MEMORY_FLOW_H

#include "state/banker.h"
#include "state/slot.h"

/* ---- callers hold shared->lock exclusively ---- */

/*
 * The bytes without which the device's flowing jobs do not fit any more, and
 * without which their state is not safe now; 0 if there are none.
 */
extern void tensile_memory_flow_needs(int device, int64 *fit_bytes, int64 *safe_bytes);

/* Wakes the workers of this device that wait for a group. */
extern void tensile_memory_flow_wake(int device);

/* Frees all that the slot holds of the memory that flows. */
extern void tensile_memory_flow_clear(TensileSlot *slot);

/*
 * Has this worker's job take part with these groups, in place of its constant
 * grant or of other groups.
 */
extern void tensile_memory_flow_adopt(uint64 generation, const TensileFlow *groups);

/* Claims something for this worker's job, which waits for it from now on. */
extern void tensile_memory_flow_claim(TensileClaimKind kind, int64 constant_bytes);

/* ---- of this worker's job; these take the lock themselves ---- */

/* Lets the job have what it claims; false if it claims nothing or has to wait. */
extern bool tensile_memory_flow_grant(void);

/*
 * Marks the jobs that this one has waited for longer than
 * pg_tensile.flow_timeout, and wakes their workers.
 */
extern void tensile_memory_flow_mark_late(void);

#endif
