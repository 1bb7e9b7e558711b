/*
 * mlp.h: the architecture mlp (pg_tensile/execution/models/mlp.py).
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_MLP_H
#define TENSILE_MLP_H

#include "evaluator/embedding.h"

typedef struct MlpLayer
{
	Dense		dense;
	const float *scale;			/* of a layer norm, NULL: none */
	const float *shift;
} MlpLayer;

typedef struct Mlp
{
	const Features *features;
	Embedding	embedding;
	Activation	activation;
	int			count;			/* of layers, that of the outputs included */
	MlpLayer   *layers;
	int			extra;			/* numbers that it adds to a row of features */
	int			widest;			/* of hidden layers */
	Rows		hidden[2];		/* workspace */
	const DenseKernels *kernels;
} Mlp;

extern void mlp_compile(ImageWriter *writer, const ModelSource *source);
extern void mlp_open(Mlp *self, ImageReader *reader, const Features *features, int outputs);

/* Allocates the workspace for this number of rows. */
extern void mlp_prepare(Mlp *self, int rows);
extern void mlp_close(Mlp *self);

extern void mlp_outputs(Mlp *self, const FeatureBlock *block, Rows *y);

#endif
