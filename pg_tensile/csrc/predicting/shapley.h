/*
 * shapley.h: shares of the features in the prediction for a row.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_SHAPLEY_H
#define TENSILE_SHAPLEY_H

#include "rows/model.h"
#include "rows/predict_features.h"

typedef struct Attributions
{
	int			label;			/* whose probability is explained; -1: a regression */
	double		average;		/* the prediction for average features */
	double	   *features;		/* what each adds to that */
} Attributions;

/* Those of the only row of a batch. */
extern Attributions shapley_attributions(const PredictModel *model, FeatureBatch *row,
										 int64 memory_budget);

#endif
