/*
 * arrays.c: arrays of numbers.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include <math.h>

#include "evaluator/arrays.h"

#define MOST_COLUMNS 65536
#define MOST_LENGTH (1 << 24)
#define MOST_WIDTH 131072		/* of all columns together */
#define ADDED 3					/* to a series: the last element, the mean and the deviation */

static int64
width_of(int64 length, int64 segment, bool is_series)
{
	int64		segments = (length + segment - 1) / segment;

	return is_series ? 2 * segments - 1 + ADDED : segments;
}

static void
compile_column(ImageWriter *writer, const JsonNode *feature)
{
	Compilation *compilation = writer->compilation;
	const JsonNode *means = json_member(feature, "means");
	const JsonNode *stds = json_member(feature, "stds");
	int64		length = json_whole(compilation, json_member(feature, "length"), 0, MOST_LENGTH, 0);
	int64		segment = Max(json_whole(compilation, json_member(feature, "segment"), 0,
										 MOST_LENGTH, 1), 1);
	bool		is_series = json_true(compilation, json_member(feature, "series"));
	int			scalings = 1;
	Scaling    *scaling;

	if (length == 0 || width_of(length, segment, is_series) > MOST_WIDTH)
		compilation_unsuitable(compilation);
	image_write_whole(writer, length);
	image_write_whole(writer, segment);
	image_write_whole(writer, is_series);
	image_write_whole(writer, json_number(compilation, json_member(feature, "nulls"), 0.0) != 0.0);
	if (means == NULL && stds == NULL)
	{
		if (segment > 1 || is_series)
			compilation_damaged(compilation, "the numbers of an array have no means");
		image_write_whole(writer, false);
		scaling = image_write_items(writer, 1, sizeof(Scaling));
		scaling_set(scaling, json_number(compilation, json_member(feature, "mean"), 0.0),
					json_number(compilation, json_member(feature, "std"), 0.0));
	}
	else
	{
		int			deviations;
		const double *mean = json_numbers(compilation, means, &scalings);
		const double *std = json_numbers(compilation, stds, &deviations);

		if (scalings != deviations || scalings != width_of(length, segment, is_series))
			compilation_damaged(compilation,
								"an array has not a mean and a deviation for each number");
		if (!compilation_ready(compilation))
			return;
		image_write_whole(writer, true);
		scaling = image_write_items(writer, scalings, sizeof(Scaling));
		for (int i = 0; i < scalings; i++)
			scaling_set(&scaling[i], mean[i], std[i]);
	}
}

static bool
is_array(const JsonNode *feature)
{
	return json_equals(json_member(feature, "kind"), "array");
}

void
arrays_compile(ImageWriter *writer, const JsonNode *features)
{
	int			count = 0;

	json_for_each(feature, features)
		count += is_array(feature);
	image_write_whole(writer, count);
	json_for_each(feature, features)
		if (is_array(feature))
			compile_column(writer, feature);
}

static void
open_column(ArrayColumn *self, ImageReader *reader)
{
	self->length = (int) image_whole(reader, 1, MOST_LENGTH);
	self->segment = (int) image_whole(reader, 1, MOST_LENGTH);
	self->is_series = image_whole(reader, 0, 1) != 0;
	self->has_indicator = image_whole(reader, 0, 1) != 0;
	self->width = (int) width_of(self->length, self->segment, self->is_series);
	self->scalings = image_whole(reader, 0, 1) != 0 ? self->width : 1;
	self->scaling = image_array(reader, Scaling, self->scalings);
}

void
arrays_open(Arrays *self, ImageReader *reader)
{
	int			widest = 1;

	memset(self, 0, sizeof(*self));
	self->count = (int) image_whole(reader, 0, MOST_COLUMNS);
	self->columns = palloc0(sizeof(ArrayColumn) * self->count + 1);
	self->kernels = scaling_kernels();
	for (int i = 0; i < self->count && !reader->is_damaged; i++)
	{
		ArrayColumn *column = &self->columns[i];

		open_column(column, reader);
		self->indicators += column->has_indicator;
		self->width += column->width;
		widest = Max(widest, column->width);
		if (self->width > MOST_WIDTH)
			reader->is_damaged = true;
	}
	self->numbers = palloc(sizeof(double) * (reader->is_damaged ? 1 : widest));
	self->places = palloc0(sizeof(int64) * (self->count + 1));
}

