/*
 * process.c: which process of pg_tensile the current one is, and what all of
 * them have in common.
 *
 * A singleton occupies an entry in shared memory from before it connects to a
 * database until its exit callback, whatever has ended it.  A worker occupies
 * a job slot in the same way (slot.c).
 *
 * Functions that only one kind of process may call check that here.  A worker
 * may not call them while it runs its training query, because that executes
 * functions of the submitter.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include <fcntl.h>
#include <unistd.h>

#include "fmgr.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "utils/builtins.h"
#include "utils/pidfile.h"
#include "utils/timestamp.h"

#include "base/library.h"
#include "processes/wait.h"
#include "state/extension.h"
#include "state/identity.h"
#include "state/ledger.h"
#include "state/shmem.h"
#include "state/slot.h"

PG_FUNCTION_INFO_V1(tensile_my_job);
PG_FUNCTION_INFO_V1(tensile_my_process);
PG_FUNCTION_INFO_V1(tensile_stop_cause);

TensileProcessKind tensile_process = TENSILE_NO_PROCESS;

static const char *const process_names[] = {
	"launcher", "controller", "scheduler", "inference", "worker"
};

static TensileOutcome my_outcome = TENSILE_FAILED;

/* ---- identity ---- */

const char *
tensile_process_name(TensileProcessKind kind)
{
	return process_names[kind];
}

bool
tensile_in_worker(void)
{
	return tensile_process == TENSILE_WORKER;
}

/*
 * Does this worker execute code of the submitter?  It does so in
 * tensile_feed_in_worker only: not even what is called there, as a SECURITY
 * DEFINER function, leaves the restricted operation.
 */
static bool
runs_training_query(void)
{
	return tensile_in_worker() && InSecurityRestrictedOperation();
}

void
tensile_require_process(TensileProcessKind kind)
{
	tensile_require_preload();
	if (tensile_process != kind || runs_training_query())
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("only the pg_tensile %s may call this function", process_names[kind])));
	tensile_require_extension();
}

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

/* tensile._my_job(): the job of this worker */
Datum
tensile_my_job(PG_FUNCTION_ARGS)
{
	tensile_require_process(TENSILE_WORKER);
	PG_RETURN_INT64(tensile_my_slot->job);
}

/* tensile._process(): the name of this kind of process */
Datum
tensile_my_process(PG_FUNCTION_ARGS)
{
	tensile_require_preload();
	if (tensile_process == TENSILE_NO_PROCESS || runs_training_query())
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("only processes of pg_tensile may call this function")));
	PG_RETURN_TEXT_P(cstring_to_text(process_names[tensile_process]));
}

/* ---- stopping ---- */

/*
 * Reads the state that the postmaster writes into its lock file before it
 * signals anybody.  Does not allocate, because exit callbacks call it.
 */
static bool
server_is_stopping(void)
{
	char		buffer[1024];
	char	   *line = buffer;
	int			fd = open("postmaster.pid", O_RDONLY);
	ssize_t		length = fd >= 0 ? read(fd, buffer, sizeof(buffer) - 1) : -1;

	if (fd >= 0)
		close(fd);
	if (length < 0)
		return true;			/* the postmaster is gone */
	buffer[length] = '\0';
	for (int i = 1; i < LOCK_FILE_LINE_PM_STATUS && line != NULL; i++)
	{
		line = strchr(line, '\n');
		line = line ? line + 1 : NULL;
	}
	return line != NULL && strncmp(line, PM_STATUS_STOPPING, strlen(PM_STATUS_STOPPING)) == 0;
}

bool
tensile_terminated(void)
{
	return tensile_in_worker() && tensile_stop_received() && !tensile_my_slot->evicted &&
		!server_is_stopping();
}

/*
 * tensile._stop_cause(): the sender of the worker's SIGTERM: the server that
 * stops, the launcher (after release_database or a change of the setting), or
 * pg_terminate_backend
 */
Datum
tensile_stop_cause(PG_FUNCTION_ARGS)
{
	const char *cause = "server";

	tensile_require_process(TENSILE_WORKER);
	if (tensile_my_slot->evicted)
		cause = tensile_shared->released == MyDatabaseId ? "release" : "launcher";
	else if (tensile_terminated())
		cause = "terminated";
	PG_RETURN_TEXT_P(cstring_to_text(cause));
}

/* ---- singletons ---- */

void
tensile_singleton_set_outcome(TensileOutcome outcome)
{
	my_outcome = outcome;
}

/* Leaves the entry in shared memory; an exit callback. */
static void
singleton_detach(int code, Datum kind)
{
	TensileSingleton *self = &tensile_shared->singletons[DatumGetInt32(kind)];

	LWLockReleaseAll();
	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	self->pid = 0;
	self->wakeup.latch = NULL;
	self->ended_at = GetCurrentTimestamp();
	self->outcome = my_outcome;
	if (DatumGetInt32(kind) == TENSILE_INFERENCE)
	{
		tensile_ledger_forget_inference();
		tensile_shared->nloaded = 0;
	}
	tensile_wake(&tensile_shared->singletons[TENSILE_LAUNCHER].wakeup);
	LWLockRelease(tensile_shared->lock);
}

bool
tensile_singleton_attach(TensileProcessKind kind, Oid database)
{
	TensileSingleton *self = &tensile_shared->singletons[kind];
	bool		free;

	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	free = self->pid == 0 &&
		(!OidIsValid(database) || database != tensile_shared->released);
	if (free)
	{
		self->pid = MyProcPid;
		self->database = database;
		self->started_at = GetCurrentTimestamp();
		self->requested_at = 0;
		self->wakeup.latch = MyLatch;
	}
	LWLockRelease(tensile_shared->lock);
	if (!free)
		return false;
	tensile_process = kind;
	before_shmem_exit(singleton_detach, Int32GetDatum(kind));
	return true;
}

/* ---- registering ---- */

void
tensile_describe_worker(BackgroundWorker *worker, TensileProcessKind kind, int64 job)
{
	memset(worker, 0, sizeof(*worker));
	snprintf(worker->bgw_type, sizeof(worker->bgw_type), "pg_tensile %s", process_names[kind]);
	if (kind == TENSILE_WORKER)
		snprintf(worker->bgw_name, sizeof(worker->bgw_name),
				 "pg_tensile worker job " INT64_FORMAT, job);
	else
		strlcpy(worker->bgw_name, worker->bgw_type, sizeof(worker->bgw_name));
	worker->bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;

	/*
	 * A standby makes predictions.  Processes for training are registered
	 * there as well, and started by the postmaster after a promotion.
	 */
	worker->bgw_start_time = kind == TENSILE_LAUNCHER || kind == TENSILE_INFERENCE ?
		BgWorkerStart_ConsistentState : BgWorkerStart_RecoveryFinished;
	worker->bgw_restart_time = BGW_NEVER_RESTART;
	strlcpy(worker->bgw_library_name, TENSILE_LIBRARY, sizeof(worker->bgw_library_name));
	snprintf(worker->bgw_function_name, sizeof(worker->bgw_function_name),
			 "tensile_%s_main", process_names[kind]);
	memcpy(worker->bgw_extra, &job, sizeof(job));
}
