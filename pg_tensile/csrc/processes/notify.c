/*
 * notify.c: what a transaction tells other processes when it commits.
 *
 * No process may be woken before a change is visible, nor for a change that
 * is rolled back.  So a transaction collects notices (pending), forgets those
 * of subtransactions that abort, and delivers the rest in its commit callback,
 * which PostgreSQL calls after the transaction has become visible.  Nothing
 * there may raise.
 *
 * An object access hook notices dropped roles and extensions, so that the
 * background processes need not look for them all the time, and tells who
 * creates the extension in another database than theirs.
 *
 * A worker that runs its training query is interrupted (SIGINT) only by
 * changes that may end its job.  The slot's flag `interrupted` distinguishes
 * that cancel request from one by pg_cancel_backend.
 *
 * Log lines of jobs are written after the commit as well, so that the log
 * does not report what was rolled back.
 *
 * PREPARE TRANSACTION is refused, as after NOTIFY: COMMIT PREPARED would have
 * nothing to deliver.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include <signal.h>

#include "access/xact.h"
#include "catalog/objectaccess.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_extension.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "utils/memutils.h"

#include "base/convert.h"
#include "base/guc.h"
#include "base/library.h"
#include "base/process_kind.h"
#include "processes/notify.h"
#include "state/extension.h"
#include "state/images.h"
#include "state/models_generation.h"
#include "state/shmem.h"
#include "state/slot.h"
#include "state/wakeup.h"

#define LOG_LINE_LENGTH 1000

PG_FUNCTION_INFO_V1(tensile_notify);
PG_FUNCTION_INFO_V1(tensile_notify_stop);
PG_FUNCTION_INFO_V1(tensile_log_job);
PG_FUNCTION_INFO_V1(tensile_submitted_here);

typedef enum PendingKind
{
	PENDING_JOB,				/* a job changed */
	PENDING_STOP,				/* a job has to stop */
	PENDING_LOG,				/* a line for the server's log */
	PENDING_SUBMITTED,			/* a job was submitted */
	PENDING_MODELS,				/* models, versions or grants changed */
	PENDING_VERSION_DELETED,
	PENDING_INSTALL,			/* the extension was created or updated */
	PENDING_DROP_ROLE,			/* a role was dropped */
	PENDING_DROP_EXTENSION		/* the extension was dropped in this database */
} PendingKind;

typedef struct Pending
{
	PendingKind kind;
	int64		object;			/* the job, version or role */
	const char *line;			/* for the log */
	SubTransactionId subtransaction;
} Pending;

static List *pending = NIL;		/* of Pending, in TopTransactionContext */

static object_access_hook_type previous_object_access = NULL;

/* ---- collecting ---- */

static void
add_pending(PendingKind kind, int64 object, const char *line)
{
	SubTransactionId current = GetCurrentSubTransactionId();
	Pending    *last = pending != NIL ? llast(pending) : NULL;
	MemoryContext old;

	if (last && last->kind == kind && last->object == object &&
		last->subtransaction == current && kind != PENDING_LOG)
		return;
	old = MemoryContextSwitchTo(TopTransactionContext);
	last = palloc(sizeof(Pending));
	*last = (Pending) {kind, object, line, current};
	pending = lappend(pending, last);
	MemoryContextSwitchTo(old);
}

static bool
is_pending(PendingKind kind)
{
	ListCell   *cell;

	foreach(cell, pending)
		if (((Pending *) lfirst(cell))->kind == kind)
			return true;
	return false;
}

void
tensile_submitted_at_commit(int64 job)
{
	tensile_require_preload();
	add_pending(PENDING_SUBMITTED, job, NULL);
}

void
tensile_models_changed_at_commit(void)
{
	tensile_require_preload();
	add_pending(PENDING_MODELS, 0, NULL);
	tensile_models_changed_here();
}

void
tensile_version_deleted_at_commit(int64 version)
{
	tensile_require_preload();
	add_pending(PENDING_VERSION_DELETED, version, NULL);
}

