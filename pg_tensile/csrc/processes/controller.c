/*
 * controller.c: functions of the controller, which launches the workers of
 * jobs.
 *
 * A worker that never attaches to its slot, because the postmaster could not
 * fork it, would leave the reservation behind.  So the controller keeps the
 * handle of each worker that it has registered, and frees the slot once the
 * postmaster reports that the worker has ended.  Reservations of a controller
 * that has died have no handle: they expire.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "funcapi.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "base/guc.h"
#include "processes/registration.h"
#include "state/identity.h"
#include "state/shmem.h"
#include "state/slot.h"

#define RESERVATION_EXPIRES_MS (30 * 1000)

PG_FUNCTION_INFO_V1(tensile_launch_worker);
PG_FUNCTION_INFO_V1(tensile_job_slots);
PG_FUNCTION_INFO_V1(tensile_free_slots);
PG_FUNCTION_INFO_V1(tensile_worker_end);

/* Workers that this controller has registered, by slot. */
static BackgroundWorkerHandle *handles[TENSILE_MAX_JOBS];

/*
 * Has the worker of this reservation ended, or the controller that has
 * registered it?
 */
static bool
reservation_lost(int index)
{
	pid_t		pid;

	if (handles[index] != NULL)
		return GetBackgroundWorkerPid(handles[index], &pid) == BGWH_STOPPED;
	return TimestampDifferenceExceeds(tensile_shared->slots[index].since, GetCurrentTimestamp(),
									  RESERVATION_EXPIRES_MS);
}

static void
forget_handle(int index)
{
	if (handles[index] != NULL)
		pfree(handles[index]);
	handles[index] = NULL;
}

/* Frees the slots whose workers never attached. */
static void
free_lost_reservations(void)
{
	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < tensile_shared->max_jobs; i++)
	{
		TensileSlot *slot = &tensile_shared->slots[i];

		if (slot->state == SLOT_RESERVED && reservation_lost(i))
			tensile_slot_clear(slot);
		if (slot->state == SLOT_FREE)
			forget_handle(i);
	}
	LWLockRelease(tensile_shared->lock);
}

/*
 * Registers the worker of a reserved slot; false when no background worker is
 * free.
 */
static bool
register_worker(TensileSlot *slot, int64 job)
{
	int			index = slot - tensile_shared->slots;
	BackgroundWorker worker;
	MemoryContext old = MemoryContextSwitchTo(TopMemoryContext);
	bool		registered;

	tensile_describe_worker(&worker, TENSILE_WORKER, job);
	worker.bgw_main_arg = Int32GetDatum(index);
	worker.bgw_notify_pid = MyProcPid;
	forget_handle(index);
	registered = RegisterDynamicBackgroundWorker(&worker, &handles[index]);
	MemoryContextSwitchTo(old);
	return registered;
}

/*
 * tensile_internal._launch_worker(job, owner): 'started' (also if the job has a slot
 * already), 'no_slot' or 'no_worker'
 */
Datum
tensile_launch_worker(PG_FUNCTION_ARGS)
{
	int64		job = PG_GETARG_INT64(0);
	Oid			role = PG_GETARG_OID(1);
	TensileSlot *slot;
	bool		exists;

	tensile_require_process(TENSILE_CONTROLLER);
	free_lost_reservations();
	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	exists = tensile_slot_of_job(job) != NULL;
	slot = exists ? NULL : tensile_slot_reserve(job, role);
	LWLockRelease(tensile_shared->lock);
	if (exists)
		PG_RETURN_TEXT_P(cstring_to_text("started"));
	if (slot == NULL)
		PG_RETURN_TEXT_P(cstring_to_text("no_slot"));
	if (register_worker(slot, job))
		PG_RETURN_TEXT_P(cstring_to_text("started"));

	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	tensile_slot_clear(slot);
	LWLockRelease(tensile_shared->lock);
	PG_RETURN_TEXT_P(cstring_to_text("no_worker"));
}

/*
 * tensile_internal._free_slots(): the number of jobs that may be launched.  Sessions
 * that explain a job occupy slots, too.
 */
Datum
tensile_free_slots(PG_FUNCTION_ARGS)
{
	int			nfree = 0;

	tensile_require_process(TENSILE_CONTROLLER);
	LWLockAcquire(tensile_shared->lock, LW_SHARED);
	for (int i = 0; i < tensile_shared->max_jobs; i++)
		nfree += tensile_shared->slots[i].state == SLOT_FREE;
	LWLockRelease(tensile_shared->lock);
	PG_RETURN_INT32(nfree);
}

/*
 * The error that the last worker of the job reported before it ended, "" if
 * none.  `terminated`: it was ended by pg_terminate_backend.
 */
static char *
find_last_error(int64 job, bool *terminated)
{
	char	   *error = palloc0(TENSILE_LAST_ERROR_LENGTH);

	*terminated = false;
	LWLockAcquire(tensile_shared->lock, LW_SHARED);
	for (int i = 0; i < tensile_shared->max_jobs; i++)
	{
		TensileSlot *slot = &tensile_shared->slots[i];

		if (slot->state != SLOT_FREE || slot->last_job != job ||
			slot->last_database != MyDatabaseId)
			continue;
		strlcpy(error, slot->last_error, TENSILE_LAST_ERROR_LENGTH);
		*terminated = slot->last_terminated;
	}
	LWLockRelease(tensile_shared->lock);
	error[pg_mbcliplen(error, strlen(error), TENSILE_LAST_ERROR_LENGTH - 1)] = '\0';
	/* It may be of a session that did not know its encoding yet. */
	if (!pg_verifymbstr(error, strlen(error), true))
		*error = '\0';
	return error;
}

/*
 * tensile_internal._worker_end(job) -> (terminated, error): how the job's last worker
 * ended
 */
Datum
tensile_worker_end(PG_FUNCTION_ARGS)
{
	int64		job = PG_GETARG_INT64(0);
	TupleDesc	desc;
	Datum		values[2];
	bool		nulls[2] = {false};
	bool		terminated;
	char	   *error;

	tensile_require_process(TENSILE_CONTROLLER);
	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	error = find_last_error(job, &terminated);
	values[0] = BoolGetDatum(terminated);
	values[1] = CStringGetTextDatum(error);
	nulls[1] = *error == '\0';
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc), values, nulls)));
}

/* tensile_internal._job_slots() -> (job, pid, state, seconds in that state) */
Datum
tensile_job_slots(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	TensileSlot *slots;
	int			nslots;

	tensile_require_process(TENSILE_CONTROLLER);
	InitMaterializedSRF(fcinfo, 0);
	free_lost_reservations();
	slots = tensile_copy_slots(&nslots);
	for (int i = 0; i < nslots; i++)
	{
		TensileSlot *slot = &slots[i];
		Datum		values[4];
		bool		nulls[4] = {false};

		values[0] = Int64GetDatum(slot->job);
		values[1] = Int32GetDatum(slot->pid);
		nulls[1] = slot->pid == 0;
		values[2] = CStringGetTextDatum(slot->state == SLOT_RESERVED ? "reserved" : "attached");
		values[3] = Float8GetDatum((GetCurrentTimestamp() - slot->since) / 1e6);
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
	PG_RETURN_NULL();
}
