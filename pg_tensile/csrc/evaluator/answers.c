/*
 * answers.c: answers to what a model's outputs mean.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include <math.h>

#include "evaluator/answers.h"

#define LARGEST_LOG 700.0		/* whose exponential is finite */
#define ROUNDING 1e-9			/* of (rows + 1) * coverage, which is meant in decimal */
#define MOST_KNOTS (1 << 24)

void
answers_open(Answers *self, ImageReader *reader)
{
	Size		count;

	memset(self, 0, sizeof(*self));
	self->task = (ModelTask) image_whole(reader, TASK_REGRESSION, TASK_MULTICLASS);
	self->outputs = (int) image_whole(reader, 1, ANSWERS_MOST_OUTPUTS);
	self->labels = (int) image_whole(reader, 0, ANSWERS_MOST_OUTPUTS);
	if (self->labels != (self->task == TASK_REGRESSION ? 0 :
						 self->task == TASK_BINARY ? 2 : self->outputs))
		reader->is_damaged = true;
	self->mean = image_double(reader);
	self->std = image_double(reader);
	self->is_nonnegative = image_whole(reader, 0, 1) != 0;
	self->transform = (TargetTransform) image_whole(reader, TRANSFORM_NONE, TRANSFORM_QUANTILE);
	if (self->transform == TRANSFORM_QUANTILE)
	{
		self->values = image_some(reader, sizeof(double), MOST_KNOTS, &count);
		self->scores = image_array(reader, double, count);
		self->knots = (int) count;
		if (count == 0)
			reader->is_damaged = true;
	}
	if (image_whole(reader, 0, 1) != 0)
	{
		self->numbers = image_some(reader, sizeof(double), ANSWERS_MOST_OUTPUTS, &count);
		if (self->labels > 0 && count != self->labels)
			reader->is_damaged = true;
	}
	self->is_calibrated = image_whole(reader, 0, 1) != 0;
	self->scale = image_double(reader);
	self->shift = image_double(reader);
	if (image_whole(reader, 0, 1) != 0)
	{
		self->rows = image_whole(reader, 1, ANSWERS_MOST_ROWS);
		self->error = image_some(reader, sizeof(double), MOST_KNOTS, &count);
		self->errors = (int) count;
		if (count == 0)
			reader->is_damaged = true;
	}
}

/*
 * Interpolation between the scores of the target's quantiles, constant beyond
 * them (numpy.interp).
 */
static double
quantile_at(const Answers *self, double score)
{
	int			low = 0,
				high = self->knots - 1;
	double		slope;

	if (isnan(score))
		return score;
	if (score >= self->scores[high])
		return self->values[high];
	if (score < self->scores[0])
		return self->values[0];
	/* the last knot that is not above */
	while (high - low > 1)
	{
		int			middle = (low + high) / 2;

		if (self->scores[middle] <= score)
			low = middle;
		else
			high = middle;
	}
	slope = (self->values[high] - self->values[low]) / (self->scores[high] - self->scores[low]);
	return slope * (score - self->scores[low]) + self->values[low];
}

/* An output, or a bound, in the target's unit. */
static double
answered(const Answers *self, double output)
{
	double		x = output * self->std + self->mean;

	if (self->transform == TRANSFORM_LOG)
		x = copysign(expm1(fmin(fabs(x), LARGEST_LOG)), x) + (isnan(x) ? x : 0.0);
	else if (self->transform == TRANSFORM_QUANTILE)
		x = quantile_at(self, x);
	return self->is_nonnegative && x < 0.0 ? 0.0 : x;
}

static double
logit(const Answers *self, double output)
{
	return self->is_calibrated ? output * self->scale + self->shift : output;
}

static double
sigmoid(double x)
{
	return 1.0 / (1.0 + exp(x < -700.0 ? 700.0 : x > 700.0 ? -700.0 : -x));
}

/* The label with the largest of some logits, the first of equal ones. */
static int
largest(const Answers *self, const double *outputs)
{
	int			label = 0;

	for (int i = 1; i < self->labels; i++)
		if (logit(self, outputs[i]) > logit(self, outputs[label]))
			label = i;
	return label;
}

void
answers_find(const Answers *self, const double *outputs, int rows, double *prediction,
			 double *probability, int32 *label)
{
	for (int row = 0; row < rows; row++, outputs += self->outputs)
	{
		if (self->task == TASK_REGRESSION)
		{
			prediction[row] = answered(self, outputs[0]);
			probability[row] = NAN;
			label[row] = -1;
		}
		else if (self->task == TASK_BINARY)
		{
			double		positive = sigmoid(logit(self, outputs[0]));

			prediction[row] = positive;
			label[row] = positive > 0.5;
			probability[row] = label[row] ? positive : 1.0 - positive;
		}
		else
		{
			int			best = largest(self, outputs);
			double		most = logit(self, outputs[best]);
			double		sum = 0.0;

			for (int i = 0; i < self->labels; i++)
				sum += exp(logit(self, outputs[i]) - most);
			prediction[row] = self->numbers == NULL ? NAN : self->numbers[best];
			probability[row] = 1.0 / sum;
			label[row] = best;
		}
	}
}

void
answers_probabilities(const Answers *self, const double *outputs, int rows, double *probabilities)
{
	for (int row = 0; row < rows; row++, outputs += self->outputs, probabilities += self->labels)
	{
		double		most;
		double		sum = 0.0;

		if (self->task == TASK_BINARY)
		{
			probabilities[1] = sigmoid(logit(self, outputs[0]));
			probabilities[0] = 1.0 - probabilities[1];
			continue;
		}
		most = logit(self, outputs[largest(self, outputs)]);
		for (int i = 0; i < self->labels; i++)
		{
			probabilities[i] = exp(logit(self, outputs[i]) - most);
			sum += probabilities[i];
		}
		for (int i = 0; i < self->labels; i++)
			probabilities[i] /= sum;
	}
}

/* How far the bounds lie outside of what the outputs state (conformal.py). */
static EvaluatorInterval
find_radius(const Answers *self, double coverage, double *radius)
{
	int64		rank;

	if (self->rows == 0)
		return INTERVAL_NO_ROWS;
	if (!(coverage > 0.0 && coverage < 1.0))
		return INTERVAL_FEW_ROWS;
	rank = (int64) ceil((self->rows + 1) * coverage - ROUNDING);
	if (rank > self->rows)
		return INTERVAL_FEW_ROWS;
	*radius = self->error[(Max(rank, 1) - 1) * self->errors / self->rows];
	return INTERVAL_READY;
}

EvaluatorInterval
answers_interval(const Answers *self, const double *outputs, int rows, double coverage,
				 double *lower, double *upper)
{
	double		radius = 0.0;
	EvaluatorInterval status = find_radius(self, coverage, &radius);

	if (status != INTERVAL_READY)
		return status;
	for (int row = 0; row < rows; row++, outputs += self->outputs)
	{
		/* the quantiles that the model has learned, or its prediction */
		int			first = self->outputs > 1 ? 1 : 0;
		double		low = outputs[first],
					high = outputs[first];

		for (int i = first + 1; i < self->outputs; i++)
		{
			low = Min(low, outputs[i]);
			high = Max(high, outputs[i]);
		}
		/*
		 * The prediction lies outside if the bounds are narrower than the
		 * quantiles, which may cross.
		 */
		lower[row] = answered(self, Min(low - radius, outputs[0]));
		upper[row] = answered(self, Max(high + radius, outputs[0]));
	}
	return INTERVAL_READY;
}
