/*
 * worker.c: how a background worker becomes a controller, scheduler, inference
 * process or worker of a job, and how it ends.
 *
 * Phases: attach to shared memory (to the entry of a singleton, or to the slot
 * that the controller has reserved) and register the exit callback that
 * detaches; connect, which may fail because the database or the role was
 * dropped, and must not leave the entry occupied; find the extension; run
 * steps (step.c).
 *
 * A worker connects as the role that has submitted the job and remains it.
 * Settings that ALTER ROLE may have made for that role must not change how
 * the supervisor works, so those that could are reset.
 *
 * Ends: after the last step with exit code 0; by an error with one log line
 * and exit code 1, or for an error that the same singleton has shown before
 * with exit code 0 and no line; by SIGTERM as described in wait.c.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "access/xact.h"
#include "common/hashfn.h"
#include "miscadmin.h"
#include "postmaster/bgworker.h"
#include "storage/ipc.h"
#include "utils/backend_status.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "base/library.h"
#include "processes/step.h"
#include "processes/wait.h"
#include "state/extension.h"
#include "state/shmem.h"
#include "state/singleton.h"
#include "state/slot.h"

#define STEADY_MS (60 * 1000)	/* after a run of that length, errors are logged again */

PGDLLEXPORT void tensile_controller_main(Datum main_arg);
PGDLLEXPORT void tensile_scheduler_main(Datum main_arg);
PGDLLEXPORT void tensile_inference_main(Datum main_arg);
PGDLLEXPORT void tensile_worker_main(Datum main_arg);

static emit_log_hook_type previous_emit_log = NULL;

/* ---- connecting ---- */

/*
 * Settings of the role, the database or the server that would change or end
 * what a supervisor does, or change how values look as text and so what is
 * trained.
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
	/* DROP EXTENSION locks tables in another order: this process yields. */
	{"deadlock_timeout", "100ms"},
};

static void
reset_settings(void)
{
	for (int i = 0; i < lengthof(settings); i++)
		if (GetConfigOption(settings[i].name, true, false) != NULL)
			SetConfigOption(settings[i].name, settings[i].value, PGC_SUSET, PGC_S_SESSION);
}

/* Connects to the database; false if it does not have the extension. */
static bool
connect_to(Oid database, Oid role)
{
	BackgroundWorkerInitializeConnectionByOid(database, role, 0);
	pgstat_report_appname(MyBgworkerEntry->bgw_name);
	reset_settings();
	return tensile_find_extension();
}

/* ---- singletons ---- */

/*
 * Did this singleton end with the same error before, a short while ago?
 * Remembers the error.
 */
static bool
error_is_repeated(const char *message)
{
	TensileSingleton *self = &tensile_shared->singletons[tensile_process];
	uint32		hash = hash_bytes((const unsigned char *) message, strlen(message));
	bool		repeated;

	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	repeated = self->error_hash == hash &&
		!TimestampDifferenceExceeds(self->started_at, GetCurrentTimestamp(), STEADY_MS);
	self->error_hash = hash;
	LWLockRelease(tensile_shared->lock);
	return repeated;
}

/*
 * Runs the steps of a singleton.  The launcher starts it again and again, so
 * an error that persists is logged once.
 */
static void
run_singleton_loop(void)
{
	MemoryContext context = CurrentMemoryContext;

	PG_TRY();
	{
		tensile_run_steps();
	}
	PG_CATCH();
	{
		ErrorData  *error;

		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		if (error_is_repeated(error->message ? error->message : ""))
		{
			FlushErrorState();
			proc_exit(0);
		}
		PG_RE_THROW();
	}
	PG_END_TRY();
}

/*
 * Does the extension have the library's version?  Logs once if not; then the
 * launcher waits as if there were no extension.
 */
static bool
accept_version(void)
{
	bool		accepted;

	StartTransactionCommand();
	accepted = tensile_version_matches();
	if (!accepted && !error_is_repeated(psprintf("version %s", tensile_extension_version())))
		tensile_report_version(LOG);
	CommitTransactionCommand();
	return accepted;
}

static void
run_singleton(TensileProcessKind kind, Oid database)
{
	tensile_setup_signals();
	if (!tensile_singleton_attach(kind, database))
		return;
	if (!connect_to(database, InvalidOid) || !accept_version())
	{
		tensile_singleton_set_outcome(TENSILE_NO_EXTENSION);
		return;
	}
	run_singleton_loop();
	if (!tensile_still_there())
		tensile_singleton_set_outcome(TENSILE_GONE);
}

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

/* ---- workers of jobs ---- */

/*
 * Keeps the last error that the worker reports, which may be a FATAL: the
 * controller makes it the reason of the job's failure.
 */
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

void
tensile_worker_main(Datum main_arg)
{
	int64		job;

	memcpy(&job, MyBgworkerEntry->bgw_extra, sizeof(job));
	tensile_setup_signals();
	tensile_my_slot = tensile_slot_attach(DatumGetInt32(main_arg), job);
	if (tensile_my_slot == NULL)
		return;					/* too late: the reservation has expired */
	tensile_process = TENSILE_WORKER;
	before_shmem_exit(slot_detach, (Datum) 0);
	previous_emit_log = emit_log_hook;
	emit_log_hook = keep_error;
	if (!connect_to(tensile_my_slot->database, tensile_my_slot->role))
		return;
	StartTransactionCommand();
	tensile_require_version();
	CommitTransactionCommand();
	tensile_run_steps();
}
