/*
 * process_kind.h: the kinds of background processes of pg_tensile, and which
 * of them the current process is.
 *
 * The launcher, controller, scheduler and inference process are singletons:
 * each exists at most once in a cluster.  There is one worker for each job
 * that runs.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_PROCESS_KIND_H
#define TENSILE_PROCESS_KIND_H

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

/* TENSILE_NO_PROCESS in sessions */
extern TensileProcessKind tensile_process;

extern const char *tensile_process_name(TensileProcessKind kind);
extern bool tensile_in_worker(void);

#endif
