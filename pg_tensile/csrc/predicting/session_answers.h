/*
 * session_answers.h: answers that the session computes itself.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_SESSION_ANSWERS_H
#define TENSILE_SESSION_ANSWERS_H

#include "evaluator/evaluator.h"
#include "predicting/answers.h"

/*
 * Computes the answers to all rows of a batch, valid until the next call.
 * Raises 22000 for rows and wishes that the model does not fit.
 */
extern void session_answers(Evaluator *evaluator, const PredictModel *model,
							const FeatureBatch *batch, const Wish *wish, Predictions *answers);

#endif
