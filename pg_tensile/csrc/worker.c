/*
 * worker.c: how a background worker becomes a controller, scheduler, worker or inference process, and its loop.
 *
 * Phases of each: take its place in shared memory (a singleton's entry, or the slot that the controller reserved), and
 * register the exit callback that gives it back; only then connect, because connecting may fail (database or role
 * dropped) and must not leave the place taken. Then look for the extension, and loop: a step, which is one CALL of
 * tensile._step, and a wait (wait.c) for what that step asked for. The supervisor is a coroutine in PL/Python: a step
 * resumes it, and what it awaits is the CALL's row.
 *
 * The CALL runs through a top-level portal, which is what lets a step commit; SPI would not. Between steps there is no
 * transaction: no snapshot, no time-out of one, and the statistics of what the step did are reported.
 *
 * A worker connects as the submitting role and stays it. What that role has set with ALTER ROLE must not change how the
 * supervisor works, so the settings that could are set again (reset_settings).
 *
 * Each process belongs to the extension that it found, and to that version of it. What it writes is committed only if
 * that extension is still there: one that was dropped and created again has other jobs with the same numbers.
 *
 * Ends: a step without a time-out was the last -> exit 0. An error in it -> one log line and exit 1; an error that a
 * singleton has shown before -> exit 0 without a line. SIGTERM -> see wait.c.
 */
#include "postgres.h"

#include <fcntl.h>
#include <unistd.h>

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/indexing.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_extension.h"
#include "commands/dbcommands.h"
#include "commands/extension.h"
#include "common/hashfn.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "pgstat.h"
#include "storage/ipc.h"
#include "tcop/dest.h"
#include "tcop/pquery.h"
#include "tcop/tcopprot.h"
#include "utils/backend_status.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/guc.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/pidfile.h"
#include "utils/portal.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "pg_tensile.h"

#define STEADY_MS (60 * 1000)			/* a singleton that ran so long shows an error again */
#define INFERENCE_PENDING_MS (10 * 1000)	/* a registration not heard of for so long is repeated */
#define INFERENCE_BACKOFF_MS (5 * 1000) /* after it ended */

PGDLLEXPORT void tensile_controller_main(Datum main_arg);
PGDLLEXPORT void tensile_scheduler_main(Datum main_arg);
PGDLLEXPORT void tensile_inference_main(Datum main_arg);
PGDLLEXPORT void tensile_worker_main(Datum main_arg);

PG_FUNCTION_INFO_V1(tensile_my_job);
PG_FUNCTION_INFO_V1(tensile_my_process);
PG_FUNCTION_INFO_V1(tensile_stop_cause);

TensileProcessKind tensile_process = TENSILE_NO_PROCESS;
TensileSlot *tensile_my_slot = NULL;

static const char *const process_names[] = {"launcher", "controller", "scheduler", "inference", "worker"};

/* What pg_extension says of us, as this session knows it. */
typedef struct Extension
{
	bool		valid;			/* nothing has happened since that could have changed it */
	uint64		changes;		/* extensions created, updated and dropped when it was looked up */
	Oid			oid;			/* InvalidOid: there is none */
	char		version[NAMEDATALEN];
} Extension;

static Extension extension;
static emit_log_hook_type previous_emit_log = NULL;

static TensileOutcome my_outcome = TENSILE_FAILED;
static Oid	my_extension = InvalidOid;

/* ---- who this process is ---- */

bool
tensile_in_worker(void)
{
	return tensile_process == TENSILE_WORKER;
}

