/*
 * slot.c: job slots.
 *
 * A slot is the right to run one job.  It is FREE, then RESERVED by the
 * controller, which registers a background worker (controller.c), then
 * ATTACHED by that worker before it connects, and FREE again after the
 * worker's exit callback, whatever has ended the worker.  A worker that comes
 * too late finds its slot free or taken by another job, and exits.
 *
 * A session that explains a training job has a trainer like a worker, so it
 * takes a slot too: one of job 0, ATTACHED.
 *
 * A slot that was freed remembers its last job and how the worker ended,
 * until it is reserved again.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "catalog/pg_authid.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "utils/acl.h"
#include "utils/timestamp.h"

#include "state/identity.h"
#include "state/memory_flow.h"
#include "state/shmem.h"
#include "state/slot.h"
#include "state/wakeup.h"

static TensileSlot *session_slot = NULL;

/*
 * Is the slot in use by a job of this database?  While the server moves to
 * another pg_tensile.database, slots of the old one still exist, and numbers
 * of jobs are unique only within a database.
 */
static bool
slot_is_here(const TensileSlot *slot)
{
	return slot->state != SLOT_FREE && slot->job != 0 && slot->database == MyDatabaseId;
}

TensileSlot *
tensile_slot_of_job(int64 job)
{
	for (int i = 0; i < tensile_shared->max_jobs; i++)
		if (slot_is_here(&tensile_shared->slots[i]) && tensile_shared->slots[i].job == job)
			return &tensile_shared->slots[i];
	return NULL;
}

void
tensile_slot_clear(TensileSlot *slot)
{
	slot->state = SLOT_FREE;
	slot->job = 0;
	slot->pid = 0;
	slot->feeding = false;
	slot->interrupted = false;
	slot->evicted = false;
	slot->wakeup.latch = NULL;
	slot->device = -1;
	slot->granted_bytes = 0;
	slot->overhead_bytes = 0;
	slot->acknowledged = 0;
	memset(&slot->flow, 0, sizeof(slot->flow));
	slot->flow_generation = 0;
	slot->late_for_job = 0;
}

TensileSlot *
tensile_slot_reserve(int64 job, Oid role)
{
	if (job != 0 && tensile_shared->released == MyDatabaseId)
		return NULL;
	for (int i = 0; i < tensile_shared->max_jobs; i++)
	{
		TensileSlot *slot = &tensile_shared->slots[i];

		if (slot->state != SLOT_FREE)
			continue;
		tensile_slot_clear(slot);
		slot->state = SLOT_RESERVED;
		slot->job = job;
		slot->role = role;
		slot->database = MyDatabaseId;
		slot->since = GetCurrentTimestamp();
		slot->last_job = 0;
		slot->last_error[0] = '\0';
		LWLockAcquire(slot->lock, LW_EXCLUSIVE);
		memset(&slot->progress, 0, sizeof(slot->progress));
		memset(&slot->plan, 0, sizeof(slot->plan));
		LWLockRelease(slot->lock);
		return slot;
	}
	return NULL;
}

TensileSlot *
tensile_slot_attach(int index, int64 job)
{
	TensileSlot *slot;
	bool		attached = false;

	if (index < 0 || index >= tensile_shared->max_jobs)
		return NULL;
	slot = &tensile_shared->slots[index];
	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	if (slot->state == SLOT_RESERVED && slot->job == job)
	{
		slot->state = SLOT_ATTACHED;
		slot->pid = MyProcPid;
		slot->since = GetCurrentTimestamp();
		slot->wakeup.latch = MyLatch;
		attached = true;
	}
	LWLockRelease(tensile_shared->lock);
	return attached ? slot : NULL;
}

void
tensile_slot_free(TensileSlot *slot)
{
	bool		terminated = tensile_terminated();

	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	if (slot->state == SLOT_ATTACHED && slot->pid == MyProcPid)
	{
		slot->last_job = slot->job;
		slot->last_database = slot->database;
		slot->last_terminated = terminated;
		tensile_memory_flow_wake(slot->device);
		tensile_slot_clear(slot);
		tensile_wake(&tensile_shared->singletons[TENSILE_CONTROLLER].wakeup);
		tensile_wake(&tensile_shared->singletons[TENSILE_SCHEDULER].wakeup);
	}
	LWLockRelease(tensile_shared->lock);
}

TensilePlanEvent *
tensile_slot_events(const TensileSlot *slot)
{
	Size		index = slot - tensile_shared->slots;

	return tensile_shared->events + index * tensile_shared->plan_events;
}

TensileSlot *
tensile_copy_slots(int *nslots)
{
	TensileSlot *copy = palloc(tensile_shared->max_jobs * sizeof(TensileSlot));

	*nslots = 0;
	LWLockAcquire(tensile_shared->lock, LW_SHARED);
	for (int i = 0; i < tensile_shared->max_jobs; i++)
	{
		TensileSlot *slot = &tensile_shared->slots[i];

		if (!slot_is_here(slot))
			continue;
		LWLockAcquire(slot->lock, LW_SHARED);
		copy[(*nslots)++] = *slot;
		LWLockRelease(slot->lock);
	}
	LWLockRelease(tensile_shared->lock);
	return copy;
}

bool
tensile_role_visible(Oid role)
{
	return has_privs_of_role(GetUserId(), role) ||
		has_privs_of_role(GetUserId(), ROLE_PG_READ_ALL_STATS);
}

/* ---- a session's slot ---- */

/* An exit callback. */
static void
free_session_slot(int code, Datum arg)
{
	LWLockReleaseAll();
	tensile_session_slot_free();
}

void
tensile_session_slot_take(const char *function)
{
	static bool registered = false;

	Assert(session_slot == NULL);
	if (!registered)
		before_shmem_exit(free_session_slot, (Datum) 0);
	registered = true;
	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	session_slot = tensile_slot_reserve(0, GetUserId());
	if (session_slot != NULL)
	{
		session_slot->state = SLOT_ATTACHED;
		session_slot->pid = MyProcPid;
	}
	LWLockRelease(tensile_shared->lock);
	if (session_slot == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_RESOURCES),
				 errmsg("no job slot is free"),
				 errdetail("%s takes one of the %d slots of pg_tensile.max_jobs, as a job does.",
						   function, tensile_shared->max_jobs),
				 errhint("Try again when a job has ended, or increase pg_tensile.max_jobs "
						 "and restart the server.")));
}

void
tensile_session_slot_free(void)
{
	if (session_slot != NULL)
		tensile_slot_free(session_slot);
	session_slot = NULL;
}
