/*
 * slot.h: job slots, each the right to run one job.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_SLOT_H
#define TENSILE_SLOT_H

#include "datatype/timestamp.h"
#include "storage/lwlock.h"

#include "state/banker.h"
#include "state/plan.h"
#include "state/progress.h"
#include "state/wakeup.h"

#define TENSILE_LAST_ERROR_LENGTH 256

typedef enum TensileSlotState
{
	SLOT_FREE,
	SLOT_RESERVED,				/* a background worker is registered for the job */
	SLOT_ATTACHED				/* the worker runs */
} TensileSlotState;

typedef struct TensileSlot
{
	TensileSlotState state;
	int64		job;			/* 0: a session that explains one */
	Oid			role;			/* that has submitted the job */
	Oid			database;
	pid_t		pid;			/* of the worker; 0 before it attaches */
	volatile bool feeding;		/* the worker runs the training query; written by
								 * the worker only */
	volatile bool interrupted;	/* a change of the job has canceled the query, not
								 * pg_cancel_backend */
	volatile bool evicted;		/* the launcher stops the worker, because
								 * pg_tensile.database has changed */
	TimestampTz since;			/* when it was reserved or attached */
	int			device;			/* index into shared->devices; -1: none yet */
	int64		granted_bytes;	/* of the device: the larger of the acknowledged
								 * and the newest plan's grant */
	int64		overhead_bytes; /* of the device, outside of the plan */
	uint64		acknowledged;	/* generation of the newest plan that an iteration
								 * has followed; 0: none */
	TensileWakeup wakeup;

	/* Memory that flows (memory_flow.c); granted_bytes is 0 then. */
	TensileFlow flow;
	uint64		flow_generation;	/* of the plan that has its groups */
	TimestampTz flow_heard;		/* the job's last request, or the answer to it */
	TimestampTz flow_waits_since;
	int64		late_for_job;	/* the job that this one keeps waiting; 0: none */
	int			late_s;			/* seconds that it has waited */

	/* The worker that has left the slot last; last_job 0: none. */
	int64		last_job;
	Oid			last_database;
	bool		last_terminated;	/* by pg_terminate_backend */
	char		last_error[TENSILE_LAST_ERROR_LENGTH];	/* that it reported; "": none */

	/*
	 * Protects the rest, and the slot's event rows with the order behind them.
	 */
	LWLock	   *lock;
	TensileProgress progress;
	TensilePlanHeader plan;
} TensileSlot;

/* Makes the slot FREE.  Caller holds shared->lock exclusively. */
extern void tensile_slot_clear(TensileSlot *slot);

/*
 * Reserves a free slot for a job of this database, or (job 0) for a session.
 * NULL if none is free, or the database of the job is released.  Caller holds
 * shared->lock exclusively.
 */
extern TensileSlot *tensile_slot_reserve(int64 job, Oid role);

/*
 * Attaches this worker to the slot reserved for it; NULL if it no longer is.
 */
extern TensileSlot *tensile_slot_attach(int index, int64 job);

/* Frees the slot if it is attached to this process. */
extern void tensile_slot_free(TensileSlot *slot);

/*
 * The slot of a job of this database, or NULL.  Caller holds shared->lock.
 */
extern TensileSlot *tensile_slot_of_job(int64 job);

/* The rows of the slot's plan, in shared memory. */
extern TensilePlanEvent *tensile_slot_events(const TensileSlot *slot);

/* A copy of the slots of this database's jobs, to be read without locks. */
extern TensileSlot *tensile_copy_slots(int *nslots);

/* May the current user see the jobs of that role? */
extern bool tensile_role_visible(Oid role);

/*
 * Takes a slot for this session and gives it back; 53000 when none is free.
 * The end of the session gives it back as well.
 */
extern void tensile_session_slot_take(const char *function);
extern void tensile_session_slot_free(void);

#endif
