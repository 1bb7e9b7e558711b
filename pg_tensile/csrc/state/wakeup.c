/*
 * wakeup.c: how processes and sessions wake each other.
 *
 * Background processes have a latch and a count each.  Sessions that wait for
 * a change of a job share a counter, which rises with every change, and a
 * condition variable.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "base/process_kind.h"
#include "state/shmem.h"
#include "state/wakeup.h"

TensileWakeup *
tensile_my_wakeup(void)
{
	if (tensile_process == TENSILE_WORKER)
		return &tensile_my_slot->wakeup;
	if (tensile_process < TENSILE_N_SINGLETONS)
		return &tensile_shared->singletons[tensile_process].wakeup;
	return NULL;
}

void
tensile_wake(TensileWakeup *wakeup)
{
	pg_atomic_fetch_add_u64(&wakeup->count, 1);
	if (wakeup->latch)
		SetLatch(wakeup->latch);
}

void
tensile_announce_job_change(void)
{
	pg_atomic_fetch_add_u64(&tensile_shared->changes, 1);
	ConditionVariableBroadcast(&tensile_shared->job_changed);
}
