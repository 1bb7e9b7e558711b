/*
 * shmem.h: the layout of shared memory.
 *
 * Shared memory is one TensileShared, which ends with max_jobs slots, and
 * behind it the devices and plan_events event rows for each slot.  Its locks are
 *
 *	 shared->lock		the singletons, the slots (with the exceptions below),
 *						the device ledger, the loaded models, and the images
 *	 slot->lock			the slot's progress and plan; taken after shared->lock
 *						when both are needed
 *	 shared->predictions_lock
 *						which counters of predictions belong to which version
 *
 * Everything else is atomic.  No spinlock protects anything, so ereport is
 * allowed under every lock; but callbacks at commit and at exit never raise.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_SHMEM_H
#define TENSILE_SHMEM_H

#include "port/atomics.h"
#include "storage/condition_variable.h"
#include "storage/lwlock.h"

#include "state/device.h"
#include "state/images.h"
#include "state/plan.h"
#include "state/predictions.h"
#include "state/singleton.h"
#include "state/slot.h"

typedef struct TensileShared
{
	LWLock	   *lock;
	LWLock	   *predictions_lock;
	pg_atomic_uint64 models_generation; /* rises when a change of models has become visible */
	pg_atomic_uint64 models_changed;	/* transactions that were completed at the last change */
	pg_atomic_uint32 models_committing; /* transactions that are committing a change */
	pg_atomic_uint64 drops;		/* of roles and of the extension */
	pg_atomic_uint64 installs;	/* CREATE EXTENSIONs that have committed */
	pg_atomic_uint64 changes;	/* of jobs */
	ConditionVariable job_changed;
	Oid			released;		/* a database without supervisors (release.c) */
	TensileSingleton singletons[TENSILE_N_SINGLETONS];
	TensilePredictions predictions[TENSILE_MAX_PREDICTIONS];
	int			nloaded;
	TensileLoaded loaded[TENSILE_MAX_LOADED];	/* in the inference process's database */
	TensileDeviceName loaded_on[TENSILE_MAX_LOADED];	/* device of each of them */
	TensileImage images[TENSILE_MAX_IMAGES];
	uint64		last_image;		/* serial */
	int			max_jobs;
	int			max_devices;
	int			plan_events;
	TensileDevice *devices;		/* max_devices */
	TensilePlanEvent *events;	/* max_jobs * plan_events */
	TensileSlot slots[FLEXIBLE_ARRAY_MEMBER];
} TensileShared;

/*
 * NULL if the library is not preloaded: call tensile_require_preload() first.
 */
extern TensileShared *tensile_shared;

/* The slot of the job of this worker; NULL in other processes. */
extern TensileSlot *tensile_my_slot;

/* Raises 55000 unless the library is in shared_preload_libraries. */
extern void tensile_require_preload(void);

extern void tensile_request_shmem(void);

#endif
