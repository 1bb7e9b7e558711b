/*
 * linear.h: the architecture linear (pg_tensile/execution/models/linear.py).
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_LINEAR_H
#define TENSILE_LINEAR_H

#include "evaluator/embedding.h"

typedef struct Linear
{
	Dense		numbers;
	Embedding	categories;
	const DenseKernels *kernels;
} Linear;

extern void linear_compile(ImageWriter *writer, const ModelSource *source);
extern void linear_open(Linear *self, ImageReader *reader, const Features *features, int outputs);
extern void linear_outputs(const Linear *self, const FeatureBlock *block, Rows *y);

#endif
