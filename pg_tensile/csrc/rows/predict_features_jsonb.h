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

/* Reads an object given as text or json; 22P02 unless it is one. */
extern Jsonb *feature_object(const FeatureSet *set, text *given);

#endif
