/*
 * embedding.c: a vector for each code of the categories.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include "evaluator/embedding.h"

void
embedding_compile(ImageWriter *writer, const ModelSource *source, const char *name, int width)
{
	int			codes = source->features->categories.codes;
	const float *vectors;

	if (codes == 0 || !compilation_weigh(source->compilation, codes, width))
		return;
	vectors = weights_floats(source->weights, source->prefix, name, codes, width, -1);
	if (vectors != NULL)
		image_write_copy(writer, vectors, (Size) codes * width, sizeof(float));
}

void
embedding_open(Embedding *self, ImageReader *reader, const Categories *categories, int width)
{
	self->categories = categories;
	self->width = width;
	if (categories->codes > 0)
		self->vectors = image_array(reader, float, (Size) categories->codes * width);
}

void
embedding_add(const Embedding *self, const DenseKernels *kernels, const int32 *codes, float *y)
{
	for (int i = 0; i < self->categories->count; i++)
		kernels->add(embedding_vector(self, i, codes[i]), self->width, y);
}

void
embedding_join(const Embedding *self, const int32 *codes, float *y)
{
	for (int i = 0; i < self->categories->count; i++)
		memcpy(y + (Size) i * self->width, embedding_vector(self, i, codes[i]),
			   sizeof(float) * self->width);
}
