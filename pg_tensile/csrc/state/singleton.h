/*
 * singleton.h: entries of the launcher, controller, scheduler and inference
 * process in shared memory.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_SINGLETON_H
#define TENSILE_SINGLETON_H

#include "datatype/timestamp.h"

#include "base/process_kind.h"
#include "state/wakeup.h"

/* How a singleton ended; decides when the launcher starts the next one. */
typedef enum TensileOutcome
{
	TENSILE_FAILED,				/* by an error or a signal */
	TENSILE_GONE,				/* the extension was dropped while it ran */
	TENSILE_NO_EXTENSION		/* no extension of the library's version */
} TensileOutcome;

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

/* Enters this process as the singleton of its kind; false if there is one. */
extern bool tensile_singleton_attach(TensileProcessKind kind, Oid database);

/* Sets the outcome that the singleton leaves when it exits. */
extern void tensile_singleton_set_outcome(TensileOutcome outcome);

#endif
