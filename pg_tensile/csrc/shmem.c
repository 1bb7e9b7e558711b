/*
 * shmem.c: shared memory and the jobs' slots.
 *
 * A slot is the right to run one job: FREE -> RESERVED (by the controller, which registers a background worker) ->
 * ATTACHED (by that worker, before it connects) -> FREE (by the worker's exit callback, whatever ended it). A worker that
 * never attaches, because the postmaster could not fork it, would leave its reservation behind: the controller keeps the
 * worker's handle and frees the slot once the postmaster says that the worker is gone. Reservations of a controller that
 * has died itself have no handle: they expire. A worker that comes too late finds another job in its slot, or none, and exits.
 *
 * A session that explains a training job has an executor like a worker, so it takes a slot too: one of job 0, ATTACHED.
 *
 * A slot that was freed remembers whose it was and how its worker left, until it is reserved again.
 *
 * Memory and locks: see pg_tensile.h. A crash of any process attached to shared memory makes the postmaster build it
 * anew, so a slot never outlives its process.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_authid.h"
#include "funcapi.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/shmem.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "pg_tensile.h"

#define RESERVATION_EXPIRES_MS (30 * 1000)
#define FIXED_LOCKS 2			/* shared->lock and shared->predictions_lock */

PG_FUNCTION_INFO_V1(tensile_launch_worker);
PG_FUNCTION_INFO_V1(tensile_job_slots);
PG_FUNCTION_INFO_V1(tensile_free_slots);
PG_FUNCTION_INFO_V1(tensile_worker_end);

TensileShared *tensile_shared = NULL;

static shmem_request_hook_type previous_shmem_request = NULL;
static shmem_startup_hook_type previous_shmem_startup = NULL;

/* The workers that this controller has registered, by slot. */
static BackgroundWorkerHandle *handles[TENSILE_MAX_JOBS];

/* ---- layout ---- */

static Size
slots_size(void)
{
	return MAXALIGN(add_size(offsetof(TensileShared, slots), mul_size(tensile_max_jobs, sizeof(TensileSlot))));
}

static Size
shared_size(void)
{
	return add_size(slots_size(), mul_size(mul_size(tensile_max_jobs, tensile_plan_events), sizeof(TensilePlanEvent)));
}

static void
request_shmem(void)
{
	if (previous_shmem_request)
		previous_shmem_request();
	RequestAddinShmemSpace(shared_size());
	RequestNamedLWLockTranche(TENSILE_EXTENSION, FIXED_LOCKS + tensile_max_jobs);
}

static void
init_wakeup(TensileWakeup *wakeup)
{
	wakeup->latch = NULL;
	pg_atomic_init_u64(&wakeup->count, 0);
}

/* Everything but the event rows, which are written before they are read. */
static void
init_shared(void)
{
	LWLockPadded *locks = GetNamedLWLockTranche(TENSILE_EXTENSION);

	memset(tensile_shared, 0, slots_size());
	tensile_shared->lock = &locks[0].lock;
	tensile_shared->predictions_lock = &locks[1].lock;
	pg_atomic_init_u64(&tensile_shared->models_generation, 0);
	pg_atomic_init_u64(&tensile_shared->drops, 0);
	pg_atomic_init_u64(&tensile_shared->installs, 0);
	pg_atomic_init_u64(&tensile_shared->changes, 0);
	ConditionVariableInit(&tensile_shared->job_changed);
	for (int i = 0; i < TENSILE_N_SINGLETONS; i++)
		init_wakeup(&tensile_shared->singletons[i].wakeup);
	for (int i = 0; i < TENSILE_MAX_PREDICTIONS; i++)
	{
		pg_atomic_init_u64(&tensile_shared->predictions[i].rows, 0);
		pg_atomic_init_u64(&tensile_shared->predictions[i].requests, 0);
		pg_atomic_init_u64(&tensile_shared->predictions[i].unknown_categories, 0);
		pg_atomic_init_u64(&tensile_shared->predictions[i].last_used, 0);
	}
	tensile_shared->max_jobs = tensile_max_jobs;
	tensile_shared->plan_events = tensile_plan_events;
	tensile_shared->events = (TensilePlanEvent *) ((char *) tensile_shared + slots_size());
	for (int i = 0; i < tensile_max_jobs; i++)
	{
		init_wakeup(&tensile_shared->slots[i].wakeup);
		tensile_shared->slots[i].lock = &locks[FIXED_LOCKS + i].lock;
	}
}

static void
startup_shmem(void)
{
	bool		found;

	if (previous_shmem_startup)
		previous_shmem_startup();
	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	tensile_shared = ShmemInitStruct(TENSILE_EXTENSION, shared_size(), &found);
	if (!found)
		init_shared();
	LWLockRelease(AddinShmemInitLock);
}

