/*
 * wakeup.h: how processes and sessions wake each other.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_WAKEUP_H
#define TENSILE_WAKEUP_H

#include "port/atomics.h"
#include "storage/latch.h"

/* The latch of a process, and a count of the times it was woken (wait.c). */
typedef struct TensileWakeup
{
	Latch	   *latch;			/* NULL: no process */
	pg_atomic_uint64 count;
} TensileWakeup;

/*
 * The entry in shared memory by which others wake this process; NULL in
 * sessions.
 */
extern TensileWakeup *tensile_my_wakeup(void);

/*
 * Wakes a process from its wait.  Caller holds shared->lock, at least shared.
 */
extern void tensile_wake(TensileWakeup *wakeup);

/* Wakes the sessions in tensile_worker._wait_for_change (job_change.c). */
extern void tensile_announce_job_change(void);

#endif
