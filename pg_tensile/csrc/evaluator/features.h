/*
 * features.h: from raw values of some rows to the inputs of a model
 * (Preprocessing.apply of pg_tensile/execution/data/preprocessing.py).
 *
 * A row of numbers has ranks, then plain numbers, then those of arrays; `extra`
 * ones behind them are room for what a model makes of others.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_FEATURES_H
#define TENSILE_FEATURES_H

#include "evaluator/arrays.h"
#include "evaluator/categories.h"
#include "evaluator/numbers.h"

typedef struct Features
{
	Numbers		numbers;
	Categories	categories;
	Arrays		arrays;
	int			ranks;
	int			plain;			/* with the indicators of arrays */
	int			width;			/* of all numbers */
} Features;

/* Some rows as a model takes them. */
typedef struct FeatureBlock
{
	int			rows;
	int			stride;			/* of a row of numbers */
	float	   *numbers;		/* [rows][stride] */
	int32	   *codes;			/* [rows][categories], below their cardinalities */
} FeatureBlock;

/* `features` is the array of a version's JSON. */
extern void features_compile(ImageWriter *writer, const JsonNode *features);
extern void features_open(Features *self, ImageReader *reader);
extern void features_close(Features *self);

extern void features_apply(Features *self, const EvaluatorRows *rows, int first,
						   FeatureBlock *block);

#endif
