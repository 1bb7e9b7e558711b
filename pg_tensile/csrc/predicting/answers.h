/*
 * answers.h: answers to the rows of a batch.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_ANSWERS_H
#define TENSILE_ANSWERS_H

#include "predicting/predict_client.h"
#include "rows/model.h"
#include "rows/predict_features.h"

/* What a request asks for besides predictions; the extras of the answer. */
typedef enum WishKind
{
	WISH_NOTHING,
	WISH_INTERVAL,				/* of a regression: lower, upper [rows] */
	WISH_OPTIONAL_INTERVAL,		/* the same, without extras if the model has none */
	WISH_PROBABILITIES			/* of a classifier: [rows][labels] */
} WishKind;

typedef struct Wish
{
	WishKind	kind;
	double		coverage;		/* of an interval */
	bool		is_trial;		/* rows that nobody has asked for: none counts for drift */
} Wish;

/*
 * Gets the answers to all rows of a batch, valid until the next call in this
 * session.  Counts nothing; the predictor counts a single row, which is passed
 * on at once.
 */
extern void predict_answers(const PredictModel *model, FeatureBatch *batch, int64 memory_budget,
							const Wish *wish, Predictions *answers);

/* Counts rows of the batch, those from `first` on, once they have been passed on. */
extern void predict_count(const PredictModel *model, const FeatureBatch *batch,
						  const Predictions *answers, int first, int rows);

/* Raises 22023 unless intervals can have this coverage. */
extern void predict_check_coverage(double coverage);

#endif
