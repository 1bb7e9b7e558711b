/*
 * launcher.c: the static background worker, which keeps a controller and a
 * scheduler running in pg_tensile.database.
 *
 * The launcher is not connected to a database, so that it neither blocks DROP
 * DATABASE nor fails without the database.  The processes that it starts are,
 * and they end when the extension or the database is dropped, or the setting
 * changes.  Each pass of the launcher
 *	 1. looks for the database, and logs once if it does not exist;
 *	 2. stops the processes of pg_tensile in other databases;
 *	 3. starts the controller and the scheduler unless they run, are starting,
 *		or have to wait.
 * The time of a restart depends on how the process ended (plan_restart).
 * After an error it waits for 6 s, which is longer than DROP DATABASE ... WITH
 * (FORCE) waits for the processes that it terminates, and twice as long after
 * each further error.
 *
 * The launcher also runs on a standby, because the inference process does, and
 * may have to leave another database there, too.  The postmaster starts the
 * controller and the scheduler after a promotion (tensile_describe_worker).
 *
 * Shared memory says what runs, so a launcher that was restarted itself finds
 * the processes there.  Handles only say whether a registered process is still
 * starting.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include <signal.h>

#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_database.h"
#include "libpq/pqsignal.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "base/compat.h"
#include "base/guc.h"
#include "processes/launcher.h"
#include "processes/registration.h"
#include "processes/wait.h"
#include "state/shmem.h"
#include "state/singleton.h"
#include "state/slot.h"

#define LAUNCHER_RESTART_S 5
#define PASS_MS (30 * 1000)		/* between passes without another reason */
#define GONE_MS 1000			/* after the extension was dropped */
#define BACKOFF_MS (6 * 1000)	/* after the first error; doubles with each further one */
#define MAX_BACKOFF_MS (300 * 1000)
#define STEADY_MS (60 * 1000)	/* a run of that length resets the back-off */

PGDLLEXPORT void tensile_launcher_main(Datum main_arg);

/* A process that the launcher keeps running. */
typedef struct SupervisedProcess
{
	TensileProcessKind kind;
	BackgroundWorkerHandle *handle; /* NULL: not registered, or known to have ended */
	TimestampTz seen_end;		/* TensileSingleton.ended_at that set not_before */
	TimestampTz not_before;		/* time of the next start */
	bool		awaits_extension;	/* to be started when the extension is created */
	uint64		installs;		/* CREATE EXTENSIONs counted at the last start */
	int			failures;		/* in a row */
} SupervisedProcess;

static SupervisedProcess processes[] = {{TENSILE_CONTROLLER}, {TENSILE_SCHEDULER}};

/* Processes in other databases that have been sent a SIGTERM. */
static pid_t stopped_singletons[TENSILE_N_SINGLETONS];
static pid_t stopped_workers[TENSILE_MAX_JOBS];

/* ---- one log line per cause ---- */

typedef enum Cause
{
	CAUSE_NONE,
	NO_DATABASE,
	DATABASE_CLOSED,
	DATABASE_RELEASED,
	NO_BACKGROUND_WORKER
} Cause;

/* Does this cause differ from the last one?  Remembers it. */
static bool
is_news(Cause *last, Cause cause)
{
	bool		news = *last != cause;

	*last = cause;
	return news;
}

/* ---- the database ---- */

/*
 * The OID of the database with that name; InvalidOid if there is none.  Scans
 * the table, because the syscache needs a connection to a database.
 */
static Oid
scan_databases(const char *name, bool *open)
{
	Oid			result = InvalidOid;
	Relation	relation;
	TableScanDesc scan;
	HeapTuple	tuple;

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	(void) GetTransactionSnapshot();
	relation = table_open(DatabaseRelationId, AccessShareLock);
	scan = table_beginscan_catalog(relation, 0, NULL);
	while ((tuple = heap_getnext(scan, ForwardScanDirection)) != NULL)
	{
		Form_pg_database database = (Form_pg_database) GETSTRUCT(tuple);

		/* A limit of -2 marks a database whose DROP DATABASE has begun. */
		if (strcmp(NameStr(database->datname), name) != 0 || database->datconnlimit == -2)
			continue;
		result = database->oid;
		*open = database->datallowconn;
	}
	table_endscan(scan);
	table_close(relation, AccessShareLock);
	CommitTransactionCommand();
	return result;
}

