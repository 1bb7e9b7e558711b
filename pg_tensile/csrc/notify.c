/*
 * notify.c: what a transaction tells the others when it commits.
 *
 * Nobody may be woken before a change is visible, nor for one that is rolled back. So a transaction collects what it has
 * to tell (pending), forgets what its aborted subtransactions wanted to tell, and delivers the rest in its commit
 * callback, which PostgreSQL calls after the transaction has become visible. Nothing there may raise.
 *
 * Dropped roles and extensions are noticed by an object access hook, so that our processes need not look all the time.
 *
 * A worker that runs its training query is interrupted (SIGINT) only by what may end its job. The slot's flag `interrupted`
 * tells that cancel from one by pg_cancel_backend.
 *
 * Log lines of jobs are written after the commit, too: what was rolled back has not happened.
 *
 * PREPARE TRANSACTION is refused, as after NOTIFY: COMMIT PREPARED would have nothing to deliver.
 */
#include "postgres.h"

#include <signal.h>

#include "access/xact.h"
#include "catalog/objectaccess.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_extension.h"
#include "commands/extension.h"
#include "commands/trigger.h"
#include "miscadmin.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "pg_tensile.h"

PG_FUNCTION_INFO_V1(tensile_notify);
PG_FUNCTION_INFO_V1(tensile_notify_stop);
PG_FUNCTION_INFO_V1(tensile_log_job);
PG_FUNCTION_INFO_V1(tensile_submitted_here);
PG_FUNCTION_INFO_V1(tensile_models_changed);
PG_FUNCTION_INFO_V1(tensile_wait_for_change);

typedef enum PendingKind
{
	PENDING_JOB,				/* a job changed */
	PENDING_STOP,				/* a job has to stop */
	PENDING_LOG,				/* `line` is for the server's log */
	PENDING_SUBMITTED,			/* a job was submitted */
	PENDING_MODELS,				/* models, versions or grants changed */
	PENDING_INSTALL,			/* the extension was created or updated */
	PENDING_DROP_ROLE,			/* the role `object` was dropped */
	PENDING_DROP_EXTENSION		/* this extension was dropped in this database */
} PendingKind;

typedef struct Pending
{
	PendingKind kind;
	int64		object;			/* the job or role */
	SubTransactionId subtransaction;
	char	   *line;
} Pending;

/* In TopTransactionContext. */
static Pending *pending = NULL;
static int	npending = 0;
static int	pending_capacity = 0;

/*
 * Changes that only this session knows: its own, before they are visible or after they were rolled back; and those that
 * come as invalidations of tensile.models. On a standby, where no commit callback runs, and after its promotion there is
 * no other word of what happened on the primary.
 */
static uint64 own_models_generation = 0;
static Oid	models_relation = InvalidOid;

/* Value of shared->changes that tensile._wait_for_change returned for; at first none, so that the first call returns at once. */
static uint64 seen_changes = PG_UINT64_MAX;

static object_access_hook_type previous_object_access = NULL;

#define LOG_LINE_LENGTH 1000

/* ---- collecting ---- */

static void
add_pending(PendingKind kind, int64 object)
{
	SubTransactionId current = GetCurrentSubTransactionId();
	Pending    *last = npending > 0 ? &pending[npending - 1] : NULL;

	if (last && last->kind == kind && last->object == object && last->subtransaction == current && kind != PENDING_LOG)
		return;
	if (npending == pending_capacity)
	{
		int			capacity = Max(16, 2 * pending_capacity);
		Pending    *grown = MemoryContextAllocHuge(TopTransactionContext, capacity * sizeof(Pending));

		if (npending > 0)
			memcpy(grown, pending, npending * sizeof(Pending));
		pending = grown;		/* the old one goes with the transaction */
		pending_capacity = capacity;
	}
	pending[npending++] = (Pending) {kind, object, current, NULL};
}

static void
forget_pending(void)
{
	pending = NULL;
	npending = pending_capacity = 0;
}

static bool
is_pending(PendingKind kind)
{
	for (int i = 0; i < npending; i++)
		if (pending[i].kind == kind)
			return true;
	return false;
}

void
tensile_notify_at_commit(int64 job)
{
	tensile_require_preload();
	add_pending(PENDING_JOB, job);
}

void
tensile_submitted_at_commit(int64 job)
{
	tensile_require_preload();
	add_pending(PENDING_SUBMITTED, job);
}

uint64
tensile_models_generation(void)
{
	tensile_require_preload();
	return pg_atomic_read_u64(&tensile_shared->models_generation) + own_models_generation;
}

