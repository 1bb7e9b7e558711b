/*
 * step.h: the loop of a supervisor.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_STEP_H
#define TENSILE_STEP_H

/* Runs steps until the last one; raises the error of one that fails. */
extern void tensile_run_steps(void);

#endif
