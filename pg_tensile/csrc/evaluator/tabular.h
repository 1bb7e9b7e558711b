/*
 * tabular.h: the architecture tabular (pg_tensile/execution/models/tabular.py).
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_TABULAR_H
#define TENSILE_TABULAR_H

#include "evaluator/embedding.h"
#include "evaluator/rank_embedding.h"

typedef struct Tabular
{
	const Features *features;
	RankEmbedding ranks;
	int			inputs;			/* numbers that are projected, 0: none */
	Dense		project;
	Embedding	categories;
	int			projection;
	int			hidden;
	int			members;
	int			layers;			/* of each member, with that of the outputs */
	Dense	   *dense;			/* [members][layers], with the scales of the members */
	int			extra;			/* numbers that it adds to a row of features */
	Rows		projected;		/* workspace */
	Rows		workspace[2];
	const DenseKernels *kernels;
} Tabular;

extern void tabular_compile(ImageWriter *writer, const ModelSource *source);
extern void tabular_open(Tabular *self, ImageReader *reader, const Features *features, int outputs);

/* Allocates the workspace for this number of rows. */
extern void tabular_prepare(Tabular *self, int rows);
extern void tabular_close(Tabular *self);

extern void tabular_outputs(Tabular *self, const FeatureBlock *block, Rows *y);

#endif
