/*
 * job_change.c: sessions that wait for a change of a job.
 *
 * A counter in shared memory rises with every change, and a condition variable
 * wakes the sessions (wakeup.c).
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "fmgr.h"
#include "miscadmin.h"
#include "storage/condition_variable.h"
#include "utils/timestamp.h"

#include "processes/wait.h"
#include "state/shmem.h"

PG_FUNCTION_INFO_V1(tensile_wait_for_change);

/*
 * The number of changes when tensile_worker._wait_for_change last returned.  At first
 * none, so that the first call returns at once.
 */
static uint64 seen_changes = PG_UINT64_MAX;

/*
 * tensile_worker._wait_for_change(timeout_ms): returns when a job has changed since
 * the last call in this session returned.  So a caller that looks, waits and
 * looks again misses nothing.
 */
Datum
tensile_wait_for_change(PG_FUNCTION_ARGS)
{
	int			timeout_ms = PG_GETARG_INT32(0);
	TimestampTz start = GetCurrentTimestamp();
	long		remaining = timeout_ms;

	tensile_require_preload();
	ConditionVariablePrepareToSleep(&tensile_shared->job_changed);
	while (pg_atomic_read_u64(&tensile_shared->changes) == seen_changes && remaining > 0)
	{
		if (ConditionVariableTimedSleep(&tensile_shared->job_changed, remaining,
										tensile_wait_event(TENSILE_WAIT_JOB)))
			break;
		remaining = timeout_ms - TimestampDifferenceMilliseconds(start, GetCurrentTimestamp());
	}
	ConditionVariableCancelSleep();
	seen_changes = pg_atomic_read_u64(&tensile_shared->changes);
	PG_RETURN_VOID();
}
