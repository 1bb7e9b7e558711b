/*
 * scaling_kernels.h: the kernels of scaling.c, included for each kind of
 * vectors with another KERNEL(name).
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */

static inline float
KERNEL(scaled) (double x, double unit, double center, double scale)
{
	double		y = (x * unit - center) / scale;

	y = y < LIMIT ? y : LIMIT;
	return (float) (y > -LIMIT ? y : -LIMIT);
}

static void
KERNEL(limited) (const LimitedScaling *scaling, const double *restrict x, int rows,
				 float *restrict y)
{
	const Scaling own = scaling->scaling;
	double		low = scaling->low,
				high = scaling->high;

	for (int row = 0; row < rows; row++)
	{
		double		number = is_finite_number(x[row]) ? x[row] : own.fill;

		number = number < high ? number : high;
		number = number > low ? number : low;
		y[row] = KERNEL(scaled) (number, own.unit, own.center, own.scale);
	}
}

static void
KERNEL(nulls) (const double *restrict x, int rows, float *restrict y)
{
	for (int row = 0; row < rows; row++)
		y[row] = is_finite_number(x[row]) ? 0.0f : 1.0f;
}

static void
KERNEL(robust) (const RankScale *scale, const double *restrict x, int rows, float *restrict y)
{
	double		center = scale->center,
				spread = scale->spread;

	for (int row = 0; row < rows; row++)
	{
		double		z = (x[row] - center) / spread;
		double		third;

		z = z < 1e100 ? z : 1e100;
		z = z > -1e100 ? z : -1e100;
		third = z / SMOOTH_LIMIT;
		y[row] = is_finite_number(x[row]) ? (float) (z / sqrt(1.0 + third * third)) : 0.0f;
	}
}

static void
KERNEL(ranks) (const RankScale *scale, const double *restrict x, int rows, float *restrict y)
{
	const double *knots = scale->knots;

	/* Several searches at once, none of which branches: each waits for memory. */
	for (int row = 0; row < rows; row += SEARCHES)
	{
		int			searches = Min(rows - row, SEARCHES);
		double		numbers[SEARCHES];
		int			places[SEARCHES] = {0};
		int			length = scale->count;

		for (int i = 0; i < SEARCHES; i++)
			numbers[i] = i < searches && is_finite_number(x[row + i]) ? x[row + i] : 0.0;
		while (length > 1)
		{
			int			half = length / 2;

			for (int i = 0; i < SEARCHES; i++)
				places[i] += half * (knots[places[i] + half - 1] <= numbers[i]);
			length -= half;
		}
		for (int i = 0; i < searches; i++)
		{
			const RankSegment *segment =
				&scale->segments[places[i] + (knots[places[i]] <= numbers[i])];
			double		part = (numbers[i] - segment->start) / segment->width;
			double		rank = segment->base + (part < 1.0 ? part : 1.0) * segment->rise;

			y[row + i] = is_finite_number(x[row + i]) ? (float) rank : 0.0f;
		}
	}
}

static void
KERNEL(elements) (const Scaling *scaling, const double *restrict x, int count, float *restrict y)
{
	const Scaling own = *scaling;

	for (int i = 0; i < count; i++)
		y[i] = KERNEL(scaled) (is_finite_number(x[i]) ? x[i] : own.fill, own.unit, own.center,
							   own.scale);
}

static void
KERNEL(each) (const Scaling *restrict scalings, const double *restrict x, int count,
			  float *restrict y)
{
	for (int i = 0; i < count; i++)
	{
		const Scaling *own = &scalings[i];

		y[i] = KERNEL(scaled) (is_finite_number(x[i]) ? x[i] : own->fill, own->unit, own->center,
							   own->scale);
	}
}

static const ScalingKernels KERNEL(scaling_kernels) = {
	.limited = KERNEL(limited),
	.nulls = KERNEL(nulls),
	.robust = KERNEL(robust),
	.ranks = KERNEL(ranks),
	.elements = KERNEL(elements),
	.each = KERNEL(each),
};
