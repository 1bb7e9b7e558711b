/*
 * mlp.c: the architecture mlp.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include <math.h>

#include "evaluator/mlp.h"

#define MOST_HIDDEN 64
#define MOST_WIDTH 65536
#define MOST_EMBEDDING 1024
#define EPSILON 1e-5f			/* of PyTorch's batch norm */

typedef struct MlpDescription
{
	int			layers;			/* hidden ones */
	int			hidden[MOST_HIDDEN];
	Activation	activation;
	bool		is_batch_norm;
	bool		is_layer_norm;
	bool		has_dropout;
	int			embedding;
} MlpDescription;

static void
describe(const ModelSource *source, MlpDescription *given)
{
	static const char *const activations[] = {"none", "relu", "tanh", "gelu", "silu"};
	Compilation *compilation = source->compilation;
	const JsonNode *hidden = json_member(source->architecture, "hidden");
	const JsonNode *activation = json_member(source->architecture, "activation");
	const JsonNode *norm = json_member(source->architecture, "norm");

	*given = (MlpDescription) {.layers = 2, .hidden = {128, 64}, .activation = ACTIVATION_RELU};
	if (hidden != NULL)
	{
		given->layers = 0;
		json_for_each(item, json_array(compilation, hidden))
		{
			if (given->layers == MOST_HIDDEN)
			{
				compilation_damaged(compilation, "its architecture has too many layers");
				break;
			}
			given->hidden[given->layers++] = (int) json_whole(compilation, item, 1, MOST_WIDTH, 1);
		}
	}
	if (activation != NULL)
	{
		given->activation = ACTIVATION_NONE;
		for (int i = ACTIVATION_RELU; i <= ACTIVATION_SILU; i++)
			if (json_equals(activation, activations[i]))
				given->activation = (Activation) i;
		if (given->activation == ACTIVATION_NONE)
			compilation_unsuitable(compilation);
	}
	given->is_batch_norm = json_equals(norm, "batch");
	given->is_layer_norm = json_equals(norm, "layer");
	if (norm != NULL && !given->is_batch_norm && !given->is_layer_norm &&
		!json_equals(norm, "none"))
		compilation_unsuitable(compilation);
	given->has_dropout = json_number(compilation, json_member(source->architecture, "dropout"),
									 0.0) != 0.0;
	given->embedding = (int) json_whole(compilation, json_member(source->architecture, "embedding"),
										1, MOST_EMBEDDING, 16);
}

/*
 * The place of an input of the first layer: the predictor has vectors of codes
 * between numbers and arrays.
 */
static int
place_of_input(const Features *features, int extra, int input)
{
	int			numbers = features->plain + features->ranks;

	if (input < numbers)
		return model_number(features, input);
	return input < numbers + extra ? features->width + input - numbers : input - extra;
}

/* Folds a batch norm into the weights [inputs][outputs] in front of it. */
static void
fold(const ModelSource *source, const char *layer, int inputs, int outputs, float *weights,
	 float *bias)
{
	const float *weight = weights_floats(source->weights, layer, "weight", outputs, -1, -1);
	const float *shift = weights_floats(source->weights, layer, "bias", outputs, -1, -1);
	const float *mean = weights_floats(source->weights, layer, "running_mean", outputs, -1, -1);
	const float *variance = weights_floats(source->weights, layer, "running_var", outputs, -1, -1);

	weights_skip(source->weights, layer, "num_batches_tracked");
	if (!compilation_ready(source->compilation))
		return;
	for (int output = 0; output < outputs; output++)
	{
		float		scale = weight[output] / sqrtf(variance[output] + EPSILON);

		for (int k = 0; k < inputs; k++)
			weights[(Size) k * outputs + output] *= scale;
		bias[output] = (bias[output] - mean[output]) * scale + shift[output];
	}
}

/*
 * Adds the layer with this number among those of the predictor, and its norm;
 * returns the next number.
 */
static int
compile_layer(ImageWriter *writer, const ModelSource *source, const MlpDescription *given,
			  int extra, int number, int inputs, int outputs, bool is_hidden)
{
	Compilation *compilation = source->compilation;
	char		layer[64];
	const float *stored,
			   *stored_bias;
	float	   *weights,
			   *bias;

	snprintf(layer, sizeof(layer), "%sdense.%d.", source->prefix, number);
	if (!compilation_weigh(compilation, inputs + 1, outputs))
		return number;
	stored = weights_floats(source->weights, layer, "weight", outputs, inputs, -1);
	stored_bias = weights_floats(source->weights, layer, "bias", outputs, -1, -1);
	if (!compilation_ready(compilation))
		return number;
	weights = compilation_new(compilation, float, (Size) inputs * outputs);
	bias = compilation_new(compilation, float, outputs);
	memcpy(bias, stored_bias, sizeof(float) * outputs);
	for (int output = 0; output < outputs; output++)
		for (int k = 0; k < inputs; k++)
		{
			int			place = number == 0 ? place_of_input(source->features, extra, k) : k;

			weights[(Size) place * outputs + output] = stored[(Size) output * inputs + k];
		}
	number++;
	snprintf(layer, sizeof(layer), "%sdense.%d.", source->prefix, number);
	if (is_hidden && given->is_batch_norm)
		fold(source, layer, inputs, outputs, weights, bias);
	dense_compile(writer, inputs, outputs, weights, bias);
	if (is_hidden && given->is_layer_norm)
	{
		const float *scale = weights_floats(source->weights, layer, "weight", outputs, -1, -1);
		const float *shift = weights_floats(source->weights, layer, "bias", outputs, -1, -1);

		if (!compilation_ready(compilation))
			return number;
		image_write_copy(writer, scale, outputs, sizeof(float));
		image_write_copy(writer, shift, outputs, sizeof(float));
	}
	return number + (given->is_batch_norm || given->is_layer_norm) + 1 + given->has_dropout;
}

