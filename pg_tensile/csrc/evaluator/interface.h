/*
 * interface.h: what the users of the evaluator and its parts exchange.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_INTERFACE_H
#define TENSILE_INTERFACE_H

#include "evaluator/platform.h"

/*
 * Changes with this file and evaluator.h: users of the library of another build
 * (pg_tensile/execution/evaluator.py) compare it.
 */
#define EVALUATOR_INTERFACE 1

/* Weights of a model that is evaluated in a session, at most. */
#define EVALUATOR_MOST_WEIGHTS (4 * 1024 * 1024)

typedef enum EvaluatorStatus
{
	EVALUATOR_READY,
	EVALUATOR_UNSUITABLE,		/* a model that the predictor has to answer for */
	EVALUATOR_DAMAGED			/* `problem` says what is wrong */
} EvaluatorStatus;

/* Arrays of one feature of some rows, as in a PREDICT frame. */
typedef struct EvaluatorArrays
{
	const int32 *lengths;		/* [rows]; -1 = null */
	const double *elements;		/* of all rows; NaN = null */
} EvaluatorArrays;

/*
 * Raw features of some rows, by kind and in the order of the model's features,
 * as a FeatureBatch has them, but for the codes.
 */
typedef struct EvaluatorRows
{
	int			rows;
	int			capacity;		/* distance between two features' values */
	const double *scalars;		/* [scalars][capacity]; NaN = null; times in microseconds */
	const int32 *codes;			/* [categories][capacity]: of evaluator_code(); -1 = null */
	const EvaluatorArrays *arrays;	/* [arrays] */
} EvaluatorRows;

/* An array of a wrong length, at which an evaluation ends. */
typedef struct EvaluatorMismatch
{
	int			array;			/* which of the array features */
	int			row;			/* from 0 */
	int			length;			/* that it has */
	int			expected;
} EvaluatorMismatch;

typedef enum EvaluatorInterval
{
	INTERVAL_READY,
	INTERVAL_NO_ROWS,			/* the model was trained without validation rows */
	INTERVAL_FEW_ROWS			/* the coverage needs more of them */
} EvaluatorInterval;

#endif
