/*
 * numbers.c: columns of numbers and timestamps.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include <math.h>

#include "evaluator/numbers.h"

#define MOST_COLUMNS 65536
#define MOST_KNOTS 65536
#define QUARTILE 0.6744897501960817 /* of the normal distribution */

#define DAY_US 86400e6
#define MOST_US 9.2e18
#define EPOCH_DAYS 10957		/* 2000-01-01 in days since 1970-01-01 */
#define MARCH_DAYS 719468		/* 1970-01-01 in days since 0000-03-01 */
#define WEEK 7
#define YEAR 366

typedef enum NumberFlags
{
	NUMBER_TIME = 1,
	NUMBER_HOURS = 2,
	NUMBER_NULLS = 4,
	NUMBER_RANKS = 8
} NumberFlags;

/* Interpolation between ascending points, constant beyond them. */
static double
interpolated(double x, const double *xs, const double *ys, int count)
{
	int			place = 0;

	if (x >= xs[count - 1])
		return ys[count - 1];
	if (!(x > xs[0]))
		return ys[0];
	while (xs[place + 1] <= x)
		place++;
	return (ys[place + 1] - ys[place]) / (xs[place + 1] - xs[place]) * (x - xs[place]) + ys[place];
}

static bool
is_ascending(const double *numbers, int count)
{
	for (int i = 0; i < count; i++)
		if (!is_finite_number(numbers[i]) || (i > 0 && !(numbers[i] > numbers[i - 1])))
			return false;
	return true;
}

static void
compile_ranks(ImageWriter *writer, const JsonNode *ranks)
{
	Compilation *compilation = writer->compilation;
	int			count,
				deviates;
	const double *x = json_numbers(compilation, json_member(ranks, "values"), &count);
	const double *z = json_numbers(compilation, json_member(ranks, "deviates"), &deviates);
	RankSegment *segments;
	double		spread;

	if (count < 2 || count > MOST_KNOTS || deviates != count || !is_ascending(x, count) ||
		!is_ascending(z, count))
	{
		compilation_damaged(compilation, "the ranks of a column are not in order");
		return;
	}
	image_write_double(writer, interpolated(0.0, z, x, count));
	spread = interpolated(QUARTILE, z, x, count) - interpolated(-QUARTILE, z, x, count);
	image_write_double(writer, spread != 0.0 ? spread : (x[count - 1] - x[0]) / 2);
	image_write_copy(writer, x, count, sizeof(double));
	/* Segment i lies in front of knot i; the first and the last one are constant. */
	segments = image_write_items(writer, count + 1, sizeof(RankSegment));
	segments[0] = (RankSegment) {.width = 1.0, .base = z[0]};
	segments[count] = (RankSegment) {.start = x[count - 1], .width = 1.0, .base = z[count - 1]};
	for (int i = 1; i < count; i++)
		segments[i] = (RankSegment) {
			.start = x[i - 1], .width = x[i] - x[i - 1], .base = z[i - 1], .rise = z[i] - z[i - 1]
		};
}

static void
compile_column(ImageWriter *writer, const JsonNode *feature)
{
	Compilation *compilation = writer->compilation;
	const JsonNode *ranks = json_member(feature, "ranks");
	const JsonNode *low = json_member(feature, "low");
	const JsonNode *high = json_member(feature, "high");
	LimitedScaling *scaling;
	int			flags = 0;

	if (json_equals(json_member(feature, "kind"), "timestamp"))
		flags |= NUMBER_TIME;
	if (json_true(compilation, json_member(feature, "hour")))
		flags |= NUMBER_HOURS;
	if (json_number(compilation, json_member(feature, "nulls"), 0.0) != 0.0)
		flags |= NUMBER_NULLS;
	if (json_is(ranks, JSON_IS_OBJECT) && ranks->count > 0)
		flags |= NUMBER_RANKS;
	image_write_whole(writer, flags);
	scaling = image_write_items(writer, 1, sizeof(LimitedScaling));
	scaling_set(&scaling->scaling, json_number(compilation, json_member(feature, "mean"), 0.0),
				json_number(compilation, json_member(feature, "std"), 0.0));
	scaling->low = -INFINITY;
	scaling->high = INFINITY;
	if (low != NULL && high != NULL)
	{
		double		least = json_number(compilation, low, 0.0),
					most = json_number(compilation, high, 0.0);

		scaling->low = least - (most - least);
		scaling->high = most + (most - least);
	}
	if (flags & NUMBER_RANKS)
		compile_ranks(writer, ranks);
}

static bool
is_number(const JsonNode *feature)
{
	const JsonNode *kind = json_member(feature, "kind");

	return json_equals(kind, "numeric") || json_equals(kind, "timestamp");
}

void
numbers_compile(ImageWriter *writer, const JsonNode *features)
{
	int			count = 0;
	float	   *waves;

	json_for_each(feature, features)
		count += is_number(feature);
	image_write_whole(writer, count);
	waves = image_write_items(writer, 2 * (WEEK + YEAR), sizeof(float));
	for (int day = 0; day < WEEK + YEAR; day++)
	{
		double		angle = day < WEEK ?
			day * (2.0 * M_PI / 7.0) : (day - WEEK) * (2.0 * M_PI / 365.25);

		waves[2 * day] = (float) sin(angle);
		waves[2 * day + 1] = (float) cos(angle);
	}
	json_for_each(feature, features)
		if (is_number(feature))
			compile_column(writer, feature);
}

