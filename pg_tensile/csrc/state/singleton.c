/*
 * singleton.c: entries of the launcher, controller, scheduler and inference
 * process in shared memory.
 *
 * A singleton occupies its entry from before it connects to a database until
 * its exit callback, whatever has ended it.  A worker occupies a job slot in
 * the same way (slot.c).
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/ipc.h"
#include "utils/timestamp.h"

#include "base/process_kind.h"
#include "state/ledger.h"
#include "state/shmem.h"
#include "state/singleton.h"
#include "state/wakeup.h"

static TensileOutcome my_outcome = TENSILE_FAILED;

void
tensile_singleton_set_outcome(TensileOutcome outcome)
{
	my_outcome = outcome;
}

/* Leaves the entry in shared memory; an exit callback. */
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
	free = self->pid == 0 &&
		(!OidIsValid(database) || database != tensile_shared->released);
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
