/*
 * shmem.c: allocates and initialises shared memory, whose layout and locks
 * shmem.h describes.
 *
 * When a process attached to shared memory crashes, the postmaster builds it
 * anew.  So nothing in it outlives the process that it belongs to.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/shmem.h"

#include "base/compat.h"
#include "base/guc.h"
#include "base/library.h"
#include "base/process_kind.h"
#include "state/device.h"
#include "state/plan.h"
#include "state/predictions.h"
#include "state/shmem.h"
#include "state/slot.h"
#include "state/wakeup.h"

#define FIXED_LOCKS 2			/* shared->lock and shared->predictions_lock */

TensileShared *tensile_shared = NULL;
TensileSlot *tensile_my_slot = NULL;

static Size
slots_size(void)
{
	Size		slots = mul_size(tensile_max_jobs, sizeof(TensileSlot));

	return MAXALIGN(add_size(offsetof(TensileShared, slots), slots));
}

/* Each job uses at most one device. */
static int
max_devices(void)
{
	return tensile_max_jobs + TENSILE_MORE_DEVICES;
}

/* All but the event rows. */
static Size
fixed_size(void)
{
	return add_size(slots_size(), MAXALIGN(mul_size(max_devices(), sizeof(TensileDevice))));
}

static Size
shared_size(void)
{
	Size		nevents = mul_size(tensile_max_jobs, tensile_plan_events);

	return add_size(fixed_size(), mul_size(nevents, sizeof(TensilePlanEvent)));
}

static int
number_of_locks(void)
{
	return FIXED_LOCKS + tensile_max_jobs;
}

static void
init_wakeup(TensileWakeup *wakeup)
{
	wakeup->latch = NULL;
	pg_atomic_init_u64(&wakeup->count, 0);
}

/*
 * Initialises everything but the event rows, which are written before they are
 * read.
 */
static void
init_shared(LWLockPadded *locks)
{
	memset(tensile_shared, 0, fixed_size());
	tensile_shared->lock = &locks[0].lock;
	tensile_shared->predictions_lock = &locks[1].lock;
	pg_atomic_init_u64(&tensile_shared->models_generation, 0);
	pg_atomic_init_u64(&tensile_shared->models_changed, 0);
	pg_atomic_init_u32(&tensile_shared->models_committing, 0);
	pg_atomic_init_u64(&tensile_shared->drops, 0);
	pg_atomic_init_u64(&tensile_shared->installs, 0);
	pg_atomic_init_u64(&tensile_shared->changes, 0);
	ConditionVariableInit(&tensile_shared->job_changed);
	for (int i = 0; i < TENSILE_N_SINGLETONS; i++)
		init_wakeup(&tensile_shared->singletons[i].wakeup);
	for (int i = 0; i < TENSILE_MAX_PREDICTIONS; i++)
	{
		pg_atomic_init_u64(&tensile_shared->predictions[i].rows, 0);
		pg_atomic_init_u64(&tensile_shared->predictions[i].requests, 0);
		pg_atomic_init_u64(&tensile_shared->predictions[i].unknown_categories, 0);
		pg_atomic_init_u64(&tensile_shared->predictions[i].last_used, 0);
	}
	for (int i = 0; i < TENSILE_MAX_IMAGES; i++)
	{
		pg_atomic_init_u64(&tensile_shared->images[i].serial, 0);
		pg_atomic_init_u64(&tensile_shared->images[i].last_used, 0);
		pg_atomic_init_u32(&tensile_shared->images[i].counted, 0);
	}
	tensile_shared->max_jobs = tensile_max_jobs;
	tensile_shared->plan_events = tensile_plan_events;
	tensile_shared->max_devices = max_devices();
	tensile_shared->devices = (TensileDevice *) ((char *) tensile_shared + slots_size());
	tensile_shared->events = (TensilePlanEvent *) ((char *) tensile_shared + fixed_size());
	for (int i = 0; i < tensile_max_jobs; i++)
	{
		init_wakeup(&tensile_shared->slots[i].wakeup);
		tensile_shared->slots[i].lock = &locks[FIXED_LOCKS + i].lock;
	}
}

#ifdef TENSILE_HAS_SHMEM_CALLBACKS

static LWLockPadded *all_locks = NULL;

static void
request_shmem(void *arg)
{
	ShmemRequestStruct(.name = TENSILE_EXTENSION, .size = shared_size(),
					   .ptr = (void **) &tensile_shared);
	ShmemRequestStruct(.name = TENSILE_EXTENSION " locks",
					   .size = mul_size(number_of_locks(), sizeof(LWLockPadded)),
					   .ptr = (void **) &all_locks);
}

static void
initialise_shmem(void *arg)
{
	int			tranche = LWLockNewTrancheId(TENSILE_EXTENSION);

	for (int i = 0; i < number_of_locks(); i++)
		LWLockInitialize(&all_locks[i].lock, tranche);
	init_shared(all_locks);
}

void
tensile_request_shmem(void)
{
	static const ShmemCallbacks callbacks = {
		.request_fn = request_shmem,
		.init_fn = initialise_shmem,
	};

	RegisterShmemCallbacks(&callbacks);
}

#else

static shmem_request_hook_type previous_shmem_request = NULL;
static shmem_startup_hook_type previous_shmem_startup = NULL;

static void
request_shmem(void)
{
	if (previous_shmem_request)
		previous_shmem_request();
	RequestAddinShmemSpace(shared_size());
	RequestNamedLWLockTranche(TENSILE_EXTENSION, number_of_locks());
}

static void
startup_shmem(void)
{
	bool		found;

	if (previous_shmem_startup)
		previous_shmem_startup();
	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	tensile_shared = ShmemInitStruct(TENSILE_EXTENSION, shared_size(), &found);
	if (!found)
		init_shared(GetNamedLWLockTranche(TENSILE_EXTENSION));
	LWLockRelease(AddinShmemInitLock);
}

void
tensile_request_shmem(void)
{
	previous_shmem_request = shmem_request_hook;
	shmem_request_hook = request_shmem;
	previous_shmem_startup = shmem_startup_hook;
	shmem_startup_hook = startup_shmem;
}

#endif

void
tensile_require_preload(void)
{
	if (tensile_shared == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("pg_tensile is not in shared_preload_libraries"),
				 errhint("Add pg_tensile to shared_preload_libraries in postgresql.conf "
						 "and restart the server.")));
}