/* A callback of the relation cache; the OID is invalid when anything may have changed. */
static void
relation_changed(Datum arg, Oid relation)
{
	if (relation == models_relation || !OidIsValid(relation))
		own_models_generation++;
}

void
tensile_watch_models(Oid relation)
{
	models_relation = relation;
}

static void
object_access(ObjectAccessType access, Oid class, Oid object, int subobject, void *arg)
{
	if (previous_object_access)
		previous_object_access(access, class, object, subobject, arg);
	if ((access != OAT_DROP && access != OAT_POST_ALTER) || !IsTransactionState())
		return;
	if (access == OAT_POST_ALTER)
	{
		/* ALTER EXTENSION UPDATE: what waits for another version looks again. */
		if (class == ExtensionRelationId && object == get_extension_oid(TENSILE_EXTENSION, true))
			add_pending(PENDING_INSTALL, object);
	}
	else if (class == AuthIdRelationId)
		add_pending(PENDING_DROP_ROLE, object);
	else if (class == ExtensionRelationId && object == get_extension_oid(TENSILE_EXTENSION, true))
		add_pending(PENDING_DROP_EXTENSION, object);
}

/* ---- delivering ---- */

/* Wakes a worker to look at the state of its job; `stop`: the job may have to end, so its training query is interrupted. */
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

/* Wakes the workers whose role may be gone, and all processes if the extension may be: they look whether it is so. */
static void
wake_bereft(const Pending *drop)
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

void
tensile_wake_readers(void)
{
	pg_atomic_fetch_add_u64(&tensile_shared->changes, 1);
	ConditionVariableBroadcast(&tensile_shared->job_changed);
}

static void
write_log_lines(void)
{
	for (int i = 0; i < npending; i++)
		if (pending[i].kind == PENDING_LOG)
			ereport(LOG, (errmsg_internal("%s", pending[i].line), errhidestmt(true), errhidecontext(true)));
}

static void
deliver(void)
{
	bool		jobs = is_pending(PENDING_JOB) || is_pending(PENDING_STOP) || is_pending(PENDING_SUBMITTED);

	write_log_lines();
	LWLockAcquire(tensile_shared->lock, LW_SHARED);
	for (int i = 0; i < npending; i++)
	{
		if (pending[i].kind == PENDING_JOB || pending[i].kind == PENDING_STOP)
			wake_worker(tensile_slot_of_job(pending[i].object), pending[i].kind == PENDING_STOP);
		else if (pending[i].kind == PENDING_DROP_ROLE || pending[i].kind == PENDING_DROP_EXTENSION)
			wake_bereft(&pending[i]);
	}
	if (is_pending(PENDING_INSTALL))
	{
		pg_atomic_fetch_add_u64(&tensile_shared->installs, 1);
		tensile_wake(&tensile_shared->singletons[TENSILE_LAUNCHER].wakeup);
	}
	if (is_pending(PENDING_MODELS))
		pg_atomic_fetch_add_u64(&tensile_shared->models_generation, 1);
	if (jobs)
	{
		tensile_wake(&tensile_shared->singletons[TENSILE_CONTROLLER].wakeup);
		tensile_wake(&tensile_shared->singletons[TENSILE_SCHEDULER].wakeup);
	}
	LWLockRelease(tensile_shared->lock);
	if (jobs)
		tensile_wake_readers();
}

static void
at_transaction_end(XactEvent event, void *arg)
{
	if (event == XACT_EVENT_PRE_COMMIT)
		tensile_check_commit();
	if (npending == 0)
		return;
	switch (event)
	{
		case XACT_EVENT_COMMIT:
			deliver();
			forget_pending();
			break;
		case XACT_EVENT_ABORT:
			if (is_pending(PENDING_MODELS))
				own_models_generation++;
			forget_pending();
			break;
		case XACT_EVENT_PRE_PREPARE:
			if (is_pending(PENDING_JOB) || is_pending(PENDING_STOP) || is_pending(PENDING_SUBMITTED) ||
				is_pending(PENDING_MODELS))
				ereport(ERROR,
						(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
						 errmsg("cannot PREPARE a transaction that has changed jobs or models of pg_tensile")));
			break;
		case XACT_EVENT_PREPARE:
		case XACT_EVENT_PARALLEL_COMMIT:
		case XACT_EVENT_PARALLEL_ABORT:
			forget_pending();
			break;
		case XACT_EVENT_PRE_COMMIT:
		case XACT_EVENT_PARALLEL_PRE_COMMIT:
			break;
	}
}