static void
object_access(ObjectAccessType access, Oid class, Oid object, int subobject, void *arg)
{
	if (previous_object_access)
		previous_object_access(access, class, object, subobject, arg);
	if (!IsTransactionState())
		return;
	if (access == OAT_POST_CREATE && class == ExtensionRelationId)
		tensile_extension_created(object);
	if (access != OAT_DROP && access != OAT_POST_ALTER)
		return;
	if (access == OAT_POST_ALTER)
	{
		/* ALTER EXTENSION UPDATE: processes may wait for another version. */
		if (class == ExtensionRelationId && object == get_extension_oid(TENSILE_EXTENSION, true))
			add_pending(PENDING_INSTALL, object, NULL);
	}
	else if (class == AuthIdRelationId)
		add_pending(PENDING_DROP_ROLE, object, NULL);
	else if (class == ExtensionRelationId && object == get_extension_oid(TENSILE_EXTENSION, true))
		add_pending(PENDING_DROP_EXTENSION, object, NULL);
}

/* ---- delivering ---- */

/*
 * Wakes a worker to look at the state of its job.  `stop`: the job may have to
 * end, so its training query is interrupted.
 */
static void
wake_worker(TensileSlot *slot, bool stop)
{
	if (slot == NULL || slot->state != SLOT_ATTACHED)
		return;
	tensile_wake(&slot->wakeup);
	if (stop && slot->feeding)
	{
		slot->interrupted = true;
		kill(slot->pid, SIGINT);
	}
}

/*
 * Wakes the processes that have to look whether what they run for was dropped:
 * the workers of the role, or all processes after a drop of the extension.
 */
static void
wake_affected(const Pending *drop)
{
	bool		role = drop->kind == PENDING_DROP_ROLE;

	pg_atomic_fetch_add_u64(&tensile_shared->drops, 1);
	for (int i = 0; i < tensile_shared->max_jobs; i++)
	{
		TensileSlot *slot = &tensile_shared->slots[i];

		if (role ? slot->role == (Oid) drop->object : slot->database == MyDatabaseId)
			wake_worker(slot, true);
	}
	for (int kind = 0; !role && kind < TENSILE_N_SINGLETONS; kind++)
		tensile_wake(&tensile_shared->singletons[kind].wakeup);
}

static void
write_log_lines(void)
{
	ListCell   *cell;

	foreach(cell, pending)
	{
		const Pending *notice = lfirst(cell);

		if (notice->kind == PENDING_LOG)
			ereport(LOG,
					(errmsg_internal("%s", notice->line), errhidestmt(true), errhidecontext(true)));
	}
}

static bool
jobs_pending(void)
{
	return is_pending(PENDING_JOB) || is_pending(PENDING_STOP) || is_pending(PENDING_SUBMITTED);
}

/* Removes the images of versions that were deleted, all with the extension. */
static void
remove_images(void)
{
	ListCell   *cell;

	foreach(cell, pending)
	{
		const Pending *notice = lfirst(cell);

		if (notice->kind == PENDING_VERSION_DELETED)
			tensile_images_remove(notice->object);
		else if (notice->kind == PENDING_DROP_EXTENSION)
			tensile_images_remove(0);
	}
}

static void
deliver(void)
{
	bool		jobs = jobs_pending();
	ListCell   *cell;

	write_log_lines();
	LWLockAcquire(tensile_shared->lock, LW_SHARED);
	foreach(cell, pending)
	{
		const Pending *notice = lfirst(cell);

		if (notice->kind == PENDING_JOB || notice->kind == PENDING_STOP)
			wake_worker(tensile_slot_of_job(notice->object), notice->kind == PENDING_STOP);
		else if (notice->kind == PENDING_DROP_ROLE || notice->kind == PENDING_DROP_EXTENSION)
			wake_affected(notice);
	}
	if (is_pending(PENDING_INSTALL))
	{
		pg_atomic_fetch_add_u64(&tensile_shared->installs, 1);
		tensile_wake(&tensile_shared->singletons[TENSILE_LAUNCHER].wakeup);
	}
	if (jobs)
	{
		tensile_wake(&tensile_shared->singletons[TENSILE_CONTROLLER].wakeup);
		tensile_wake(&tensile_shared->singletons[TENSILE_SCHEDULER].wakeup);
	}
	LWLockRelease(tensile_shared->lock);
	remove_images();
	if (jobs)
		tensile_announce_job_change();
}

