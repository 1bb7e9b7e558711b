/*
 * registration.c: registering the background processes of pg_tensile with the
 * postmaster.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "base/compat.h"
#include "base/library.h"
#include "processes/registration.h"

void
tensile_describe_worker(BackgroundWorker *worker, TensileProcessKind kind, int64 job)
{
	memset(worker, 0, sizeof(*worker));
	snprintf(worker->bgw_type, sizeof(worker->bgw_type), "pg_tensile %s",
			 tensile_process_name(kind));
	if (kind == TENSILE_WORKER)
		snprintf(worker->bgw_name, sizeof(worker->bgw_name),
				 "pg_tensile worker job " INT64_FORMAT, job);
	else
		strlcpy(worker->bgw_name, worker->bgw_type, sizeof(worker->bgw_name));
	worker->bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	/* The launcher is in no database. */
	if (kind != TENSILE_LAUNCHER)
		worker->bgw_flags |= BGWORKER_INTERRUPTIBLE;

	/*
	 * A standby makes predictions.  Processes for training are registered
	 * there as well, and started by the postmaster after a promotion.
	 */
	worker->bgw_start_time = kind == TENSILE_LAUNCHER || kind == TENSILE_INFERENCE ?
		BgWorkerStart_ConsistentState : BgWorkerStart_RecoveryFinished;
	worker->bgw_restart_time = BGW_NEVER_RESTART;
	strlcpy(worker->bgw_library_name, TENSILE_LIBRARY, sizeof(worker->bgw_library_name));
	snprintf(worker->bgw_function_name, sizeof(worker->bgw_function_name),
			 "tensile_%s_main", tensile_process_name(kind));
	memcpy(worker->bgw_extra, &job, sizeof(job));
}
