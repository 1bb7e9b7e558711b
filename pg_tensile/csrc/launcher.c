/*
 * launcher.c: the one static worker. It keeps a controller and a scheduler running in pg_tensile.database.
 *
 * It is not connected to a database, so that it neither hinders DROP DATABASE nor fails when the database is missing;
 * the others are, and they come and go: the extension is created and dropped, the database is dropped, the setting is
 * changed. Each pass of the launcher looks at shared memory and the clock and
 *   1. finds the database; when it is missing it says so once and looks again from time to time,
 *   2. stops whatever of pg_tensile runs in another database,
 *   3. starts the controller and the scheduler unless they run, are starting, or are not to be started yet.
 * When to start again depends on how the last one ended (plan_restart). After an error it takes at least 6 s, longer than
 * DROP DATABASE ... WITH (FORCE) waits for those it has terminated, and longer each time.
 *
 * On a standby it runs as well, because inference does, which has to leave another database there too. The controller
 * and the scheduler that it registers wait in the postmaster until the standby is promoted (tensile_describe_worker).
 *
 * What runs is known from shared memory, not from handles: a launcher that was itself restarted finds them there. Handles
 * tell only whether what it has registered is still on its way.
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

#include "compat.h"
#include "guc.h"
#include "process.h"
#include "shmem.h"
#include "slot.h"
#include "wait.h"

#define LAUNCHER_RESTART_S 5
#define LOOK_MS (30 * 1000)		/* between looks for what is missing */
#define GONE_MS 1000			/* after the extension was dropped */
#define BACKOFF_MS (6 * 1000)	/* after the first error, twice as long after the next, ... */
#define MAX_BACKOFF_MS (300 * 1000)
#define STEADY_MS (60 * 1000)	/* a process that ran that long starts with the first back-off again */

PGDLLEXPORT void tensile_launcher_main(Datum main_arg);

/* What the launcher knows of the controller and of the scheduler. */
typedef struct Charge
{
	TensileProcessKind kind;
	BackgroundWorkerHandle *handle; /* registered; NULL: not, or known to have ended */
	TimestampTz seen_end;		/* TensileSingleton.ended_at that not_before takes into account */
	TimestampTz not_before;		/* start it then, not earlier */
	bool		awaits_extension;	/* start it earlier when an extension is created */
	uint64		installs;		/* CREATE EXTENSIONs counted when it was started */
	int			failures;		/* in a row */
} Charge;

static Charge charges[] = {{TENSILE_CONTROLLER}, {TENSILE_SCHEDULER}};

/* Who has been told to leave another database: one SIGTERM each. */
static pid_t told_singletons[TENSILE_N_SINGLETONS];
static pid_t told_workers[TENSILE_MAX_JOBS];

/* ---- one log line per cause ---- */

typedef enum Cause
{
	CAUSE_NONE,
	NO_DATABASE,
	DATABASE_CLOSED,
	NO_BACKGROUND_WORKER
} Cause;

/* Is this cause another one than the last that was asked about here? */
static bool
is_news(Cause *last, Cause cause)
{
	bool		news = *last != cause;

	*last = cause;
	return news;
}

/* ---- the database ---- */

/* The OID of the database with that name, InvalidOid if there is none. By a scan: no syscache without a database. */
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

		/* A limit of -2: being dropped, or left behind by a DROP DATABASE that failed; it can't come back. */
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

/* pg_tensile.database; `open`: may it be connected to? Says once if not. */
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
					 errmsg("pg_tensile waits for database \"%s\", which does not exist", tensile_database),
					 errhint("Create it, or change pg_tensile.database and reload.")));
	}
	else if (!*open)
	{
		if (is_news(&last, DATABASE_CLOSED))
			ereport(LOG,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("pg_tensile waits for database \"%s\", which does not accept connections", tensile_database),
					 errhint("Allow connections to it, or change pg_tensile.database and reload.")));
	}
	else
		last = CAUSE_NONE;
	return database;
}

/* ---- stopping what runs elsewhere ---- */

static void
tell_to_stop(pid_t *told, pid_t pid)
{
	if (pid == 0 || pid == *told)
		return;
	*told = pid;
	(void) kill(pid, SIGTERM);	/* a process that ends has removed its pid from shared memory first */
}

static void
stop_elsewhere(Oid database)
{
	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	for (int kind = TENSILE_CONTROLLER; kind < TENSILE_N_SINGLETONS; kind++)
		if (tensile_shared->singletons[kind].database != database)
			tell_to_stop(&told_singletons[kind], tensile_shared->singletons[kind].pid);
	for (int i = 0; i < tensile_shared->max_jobs; i++)
	{
		TensileSlot *slot = &tensile_shared->slots[i];

		if (slot->state == SLOT_FREE || slot->database == database)
			continue;
		if (slot->state == SLOT_RESERVED)
			tensile_slot_clear(slot);
		else if (slot->job != 0)	/* a session that explains is a client's */
		{
			slot->evicted = true;
			tell_to_stop(&told_workers[i], slot->pid);
		}
	}
	LWLockRelease(tensile_shared->lock);
}

