/*
 * weights.h: the tensors of a stored version, a safetensors file.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_WEIGHTS_H
#define TENSILE_WEIGHTS_H

#include "evaluator/compilation.h"

typedef struct Tensor
{
	const char *name;
	const char *type;			/* F32, U8, ... */
	int64		shape[3];		/* of 1 where it has fewer dimensions */
	int			dimensions;
	const char *data;
	Size		bytes;
} Tensor;

typedef struct Weights
{
	Compilation *compilation;
	Tensor	   *tensors;
	int			count;
	int			taken;			/* how many tensors have been asked for */
} Weights;

extern void weights_open(Weights *self, Compilation *compilation, const char *bytes, Size length);

/*
 * The float32 numbers of a layer's tensor of this shape (-1: it has no such
 * dimension).  A version without them is damaged, and with other numbers
 * unsuitable; NULL once a version is either.
 */
extern const float *weights_floats(Weights *self, const char *layer, const char *name,
								   int64 first, int64 second, int64 third);

/* The bytes of a tensor of bytes. */
extern const char *weights_bytes(Weights *self, const char *layer, const char *name, Size *length);

/* Passes over a tensor that the evaluation does not need. */
extern void weights_skip(Weights *self, const char *layer, const char *name);

#endif
