/*
 * model.h: a model of any architecture that is evaluated in a session.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_MODEL_H
#define TENSILE_MODEL_H

#include "evaluator/forest.h"
#include "evaluator/linear.h"
#include "evaluator/mlp.h"
#include "evaluator/tabular.h"

typedef enum ModelKind
{
	MODEL_LINEAR,
	MODEL_MLP,
	MODEL_TABULAR,
	MODEL_BOOSTED
} ModelKind;

/* A member of the average; a model that is none has one. */
typedef struct ModelMember
{
	ModelKind	kind;
	float		weight;
	Linear		linear;
	Mlp			mlp;
	Tabular		tabular;
	Forest		forest;
} ModelMember;

typedef struct Model
{
	const Features *features;
	int			outputs;
	bool		is_average;
	int			count;
	ModelMember *members;
	int			extra;			/* numbers that members add to a row of features */
	int			widest;			/* of the rows of numbers that it computes */
	Rows		y;				/* workspace */
} Model;

extern void model_compile(ImageWriter *writer, const ModelSource *source);
extern void model_open(Model *self, ImageReader *reader, const Features *features, int outputs);

/* Allocates the workspace for this number of rows. */
extern void model_prepare(Model *self, int rows);
extern void model_close(Model *self);

/*
 * The outputs of some rows, whose numbers have room for the extra ones; y has
 * as many as the features have rows.
 */
extern void model_outputs(Model *self, const FeatureBlock *block, Rows *y);

#endif
