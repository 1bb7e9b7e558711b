/*
 * session_models.h: versions that this session evaluates itself.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_SESSION_MODELS_H
#define TENSILE_SESSION_MODELS_H

#include "evaluator/evaluator.h"
#include "predicting/predict_client.h"
#include "rows/model.h"

/*
 * The evaluator of the model's version, valid until the next call; NULL: the
 * predictor has to answer.  Raises XX001 if the version is damaged.
 */
extern Evaluator *session_model(const PredictModel *model);

/*
 * Counts some of the rows of a batch that this session has answered, those
 * from `first` on, for drift.
 */
extern void session_model_count(const PredictModel *model, const FeatureBatch *batch,
								const Predictions *answers, int first, int rows);

#endif