/* ---- controller and scheduler ---- */

/* 6, 12, 24, ... s */
static long
next_backoff(Charge *charge, const TensileSingleton *self)
{
	if (TimestampDifferenceExceeds(self->started_at, self->ended_at, STEADY_MS))
		charge->failures = 0;
	charge->failures = Min(charge->failures + 1, 10);
	return Min((long) BACKOFF_MS << (charge->failures - 1), MAX_BACKOFF_MS);
}

/* It has ended: when may it start again? `attached`: it came as far as shared memory. */
static void
plan_restart(Charge *charge, const TensileSingleton *self, bool attached, Oid database)
{
	TensileOutcome outcome = attached ? self->outcome : TENSILE_FAILED;
	long		delay;

	charge->awaits_extension = outcome == TENSILE_NO_EXTENSION;
	if (attached && self->database != database)
		delay = 0;				/* it was told to */
	else if (outcome == TENSILE_FAILED)
		delay = next_backoff(charge, self);
	else
		delay = outcome == TENSILE_GONE ? GONE_MS : LOOK_MS;
	charge->not_before = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), delay);
}

static void
start(Charge *charge, Oid database)
{
	static Cause last = CAUSE_NONE;
	BackgroundWorker worker;

	tensile_describe_worker(&worker, charge->kind, 0);
	worker.bgw_main_arg = ObjectIdGetDatum(database);
	worker.bgw_notify_pid = MyProcPid;
	charge->installs = pg_atomic_read_u64(&tensile_shared->installs);
	if (RegisterDynamicBackgroundWorker(&worker, &charge->handle))
	{
		last = CAUSE_NONE;
		return;
	}
	charge->handle = NULL;
	charge->not_before = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), LOOK_MS);
	if (is_news(&last, NO_BACKGROUND_WORKER))
		ereport(LOG,
				(errcode(ERRCODE_INSUFFICIENT_RESOURCES),
				 errmsg("pg_tensile has no free background worker for its controller and scheduler"),
				 errhint("Increase max_worker_processes.")));
}

/* Is what was registered still on its way into shared memory, or out of the process table? */
static bool
on_its_way(Charge *charge)
{
	pid_t		pid;

	return charge->handle != NULL && GetBackgroundWorkerPid(charge->handle, &pid) != BGWH_STOPPED;
}

/* Starts it if it is time; returns the milliseconds until there is something to do for it. */
static long
look_after(Charge *charge, Oid database, bool open)
{
	TensileSingleton self;
	TimestampTz now = GetCurrentTimestamp();

	LWLockAcquire(tensile_shared->lock, LW_SHARED);
	self = tensile_shared->singletons[charge->kind];
	LWLockRelease(tensile_shared->lock);
	if (self.pid != 0 || on_its_way(charge))
		return LOOK_MS;
	if (charge->handle != NULL || self.ended_at != charge->seen_end)
		plan_restart(charge, &self, self.ended_at != charge->seen_end, database);
	charge->seen_end = self.ended_at;
	if (charge->handle != NULL)
		pfree(charge->handle);
	charge->handle = NULL;
	if (charge->awaits_extension && charge->installs != pg_atomic_read_u64(&tensile_shared->installs))
		charge->not_before = now;
	if (!open)
		return LOOK_MS;
	if (now < charge->not_before)
		return Min(TimestampDifferenceMilliseconds(now, charge->not_before) + 1, LOOK_MS);
	start(charge, database);
	return LOOK_MS;
}

/* One pass; returns how long to sleep. */
static long
supervise(void)
{
	long		sleep_ms = LOOK_MS;
	bool		open;
	Oid			database = find_database(&open);

	stop_elsewhere(database);
	for (int i = 0; i < lengthof(charges); i++)
		sleep_ms = Min(sleep_ms, look_after(&charges[i], database, open));
	return sleep_ms;
}

void
tensile_launcher_main(Datum main_arg)
{
	pqsignal(SIGINT, PG_SIG_IGN);	/* it runs nothing that could be cancelled */
	tensile_setup_signals();
	if (!tensile_singleton_attach(TENSILE_LAUNCHER, InvalidOid))
		proc_exit(1);
	BackgroundWorkerInitializeConnection(NULL, NULL, 0);
	MemoryContextSwitchTo(TopMemoryContext);	/* handles live there */
	while (!(tensile_wait_stoppable(-1, 0, supervise()) & TENSILE_WAIT_STOP))
		;
	proc_exit(1);				/* 0 would mean: never again */
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
