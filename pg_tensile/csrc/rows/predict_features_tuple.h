/*
 * predict_features_tuple.h: tuples as rows of features.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_PREDICT_FEATURES_TUPLE_H
#define TENSILE_PREDICT_FEATURES_TUPLE_H

#include "access/tupdesc.h"

#include "base/convert.h"
#include "rows/predict_features.h"

/* The column of a feature, and the conversion of its values. */
typedef struct FeatureSource
{
	int			attribute;		/* index into the tuple's values */
	ToFloat8	to_float8;		/* of numbers and timestamps, or elements of an array */
	TextConverter text;			/* of categories */
	Oid			element;		/* base type of an array's elements, or bytea */
	bool		is_float8;		/* needs no conversion, */
	bool		is_utf8;		/* as a text in a database with UTF-8, but for long ones */
} FeatureSource;

/*
 * Finds the column of each feature by its name.  Raises 42703, 42702 or 42804
 * if there is none, more than one, or one of a wrong type.
 */
extern FeatureSource *feature_sources_create(const FeatureSet *set, TupleDesc desc,
											 MemoryContext context);

/* Adds the values of a tuple as a row. */
extern void feature_batch_add_tuple(FeatureBatch *batch, FeatureSource *sources,
									const Datum *values, const bool *nulls);

#endif
