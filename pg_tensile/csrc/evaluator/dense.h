/*
 * dense.h: the layers of networks.
 *
 * Rows of numbers have a stride of whole LANES; what lies behind the numbers of
 * a row is undefined.  The sum of an output runs over the inputs in one order,
 * so that a row's results have the same bits among any others.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_DENSE_H
#define TENSILE_DENSE_H

#include "evaluator/image.h"

/* Numbers of a panel of weights and of a vector in the kernels. */
#define LANES 16

/* The next multiple of LANES. */
static inline int
whole_lanes(int count)
{
	return (count + LANES - 1) / LANES * LANES;
}

/* Outputs, at most, of a layer whose sums run over LANES inputs at once. */
#define NARROW 4

/*
 * Weights in panels of LANES outputs, [panels][inputs][LANES], or of a narrow
 * layer [outputs][inputs]; whole LANES of biases.
 */
typedef struct Dense
{
	int			inputs;
	int			outputs;
	const float *weights;
	const float *bias;
} Dense;

/* Some rows of numbers. */
typedef struct Rows
{
	float	   *numbers;
	int			stride;
} Rows;

typedef enum Activation
{
	ACTIVATION_NONE,
	ACTIVATION_RELU,
	ACTIVATION_TANH,
	ACTIVATION_GELU,
	ACTIVATION_SILU
} Activation;

typedef struct DenseKernels
{
	/*
	 * y = start + x . weights, negative ones as 0 if `relu`; a stride of 0
	 * starts all rows with the same numbers.
	 */
	void		(*dense) (const Dense *layer, const float *x, int x_stride, const float *start,
						  int start_stride, int rows, float *y, int y_stride, bool relu);

	void		(*activate) (Activation kind, float *y, int count);

	/* Normalises the numbers of each row, then scales and shifts them. */
	void		(*normalise) (const float *scale, const float *shift, int count, int rows, float *y,
							  int stride);

	/* y += x */
	void		(*add) (const float *x, int count, float *y);

	/* y = base + part * rise + x * linear, where base, rise and linear are [count] each */
	void		(*piece) (const float *piece, float part, const float *linear, float x, int count,
						  float *y);
} DenseKernels;

extern const DenseKernels *dense_kernels(void);

/* Adds a layer with weights [inputs][outputs]. */
extern void dense_compile(ImageWriter *writer, int inputs, int outputs, const float *weights,
						  const float *bias);
extern void dense_open(Dense *self, ImageReader *reader, int inputs, int outputs);

/* Rows of zeros, each at a multiple of IMAGE_ALIGNMENT. */
extern void rows_new(Rows *self, int rows, int width);
extern void rows_free(Rows *self);

#endif
