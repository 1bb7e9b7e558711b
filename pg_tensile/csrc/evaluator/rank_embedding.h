/*
 * rank_embedding.h: piecewise linear embeddings of ranks (of the library
 * rtdl_num_embeddings, version B).
 *
 * A rank's vector is a sum over all bins up to its own.  Of those in front of
 * its own the sums are known beforehand, so that it takes one piece.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_RANK_EMBEDDING_H
#define TENSILE_RANK_EMBEDDING_H

#include "evaluator/dense.h"
#include "evaluator/model_source.h"

/* The map of a rank to its part of a bin: rank * scale + shift. */
typedef struct RankBin
{
	float		scale;
	float		shift;
} RankBin;

typedef struct RankEmbedding
{
	int			ranks;
	int			width;			/* of a vector */
	int			bins;			/* of the rank that has most */
	const float *edges;			/* [ranks][bins - 1] between bins, infinite behind the last */
	const RankBin *parts;		/* [ranks][bins] */
	const float *pieces;		/* [ranks][bins][2][width]: sum at the start, and rise */
	const float *linear;		/* [ranks][width] */
} RankEmbedding;

extern void rank_embedding_compile(ImageWriter *writer, const ModelSource *source, int width);
extern void rank_embedding_open(RankEmbedding *self, ImageReader *reader, const Features *features);

/* Sets y to the vectors of a row's ranks side by side. */
extern void rank_embedding_apply(const RankEmbedding *self, const DenseKernels *kernels,
								 const float *ranks, float *y);

#endif