/* Then the worker executes functions of the submitter's. */
static bool
runs_training_query(void)
{
	return tensile_in_worker() && tensile_my_slot->feeding;
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

/* ---- the extension ---- */

static void
forget_extension(Datum arg, int cache, uint32 hash)
{
	extension.valid = false;
}

static void
read_extension(void)
{
	Relation	relation = table_open(ExtensionRelationId, AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;

	ScanKeyInit(&key, Anum_pg_extension_extname, BTEqualStrategyNumber, F_NAMEEQ, CStringGetDatum(TENSILE_EXTENSION));
	scan = systable_beginscan(relation, ExtensionNameIndexId, true, NULL, 1, &key);
	tuple = systable_getnext(scan);
	extension.oid = InvalidOid;
	extension.version[0] = '\0';
	if (HeapTupleIsValid(tuple))
	{
		bool		isnull;
		Datum		version = heap_getattr(tuple, Anum_pg_extension_extversion, RelationGetDescr(relation), &isnull);

		extension.oid = ((Form_pg_extension) GETSTRUCT(tuple))->oid;
		strlcpy(extension.version, TextDatumGetCString(version), NAMEDATALEN);
	}
	systable_endscan(scan);
	table_close(relation, AccessShareLock);
}

/*
 * Extensions have no syscache before PostgreSQL 18; but creating, updating and dropping one changes functions, and a
 * session is told of that before it can see the new ones.
 */
static void
look_up_extension(void)
{
	static bool registered = false;
	uint64		changes = pg_atomic_read_u64(&tensile_shared->installs) + pg_atomic_read_u64(&tensile_shared->drops);

	if (!registered)
	{
		CacheRegisterSyscacheCallback(PROCOID, forget_extension, (Datum) 0);
		registered = true;
	}
	if (extension.valid && extension.changes == changes)
		return;
	extension.changes = changes - 1;	/* an error below leaves the cache stale */
	extension.valid = true;		/* unless it is forgotten meanwhile */
	InvalidateCatalogSnapshot();
	read_extension();
	extension.changes = changes;
}

void
tensile_require_extension(void)
{
	if (!OidIsValid(my_extension))
		return;					/* a session, or one of our processes before it has found it */
	look_up_extension();
	if (extension.oid != my_extension)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("extension \"pg_tensile\" was dropped while the %s worked for it",
						process_names[tensile_process])));
}

/* At commit: what has been written went into tables of that name, which may be those of another extension by now. */
void
tensile_check_commit(void)
{
	if (TransactionIdIsValid(GetTopTransactionIdIfAny()))
		tensile_require_extension();
}

static bool
version_matches(void)
{
	look_up_extension();
	return !OidIsValid(extension.oid) || strcmp(extension.version, TENSILE_VERSION) == 0;
}

static void
report_version(int level)
{
	ereport(level,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("extension \"pg_tensile\" has version %s, but the server's library has version %s", extension.version,
					TENSILE_VERSION),
			 errhint("Run ALTER EXTENSION pg_tensile UPDATE; if the library is the older one, run make install and "
					 "restart the server first.")));
}

void
tensile_require_version(void)
{
	tensile_require_preload();
	if (!version_matches())
		report_version(ERROR);
}

/* ---- stopping ---- */

/* Looks at the state that the postmaster writes into its lock file before it signals anybody; without allocating. */
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
		return true;			/* it is gone */
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
	return tensile_in_worker() && tensile_stop_received() && !tensile_my_slot->evicted && !server_is_stopping();
}

/* tensile._stop_cause(): who told the worker to stop: a server that stops, the launcher, or pg_terminate_backend. */
Datum
tensile_stop_cause(PG_FUNCTION_ARGS)
{
	const char *cause = "server";

	tensile_require_process(TENSILE_WORKER);
	if (tensile_my_slot->evicted)
		cause = "launcher";
	else if (tensile_terminated())
		cause = "terminated";
	PG_RETURN_TEXT_P(cstring_to_text(cause));
}

/* ---- role and extension, looked at anew ---- */

/*
 * Not by the syscache: who drops a role wakes us when its commit can be seen, but before the cache is told.
 */