static bool
is_released(Oid database)
{
	bool		released;

	LWLockAcquire(tensile_shared->lock, LW_SHARED);
	released = tensile_shared->released == database;
	LWLockRelease(tensile_shared->lock);
	return released;
}

/*
 * The OID of pg_tensile.database, and whether it accepts connections (`open`).
 * Logs once if it does not.  InvalidOid if it is released (release.c), so that
 * all processes are elsewhere.
 */
static Oid
find_database(bool *open)
{
	static Cause last = CAUSE_NONE;
	static char last_name[NAMEDATALEN];
	Oid			database;

	if (strncmp(last_name, tensile_database, NAMEDATALEN - 1) != 0)
		last = CAUSE_NONE;
	strlcpy(last_name, tensile_database, NAMEDATALEN);
	*open = false;
	if (*tensile_database == '\0')
		return InvalidOid;
	database = scan_databases(tensile_database, open);
	if (!OidIsValid(database))
	{
		if (is_news(&last, NO_DATABASE))
			ereport(LOG,
					(errcode(ERRCODE_UNDEFINED_DATABASE),
					 errmsg("pg_tensile waits for database \"%s\", which does not exist",
							tensile_database),
					 errhint("Create it, or change pg_tensile.database and reload.")));
	}
	else if (!*open)
	{
		if (is_news(&last, DATABASE_CLOSED))
			ereport(LOG,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("pg_tensile waits for database \"%s\", "
							"which does not accept connections",
							tensile_database),
					 errhint("Allow connections to it, "
							 "or change pg_tensile.database and reload.")));
	}
	else if (is_released(database))
	{
		if (is_news(&last, DATABASE_RELEASED))
			ereport(LOG,
					(errmsg("pg_tensile has released database \"%s\"", tensile_database),
					 errhint("resume_database() in that database ends this, and so does a restart.")));
		*open = false;
		return InvalidOid;
	}
	else
		last = CAUSE_NONE;
	return database;
}

/* ---- stopping processes in other databases ---- */

static void
stop_once(pid_t *stopped, pid_t pid)
{
	if (pid == 0 || pid == *stopped)
		return;
	*stopped = pid;
	/* A process that ends removes its pid from shared memory first. */
	(void) kill(pid, SIGTERM);
}

static void
stop_elsewhere(Oid database)
{
	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	for (int kind = TENSILE_CONTROLLER; kind < TENSILE_N_SINGLETONS; kind++)
		if (tensile_shared->singletons[kind].database != database)
			stop_once(&stopped_singletons[kind], tensile_shared->singletons[kind].pid);
	for (int i = 0; i < tensile_shared->max_jobs; i++)
	{
		TensileSlot *slot = &tensile_shared->slots[i];

		if (slot->state == SLOT_FREE || slot->database == database)
			continue;
		if (slot->state == SLOT_RESERVED)
			tensile_slot_clear(slot);
		else if (slot->job != 0)	/* but leave sessions that explain */
		{
			slot->evicted = true;
			stop_once(&stopped_workers[i], slot->pid);
		}
	}
	LWLockRelease(tensile_shared->lock);
}

/* ---- controller and scheduler ---- */

/* Milliseconds until the restart after an error: 6, 12, 24, ... s. */
static long
next_backoff(SupervisedProcess *process, const TensileSingleton *self)
{
	if (TimestampDifferenceExceeds(self->started_at, self->ended_at, STEADY_MS))
		process->failures = 0;
	process->failures = Min(process->failures + 1, 10);
	return Min((long) BACKOFF_MS << (process->failures - 1), MAX_BACKOFF_MS);
}

/*
 * Sets the time of the restart of a process that has ended.  `attached`: it
 * had attached to shared memory.
 */
