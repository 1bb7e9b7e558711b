/*
 * inference.c: starting the inference process.
 *
 * It runs only when predictions are made: the session that finds no predictor
 * registers it, and other sessions that look for it meanwhile see in shared
 * memory that it is on its way.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/timestamp.h"

#include "extension.h"
#include "inference.h"
#include "process.h"
#include "shmem.h"

#define PENDING_MS (10 * 1000)	/* then a registration without effect is repeated */
#define BACKOFF_MS (5 * 1000)	/* between the end of a process and the next one */

/*
 * Claims the registration of the inference process, unless it runs, is on its
 * way, or has ended a moment ago.
 */
static bool
claim_inference(void)
{
	TensileSingleton *inference = &tensile_shared->singletons[TENSILE_INFERENCE];
	TimestampTz now = GetCurrentTimestamp();
	bool		claimed;

	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	claimed = inference->pid == 0 &&
		TimestampDifferenceExceeds(inference->requested_at, now, PENDING_MS) &&
		TimestampDifferenceExceeds(inference->ended_at, now, BACKOFF_MS);
	if (claimed)
		inference->requested_at = now;
	LWLockRelease(tensile_shared->lock);
	return claimed;
}

void
tensile_start_inference(void)
{
	BackgroundWorker worker;

	tensile_require_preload();
	tensile_require_database();
	if (!claim_inference())
		return;
	tensile_describe_worker(&worker, TENSILE_INFERENCE, 0);
	worker.bgw_main_arg = ObjectIdGetDatum(MyDatabaseId);
	if (RegisterDynamicBackgroundWorker(&worker, NULL))
		return;

	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	tensile_shared->singletons[TENSILE_INFERENCE].requested_at = 0;
	LWLockRelease(tensile_shared->lock);
	ereport(ERROR,
			(errcode(ERRCODE_INSUFFICIENT_RESOURCES),
			 errmsg("no background worker is free for the predictor"),
			 errhint("Increase max_worker_processes, "
					 "or try again when other workers have ended.")));
}
