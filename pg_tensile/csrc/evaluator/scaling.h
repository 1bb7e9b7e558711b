/*
 * scaling.h: maps of numbers, with the arithmetic of
 * pg_tensile/execution/data/preprocessing.py and ranks.py: trees compare their
 * results with thresholds, so all bits count.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_SCALING_H
#define TENSILE_SCALING_H

#include "evaluator/platform.h"

/* The map x -> (x * unit - center) / scale, limited to +-1e6. */
typedef struct Scaling
{
	double		unit;
	double		center;
	double		scale;
	double		fill;			/* in place of a number that is not finite */
} Scaling;

/* Of the numbers of a column, what lies beyond `low` and `high` is these. */
typedef struct LimitedScaling
{
	Scaling		scaling;
	double		low;
	double		high;
} LimitedScaling;

/* The ranks between two knots: base + min((x - start) / width, 1) * rise. */
typedef struct RankSegment
{
	double		start;
	double		width;
	double		base;
	double		rise;
} RankSegment;

typedef struct RankScale
{
	double		center;			/* of robust values */
	double		spread;
	int			count;
	const double *knots;		/* [count], ascending */
	const RankSegment *segments;	/* [count + 1] */
} RankScale;

typedef struct ScalingKernels
{
	void		(*limited) (const LimitedScaling *scaling, const double *x, int rows, float *y);
	void		(*nulls) (const double *x, int rows, float *y); /* 1 for what is not finite */
	void		(*robust) (const RankScale *scale, const double *x, int rows, float *y);
	void		(*ranks) (const RankScale *scale, const double *x, int rows, float *y);

	/* Elements of an array with one scaling, or a scaling for each. */
	void		(*elements) (const Scaling *scaling, const double *x, int count, float *y);
	void		(*each) (const Scaling *scalings, const double *x, int count, float *y);
} ScalingKernels;

extern const ScalingKernels *scaling_kernels(void);

extern void scaling_set(Scaling *self, double mean, double std);

static inline bool
is_finite_number(double x)
{
	return x - x == 0.0;
}

#endif
