/*
 * dense_kernels.h: the kernels of dense.c, included for each kind of vectors
 * with another KERNEL(name) and VECTOR_BYTES.
 *
 * ROWS are multiplied at once, or FEW, or PANELS for a single row: that makes
 * more sums than a processor adds at once, and not more than there are
 * registers.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */

typedef float KERNEL(Vector) __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef uint32 KERNEL(Words) __attribute__((vector_size(VECTOR_BYTES)));

#define Vector KERNEL(Vector)
#define Words KERNEL(Words)
#define WIDTH ((int) (VECTOR_BYTES / sizeof(float)))
#define PARTS (LANES / WIDTH)	/* vectors of a panel's numbers */

/* A panel of outputs for a number of rows. */
#define PANEL_OF_ROWS(name, ROWS_) \
static void \
KERNEL(name) (const float *restrict weights, int inputs, const float *restrict x, Size x_stride, \
			  const float *start, Size start_stride, float *y, Size y_stride, bool relu) \
{ \
	Vector		sums[ROWS_][PARTS]; \
 \
	for (int row = 0; row < ROWS_; row++) \
		for (int part = 0; part < PARTS; part++) \
			sums[row][part] = LOAD(start + row * start_stride + part * WIDTH); \
	for (int k = 0; k < inputs; k++, weights += LANES) \
		UNROLLED(for (int row = 0; row < ROWS_; row++)) \
			UNROLLED(for (int part = 0; part < PARTS; part++)) \
				sums[row][part] += x[row * x_stride + k] * LOAD(weights + part * WIDTH); \
	for (int row = 0; row < ROWS_; row++) \
		for (int part = 0; part < PARTS; part++) \
			STORE(y + row * y_stride + part * WIDTH, \
				  relu ? POSITIVE(sums[row][part]) : sums[row][part]); \
}

PANEL_OF_ROWS(panel_of_many, ROWS)
PANEL_OF_ROWS(panel_of_few, FEW)
PANEL_OF_ROWS(panel_of_one, 1)

/* Several panels for a single row. */
static void
KERNEL(panels_of_one) (const float *restrict weights, int inputs, const float *restrict x,
					   const float *start, float *y, bool relu)
{
	Size		panel_size = (Size) inputs * LANES;
	Vector		sums[PANELS][PARTS];

	for (int panel = 0; panel < PANELS; panel++)
		for (int part = 0; part < PARTS; part++)
			sums[panel][part] = LOAD(start + panel * LANES + part * WIDTH);
	for (int k = 0; k < inputs; k++, weights += LANES)
		UNROLLED(for (int panel = 0; panel < PANELS; panel++))
			UNROLLED(for (int part = 0; part < PARTS; part++))
				sums[panel][part] += x[k] * LOAD(weights + panel * panel_size + part * WIDTH);
	for (int panel = 0; panel < PANELS; panel++)
		for (int part = 0; part < PARTS; part++)
			STORE(y + panel * LANES + part * WIDTH,
				  relu ? POSITIVE(sums[panel][part]) : sums[panel][part]);
}

static float
KERNEL(sum) (const float *lanes)
{
	float		sums[LANES / 2];

	for (int i = 0; i < LANES / 2; i++)
		sums[i] = lanes[i] + lanes[i + LANES / 2];
	for (int width = LANES / 4; width > 0; width /= 2)
		for (int i = 0; i < width; i++)
			sums[i] += sums[i + width];
	return sums[0];
}

/* One output, for some rows. */
#define OUTPUT_OF_ROWS(name, ROWS_) \
static void \
KERNEL(name) (const float *restrict weights, int inputs, const float *restrict x, Size x_stride, \
			  const float *start, Size start_stride, float *y, Size y_stride, bool relu) \
{ \
	Vector		sums[ROWS_][PARTS] = {{{0}}}; \
	int			k = 0; \
 \
	for (; k + LANES <= inputs; k += LANES) \
		UNROLLED(for (int row = 0; row < ROWS_; row++)) \
			UNROLLED(for (int part = 0; part < PARTS; part++)) \
				sums[row][part] += LOAD(x + row * x_stride + k + part * WIDTH) * \
					LOAD(weights + k + part * WIDTH); \
	for (int row = 0; row < ROWS_; row++) \
	{ \
		float		sum = start[row * start_stride] + KERNEL(sum) ((float *) sums[row]); \
 \
		for (int rest = k; rest < inputs; rest++) \
			sum += x[row * x_stride + rest] * weights[rest]; \
		y[row * y_stride] = relu && sum < 0.0f ? 0.0f : sum; \
	} \
}