static void
plan_restart(SupervisedProcess *process, const TensileSingleton *self, bool attached, Oid database)
{
	TensileOutcome outcome = attached ? self->outcome : TENSILE_FAILED;
	long		delay;

	process->awaits_extension = outcome == TENSILE_NO_EXTENSION;
	if (attached && self->database != database)
		delay = 0;				/* it was stopped */
	else if (outcome == TENSILE_FAILED)
		delay = next_backoff(process, self);
	else
		delay = outcome == TENSILE_GONE ? GONE_MS : PASS_MS;
	process->not_before = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), delay);
}

static void
start(SupervisedProcess *process, Oid database)
{
	static Cause last = CAUSE_NONE;
	BackgroundWorker worker;

	tensile_describe_worker(&worker, process->kind, 0);
	worker.bgw_main_arg = ObjectIdGetDatum(database);
	worker.bgw_notify_pid = MyProcPid;
	process->installs = pg_atomic_read_u64(&tensile_shared->installs);
	if (RegisterDynamicBackgroundWorker(&worker, &process->handle))
	{
		last = CAUSE_NONE;
		return;
	}
	process->handle = NULL;
	process->not_before = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), PASS_MS);
	if (is_news(&last, NO_BACKGROUND_WORKER))
		ereport(LOG,
				(errcode(ERRCODE_INSUFFICIENT_RESOURCES),
				 errmsg("pg_tensile has no free background worker "
						"for its controller and scheduler"),
				 errhint("Increase max_worker_processes.")));
}

/* Does the postmaster still know the process that was registered? */
static bool
is_alive(SupervisedProcess *process)
{
	pid_t		pid;

	return process->handle != NULL &&
		GetBackgroundWorkerPid(process->handle, &pid) != BGWH_STOPPED;
}

/*
 * Starts the process if it is time; returns the milliseconds until the next
 * check.
 */
static long
check_process(SupervisedProcess *process, Oid database, bool open)
{
	TensileSingleton self;
	TimestampTz now = GetCurrentTimestamp();

	LWLockAcquire(tensile_shared->lock, LW_SHARED);
	self = tensile_shared->singletons[process->kind];
	LWLockRelease(tensile_shared->lock);
	if (self.pid != 0 || is_alive(process))
		return PASS_MS;
	if (process->handle != NULL || self.ended_at != process->seen_end)
		plan_restart(process, &self, self.ended_at != process->seen_end, database);
	process->seen_end = self.ended_at;
	if (process->handle != NULL)
		pfree(process->handle);
	process->handle = NULL;
	if (process->awaits_extension &&
		process->installs != pg_atomic_read_u64(&tensile_shared->installs))
		process->not_before = now;
	if (!open)
		return PASS_MS;
	if (now < process->not_before)
		return Min(TimestampDifferenceMilliseconds(now, process->not_before) + 1, PASS_MS);
	start(process, database);
	return PASS_MS;
}

/* Makes one pass; returns the milliseconds until the next one. */
static long
supervise(void)
{
	long		sleep_ms = PASS_MS;
	bool		open;
	Oid			database = find_database(&open);

	stop_elsewhere(database);
	for (int i = 0; i < lengthof(processes); i++)
		sleep_ms = Min(sleep_ms, check_process(&processes[i], database, open));
	return sleep_ms;
}

void
tensile_launcher_main(Datum main_arg)
{
	pqsignal(SIGINT, PG_SIG_IGN);	/* nothing that it runs can be canceled */
	tensile_setup_signals();
	if (!tensile_singleton_attach(TENSILE_LAUNCHER, InvalidOid))
		proc_exit(1);
	BackgroundWorkerInitializeConnection(NULL, NULL, 0);
	MemoryContextSwitchTo(TopMemoryContext);	/* handles live there */
	while (!(tensile_wait_stoppable(-1, 0, supervise()) & TENSILE_WAIT_STOP))
		;
	proc_exit(1);				/* 0 would end it for good */
}

void
tensile_register_launcher(void)
{
	BackgroundWorker worker;

	if (IsBinaryUpgrade)
		return;
	tensile_describe_worker(&worker, TENSILE_LAUNCHER, 0);
	worker.bgw_restart_time = LAUNCHER_RESTART_S;
	RegisterBackgroundWorker(&worker);
}
