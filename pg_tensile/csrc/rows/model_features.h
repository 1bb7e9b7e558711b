/*
 * model_features.h: features and labels of a model's version.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_MODEL_FEATURES_H
#define TENSILE_MODEL_FEATURES_H

#include "utils/jsonb.h"

#include "rows/model.h"

/* Fills in the task, target, features and labels; XX001 if they are damaged. */
extern void model_features_read(PredictModel *model, const char *task, Jsonb *preprocessing);

#endif