OUTPUT_OF_ROWS(output_of_few, FEW)
OUTPUT_OF_ROWS(output_of_one, 1)

static void
KERNEL(narrow) (const Dense *layer, const float *x, Size x_stride, const float *start,
				Size start_stride, int rows, float *y, Size y_stride, bool relu)
{
	for (int output = 0; output < layer->outputs; output++)
	{
		const float *weights = layer->weights + (Size) output * layer->inputs;
		int			row = 0;

		for (; row + FEW <= rows; row += FEW)
			KERNEL(output_of_few) (weights, layer->inputs, x + row * x_stride, x_stride,
									start + row * start_stride + output, start_stride,
									y + row * y_stride + output, y_stride, relu);
		for (; row < rows; row++)
			KERNEL(output_of_one) (weights, layer->inputs, x + row * x_stride, x_stride,
								   start + row * start_stride + output, start_stride,
								   y + row * y_stride + output, y_stride, relu);
	}
}

#define EACH_PANEL(name) \
	for (int panel = 0; panel < panels; panel++) \
		KERNEL(name) (layer->weights + panel * panel_size, layer->inputs, x + row * xs, xs, \
					  start + row * ss + panel * LANES, ss, y + row * ys + panel * LANES, ys, relu)

static void
KERNEL(dense) (const Dense *layer, const float *x, int x_stride, const float *start,
			   int start_stride, int rows, float *y, int y_stride, bool relu)
{
	Size		xs = x_stride,
				ss = start_stride,
				ys = y_stride;
	int			panels = whole_lanes(layer->outputs) / LANES;
	Size		panel_size = (Size) layer->inputs * LANES;
	int			row = 0;

	if (layer->outputs <= NARROW)
	{
		KERNEL(narrow) (layer, x, xs, start, ss, rows, y, ys, relu);
		return;
	}
	for (; row + ROWS <= rows; row += ROWS)
		EACH_PANEL(panel_of_many);
	for (; row + FEW <= rows; row += FEW)
		EACH_PANEL(panel_of_few);
	for (; row < rows; row++)
	{
		int			panel = 0;

		for (; panel + PANELS <= panels; panel += PANELS)
			KERNEL(panels_of_one) (layer->weights + panel * panel_size, layer->inputs, x + row * xs,
								   start + row * ss + panel * LANES, y + row * ys + panel * LANES,
								   relu);
		for (; panel < panels; panel++)
			KERNEL(panel_of_one) (layer->weights + panel * panel_size, layer->inputs, x + row * xs,
								  xs, start + row * ss + panel * LANES, ss,
								  y + row * ys + panel * LANES, ys, relu);
	}
}

/* e^x of some numbers in place, relative error 2e-7; limited to what float32 has (Cephes' expf). */
static inline __attribute__((always_inline)) void
KERNEL(exponential) (Vector *numbers)
{
	Vector		x = *numbers;
	Vector		shifted,
				n,
				p;
	Words		power;

	x = CHOOSE(x > 88.0f, (Vector) {0} + 88.0f, x);
	x = CHOOSE(x < -87.0f, (Vector) {0} - 87.0f, x);
	shifted = x * 1.44269504f + 12582912.0f;	/* the low bits are the rounded number */
	n = shifted - 12582912.0f;
	x = x - n * 0.693359375f;
	x = x + n * 2.12194440e-4f;
	p = x * 1.9875691500e-4f + 1.3981999507e-3f;
	p = p * x + 8.3334519073e-3f;
	p = p * x + 4.1665795894e-2f;
	p = p * x + 1.6666665459e-1f;
	p = p * x + 5.0000001201e-1f;
	p = p * x * x + x + 1.0f;
	power = ((Words) shifted + 127) << 23;
	*numbers = p * (Vector) power;
}