void
mlp_compile(ImageWriter *writer, const ModelSource *source)
{
	MlpDescription given;
	int			extra;
	int			width;
	int			number = 0;

	describe(source, &given);
	extra = given.embedding * source->features->categories.count;
	width = source->features->width + extra;
	image_write_whole(writer, given.embedding);
	embedding_compile(writer, source, "join.embedding.weight", given.embedding);
	image_write_whole(writer, given.activation);
	image_write_whole(writer, given.is_layer_norm);
	image_write_whole(writer, given.layers);
	for (int i = 0; i <= given.layers && compilation_ready(source->compilation); i++)
	{
		bool		is_hidden = i < given.layers;
		int			outputs = is_hidden ? given.hidden[i] : source->outputs;

		image_write_whole(writer, outputs);
		number = compile_layer(writer, source, &given, extra, number, width, outputs, is_hidden);
		width = outputs;
	}
}

void
mlp_open(Mlp *self, ImageReader *reader, const Features *features, int outputs)
{
	bool		is_layer_norm;
	int			width;
	int			embedding = (int) image_whole(reader, 1, MOST_EMBEDDING);

	self->features = features;
	self->kernels = dense_kernels();
	self->extra = embedding * features->categories.count;
	width = features->width + self->extra;
	embedding_open(&self->embedding, reader, &features->categories, embedding);
	self->activation = (Activation) image_whole(reader, ACTIVATION_RELU, ACTIVATION_SILU);
	is_layer_norm = image_whole(reader, 0, 1) != 0;
	self->count = (int) image_whole(reader, 0, MOST_HIDDEN) + 1;
	self->layers = palloc0(sizeof(MlpLayer) * self->count);
	for (int i = 0; i < self->count && !reader->is_damaged; i++)
	{
		MlpLayer   *layer = &self->layers[i];
		bool		is_hidden = i < self->count - 1;
		int			next = (int) image_whole(reader, 1, MOST_WIDTH);

		if (!is_hidden && next != outputs)
			reader->is_damaged = true;
		dense_open(&layer->dense, reader, width, next);
		if (is_hidden && is_layer_norm)
		{
			layer->scale = image_array(reader, float, next);
			layer->shift = image_array(reader, float, next);
		}
		if (is_hidden)
			self->widest = Max(self->widest, next);
		width = next;
	}
}

void
mlp_prepare(Mlp *self, int rows)
{
	for (int i = 0; i < lengthof(self->hidden); i++)
		rows_new(&self->hidden[i], rows, self->widest);
}

void
mlp_close(Mlp *self)
{
	for (int i = 0; i < lengthof(self->hidden); i++)
		rows_free(&self->hidden[i]);
	pfree(self->layers);
}

void
mlp_outputs(Mlp *self, const FeatureBlock *block, Rows *y)
{
	int			categories = self->features->categories.count;
	Rows		x = {block->numbers, block->stride};

	for (int row = 0; row < block->rows && categories > 0; row++)
		embedding_join(&self->embedding, block->codes + (Size) row * categories,
					   x.numbers + (Size) row * x.stride + self->features->width);
	for (int i = 0; i < self->count; i++)
	{
		const MlpLayer *layer = &self->layers[i];
		bool		is_hidden = i < self->count - 1;
		bool		is_relu = is_hidden && self->activation == ACTIVATION_RELU &&
			layer->scale == NULL;
		Rows	   *next = is_hidden ? &self->hidden[i % 2] : y;

		self->kernels->dense(&layer->dense, x.numbers, x.stride, layer->dense.bias, 0, block->rows,
							 next->numbers, next->stride, is_relu);
		if (layer->scale != NULL)
			self->kernels->normalise(layer->scale, layer->shift, layer->dense.outputs, block->rows,
									 next->numbers, next->stride);
		if (is_hidden && !is_relu)
			for (int row = 0; row < block->rows; row++)
				self->kernels->activate(self->activation, next->numbers + (Size) row * next->stride,
										layer->dense.outputs);
		x = *next;
	}
}