void
tensile_install_shmem_hooks(void)
{
	previous_shmem_request = shmem_request_hook;
	shmem_request_hook = request_shmem;
	previous_shmem_startup = shmem_startup_hook;
	shmem_startup_hook = startup_shmem;
}

void
tensile_require_preload(void)
{
	if (tensile_shared == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("pg_tensile is not in shared_preload_libraries"),
				 errhint("Add pg_tensile to shared_preload_libraries in postgresql.conf and restart the server.")));
}

/* ---- slots ---- */

void
tensile_wake(TensileWakeup *wakeup)
{
	pg_atomic_fetch_add_u64(&wakeup->count, 1);
	if (wakeup->latch)
		SetLatch(wakeup->latch);
}

/*
 * In use, by a job of this database? Sessions have slots without a job. While the server moves to another
 * pg_tensile.database, slots of the old one are still there, and numbers of jobs are unique only within a database.
 */
static bool
slot_is_here(const TensileSlot *slot)
{
	return slot->state != SLOT_FREE && slot->job != 0 && slot->database == MyDatabaseId;
}

TensileSlot *
tensile_slot_of_job(int64 job)
{
	for (int i = 0; i < tensile_shared->max_jobs; i++)
		if (slot_is_here(&tensile_shared->slots[i]) && tensile_shared->slots[i].job == job)
			return &tensile_shared->slots[i];
	return NULL;
}

void
tensile_clear_slot(TensileSlot *slot)
{
	slot->state = SLOT_FREE;
	slot->job = 0;
	slot->pid = 0;
	slot->feeding = false;
	slot->interrupted = false;
	slot->evicted = false;
	slot->wakeup.latch = NULL;
	slot->device = -1;
	slot->granted_bytes = 0;
	slot->overhead_bytes = 0;
	slot->acknowledged = 0;
}

/* A slot for the job (0: for this session), RESERVED; NULL when all are taken. Caller holds shared->lock exclusively. */
static TensileSlot *
reserve_slot(int64 job, Oid role)
{
	for (int i = 0; i < tensile_shared->max_jobs; i++)
	{
		TensileSlot *slot = &tensile_shared->slots[i];

		if (slot->state != SLOT_FREE)
			continue;
		tensile_clear_slot(slot);
		slot->state = SLOT_RESERVED;
		slot->job = job;
		slot->role = role;
		slot->database = MyDatabaseId;
		slot->since = GetCurrentTimestamp();
		slot->last_job = 0;
		slot->last_error[0] = '\0';
		LWLockAcquire(slot->lock, LW_EXCLUSIVE);
		memset(&slot->progress, 0, sizeof(slot->progress));
		memset(&slot->plan, 0, sizeof(slot->plan));
		LWLockRelease(slot->lock);
		return slot;
	}
	return NULL;
}

TensileSlot *
tensile_slot_attach(int index, int64 job)
{
	TensileSlot *slot;
	bool		attached = false;

	if (index < 0 || index >= tensile_shared->max_jobs)
		return NULL;
	slot = &tensile_shared->slots[index];
	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	if (slot->state == SLOT_RESERVED && slot->job == job)
	{
		slot->state = SLOT_ATTACHED;
		slot->pid = MyProcPid;
		slot->since = GetCurrentTimestamp();
		slot->wakeup.latch = MyLatch;
		attached = true;
	}
	LWLockRelease(tensile_shared->lock);
	return attached ? slot : NULL;
}

void
tensile_slot_free(TensileSlot *slot)
{
	bool		terminated = tensile_terminated();

	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	if (slot->state == SLOT_ATTACHED && slot->pid == MyProcPid)
	{
		slot->last_job = slot->job;
		slot->last_database = slot->database;
		slot->last_terminated = terminated;
		tensile_clear_slot(slot);
		tensile_wake(&tensile_shared->singletons[TENSILE_CONTROLLER].wakeup);
		tensile_wake(&tensile_shared->singletons[TENSILE_SCHEDULER].wakeup);
	}
	LWLockRelease(tensile_shared->lock);
}

TensileSlot *
tensile_copy_slots(int *nslots)
{
	TensileSlot *copy = palloc(tensile_shared->max_jobs * sizeof(TensileSlot));

	*nslots = 0;
	LWLockAcquire(tensile_shared->lock, LW_SHARED);
	for (int i = 0; i < tensile_shared->max_jobs; i++)
	{
		TensileSlot *slot = &tensile_shared->slots[i];

		if (!slot_is_here(slot))
			continue;
		LWLockAcquire(slot->lock, LW_SHARED);
		copy[(*nslots)++] = *slot;
		LWLockRelease(slot->lock);
	}
	LWLockRelease(tensile_shared->lock);
	return copy;
}