static bool
role_exists(Oid role)
{
	Relation	authid = table_open(AuthIdRelationId, AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	bool		found;

	ScanKeyInit(&key, Anum_pg_authid_oid, BTEqualStrategyNumber, F_OIDEQ, ObjectIdGetDatum(role));
	scan = systable_beginscan(authid, AuthIdOidIndexId, true, NULL, 1, &key);
	found = HeapTupleIsValid(systable_getnext(scan));
	systable_endscan(scan);
	table_close(authid, AccessShareLock);
	return found;
}

bool
tensile_still_there(void)
{
	InvalidateCatalogSnapshot();
	if (get_extension_oid(TENSILE_EXTENSION, true) != my_extension)
		return false;
	return !tensile_in_worker() || role_exists(tensile_my_slot->role);
}

/* tensile._my_job() */
Datum
tensile_my_job(PG_FUNCTION_ARGS)
{
	tensile_require_process(TENSILE_WORKER);
	PG_RETURN_INT64(tensile_my_slot->job);
}

/* tensile._process() */
Datum
tensile_my_process(PG_FUNCTION_ARGS)
{
	tensile_require_preload();
	if (tensile_process == TENSILE_NO_PROCESS || runs_training_query())
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE), errmsg("only processes of pg_tensile may call this function")));
	PG_RETURN_TEXT_P(cstring_to_text(process_names[tensile_process]));
}

/* ---- places in shared memory ---- */

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
	free = self->pid == 0;
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

/* What the worker reports before it leaves, a FATAL above all: the controller makes a reason of it. */
static void
keep_error(ErrorData *error)
{
	char	   *target = tensile_my_slot->last_error;

	if (previous_emit_log)
		previous_emit_log(error);
	if (error->elevel < ERROR || error->message == NULL)
		return;
	if (error->detail)
		snprintf(target, TENSILE_LAST_ERROR_LENGTH, "%s (%s)", error->message, error->detail);
	else
		strlcpy(target, error->message, TENSILE_LAST_ERROR_LENGTH);
}

static void
slot_detach(int code, Datum arg)
{
	LWLockReleaseAll();
	tensile_slot_free(tensile_my_slot);
}

/* ---- connecting ---- */

/*
 * What the role, the database or the server may have set for sessions, and would change or end what a supervisor does,
 * or how values look as text and so what is trained.
 */
static const struct
{
	const char *name;
	const char *value;
}			settings[] = {
	{"role", "none"},
	{"search_path", "pg_catalog, pg_temp"},
	{"default_transaction_read_only", "off"},
	{"default_transaction_deferrable", "off"},
	{"default_transaction_isolation", "read committed"},
	{"row_security", "on"},
	{"lock_timeout", "0"},
	{"statement_timeout", "0"},
	{"transaction_timeout", "0"},	/* 17 and later */
	{"idle_in_transaction_session_timeout", "0"},
	{"idle_session_timeout", "0"},
	{"extra_float_digits", "1"},
	{"bytea_output", "hex"},
	{"array_nulls", "on"},
	{"xmlbinary", "base64"},
	{"standard_conforming_strings", "on"},
	{"transform_null_equals", "off"},
	{"check_function_bodies", "on"},
	/* DROP EXTENSION locks the catalogue's tables in another order: we notice first and give way. */
	{"deadlock_timeout", "100ms"},
};

static void
reset_settings(void)
{
	for (int i = 0; i < lengthof(settings); i++)
		if (GetConfigOption(settings[i].name, true, false) != NULL)
			SetConfigOption(settings[i].name, settings[i].value, PGC_SUSET, PGC_S_SESSION);
}

/* PL/Python finds the supervisors here. It reads the environment when the first procedure starts it. */
static void
set_python_path(void)
{
	char		share[MAXPGPATH];
	char	   *path;

	get_share_path(my_exec_path, share);
	path = psprintf("%s/%s/python", share, TENSILE_EXTENSION);
	if (setenv("PYTHONPATH", path, 1) != 0)
		ereport(ERROR, (errcode(ERRCODE_OUT_OF_MEMORY), errmsg("could not set PYTHONPATH: %m")));
	pfree(path);
}

