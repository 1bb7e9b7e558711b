/*
 * dense.c: the layers of networks.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include <math.h>

#include "evaluator/dense.h"
#include "evaluator/processor.h"

#define EPSILON 1e-5f			/* of PyTorch's layer norm */

/* Of a vector, at any place */
#define LOAD(place) (*(const Vector *) (place))
#define STORE(place, vector) (*(Vector *) (place) = (vector))

/* Comparisons are words of ones or zeros. */
#define CHOOSE(comparison, yes, no) \
	((Vector) (((Words) (comparison) & (Words) (yes)) | (~(Words) (comparison) & (Words) (no))))

/* A number, or 0 if it is below 0; NaN as it is. */
#define POSITIVE(vector) ((Vector) (~(Words) ((vector) < 0.0f) & (Words) (vector)))

#define KERNEL(name) baseline_##name
#define VECTOR_BYTES 16
#define ROWS 2
#define FEW 2
#define PANELS 3
#include "evaluator/dense_kernels.h"
#undef KERNEL
#undef VECTOR_BYTES
#undef ROWS
#undef FEW
#undef PANELS

#ifdef TENSILE_VECTORS
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define KERNEL(name) avx2_##name
#define VECTOR_BYTES 32
#define ROWS 6
#define FEW 4
#define PANELS 6
#include "evaluator/dense_kernels.h"
#undef KERNEL
#undef VECTOR_BYTES
#undef ROWS
#undef FEW
#undef PANELS
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512vl,avx2,fma")
#define KERNEL(name) avx512_##name
#define VECTOR_BYTES 64
#define ROWS 8
#define FEW 4
#define PANELS 8
#include "evaluator/dense_kernels.h"
#undef KERNEL
#undef VECTOR_BYTES
#undef ROWS
#undef FEW
#undef PANELS
#pragma GCC pop_options
#endif

const DenseKernels *
dense_kernels(void)
{
#ifdef TENSILE_VECTORS
	switch (processor_vectors())
	{
		case VECTORS_AVX512:
			return &avx512_dense_kernels;
		case VECTORS_AVX2:
			return &avx2_dense_kernels;
		case VECTORS_BASELINE:
			break;
	}
#endif
	return &baseline_dense_kernels;
}

static Size
weight_count(int inputs, int outputs)
{
	return (Size) inputs * (outputs <= NARROW ? outputs : whole_lanes(outputs));
}

void
dense_compile(ImageWriter *writer, int inputs, int outputs, const float *weights, const float *bias)
{
	float	   *packed = image_write_items(writer, weight_count(inputs, outputs), sizeof(float));
	float	   *biases;

	for (int output = 0; output < outputs; output++)
		for (int k = 0; k < inputs; k++)
		{
			float		weight = weights[(Size) k * outputs + output];

			if (outputs <= NARROW)
				packed[(Size) output * inputs + k] = weight;
			else
				packed[((Size) (output / LANES) * inputs + k) * LANES + output % LANES] = weight;
		}
	biases = image_write_items(writer, whole_lanes(outputs), sizeof(float));
	memcpy(biases, bias, sizeof(float) * outputs);
}

void
dense_open(Dense *self, ImageReader *reader, int inputs, int outputs)
{
	self->inputs = inputs;
	self->outputs = outputs;
	self->weights = image_array(reader, float, weight_count(inputs, outputs));
	self->bias = image_array(reader, float, whole_lanes(outputs));
}

void
rows_new(Rows *self, int rows, int width)
{
	Size		bytes;
	char	   *memory;

	self->stride = whole_lanes(width);
	bytes = sizeof(float) * rows * self->stride;
	memory = palloc0(bytes + 2 * IMAGE_ALIGNMENT);
	self->numbers = (float *) TYPEALIGN(IMAGE_ALIGNMENT, memory + sizeof(memory));
	memcpy((char *) self->numbers - sizeof(memory), &memory, sizeof(memory));
}

void
rows_free(Rows *self)
{
	char	   *memory;

	if (self->numbers == NULL)
		return;
	memcpy(&memory, (char *) self->numbers - sizeof(memory), sizeof(memory));
	pfree(memory);
}
