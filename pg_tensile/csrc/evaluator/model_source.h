/*
 * model_source.h: what a model is compiled from.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_MODEL_SOURCE_H
#define TENSILE_MODEL_SOURCE_H

#include "evaluator/features.h"
#include "evaluator/weights.h"

typedef struct ModelSource
{
	Compilation *compilation;
	Weights    *weights;
	const char *prefix;			/* of the names of its tensors */
	const JsonNode *architecture;
	const Features *features;
	int			outputs;
} ModelSource;

/*
 * The place, among a row's numbers, of each one that the predictor's models
 * take: plain ones, ranks, then those of arrays.
 */
static inline int
model_number(const Features *features, int number)
{
	if (number < features->plain)
		return features->ranks + number;
	return number < features->plain + features->ranks ? number - features->plain : number;
}

#endif
