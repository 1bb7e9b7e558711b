/*
 * rank_embedding.c: piecewise linear embeddings of ranks.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include <math.h>

#include "evaluator/rank_embedding.h"

#define MOST_BINS 32			/* of a rank (pg_tensile/execution/data/ranks.py) */
#define MOST_WIDTH 1024
#define ROUNDING 1e-5f			/* of what the weights say about the edges of bins */

/* The edges of a rank's bins, some of its deviates; returns the number of bins. */
static int
edges_of(const RankScale *scale, float *edges)
{
	int			last = scale->count - 1;
	int			bins = Min(last, MOST_BINS);

	for (int i = 0; i <= bins; i++)
	{
		int			place = bins == last ? i : (int) rint((double) i * last / MOST_BINS);

		edges[i] = (float) scale->segments[place + 1].base;
	}
	return bins;
}

/*
 * The column of a bin among those of the weights: the last bin is in the last
 * one, and a rank with fewer bins leaves out some in front of it.
 */
static int
column_of(int bin, int own, int bins)
{
	return bin == own - 1 ? bins - 1 : bin;
}

static bool
is_near(float given, float expected)
{
	return fabsf(given - expected) <= ROUNDING * Max(fabsf(expected), 1.0f);
}

/* The weights of a version: scales and shifts [ranks][bins], what follows [ranks][...][width]. */
typedef struct RankWeights
{
	int			bins;
	int			width;
	const float *scale;
	const float *shift;
	const float *rise;			/* [ranks][bins][width] */
	const float *linear;
	const float *bias;
} RankWeights;

/* The parts and pieces of one rank. */
static void
compile_rank(Compilation *compilation, const RankWeights *given, int rank, int own,
			 const float *edges, RankBin *parts, float *pieces)
{
	int			width = given->width;
	float	   *sum = compilation_new(compilation, float, width);

	memcpy(sum, given->bias + (Size) rank * width, sizeof(float) * width);
	for (int bin = 0; bin < own; bin++)
	{
		int			column = rank * given->bins + column_of(bin, own, given->bins);
		const float *rise = given->rise + (Size) column * width;
		float	   *piece = pieces + (Size) bin * 2 * width;
		float		size = edges[bin + 1] - edges[bin];

		parts[bin] = (RankBin) {given->scale[column], given->shift[column]};
		/*
		 * Weights that stand for other bins, as those of an imported model
		 * may, are left to the predictor.
		 */
		if (!is_near(parts[bin].scale * size, 1.0f) ||
			!is_near(parts[bin].shift * size, -edges[bin]))
			compilation_unsuitable(compilation);
		memcpy(piece, sum, sizeof(float) * width);
		memcpy(piece + width, rise, sizeof(float) * width);
		for (int i = 0; i < width; i++)
			sum[i] += rise[i];
	}
}

void
rank_embedding_compile(ImageWriter *writer, const ModelSource *source, int width)
{
	static const char layer[] = "embeddings.";
	Compilation *compilation = source->compilation;
	const Numbers *numbers = &source->features->numbers;
	int			ranks = numbers->ranks;
	char		prefix[64];
	RankWeights given = {.width = width};
	const RankScale **scales = compilation_new(compilation, const RankScale *, ranks);
	float		edges[MOST_BINS + 1];
	float	   *between;
	RankBin    *parts;
	float	   *pieces;

	for (int i = 0; i < numbers->count; i++)
		if (numbers->columns[i].rank >= 0)
		{
			scales[numbers->columns[i].rank] = &numbers->columns[i].scale;
			given.bins = Max(given.bins, edges_of(&numbers->columns[i].scale, edges));
		}
	image_write_whole(writer, width);
	image_write_whole(writer, given.bins);
	if (!compilation_weigh(compilation, (int64) ranks * given.bins, 2 * width + 2) ||
		!compilation_weigh(compilation, ranks, width))
		return;
	snprintf(prefix, sizeof(prefix), "%s%s", source->prefix, layer);
	given.scale = weights_floats(source->weights, prefix, "impl.weight", ranks, given.bins, -1);
	given.shift = weights_floats(source->weights, prefix, "impl.bias", ranks, given.bins, -1);
	given.rise = weights_floats(source->weights, prefix, "linear.weight", ranks, given.bins, width);
	given.linear = weights_floats(source->weights, prefix, "linear0.weight", ranks, width, -1);
	given.bias = weights_floats(source->weights, prefix, "linear0.bias", ranks, width, -1);
	weights_skip(source->weights, prefix, "impl.single_bin_mask");
	weights_skip(source->weights, prefix, "impl.mask");
	if (!compilation_ready(compilation))
		return;
	between = compilation_new(compilation, float, (Size) ranks * (given.bins - 1));
	parts = compilation_new(compilation, RankBin, (Size) ranks * given.bins);
	pieces = compilation_new(compilation, float, (Size) ranks * given.bins * 2 * width);
	for (int rank = 0; rank < ranks; rank++)
	{
		int			own = edges_of(scales[rank], edges);

		compile_rank(compilation, &given, rank, own, edges, parts + (Size) rank * given.bins,
					 pieces + (Size) rank * given.bins * 2 * width);
		for (int i = 0; i < given.bins - 1; i++)
			between[(Size) rank * (given.bins - 1) + i] = i < own - 1 ? edges[i + 1] : INFINITY;
	}
	image_write_copy(writer, between, (Size) ranks * (given.bins - 1), sizeof(float));
	image_write_copy(writer, parts, (Size) ranks * given.bins, sizeof(RankBin));
	image_write_copy(writer, pieces, (Size) ranks * given.bins * 2 * width, sizeof(float));
	image_write_copy(writer, given.linear, (Size) ranks * width, sizeof(float));
}

void
rank_embedding_open(RankEmbedding *self, ImageReader *reader, const Features *features)
{
	Size		ranks = features->ranks;

	self->ranks = features->ranks;
	self->width = (int) image_whole(reader, 1, MOST_WIDTH);
	self->bins = (int) image_whole(reader, 1, MOST_BINS);
	self->edges = image_array(reader, float, ranks * (self->bins - 1));
	self->parts = image_array(reader, RankBin, ranks * self->bins);
	self->pieces = image_array(reader, float, ranks * self->bins * 2 * self->width);
	self->linear = image_array(reader, float, ranks * self->width);
}

void
rank_embedding_apply(const RankEmbedding *self, const DenseKernels *kernels, const float *ranks,
					 float *y)
{
	int			count = self->bins - 1;

	for (int rank = 0; rank < self->ranks; rank++)
	{
		float		x = ranks[rank];
		const float *edges = self->edges + (Size) rank * count;
		Size		bin = (Size) rank * self->bins;
		Size		vector = (Size) rank * self->width;
		int			own = 0;
		int			length = count;

		while (length > 1)
		{
			int			half = length / 2;

			own += half * (edges[own + half - 1] <= x);
			length -= half;
		}
		own += length > 0 && edges[own] <= x;
		bin += own;
		kernels->piece(self->pieces + bin * 2 * self->width,
					   x * self->parts[bin].scale + self->parts[bin].shift, self->linear + vector, x,
					   self->width, y + vector);
	}
}
