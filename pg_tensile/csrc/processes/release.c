/*
 * release.c: release_database and resume_database.
 *
 * A database to which others are connected cannot be renamed, copied or
 * dropped, and the supervisors are connected all the time.  A release ends them
 * until resume_database() or the next start of the server: shared memory has
 * the OID of the database, so nothing of it is written or copied, and it is the
 * same database under another name.
 *
 * From the moment that the OID is there, no process of pg_tensile attaches for
 * that database any more; the launcher stops those that are there (launcher.c).
 *
 * Both take effect at once, whatever becomes of the transaction.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "commands/dbcommands.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "nodes/pg_list.h"
#include "storage/procarray.h"

#include "base/error_context.h"
#include "processes/wait.h"
#include "state/extension.h"
#include "state/shmem.h"
#include "state/singleton.h"
#include "state/slot.h"
#include "state/wakeup.h"

#define POLL_MS 20

PG_FUNCTION_INFO_V1(tensile_is_released);

/* Sets the released database; returns the one before. */
static Oid
set_released(Oid database)
{
	Oid			before;

	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	before = tensile_shared->released;
	tensile_shared->released = database;
	tensile_wake(&tensile_shared->singletons[TENSILE_LAUNCHER].wakeup);
	LWLockRelease(tensile_shared->lock);
	return before;
}

/* Adds the pids of the processes of pg_tensile in this database. */
static List *
add_processes(List *pids)
{
	LWLockAcquire(tensile_shared->lock, LW_SHARED);
	for (int kind = TENSILE_CONTROLLER; kind < TENSILE_N_SINGLETONS; kind++)
	{
		const TensileSingleton *singleton = &tensile_shared->singletons[kind];

		if (singleton->pid != 0 && singleton->database == MyDatabaseId)
			pids = list_append_unique_int(pids, singleton->pid);
	}
	for (int i = 0; i < tensile_shared->max_jobs; i++)
	{
		const TensileSlot *slot = &tensile_shared->slots[i];

		if (slot->state == SLOT_ATTACHED && slot->job != 0 && slot->database == MyDatabaseId)
			pids = list_append_unique_int(pids, slot->pid);
	}
	LWLockRelease(tensile_shared->lock);
	return pids;
}

/* Is one of the processes still connected? */
static bool
any_connected(List *pids)
{
	ListCell   *cell;

	foreach(cell, pids)
		if (BackendPidGetProc(lfirst_int(cell)) != NULL)
			return true;
	return false;
}

/* release_database() */
TENSILE_PUBLIC_FUNCTION(tensile_release_database)
{
	List	   *pids = NIL;

	tensile_require_preload();
	if (tensile_shared->released != MyDatabaseId)
		tensile_require_database();
	(void) set_released(MyDatabaseId);
	while (any_connected(pids = add_processes(pids)))
		(void) tensile_wait_socket(-1, 0, POLL_MS);
	PG_RETURN_VOID();
}

/* resume_database() -> was it released? */
TENSILE_PUBLIC_FUNCTION(tensile_resume_database)
{
	tensile_require_preload();
	if (tensile_shared->released != MyDatabaseId)
		PG_RETURN_BOOL(false);
	PG_RETURN_BOOL(set_released(InvalidOid) == MyDatabaseId);
}

/* tensile_internal._is_released(): is this database released? */
Datum
tensile_is_released(PG_FUNCTION_ARGS)
{
	PG_RETURN_BOOL(tensile_shared != NULL && tensile_shared->released == MyDatabaseId);
}