/* Connects; false when the extension does not exist. */
static bool
connect_to(Oid database, Oid role)
{
	BackgroundWorkerInitializeConnectionByOid(database, role, 0);
	pgstat_report_appname(MyBgworkerEntry->bgw_name);
	reset_settings();
	set_python_path();

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	my_extension = get_extension_oid(TENSILE_EXTENSION, true);
	CommitTransactionCommand();
	return OidIsValid(my_extension);
}

/* ---- the loop ---- */

/* What a step asks for, from the row of its CALL: (fd, timeout_ms, writable). */
typedef struct StepReceiver
{
	DestReceiver pub;
	int			fd;
	long		timeout_ms;
	bool		writable;
	bool		last;			/* no time-out: the process is done */
} StepReceiver;

static void
step_startup(DestReceiver *self, int operation, TupleDesc typeinfo)
{
}

static bool
step_row(TupleTableSlot *slot, DestReceiver *self)
{
	StepReceiver *receiver = (StepReceiver *) self;

	slot_getallattrs(slot);
	receiver->last = slot->tts_isnull[1];
	if (receiver->last)
		return true;
	receiver->fd = DatumGetInt32(slot->tts_values[0]);
	receiver->timeout_ms = DatumGetInt32(slot->tts_values[1]);
	receiver->writable = DatumGetBool(slot->tts_values[2]);
	return true;
}

static void
step_shutdown(DestReceiver *self)
{
}

/* Parses, analyses and plans one statement in the current memory context, which must outlive its commits. */
static List *
plan_statement(const char *sql)
{
	RawStmt    *parsed = linitial_node(RawStmt, pg_parse_query(sql));
	List	   *plans;

	PushActiveSnapshot(GetTransactionSnapshot());
	plans = pg_plan_queries(pg_analyze_and_rewrite_fixedparams(parsed, sql, NULL, 0, NULL), sql, 0, NULL);
	PopActiveSnapshot();
	return plans;
}

/* As a client's CALL runs: the portal is at top level, so the procedure may commit. */
static void
run_call(const char *sql, DestReceiver *receiver)
{
	static MemoryContext context = NULL;
	QueryCompletion completion;
	Portal		portal;
	List	   *plans;

	if (context == NULL)
		context = AllocSetContextCreate(TopMemoryContext, "pg_tensile call", ALLOCSET_DEFAULT_SIZES);
	debug_query_string = sql;
	pgstat_report_activity(STATE_RUNNING, sql);
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	MemoryContextSwitchTo(context);
	plans = plan_statement(sql);
	portal = CreatePortal("", true, true);
	portal->visible = false;
	PortalDefineQuery(portal, NULL, sql, CMDTAG_CALL, plans, NULL);
	PortalStart(portal, NULL, 0, InvalidSnapshot);
	(void) tensile_portal_run(portal, FETCH_ALL, receiver, receiver, &completion);
	PortalDrop(portal, false);
	CommitTransactionCommand();
	debug_query_string = NULL;
	MemoryContextReset(context);
}

/* One step; `bits`: what ended the wait before it. */
static void
run_step(int bits, StepReceiver *receiver)
{
	static char sql[64];		/* pg_stat_activity and an error's context show it */

	snprintf(sql, sizeof(sql), "CALL tensile._step(%d, -1, 0, false)", bits);
	receiver->last = true;
	run_call(sql, &receiver->pub);
}

/* Ends the transaction in which the error was raised; returns the error. */
static ErrorData *
recover(void)
{
	ErrorData  *error;

	HOLD_INTERRUPTS();
	MemoryContextSwitchTo(TopMemoryContext);
	error = CopyErrorData();
	FlushErrorState();
	AbortCurrentTransaction();
	PortalErrorCleanup();
	MemoryContextSwitchTo(TopMemoryContext);
	RESUME_INTERRUPTS();
	return error;
}

static bool
still_there(void)
{
	bool		result;

	StartTransactionCommand();
	result = tensile_still_there();
	CommitTransactionCommand();
	return result;
}

