/*
 * process_kind.c: the kinds of background processes of pg_tensile, and which
 * of them the current process is.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "base/process_kind.h"

TensileProcessKind tensile_process = TENSILE_NO_PROCESS;

const char *
tensile_process_name(TensileProcessKind kind)
{
	static const char *const names[] = {
		"launcher", "controller", "scheduler", "inference", "worker"
	};

	return names[kind];
}

bool
tensile_in_worker(void)
{
	return tensile_process == TENSILE_WORKER;
}
