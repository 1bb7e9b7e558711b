/*
 * embedding.h: a vector for each code of the categories.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_EMBEDDING_H
#define TENSILE_EMBEDDING_H

#include "evaluator/dense.h"
#include "evaluator/model_source.h"

typedef struct Embedding
{
	const Categories *categories;
	int			width;
	const float *vectors;		/* [codes of all categories][width] */
} Embedding;

/* Adds the tensor with this name, if there are categories. */
extern void embedding_compile(ImageWriter *writer, const ModelSource *source, const char *name,
							  int width);
extern void embedding_open(Embedding *self, ImageReader *reader, const Categories *categories,
						   int width);

static inline const float *
embedding_vector(const Embedding *self, int category, int32 code)
{
	return self->vectors + (Size) (self->categories->items[category].start + code) * self->width;
}

/* Adds the vectors of a row's codes to y [width]. */
extern void embedding_add(const Embedding *self, const DenseKernels *kernels, const int32 *codes,
						  float *y);

/* Sets y to the vectors of a row's codes side by side. */
extern void embedding_join(const Embedding *self, const int32 *codes, float *y);

#endif