void
arrays_close(Arrays *self)
{
	pfree(self->columns);
	pfree(self->numbers);
	pfree(self->places);
}

bool
arrays_begin(Arrays *self, const EvaluatorArrays *arrays, int rows, EvaluatorMismatch *mismatch)
{
	for (int i = 0; i < self->count; i++)
	{
		int			expected = self->columns[i].length;

		self->places[i] = 0;
		for (int row = 0; row < rows; row++)
		{
			int32		length = arrays[i].lengths[row];

			if (length >= 0 && length != expected)
			{
				*mismatch = (EvaluatorMismatch) {i, row, length, expected};
				return false;
			}
		}
	}
	return true;
}

/* The number at an index, 0 if it is not finite or lies behind those given. */
static inline double
number_at(const double *x, int given, int index)
{
	return index < given && is_finite_number(x[index]) ? x[index] : 0.0;
}

/*
 * The sum of the first `count` numbers, added in the order of numpy, which
 * decides what overflows.
 */
static double
sum_of(const double *x, int given, int count)
{
	double		sums[8];
	double		sum = 0.0;
	int			i = 0;

	if (count > 128)
	{
		int			half = count / 2 - count / 2 % 8;

		return sum_of(x, given, half) + sum_of(x + half, given - half, count - half);
	}
	if (count >= 8)
	{
		for (; i < 8; i++)
			sums[i] = number_at(x, given, i);
		for (; i + 8 <= count; i += 8)
			for (int k = 0; k < 8; k++)
				sums[k] += number_at(x, given, i + k);
		sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) +
			((sums[4] + sums[5]) + (sums[6] + sums[7]));
	}
	for (; i < count; i++)
		sum += number_at(x, given, i);
	return sum;
}

/*
 * The mean of the finite ones among some numbers, NaN if there are none; up to
 * `count`, zeros are added to them.
 */
static double
mean_of(const double *x, int given, int count)
{
	int			finite_ones = 0;

	for (int i = 0; i < given; i++)
		finite_ones += is_finite_number(x[i]);
	return finite_ones > 0 ? sum_of(x, given, count) / finite_ones : NAN;
}

/* The numbers of an array before they are scaled. */
static const double *
numbers_of(const Arrays *self, const ArrayColumn *column, const double *elements)
{
	double	   *x = self->numbers;
	int			count = (column->length + column->segment - 1) / column->segment;
	double		center,
				deviation;
	double	   *squares;

	if (column->segment == 1 && !column->is_series)
		return elements;
	for (int i = 0; i < count; i++)
	{
		int			start = i * column->segment;

		/* A single one that is not finite has to be no number in differences. */
		x[i] = mean_of(elements + start, Min(column->segment, column->length - start),
					   column->segment);
		if (!is_finite_number(x[i]))
			x[i] = NAN;
	}
	if (!column->is_series)
		return x;
	center = mean_of(x, count, count);
	squares = x + count;
	for (int i = 0; i < count; i++)
		squares[i] = (x[i] - center) * (x[i] - center);
	deviation = sqrt(mean_of(squares, count, count));
	for (int i = 0; i + 1 < count; i++)
		x[count + i] = x[i + 1] - x[i];
	x[2 * count - 1] = x[count - 1];
	x[2 * count] = center;
	x[2 * count + 1] = deviation;
	return x;
}

void
arrays_apply(Arrays *self, const EvaluatorArrays *arrays, int first, int rows, float *indicators,
			 float *x, int stride)
{
	for (int i = 0; i < self->count; i++)
	{
		const ArrayColumn *column = &self->columns[i];

		for (int row = 0; row < rows; row++)
		{
			float	   *own = x + (Size) row * stride;
			bool		is_null = arrays[i].lengths[first + row] < 0;

			if (column->has_indicator)
				indicators[(Size) row * stride] = is_null;
			if (is_null)
				memset(own, 0, sizeof(float) * column->width);
			else
			{
				const double *numbers = numbers_of(self, column,
												   arrays[i].elements + self->places[i]);

				if (column->scalings == 1)
					self->kernels->elements(column->scaling, numbers, column->width, own);
				else
					self->kernels->each(column->scaling, numbers, column->width, own);
				self->places[i] += column->length;
			}
		}
		x += column->width;
		indicators += column->has_indicator;
	}
}
