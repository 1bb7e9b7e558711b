/*
 * tabular.c: the architecture tabular.
 *
 * Members are evaluated one after the other, so that the values and weights of
 * one stay in the processor's cache.  Each adds to the outputs.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include "evaluator/tabular.h"

#define MOST_MEMBERS 256
#define MOST_LAYERS 64
#define MOST_WIDTH 65536
#define MOST_EMBEDDING 1024

typedef struct TabularDescription
{
	int			members;
	int			projection;
	int			hidden;
	int			layers;			/* hidden ones */
	int			embedding;
} TabularDescription;

static int
key(const ModelSource *source, const char *name, int most, int missing)
{
	return (int) json_whole(source->compilation, json_member(source->architecture, name), 1, most,
							missing);
}

/*
 * The place of an input of the projection behind the ranks: the predictor has
 * their vectors in front of arrays.
 */
static int
place_of_input(const Features *features, int extra, int input)
{
	if (input < features->plain)
		return input;
	return input < features->plain + extra ?
		features->width - features->ranks + input - features->plain : input - extra;
}

static void
compile_projection(ImageWriter *writer, const ModelSource *source, const TabularDescription *given,
				   int extra, int inputs)
{
	int			outputs = given->projection;
	const float *weights,
			   *bias;
	float	   *ordered;

	if (!compilation_weigh(source->compilation, inputs + 1, outputs))
		return;
	weights = weights_floats(source->weights, source->prefix, "project.weight", outputs, inputs,
							 -1);
	bias = weights_floats(source->weights, source->prefix, "project.bias", outputs, -1, -1);
	if (!compilation_ready(source->compilation))
		return;
	ordered = compilation_new(source->compilation, float, (Size) inputs * outputs);
	for (int output = 0; output < outputs; output++)
		for (int k = 0; k < inputs; k++)
			ordered[(Size) place_of_input(source->features, extra, k) * outputs + output] =
				weights[(Size) output * inputs + k];
	dense_compile(writer, inputs, outputs, ordered, bias);
}

/* The weights of a layer that the members share, and their scales of inputs and outputs. */
typedef struct SharedLayer
{
	int			inputs;
	int			outputs;
	const float *weight;		/* [outputs][inputs] */
	const float *in;			/* [members][inputs] */
	const float *out;			/* [members][outputs] */
	const float *bias;			/* [members][outputs] */
} SharedLayer;

static void
load_layer(const ModelSource *source, const TabularDescription *given, int number,
		   SharedLayer *layer)
{
	char		name[64];

	snprintf(name, sizeof(name), "%sbackbone.blocks.%d.0.", source->prefix, number);
	layer->inputs = number == 0 ? given->projection : given->hidden;
	layer->outputs = given->hidden;
	layer->weight = weights_floats(source->weights, name, "weight", layer->outputs, layer->inputs,
								   -1);
	layer->in = weights_floats(source->weights, name, "r", given->members, layer->inputs, -1);
	layer->out = weights_floats(source->weights, name, "s", given->members, layer->outputs, -1);
	layer->bias = weights_floats(source->weights, name, "bias", given->members, layer->outputs, -1);
}

static void
compile_layer(ImageWriter *writer, const SharedLayer *layer, int member, float *folded)
{
	const float *in = layer->in + (Size) member * layer->inputs;
	const float *out = layer->out + (Size) member * layer->outputs;

	for (int k = 0; k < layer->inputs; k++)
		for (int output = 0; output < layer->outputs; output++)
			folded[(Size) k * layer->outputs + output] =
				in[k] * layer->weight[(Size) output * layer->inputs + k] * out[output];
	dense_compile(writer, layer->inputs, layer->outputs, folded,
				  layer->bias + (Size) member * layer->outputs);
}

static void
compile_members(ImageWriter *writer, const ModelSource *source, const TabularDescription *given)
{
	Compilation *compilation = source->compilation;
	int			hidden = given->hidden;
	int			outputs = source->outputs;
	int			members = given->members;
	SharedLayer *layers = compilation_new(compilation, SharedLayer, given->layers);
	const float *last,
			   *last_bias;
	float	   *folded,
			   *mean_bias;

	if (!compilation_weigh(compilation, (int64) members * (given->projection + 1), hidden) ||
		!compilation_weigh(compilation, (int64) members * (given->layers - 1) * (hidden + 1),
						   hidden) ||
		!compilation_weigh(compilation, (int64) members * (hidden + 1), outputs))
		return;
	for (int i = 0; i < given->layers; i++)
		load_layer(source, given, i, &layers[i]);
	last = weights_floats(source->weights, source->prefix, "output.weight", members, hidden,
						  outputs);
	last_bias = weights_floats(source->weights, source->prefix, "output.bias", members, outputs,
							   -1);
	if (!compilation_ready(compilation))
		return;
	folded = compilation_new(compilation, float,
							 (Size) hidden * Max(Max(given->projection, hidden), outputs));
	mean_bias = compilation_new(compilation, float, outputs);
	for (int member = 0; member < members; member++)
		for (int i = 0; i < outputs; i++)
			mean_bias[i] += last_bias[(Size) member * outputs + i] / members;
	for (int member = 0; member < members; member++)
	{
		for (int i = 0; i < given->layers; i++)
			compile_layer(writer, &layers[i], member, folded);
		for (Size i = 0; i < (Size) hidden * outputs; i++)
			folded[i] = last[(Size) member * hidden * outputs + i] / members;
		dense_compile(writer, hidden, outputs, folded, mean_bias);
	}
}