static void
at_transaction_end(XactEvent event, void *arg)
{
	if (event == XACT_EVENT_PRE_COMMIT)
		tensile_check_commit();
	if (event == XACT_EVENT_PRE_COMMIT && is_pending(PENDING_MODELS))
		tensile_models_committing();
	if (event == XACT_EVENT_COMMIT || event == XACT_EVENT_ABORT)
		tensile_models_transaction_ended(event == XACT_EVENT_COMMIT && is_pending(PENDING_MODELS));
	if (pending == NIL)
		return;
	switch (event)
	{
		case XACT_EVENT_COMMIT:
			deliver();
			pending = NIL;
			break;
		case XACT_EVENT_ABORT:
			pending = NIL;
			break;
		case XACT_EVENT_PRE_PREPARE:
			if (jobs_pending() || is_pending(PENDING_MODELS))
				ereport(ERROR,
						(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
						 errmsg("cannot PREPARE a transaction that has changed "
								"jobs or models of pg_tensile")));
			break;
		case XACT_EVENT_PREPARE:
		case XACT_EVENT_PARALLEL_COMMIT:
		case XACT_EVENT_PARALLEL_ABORT:
			pending = NIL;
			break;
		case XACT_EVENT_PRE_COMMIT:
		case XACT_EVENT_PARALLEL_PRE_COMMIT:
			break;
	}
}

static void
at_subtransaction_end(SubXactEvent event, SubTransactionId self, SubTransactionId parent, void *arg)
{
	ListCell   *cell;

	if (event != SUBXACT_EVENT_COMMIT_SUB && event != SUBXACT_EVENT_ABORT_SUB)
		return;
	foreach(cell, pending)
	{
		Pending    *notice = lfirst(cell);

		if (notice->subtransaction != self)
			continue;
		if (event == SUBXACT_EVENT_COMMIT_SUB)
			notice->subtransaction = parent;
		else
		{
			if (notice->kind == PENDING_MODELS)
				tensile_models_changed_here();
			pending = foreach_delete_current(pending, cell);
		}
	}
}

void
tensile_install_notify_hooks(void)
{
	RegisterXactCallback(at_transaction_end, NULL);
	RegisterSubXactCallback(at_subtransaction_end, NULL);
	previous_object_access = object_access_hook;
	object_access_hook = object_access;
}

/* ---- functions in SQL ---- */

/*
 * tensile_internal._notify(job): the job has changed; job 0: the extension was created.
 */
Datum
tensile_notify(PG_FUNCTION_ARGS)
{
	int64		job = PG_GETARG_INT64(0);

	tensile_require_preload();
	add_pending(job == 0 ? PENDING_INSTALL : PENDING_JOB, job, NULL);
	PG_RETURN_VOID();
}

/*
 * tensile_internal._notify_stop(job): the job has to stop, even while its worker runs
 * the training query.
 */
Datum
tensile_notify_stop(PG_FUNCTION_ARGS)
{
	tensile_require_preload();
	add_pending(PENDING_STOP, PG_GETARG_INT64(0), NULL);
	PG_RETURN_VOID();
}

/*
 * tensile_internal._log_job(line): writes one line to the server's log when this
 * transaction commits, if pg_tensile.log_jobs is on; cut where it is too long.
 */
Datum
tensile_log_job(PG_FUNCTION_ARGS)
{
	text	   *line = PG_GETARG_TEXT_PP(0);
	char	   *copy;

	if (!tensile_log_jobs)
		PG_RETURN_VOID();
	copy = MemoryContextAlloc(TopTransactionContext, LOG_LINE_LENGTH);
	tensile_copy_text(copy, LOG_LINE_LENGTH, line);
	for (char *c = copy; *c != '\0'; c++)
		if (*c == '\n' || *c == '\r')
			*c = ' ';
	add_pending(PENDING_LOG, 0, copy);
	PG_RETURN_VOID();
}

/* tensile_worker._submitted_here(job): has this transaction submitted the job? */
Datum
tensile_submitted_here(PG_FUNCTION_ARGS)
{
	int64		job = PG_GETARG_INT64(0);
	ListCell   *cell;

	foreach(cell, pending)
	{
		const Pending *notice = lfirst(cell);

		if (notice->kind == PENDING_SUBMITTED && notice->object == job)
			PG_RETURN_BOOL(true);
	}
	PG_RETURN_BOOL(false);
}