/* (1 - e^-2x) / (1 + e^-2x), for small numbers a series, whose first term is exact */
static inline __attribute__((always_inline)) void
KERNEL(tanh) (Vector *numbers)
{
	Vector		x = *numbers;
	Vector		size = CHOOSE(x < 0.0f, -x, x);
	Vector		square = x * x;
	Vector		e = size * -2.0f;
	Vector		large;
	Vector		series = 0.333333333f - square * (0.133333333f - square * 0.0539682540f);
	Vector		small = x - x * square * series;

	KERNEL(exponential) (&e);
	large = (1.0f - e) / (1.0f + e);
	large = CHOOSE(x < 0.0f, -large, large);
	*numbers = CHOOSE(size < 0.2f, small, large);
}

/* x times the normal distribution at x (Abramowitz and Stegun 7.1.26, error 8e-8) */
static inline __attribute__((always_inline)) void
KERNEL(gelu) (Vector *numbers)
{
	Vector		x = *numbers;
	Vector		z = CHOOSE(x < 0.0f, -x, x) * 0.707106781f;
	Vector		t = 1.0f / (1.0f + 0.3275911f * z);
	Vector		e = -z * z;
	Vector		tail;

	KERNEL(exponential) (&e);
	tail = t * 1.061405429f - 1.453152027f;
	tail = t * tail + 1.421413741f;
	tail = t * tail - 0.284496736f;
	tail = t * (t * tail + 0.254829592f);
	tail = 0.5f * tail * e;
	*numbers = x * CHOOSE(x < 0.0f, tail, 1.0f - tail);
}

static inline __attribute__((always_inline)) void
KERNEL(silu) (Vector *numbers)
{
	Vector		e = -*numbers;

	KERNEL(exponential) (&e);
	*numbers = *numbers / (1.0f + e);
}

static inline __attribute__((always_inline)) void
KERNEL(relu) (Vector *numbers)
{
	*numbers = POSITIVE(*numbers);
}

#define EACH_VECTOR(function) \
	for (int i = 0; i < count; i += WIDTH) \
	{ \
		Vector		some = LOAD(y + i); \
 \
		function (&some); \
		STORE(y + i, some); \
	}

static void
KERNEL(activate) (Activation kind, float *y, int count)
{
	if (kind == ACTIVATION_RELU)
		EACH_VECTOR(KERNEL(relu))
	else if (kind == ACTIVATION_TANH)
		EACH_VECTOR(KERNEL(tanh))
	else if (kind == ACTIVATION_GELU)
		EACH_VECTOR(KERNEL(gelu))
	else if (kind == ACTIVATION_SILU)
		EACH_VECTOR(KERNEL(silu))
}

static void
KERNEL(normalise) (const float *restrict scale, const float *restrict shift, int count, int rows,
				   float *restrict y, int stride)
{
	for (int row = 0; row < rows; row++, y += stride)
	{
		double		sum = 0.0,
					squares = 0.0;
		float		mean,
					factor;

		for (int i = 0; i < count; i++)
			sum += y[i];
		mean = (float) (sum / count);
		for (int i = 0; i < count; i++)
			squares += (double) (y[i] - mean) * (y[i] - mean);
		factor = 1.0f / sqrtf((float) (squares / count) + EPSILON);
		for (int i = 0; i < count; i++)
			y[i] = (y[i] - mean) * factor * scale[i] + shift[i];
	}
}

static void
KERNEL(add) (const float *restrict x, int count, float *restrict y)
{
	for (int i = 0; i < count; i++)
		y[i] += x[i];
}

static void
KERNEL(piece) (const float *restrict piece, float part, const float *restrict linear, float x,
			   int count, float *restrict y)
{
	int			i = 0;

	for (; i + 8 <= count; i += 8)
		for (int j = i; j < i + 8; j++)
			y[j] = piece[j] + part * piece[count + j] + x * linear[j];
	for (; i < count; i++)
		y[i] = piece[i] + part * piece[count + i] + x * linear[i];
}

static const DenseKernels KERNEL(dense_kernels) = {
	.dense = KERNEL(dense),
	.activate = KERNEL(activate),
	.normalise = KERNEL(normalise),
	.add = KERNEL(add),
	.piece = KERNEL(piece),
};

#undef Vector
#undef Words
#undef WIDTH
#undef PARTS
#undef PANEL_OF_ROWS
#undef OUTPUT_OF_ROWS
#undef EACH_PANEL
#undef EACH_VECTOR