static void
open_column(Numbers *self, ImageReader *reader, NumberColumn *column)
{
	int			flags = (int) image_whole(reader, 0, 15);

	column->scaling = image_array(reader, LimitedScaling, 1);
	column->is_time = (flags & NUMBER_TIME) != 0;
	column->has_hours = column->is_time && (flags & NUMBER_HOURS);
	column->indicator = flags & NUMBER_NULLS ? 0 : -1;
	column->rank = flags & NUMBER_RANKS ? self->ranks++ : -1;
	if (column->rank >= 0)
	{
		RankScale  *scale = &column->scale;
		Size		count;

		scale->center = image_double(reader);
		scale->spread = image_double(reader);
		scale->knots = image_some(reader, sizeof(double), MOST_KNOTS, &count);
		scale->count = (int) count;
		scale->segments = image_array(reader, RankSegment, count + 1);
		if (count < 2)
			reader->is_damaged = true;
	}
}

void
numbers_open(Numbers *self, ImageReader *reader)
{
	memset(self, 0, sizeof(*self));
	self->count = (int) image_whole(reader, 0, MOST_COLUMNS);
	self->columns = palloc0(sizeof(NumberColumn) * self->count + 1);
	self->kernels = scaling_kernels();
	self->waves = image_array(reader, float, 2 * (WEEK + YEAR));
	for (int i = 0; i < self->count && !reader->is_damaged; i++)
		open_column(self, reader, &self->columns[i]);
	self->plain = self->count;
	for (int i = 0; i < self->count; i++)
		if (self->columns[i].indicator >= 0)
			self->columns[i].indicator = self->plain++;
	for (int i = 0; i < self->count; i++)
	{
		NumberColumn *column = &self->columns[i];

		if (column->is_time)
		{
			column->cycles = self->plain;
			self->plain += column->has_hours ? 6 : 4;
		}
	}
}

void
numbers_close(Numbers *self)
{
	pfree(self->columns);
}

/* The day in its year, from 0, for a day since 2000-01-01 (Hinnant's civil_from_days). */
static int
day_of_year(int64 days)
{
	int64		day = days + EPOCH_DAYS + MARCH_DAYS;
	int64		era = (day >= 0 ? day : day - 146096) / 146097;
	int			of_era = (int) (day - era * 146097);
	int			year =
		(of_era - of_era / 1460 + of_era / 36524 - of_era / 146096) / 365;   /* from March on */
	int			of_year = of_era - (365 * year + year / 4 - year / 100);
	bool		is_leap = year % 4 == 0 && (year % 100 != 0 || year == 0);

	return of_year < 306 ? of_year + 59 + is_leap : of_year - 306;
}

/* The cycles of the week and year and, with hours, of the day: sines, then cosines. */
static void
cycles(const Numbers *self, double microseconds, bool has_hours, float *x)
{
	int			waves = has_hours ? 3 : 2;
	double		exact;
	double		days;
	int64		day;
	const float *week,
			   *year;

	if (!is_finite_number(microseconds))
	{
		memset(x, 0, sizeof(float) * 2 * waves);
		return;
	}
	exact = fmax(fmin(microseconds, MOST_US), -MOST_US) / DAY_US;
	days = floor(exact);
	day = (int64) days;
	week = &self->waves[2 * (((day % WEEK) + WEEK) % WEEK)];
	year = &self->waves[2 * (WEEK + day_of_year(day))];
	x[0] = week[0];
	x[1] = year[0];
	x[waves] = week[1];
	x[waves + 1] = year[1];
	if (has_hours)
	{
		double		angle = (exact - days) * (2.0 * M_PI);

		x[2] = (float) sin(angle);
		x[5] = (float) cos(angle);
	}
}

static void
spread_column(const float *column, int rows, float *x, int stride)
{
	for (int row = 0; row < rows; row++)
		x[(Size) row * stride] = column[row];
}

void
numbers_apply(const Numbers *self, const double *scalars, int capacity, int first, int rows,
			  float *x, int stride)
{
	const ScalingKernels *kernels = self->kernels;
	float	   *plain = x + self->ranks;
	float		y[NUMBERS_MOST_ROWS];

	Assert(rows <= NUMBERS_MOST_ROWS);
	for (int i = 0; i < self->count; i++)
	{
		const NumberColumn *column = &self->columns[i];
		const double *numbers = scalars + (Size) i * capacity + first;

		if (column->rank < 0)
			kernels->limited(column->scaling, numbers, rows, y);
		else
			kernels->robust(&column->scale, numbers, rows, y);
		spread_column(y, rows, plain + i, stride);
		if (column->rank >= 0)
		{
			kernels->ranks(&column->scale, numbers, rows, y);
			spread_column(y, rows, x + column->rank, stride);
		}
		if (column->indicator >= 0)
		{
			kernels->nulls(numbers, rows, y);
			spread_column(y, rows, plain + column->indicator, stride);
		}
		if (column->is_time)
			for (int row = 0; row < rows; row++)
				cycles(self, numbers[row], column->has_hours,
					   plain + (Size) row * stride + column->cycles);
	}
}
