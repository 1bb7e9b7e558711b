/*
 * answers.h: answers to what a model's outputs mean
 * (pg_tensile/execution/data/answers.py).
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_EVALUATOR_ANSWERS_H
#define TENSILE_EVALUATOR_ANSWERS_H

#include "evaluator/image.h"
#include "evaluator/interface.h"
#include "evaluator/task.h"

#define ANSWERS_MOST_OUTPUTS 65536		/* of a model */
#define ANSWERS_MOST_ROWS (INT64CONST(1) << 31)	/* of validation */

typedef enum TargetTransform
{
	TRANSFORM_NONE,
	TRANSFORM_LOG,
	TRANSFORM_QUANTILE
} TargetTransform;

typedef struct Answers
{
	ModelTask	task;
	int			outputs;		/* of the model */
	int			labels;			/* 0: a regression */
	double		mean;			/* of the transformed target */
	double		std;
	TargetTransform transform;
	bool		is_nonnegative;
	int			knots;
	const double *values;		/* [knots] distinct quantiles of the target */
	const double *scores;		/* [knots] of these */
	const double *numbers;		/* [labels] that labels stand for, NULL: none */
	bool		is_calibrated;
	double		scale;
	double		shift;
	int64		rows;			/* of validation, 0: none */
	int			errors;
	const double *error;		/* [errors], ascending */
} Answers;

extern void answers_open(Answers *self, ImageReader *reader);

/* What outputs [rows][outputs] mean, and what is NaN or -1 where the task lacks it. */
extern void answers_find(const Answers *self, const double *outputs, int rows,
						 double *prediction, double *probability, int32 *label);

/* A classifier's probabilities [rows][labels]. */
extern void answers_probabilities(const Answers *self, const double *outputs, int rows,
								  double *probabilities);

/* A regression's bounds [rows] with this coverage, in (0, 1). */
extern EvaluatorInterval answers_interval(const Answers *self, const double *outputs, int rows,
										  double coverage, double *lower, double *upper);

#endif
