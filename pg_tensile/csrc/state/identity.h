/*
 * process.h: the background processes of pg_tensile, and which of them the
 * current process is.
 *
 * The launcher, controller, scheduler and inference process are singletons:
 * each exists at most once in a cluster.  There is one worker for each job
 * that runs.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_PROCESS_H
#define TENSILE_PROCESS_H

#include "datatype/timestamp.h"
#include "port/atomics.h"
#include "postmaster/bgworker.h"
#include "storage/latch.h"

typedef enum TensileProcessKind
{
	TENSILE_LAUNCHER,
	TENSILE_CONTROLLER,
	TENSILE_SCHEDULER,
	TENSILE_INFERENCE,
	TENSILE_N_SINGLETONS,
	TENSILE_WORKER = TENSILE_N_SINGLETONS,
	TENSILE_NO_PROCESS			/* an ordinary session */
} TensileProcessKind;

/* How a singleton ended; decides when the launcher starts the next one. */
typedef enum TensileOutcome
{
	TENSILE_FAILED,				/* by an error or a signal */
	TENSILE_GONE,				/* the extension was dropped while it ran */
	TENSILE_NO_EXTENSION		/* no extension of the library's version */
} TensileOutcome;

/* The latch of a process, and a count of the times it was woken (wait.c). */
typedef struct TensileWakeup
{
	Latch	   *latch;			/* NULL: no process */
	pg_atomic_uint64 count;
} TensileWakeup;

typedef struct TensileSingleton
{
	pid_t		pid;			/* 0: not running */
	Oid			database;		/* that it is connected to */
	TimestampTz started_at;
	TimestampTz ended_at;
	TimestampTz requested_at;	/* registered, not yet attached (inference) */
	TensileOutcome outcome;		/* of the last run */
	uint32		error_hash;		/* of the last error, which is logged once */
	TensileWakeup wakeup;
} TensileSingleton;

/* TENSILE_NO_PROCESS in sessions */
extern TensileProcessKind tensile_process;

extern const char *tensile_process_name(TensileProcessKind kind);
extern bool tensile_in_worker(void);

/* Raises 42501 unless this is a process of that kind, outside user code. */
extern void tensile_require_process(TensileProcessKind kind);

/*
 * The entry in shared memory by which others wake this process; NULL in
 * sessions.
 */
extern TensileWakeup *tensile_my_wakeup(void);

/*
 * Wakes a process from its wait.  Caller holds shared->lock, at least shared.
 */
extern void tensile_wake(TensileWakeup *wakeup);

/*
 * Was this worker stopped by pg_terminate_backend, not by a stop of the
 * server?
 */
extern bool tensile_terminated(void);

/* Enters this process as the singleton of its kind; false if there is one. */
extern bool tensile_singleton_attach(TensileProcessKind kind, Oid database);

/* Sets the outcome that the singleton leaves when it exits. */
extern void tensile_singleton_set_outcome(TensileOutcome outcome);

/* Fills in everything about a worker that does not depend on its database. */
extern void tensile_describe_worker(BackgroundWorker *worker, TensileProcessKind kind, int64 job);

extern void tensile_register_launcher(void);	/* launcher.c */

#endif
