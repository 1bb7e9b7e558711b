/*
 * predict_features_jsonb.h: objects as rows of features.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_PREDICT_FEATURES_JSONB_H
#define TENSILE_PREDICT_FEATURES_JSONB_H

#include "utils/jsonb.h"

#include "rows/predict_features.h"

/*
 * Adds an object as a row; 42804 or 42703 unless it has exactly the features.
 */
extern void feature_batch_add_object(FeatureBatch *batch, Jsonb *jsonb);

#endif