static void
at_subtransaction_end(SubXactEvent event, SubTransactionId self, SubTransactionId parent, void *arg)
{
	int			kept = 0;

	if (npending == 0 || (event != SUBXACT_EVENT_COMMIT_SUB && event != SUBXACT_EVENT_ABORT_SUB))
		return;
	for (int i = 0; i < npending; i++)
	{
		Pending		one = pending[i];

		if (one.subtransaction == self && event == SUBXACT_EVENT_ABORT_SUB)
		{
			if (one.kind == PENDING_MODELS)
				own_models_generation++;
			continue;
		}
		if (one.subtransaction == self)
			one.subtransaction = parent;
		pending[kept++] = one;
	}
	npending = kept;
}

void
tensile_install_notify_hooks(void)
{
	RegisterXactCallback(at_transaction_end, NULL);
	RegisterSubXactCallback(at_subtransaction_end, NULL);
	previous_object_access = object_access_hook;
	object_access_hook = object_access;
	CacheRegisterRelcacheCallback(relation_changed, (Datum) 0);
}

/* ---- for SQL ---- */

/* tensile._notify(job): it has changed; job 0: the extension has been created. */
Datum
tensile_notify(PG_FUNCTION_ARGS)
{
	int64		job = PG_GETARG_INT64(0);

	tensile_require_preload();
	add_pending(job == 0 ? PENDING_INSTALL : PENDING_JOB, job);
	PG_RETURN_VOID();
}

/* tensile._notify_stop(job): it has to stop, even if its worker runs the training query. */
Datum
tensile_notify_stop(PG_FUNCTION_ARGS)
{
	tensile_require_preload();
	add_pending(PENDING_STOP, PG_GETARG_INT64(0));
	PG_RETURN_VOID();
}

/* tensile._log_job(line): for the server's log when this commits, if pg_tensile.log_jobs is on; cut to one short line. */
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
	add_pending(PENDING_LOG, 0);
	pending[npending - 1].line = copy;
	PG_RETURN_VOID();
}

/* tensile._submitted_here(job) */
Datum
tensile_submitted_here(PG_FUNCTION_ARGS)
{
	int64		job = PG_GETARG_INT64(0);

	for (int i = 0; i < npending; i++)
		if (pending[i].kind == PENDING_SUBMITTED && pending[i].object == job)
			PG_RETURN_BOOL(true);
	PG_RETURN_BOOL(false);
}

/* The number under which pg_stat_activity knows a wait by its name. */
uint32
tensile_wait_event(TensileWait wait)
{
	static const char *const names[] = {"PgTensileSupervisor", "PgTensilePredictor", "PgTensileJob"};
	static uint32 events[lengthof(names)] = {0};

	if (events[wait] == 0)
		events[wait] = WaitEventExtensionNew(names[wait]);
	return events[wait];
}

/* tensile._models_changed(): statement trigger */
Datum
tensile_models_changed(PG_FUNCTION_ARGS)
{
	Oid			models;

	if (!CALLED_AS_TRIGGER(fcinfo))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("function \"%s\" was not called by trigger manager", "_models_changed")));
	tensile_require_preload();
	add_pending(PENDING_MODELS, 0);
	own_models_generation++;
	/* Travels to standbys with the commit. */
	models = get_relname_relid("models", RelationGetNamespace(((TriggerData *) fcinfo->context)->tg_relation));
	if (OidIsValid(models))
		CacheInvalidateRelcacheByRelid(models);
	return PointerGetDatum(NULL);
}

/*
 * tensile._wait_for_change(timeout_ms): returns when a job has changed since the last call in this session returned, so
 * that a caller who looks, waits and looks again misses nothing.
 */
Datum
tensile_wait_for_change(PG_FUNCTION_ARGS)
{
	int			timeout_ms = PG_GETARG_INT32(0);
	TimestampTz start = GetCurrentTimestamp();
	long		left = timeout_ms;

	tensile_require_preload();
	ConditionVariablePrepareToSleep(&tensile_shared->job_changed);
	while (pg_atomic_read_u64(&tensile_shared->changes) == seen_changes && left > 0)
	{
		if (ConditionVariableTimedSleep(&tensile_shared->job_changed, left, tensile_wait_event(TENSILE_WAIT_JOB)))
			break;
		left = timeout_ms - TimestampDifferenceMilliseconds(start, GetCurrentTimestamp());
	}
	ConditionVariableCancelSleep();
	seen_changes = pg_atomic_read_u64(&tensile_shared->changes);
	PG_RETURN_VOID();
}
