/*
 * task.h: what a model predicts.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_TASK_H
#define TENSILE_TASK_H

typedef enum ModelTask
{
	TASK_REGRESSION,
	TASK_BINARY,
	TASK_MULTICLASS
} ModelTask;

#endif
