/*
 * linear.c: the architecture linear.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include "evaluator/linear.h"

void
linear_compile(ImageWriter *writer, const ModelSource *source)
{
	int			inputs = source->features->width;
	int			outputs = source->outputs;
	const float *weights,
			   *bias;
	float	   *ordered;

	if (!compilation_weigh(source->compilation, inputs + 1, outputs))
		return;
	weights = weights_floats(source->weights, source->prefix, "numbers.weight", outputs, inputs,
							 -1);
	bias = weights_floats(source->weights, source->prefix, "numbers.bias", outputs, -1, -1);
	if (!compilation_ready(source->compilation))
		return;
	ordered = compilation_new(source->compilation, float, (Size) inputs * outputs);
	for (int output = 0; output < outputs; output++)
		for (int k = 0; k < inputs; k++)
			ordered[(Size) model_number(source->features,
										k) * outputs + output] =
											weights[(Size) output * inputs + k];
	dense_compile(writer, inputs, outputs, ordered, bias);
	embedding_compile(writer, source, "categories.weight", outputs);
}

void
linear_open(Linear *self, ImageReader *reader, const Features *features, int outputs)
{
	dense_open(&self->numbers, reader, features->width, outputs);
	embedding_open(&self->categories, reader, &features->categories, outputs);
	self->kernels = dense_kernels();
}

void
linear_outputs(const Linear *self, const FeatureBlock *block, Rows *y)
{
	int			categories = self->categories.categories->count;

	self->kernels->dense(&self->numbers, block->numbers, block->stride, self->numbers.bias, 0,
						 block->rows, y->numbers, y->stride, false);
	if (categories > 0)
		for (int row = 0; row < block->rows; row++)
			embedding_add(&self->categories, self->kernels, block->codes + (Size) row * categories,
						  y->numbers + (Size) row * y->stride);
}
