/*
 * inference.c: starting the inference process, and the predictor's socket.
 *
 * It runs only when predictions are made: the session that finds no predictor
 * registers it, and other sessions that look for it meanwhile see in shared
 * memory that it is on its way.
 *
 * The predictor's socket is in the folder of the server's own, or among the
 * temporary files, which backups omit and a start removes.  Sessions and the
 * predictor derive its path from the same settings.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/file_utils.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "nodes/pg_list.h"
#include "postmaster/postmaster.h"
#include "storage/fd.h"
#include "storage/ipc.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/varlena.h"

#include "processes/inference.h"
#include "processes/registration.h"
#include "state/extension.h"
#include "state/identity.h"
#include "state/shmem.h"
#include "state/singleton.h"

PG_FUNCTION_INFO_V1(tensile_predictor_socket);

#define PENDING_MS (10 * 1000)	/* then a registration without effect is repeated */
#define BACKOFF_MS (5 * 1000)	/* between the end of a process and the next one */

static struct sockaddr_un own_address;	/* in the inference process */
static shmem_startup_hook_type previous_shmem_startup = NULL;

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

/* ---- the predictor's socket ---- */

void
tensile_set_predictor_address(struct sockaddr_un *address)
{
	List	   *folders = NIL;
	const char *folder = "";
	int			length;

	if (Unix_socket_directories != NULL &&
		SplitDirectoriesString(pstrdup(Unix_socket_directories), ',', &folders) && folders != NIL)
		folder = linitial(folders);
	length = snprintf(address->sun_path, sizeof(address->sun_path),
					  "%s/.s.pg_tensile.%d", folder, PostPortNumber);
	if (*folder == '\0' || *folder == '@' || length >= sizeof(address->sun_path))
		strlcpy(address->sun_path, "base/" PG_TEMP_FILES_DIR "/" PG_TEMP_FILE_PREFIX ".pg_tensile",
				sizeof(address->sun_path));
}

/* An exit callback: this process may be ended before Python removes the socket. */
static void
remove_socket(int code, Datum arg)
{
	unlink(own_address.sun_path);
}

/* Returns true if the socket exists, but nobody listens at it. */
static bool
is_refused(const struct sockaddr_un *address)
{
	int			fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	bool		refused;

	if (fd < 0)
		return false;
	refused = connect(fd, (const struct sockaddr *) address, sizeof(*address)) < 0 &&
		errno == ECONNREFUSED;
	close(fd);
	return refused;
}

/*
 * In the postmaster: removes the socket that a crash has left, for then no
 * exit callback has run.  After a crash of its own processes it is this
 * server's.  At the start it may be that of another server with the same port,
 * which keeps this one from starting: then its predictor accepts connections.
 */
static void
remove_stale_socket(void)
{
	static bool started = false;
	struct sockaddr_un address = {.sun_family = AF_UNIX};

	if (previous_shmem_startup)
		previous_shmem_startup();
	if (IsUnderPostmaster)
		return;
	tensile_set_predictor_address(&address);
	if (started || is_refused(&address))
		unlink(address.sun_path);
	started = true;
}

void
tensile_install_inference_hook(void)
{
	previous_shmem_startup = shmem_startup_hook;
	shmem_startup_hook = remove_stale_socket;
}

/*
 * tensile_internal._predictor_socket(): the path that the predictor has to listen at,
 * which is removed when this process exits
 */
Datum
tensile_predictor_socket(PG_FUNCTION_ARGS)
{
	tensile_require_process(TENSILE_INFERENCE);
	if (own_address.sun_path[0] == '\0')
	{
		tensile_set_predictor_address(&own_address);
		before_shmem_exit(remove_socket, (Datum) 0);
	}
	PG_RETURN_TEXT_P(cstring_to_text(own_address.sun_path));
}