/*
 * What to do about an error outside of Python, where the supervisor has no say. Nothing, if what this process is for was
 * dropped. A cancel request came after the wait: true, it is given to the step that it kept from running. Other errors
 * are raised again.
 */
static bool
settle_error(ErrorData *error, StepReceiver *receiver)
{
	receiver->last = false;
	if (error->sqlerrcode == ERRCODE_QUERY_CANCELED)
		return true;
	receiver->last = !still_there();
	if (!receiver->last)
		ReThrowError(error);
	FreeErrorData(error);
	return false;
}

static void
run_step_to_its_end(int first_bits, StepReceiver *receiver)
{
	volatile int bits = first_bits;
	volatile bool again;

	do
	{
		ErrorData  *volatile error = NULL;

		PG_TRY();
		{
			run_step(bits, receiver);
		}
		PG_CATCH();
		{
			error = recover();
		}
		PG_END_TRY();
		again = error != NULL && settle_error(error, receiver);
		bits |= TENSILE_WAIT_CANCEL;
	} while (again);
}

/*
 * Waits for what the step asked for. Statistics are reported as a session does that becomes idle: those that come too
 * soon after the last ones a while later.
 */
static int
wait_idle(const StepReceiver *request)
{
	uint32		events = WL_SOCKET_READABLE | (request->writable ? WL_SOCKET_WRITEABLE : 0);
	long		timeout_ms = request->timeout_ms;
	long		report_ms = pgstat_report_stat(false);
	int			bits;

	pgstat_report_activity(STATE_IDLE, NULL);
	if (report_ms > 0 && report_ms < timeout_ms)
	{
		bits = tensile_wait_connected(request->fd, events, report_ms);
		if (bits != TENSILE_WAIT_TIMEOUT)
			return bits;
		pgstat_report_stat(true);
		timeout_ms -= report_ms;
	}
	return tensile_wait_connected(request->fd, events, timeout_ms);
}

static void
run_loop(void)
{
	StepReceiver receiver = {
		.pub = {.receiveSlot = step_row,.rStartup = step_startup,.rShutdown = step_shutdown,
		.rDestroy = step_shutdown,.mydest = DestNone},
	};
	int			bits = 0;

	for (;;)
	{
		run_step_to_its_end(bits, &receiver);
		if (receiver.last)
			return;
		bits = wait_idle(&receiver);
	}
}

/* Has this singleton ended with the same error before, a short while ago? Remembers it. */
static bool
error_is_known(const char *message)
{
	TensileSingleton *self = &tensile_shared->singletons[tensile_process];
	uint32		hash = hash_bytes((const unsigned char *) message, strlen(message));
	bool		known;

	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	known = self->error_hash == hash &&
		!TimestampDifferenceExceeds(self->started_at, GetCurrentTimestamp(), STEADY_MS);
	self->error_hash = hash;
	LWLockRelease(tensile_shared->lock);
	return known;
}

/* The launcher starts a singleton again and again: an error that stays is logged once. */
static void
run_singleton_loop(void)
{
	MemoryContext context = CurrentMemoryContext;

	PG_TRY();
	{
		run_loop();
	}
	PG_CATCH();
	{
		ErrorData  *error;

		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		if (error_is_known(error->message ? error->message : ""))
		{
			FlushErrorState();
			proc_exit(0);
		}
		PG_RE_THROW();
	}
	PG_END_TRY();
}

/* Is the extension of the library's version? If not, that is logged once; the launcher waits as if there were none. */
static bool
accept_version(void)
{
	bool		accepted;

	StartTransactionCommand();
	accepted = version_matches();
	if (!accepted && !error_is_known(psprintf("version %s", extension.version)))
		report_version(LOG);
	CommitTransactionCommand();
	return accepted;
}

static void
run_singleton(TensileProcessKind kind, Oid database)
{
	tensile_setup_signals();
	if (!tensile_singleton_attach(kind, database))
		return;
	if (!connect_to(database, InvalidOid))
	{
		my_outcome = TENSILE_NO_EXTENSION;
		return;
	}
	if (!accept_version())
	{
		my_outcome = TENSILE_NO_EXTENSION;
		return;
	}
	run_singleton_loop();
	if (!still_there())
		my_outcome = TENSILE_GONE;
}

