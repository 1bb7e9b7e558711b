/*
 * answers_compile.c: what answers need of a version's preprocessing.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include <math.h>

#include "evaluator/answers_compile.h"
#include "evaluator/normal_quantile.h"

static int
compare_doubles(const void *left, const void *right)
{
	double		a = *(const double *) left,
				b = *(const double *) right;

	return (a > b) - (a < b);
}

/* Distinct quantiles of the target, and the mean score of equal ones (targets.py). */
static void
compile_knots(ImageWriter *writer, const JsonNode *quantiles)
{
	Compilation *compilation = writer->compilation;
	int			count;
	double	   *values = json_numbers(compilation, quantiles, &count);
	double	   *scores = compilation_new(compilation, double, count);
	int			knots = 0;
	int			first = 0;

	if (count == 0)
	{
		compilation_damaged(compilation, "its target has no quantiles");
		return;
	}
	qsort(values, count, sizeof(double), compare_doubles);
	for (int i = 0; i < count; i++)
	{
		double		share = count > 1 ? (double) i / (count - 1) : 0.0;

		share = fmin(fmax(share, 0.5 / count), 1.0 - 0.5 / count);
		scores[knots] += normal_quantile(share);
		if (i + 1 < count && values[i + 1] == values[i])
			continue;
		values[knots] = values[i];
		scores[knots++] /= i + 1 - first;
		first = i + 1;
	}
	image_write_copy(writer, values, knots, sizeof(double));
	image_write_copy(writer, scores, knots, sizeof(double));
}

static void
compile_target(ImageWriter *writer, const JsonNode *target)
{
	Compilation *compilation = writer->compilation;
	const JsonNode *transform = json_member(target, "transform");
	TargetTransform kind = TRANSFORM_NONE;

	if (!json_is(target, JSON_IS_OBJECT))
		compilation_damaged(compilation, "it has no target");
	if (json_equals(transform, "log"))
		kind = TRANSFORM_LOG;
	else if (json_equals(transform, "quantile"))
		kind = TRANSFORM_QUANTILE;
	else if (transform != NULL)
		compilation_unsuitable(compilation);
	image_write_double(writer, json_number(compilation, json_member(target, "mean"), 0.0));
	image_write_double(writer, json_number(compilation, json_member(target, "std"), 1.0));
	image_write_whole(writer, json_true(compilation, json_member(target, "nonnegative")));
	image_write_whole(writer, kind);
	if (kind == TRANSFORM_QUANTILE)
		compile_knots(writer, json_member(target, "quantiles"));
}

/* The task, and the number of labels and of outputs. */
static void
compile_task(ImageWriter *writer, const JsonNode *preprocessing)
{
	Compilation *compilation = writer->compilation;
	const JsonNode *name = json_member(preprocessing, "task");
	const JsonNode *labels = json_member(preprocessing, "labels");
	const JsonNode *quantiles = json_member(preprocessing, "quantiles");
	int			count = labels == NULL ? 0 : json_array(compilation, labels)->count;
	int			outputs = 1 + (quantiles == NULL ? 0 : json_array(compilation, quantiles)->count);
	ModelTask		task = TASK_REGRESSION;

	if (json_equals(name, "binary"))
		task = TASK_BINARY;
	else if (json_equals(name, "multiclass"))
		task = TASK_MULTICLASS;
	else if (!json_equals(name, "regression"))
		compilation_damaged(compilation, "it has no task");
	if (task == TASK_MULTICLASS)
		outputs = count;
	if (task == TASK_REGRESSION)
		count = 0;
	if (outputs < 1 || outputs > ANSWERS_MOST_OUTPUTS || (task == TASK_BINARY && count != 2))
		compilation_damaged(compilation, "its labels are too few or too many");
	image_write_whole(writer, task);
	image_write_whole(writer, outputs);
	image_write_whole(writer, count);
}

static void
compile_label_numbers(ImageWriter *writer, const JsonNode *preprocessing)
{
	const JsonNode *numbers = json_member(preprocessing, "label_values");
	const JsonNode *labels = json_member(preprocessing, "labels");
	int			count;
	const double *values;

	image_write_whole(writer, numbers != NULL);
	if (numbers == NULL)
		return;
	values = json_numbers(writer->compilation, numbers, &count);
	if (labels == NULL || labels->count != count)
		compilation_damaged(writer->compilation, "it has not a number for each label");
	image_write_copy(writer, values, count, sizeof(double));
}

void
answers_compile(ImageWriter *writer, const JsonNode *preprocessing)
{
	Compilation *compilation = writer->compilation;
	const JsonNode *calibration = json_member(preprocessing, "calibration");
	const JsonNode *conformal = json_member(preprocessing, "conformal");

	compile_task(writer, preprocessing);
	compile_target(writer, json_member(preprocessing, "target"));
	compile_label_numbers(writer, preprocessing);
	image_write_whole(writer, calibration != NULL);
	image_write_double(writer, json_number(compilation, json_member(calibration, "scale"), 1.0));
	image_write_double(writer, json_number(compilation, json_member(calibration, "shift"), 0.0));
	image_write_whole(writer, conformal != NULL);
	if (conformal != NULL)
	{
		int			count;
		const double *scores = json_numbers(compilation, json_member(conformal, "scores"), &count);

		if (count == 0)
			compilation_damaged(compilation, "its intervals have no rows");
		image_write_whole(writer,
						  json_whole(compilation, json_member(conformal, "rows"), 1,
									 ANSWERS_MOST_ROWS, 0));
		image_write_copy(writer, scores, count, sizeof(double));
	}
}
