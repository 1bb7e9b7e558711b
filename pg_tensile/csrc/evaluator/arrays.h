/*
 * arrays.h: arrays of numbers (pg_tensile/execution/data/series.py).
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_ARRAYS_H
#define TENSILE_ARRAYS_H

#include "evaluator/image.h"
#include "evaluator/interface.h"
#include "evaluator/json.h"
#include "evaluator/scaling.h"

typedef struct ArrayColumn
{
	int			length;			/* elements */
	int			segment;		/* neighbours that are one number */
	bool		is_series;		/* has differences, the last element, mean and deviation */
	bool		has_indicator;	/* of null arrays */
	int			width;			/* numbers that a model takes */
	int			scalings;		/* 1 for all numbers, or one for each */
	const Scaling *scaling;
} ArrayColumn;

typedef struct Arrays
{
	int			count;
	ArrayColumn *columns;
	int			indicators;
	int			width;			/* numbers of all columns */
	const ScalingKernels *kernels;
	double	   *numbers;		/* workspace for those of one array */
	int64	   *places;			/* of each column's next element */
} Arrays;

extern void arrays_compile(ImageWriter *writer, const JsonNode *features);
extern void arrays_open(Arrays *self, ImageReader *reader);
extern void arrays_close(Arrays *self);

/* Begins with the first row; false if an array has a wrong length. */
extern bool arrays_begin(Arrays *self, const EvaluatorArrays *arrays, int rows,
						 EvaluatorMismatch *mismatch);

/* The indicators and the numbers of the next rows, from `first` on, [rows][stride] each. */
extern void arrays_apply(Arrays *self, const EvaluatorArrays *arrays, int first, int rows,
						 float *indicators, float *x, int stride);

#endif