void
tabular_compile(ImageWriter *writer, const ModelSource *source)
{
	const Features *features = source->features;
	TabularDescription given = {
		.members = key(source, "members", MOST_MEMBERS, 8),
		.projection = key(source, "projection", MOST_WIDTH, 128),
		.hidden = key(source, "hidden", MOST_WIDTH, 128),
		.layers = key(source, "layers", MOST_LAYERS, 2),
		.embedding = key(source, "embedding", MOST_EMBEDDING, 8),
	};
	int			extra = features->ranks * given.embedding;
	int			inputs = features->width - features->ranks + extra;

	if (inputs == 0 && features->categories.count == 0)
		compilation_damaged(source->compilation, "its model has no inputs");
	image_write_whole(writer, given.members);
	image_write_whole(writer, given.projection);
	image_write_whole(writer, given.hidden);
	image_write_whole(writer, given.layers);
	if (features->ranks > 0)
		rank_embedding_compile(writer, source, given.embedding);
	if (inputs > 0)
		compile_projection(writer, source, &given, extra, inputs);
	embedding_compile(writer, source, "categories.weight", given.projection);
	compile_members(writer, source, &given);
}

void
tabular_open(Tabular *self, ImageReader *reader, const Features *features, int outputs)
{
	self->features = features;
	self->kernels = dense_kernels();
	self->members = (int) image_whole(reader, 1, MOST_MEMBERS);
	self->projection = (int) image_whole(reader, 1, MOST_WIDTH);
	self->hidden = (int) image_whole(reader, 1, MOST_WIDTH);
	self->layers = (int) image_whole(reader, 1, MOST_LAYERS) + 1;
	if (features->ranks > 0)
		rank_embedding_open(&self->ranks, reader, features);
	self->extra = features->ranks * self->ranks.width;
	self->inputs = features->width - features->ranks + self->extra;
	if (self->inputs > 0)
		dense_open(&self->project, reader, self->inputs, self->projection);
	embedding_open(&self->categories, reader, &features->categories, self->projection);
	self->dense = palloc0(sizeof(Dense) * self->members * self->layers);
	for (int member = 0; member < self->members && !reader->is_damaged; member++)
	{
		Dense	   *dense = &self->dense[member * self->layers];

		for (int i = 0; i < self->layers - 1; i++)
			dense_open(&dense[i], reader, i == 0 ? self->projection : self->hidden, self->hidden);
		dense_open(&dense[self->layers - 1], reader, self->hidden, outputs);
	}
}

void
tabular_prepare(Tabular *self, int rows)
{
	rows_new(&self->projected, rows, self->projection);
	for (int i = 0; i < lengthof(self->workspace); i++)
		rows_new(&self->workspace[i], rows, self->hidden);
}

void
tabular_close(Tabular *self)
{
	rows_free(&self->projected);
	for (int i = 0; i < lengthof(self->workspace); i++)
		rows_free(&self->workspace[i]);
	pfree(self->dense);
}

/* All features of each row as a vector. */
static void
project(Tabular *self, const FeatureBlock *block)
{
	const Features *features = self->features;
	int			categories = features->categories.count;
	Rows	   *y = &self->projected;

	for (int row = 0; row < block->rows && features->ranks > 0; row++)
	{
		float	   *numbers = block->numbers + (Size) row * block->stride;

		rank_embedding_apply(&self->ranks, self->kernels, numbers, numbers + features->width);
	}
	if (self->inputs > 0)
		self->kernels->dense(&self->project, block->numbers + features->ranks, block->stride,
							 self->project.bias, 0, block->rows, y->numbers, y->stride, false);
	else
		memset(y->numbers, 0, sizeof(float) * block->rows * y->stride);
	for (int row = 0; row < block->rows && categories > 0; row++)
		embedding_add(&self->categories, self->kernels, block->codes + (Size) row * categories,
					  y->numbers + (Size) row * y->stride);
}

void
tabular_outputs(Tabular *self, const FeatureBlock *block, Rows *y)
{
	project(self, block);
	for (int member = 0; member < self->members; member++)
	{
		const Dense *dense = &self->dense[member * self->layers];
		const Dense *last = &dense[self->layers - 1];
		Rows	   *x = &self->projected;

		for (int i = 0; i < self->layers - 1; i++)
		{
			Rows	   *next = &self->workspace[i % 2];

			self->kernels->dense(&dense[i], x->numbers, x->stride, dense[i].bias, 0, block->rows,
								 next->numbers, next->stride, true);
			x = next;
		}
		/* The first member begins with the mean of all biases, the others with the sum so far. */
		self->kernels->dense(last, x->numbers, x->stride, member == 0 ? last->bias : y->numbers,
							 member == 0 ? 0 : y->stride, block->rows, y->numbers, y->stride, false);
	}
}
