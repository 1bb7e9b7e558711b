/*
 * numbers.h: columns of numbers and timestamps.
 *
 * Each becomes a number, and some an indicator of nulls, the cycles of a
 * timestamp, and a rank.  Ranks are the first numbers of a row of features, and
 * `plain` ones follow, in the order of the predictor.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_NUMBERS_H
#define TENSILE_NUMBERS_H

#include "evaluator/image.h"
#include "evaluator/json.h"
#include "evaluator/scaling.h"

typedef struct NumberColumn
{
	const LimitedScaling *scaling;
	bool		is_time;
	bool		has_hours;		/* the cycle of the day */
	int			indicator;		/* among plain columns, -1: none */
	int			cycles;			/* the first of them, of a timestamp */
	int			rank;			/* -1: none */
	RankScale	scale;			/* of a number with a rank */
} NumberColumn;

typedef struct Numbers
{
	int			count;
	NumberColumn *columns;
	int			plain;			/* numbers, indicators and cycles */
	int			ranks;
	const float *waves;			/* sines and cosines of the days of week and year */
	const ScalingKernels *kernels;
} Numbers;

/* Adds the columns among the features of a version. */
extern void numbers_compile(ImageWriter *writer, const JsonNode *features);

/* Rows that are computed at once, at most. */
#define NUMBERS_MOST_ROWS 256

extern void numbers_open(Numbers *self, ImageReader *reader);
extern void numbers_close(Numbers *self);

/*
 * The numbers of some rows from `first` on, [rows][stride].  `scalars` are
 * [columns][capacity].
 */
extern void numbers_apply(const Numbers *self, const double *scalars, int capacity, int first,
						  int rows, float *x, int stride);

#endif
