/*
 * identity.c: what only one kind of process may do, and whether this one was
 * told to stop.
 *
 * Functions that only one kind of process may call check that here.  A worker
 * may not call them while it runs its training query, because that executes
 * functions of the submitter.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include "fmgr.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/pidfile.h"

#include "base/library.h"
#include "base/process_kind.h"
#include "state/extension.h"
#include "state/identity.h"
#include "state/shmem.h"

PG_FUNCTION_INFO_V1(tensile_my_job);
PG_FUNCTION_INFO_V1(tensile_my_process);
PG_FUNCTION_INFO_V1(tensile_my_python_folder);
PG_FUNCTION_INFO_V1(tensile_stop_cause);

static volatile sig_atomic_t stop_received = false;	/* SIGTERM has ever come */
static volatile sig_atomic_t stopped_by_postmaster = false;	/* for certain */

/* ---- identity ---- */

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
				 errmsg("only the pg_tensile %s may call this function",
						tensile_process_name(kind))));
	tensile_require_extension();
}

/* tensile_worker._my_job(): the job of this worker */
Datum
tensile_my_job(PG_FUNCTION_ARGS)
{
	tensile_require_process(TENSILE_WORKER);
	PG_RETURN_INT64(tensile_my_slot->job);
}

static void
require_own_process(void)
{
	tensile_require_preload();
	if (tensile_process == TENSILE_NO_PROCESS || runs_training_query())
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("only processes of pg_tensile may call this function")));
}

/* tensile_worker._python_folder(): the folder of the supervisors' packages */
Datum
tensile_my_python_folder(PG_FUNCTION_ARGS)
{
	require_own_process();
	PG_RETURN_TEXT_P(cstring_to_text(tensile_python_folder()));
}

/* tensile_worker._process(): the name of this kind of process */
Datum
tensile_my_process(PG_FUNCTION_ARGS)
{
	require_own_process();
	PG_RETURN_TEXT_P(cstring_to_text(tensile_process_name(tensile_process)));
}

/* ---- stopping ---- */

void
tensile_note_stop(pid_t sender)
{
	stop_received = true;
	if (sender == PostmasterPid)
		stopped_by_postmaster = true;
}

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
	return tensile_in_worker() && stop_received && !stopped_by_postmaster &&
		!tensile_my_slot->evicted && !server_is_stopping();
}

/*
 * tensile_worker._stop_cause(): the sender of the worker's SIGTERM: the server that
 * stops, the launcher (after release_database or a change of the setting), a
 * command such as CREATE DATABASE, for which the postmaster ends processes that
 * are BGWORKER_INTERRUPTIBLE, or pg_terminate_backend
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
	else if (stopped_by_postmaster && !server_is_stopping())
		cause = "database";
	PG_RETURN_TEXT_P(cstring_to_text(cause));
}