/* ---- entry points ---- */

void
tensile_controller_main(Datum main_arg)
{
	run_singleton(TENSILE_CONTROLLER, DatumGetObjectId(main_arg));
}

void
tensile_scheduler_main(Datum main_arg)
{
	run_singleton(TENSILE_SCHEDULER, DatumGetObjectId(main_arg));
}

void
tensile_inference_main(Datum main_arg)
{
	run_singleton(TENSILE_INFERENCE, DatumGetObjectId(main_arg));
}

void
tensile_worker_main(Datum main_arg)
{
	int64		job;

	memcpy(&job, MyBgworkerEntry->bgw_extra, sizeof(job));
	tensile_setup_signals();
	tensile_my_slot = tensile_slot_attach(DatumGetInt32(main_arg), job);
	if (tensile_my_slot == NULL)
		return;					/* too late: the controller has given the slot to somebody else */
	tensile_process = TENSILE_WORKER;
	before_shmem_exit(slot_detach, (Datum) 0);
	previous_emit_log = emit_log_hook;
	emit_log_hook = keep_error;
	if (!connect_to(tensile_my_slot->database, tensile_my_slot->role))
		return;
	StartTransactionCommand();
	tensile_require_version();
	CommitTransactionCommand();
	run_loop();
}

/* ---- registering ---- */

void
tensile_describe_worker(BackgroundWorker *worker, TensileProcessKind kind, int64 job)
{
	memset(worker, 0, sizeof(*worker));
	snprintf(worker->bgw_type, sizeof(worker->bgw_type), "pg_tensile %s", process_names[kind]);
	if (kind == TENSILE_WORKER)
		snprintf(worker->bgw_name, sizeof(worker->bgw_name), "pg_tensile worker job " INT64_FORMAT, job);
	else
		strlcpy(worker->bgw_name, worker->bgw_type, sizeof(worker->bgw_name));
	worker->bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	/* A standby predicts. What trains is registered there as well, and started by the postmaster when it is promoted. */
	worker->bgw_start_time = kind == TENSILE_LAUNCHER || kind == TENSILE_INFERENCE
		? BgWorkerStart_ConsistentState : BgWorkerStart_RecoveryFinished;
	worker->bgw_restart_time = BGW_NEVER_RESTART;
	strlcpy(worker->bgw_library_name, TENSILE_LIBRARY, sizeof(worker->bgw_library_name));
	snprintf(worker->bgw_function_name, sizeof(worker->bgw_function_name), "tensile_%s_main", process_names[kind]);
	memcpy(worker->bgw_extra, &job, sizeof(job));
}

/* Does it neither run nor is about to, and has not ended a moment ago? Claims the registration if so. */
static bool
claim_inference(void)
{
	TensileSingleton *inference = &tensile_shared->singletons[TENSILE_INFERENCE];
	TimestampTz now = GetCurrentTimestamp();
	bool		claimed;

	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	claimed = inference->pid == 0 &&
		TimestampDifferenceExceeds(inference->requested_at, now, INFERENCE_PENDING_MS) &&
		TimestampDifferenceExceeds(inference->ended_at, now, INFERENCE_BACKOFF_MS);
	if (claimed)
		inference->requested_at = now;
	LWLockRelease(tensile_shared->lock);
	return claimed;
}

void
tensile_require_database(void)
{
	char	   *here = get_database_name(MyDatabaseId);

	if (here == NULL || strcmp(here, tensile_database) != 0)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("pg_tensile does not work in database \"%s\"", here ? here : ""),
				 errdetail("pg_tensile.database is \"%s\".", tensile_database),
				 errhint("Connect to that database, or change pg_tensile.database in postgresql.conf and reload.")));
	pfree(here);
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
			 errhint("Increase max_worker_processes, or try again when other workers have ended.")));
}