bool
tensile_role_visible(Oid role)
{
	return has_privs_of_role(GetUserId(), role) || has_privs_of_role(GetUserId(), ROLE_PG_READ_ALL_STATS);
}

/* ---- a session's slot ---- */

static TensileSlot *session_slot = NULL;

static void
free_session_slot(int code, Datum arg)
{
	LWLockReleaseAll();
	tensile_session_slot_free();
}

void
tensile_session_slot_take(void)
{
	static bool registered = false;

	Assert(session_slot == NULL);
	if (!registered)
		before_shmem_exit(free_session_slot, (Datum) 0);
	registered = true;
	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	session_slot = reserve_slot(0, GetUserId());
	if (session_slot != NULL)
	{
		session_slot->state = SLOT_ATTACHED;
		session_slot->pid = MyProcPid;
	}
	LWLockRelease(tensile_shared->lock);
	if (session_slot == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_RESOURCES),
				 errmsg("no job slot is free"),
				 errdetail("Explaining a job takes one of the %d slots of pg_tensile.max_jobs, as running it does.",
						   tensile_shared->max_jobs),
				 errhint("Try again when a job has ended, or increase pg_tensile.max_jobs and restart the server.")));
}

void
tensile_session_slot_free(void)
{
	if (session_slot != NULL)
		tensile_slot_free(session_slot);
	session_slot = NULL;
}

/* ---- launching (controller only) ---- */

/* Whether the worker of this reservation has ended, or the process that waited for it has. */
static bool
reservation_lost(int index)
{
	pid_t		pid;

	if (handles[index] != NULL)
		return GetBackgroundWorkerPid(handles[index], &pid) == BGWH_STOPPED;
	return TimestampDifferenceExceeds(tensile_shared->slots[index].since, GetCurrentTimestamp(), RESERVATION_EXPIRES_MS);
}

static void
forget_handle(int index)
{
	if (handles[index] != NULL)
		pfree(handles[index]);
	handles[index] = NULL;
}

/* Frees the slots whose workers never came. */
static void
free_lost_reservations(void)
{
	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < tensile_shared->max_jobs; i++)
	{
		TensileSlot *slot = &tensile_shared->slots[i];

		if (slot->state == SLOT_RESERVED && reservation_lost(i))
			tensile_clear_slot(slot);
		if (slot->state == SLOT_FREE)
			forget_handle(i);
	}
	LWLockRelease(tensile_shared->lock);
}

/* Registers the worker of a reserved slot; false when no background worker is free. */
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

/* tensile._launch_worker(job, owner): see docs/internals.md. A job that has a slot is 'started'. */
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
	slot = exists ? NULL : reserve_slot(job, role);
	LWLockRelease(tensile_shared->lock);
	if (exists)
		PG_RETURN_TEXT_P(cstring_to_text("started"));
	if (slot == NULL)
		PG_RETURN_TEXT_P(cstring_to_text("no_slot"));
	if (register_worker(slot, job))
		PG_RETURN_TEXT_P(cstring_to_text("started"));

	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	tensile_clear_slot(slot);
	LWLockRelease(tensile_shared->lock);
	PG_RETURN_TEXT_P(cstring_to_text("no_worker"));
}

/* tensile._free_slots(): how many jobs may be launched; sessions that explain take slots, too. */
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

/* What the last worker of the job reported before it left, "" if nothing; `terminated`: by pg_terminate_backend. */
static char *
find_last_error(int64 job, bool *terminated)
{
	char	   *error = palloc0(TENSILE_LAST_ERROR_LENGTH);

	*terminated = false;
	LWLockAcquire(tensile_shared->lock, LW_SHARED);
	for (int i = 0; i < tensile_shared->max_jobs; i++)
	{
		TensileSlot *slot = &tensile_shared->slots[i];

		if (slot->state != SLOT_FREE || slot->last_job != job || slot->last_database != MyDatabaseId)
			continue;
		strlcpy(error, slot->last_error, TENSILE_LAST_ERROR_LENGTH);
		*terminated = slot->last_terminated;
	}
	LWLockRelease(tensile_shared->lock);
	error[pg_mbcliplen(error, strlen(error), TENSILE_LAST_ERROR_LENGTH - 1)] = '\0';
	if (!pg_verifymbstr(error, strlen(error), true))	/* of a session whose encoding was not known yet */
		*error = '\0';
	return error;
}

/* tensile._worker_end(job), a row (terminated, error): how the last worker of the job left */
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

/* tensile._job_slots() -> (job, pid, state, seconds in that state) */
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
