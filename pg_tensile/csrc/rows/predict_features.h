/*
 * predict_features.h: batches of feature rows in the predict layout
 * (docs/internals.md, "Features").
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_PREDICT_FEATURES_H
#define TENSILE_PREDICT_FEATURES_H

#include "access/tupdesc.h"
#include "lib/stringinfo.h"
#include "utils/float.h"

#include "base/compat.h"
#include "rows/dictionary.h"
#include "rows/wire.h"

/*
 * Rows of a PREDICT frame, its bytes, and bytes of strings (up to six times as
 * many in JSON)
 */
#define FEATURES_MAX_ROWS 8192
#define FEATURES_MAX_TEXT_ROWS 64	/* if a transformer reads their texts */
#define FEATURES_MAX_BYTES ((Size) 8 * 1024 * 1024)
#define FEATURES_MAX_STRINGS ((Size) 2 * 1024 * 1024)

typedef enum FeatureKind
{
	FEATURE_NUMERIC,
	FEATURE_TIMESTAMP,
	FEATURE_CATEGORY,
	FEATURE_ARRAY
} FeatureKind;

/* Types whose values jsonb writes as other types do, but that mean something else. */
typedef enum SqlType
{
	SQL_OTHER,					/* or unknown: a version of an earlier release */
	SQL_FLOAT4,
	SQL_FLOAT4_ARRAY,
	SQL_TIME,
	SQL_INTERVAL,
	SQL_TIMESTAMPTZ,
	SQL_DATE,
	SQL_BPCHAR
} SqlType;

typedef struct Feature
{
	FeatureKind kind;
	int			index;			/* among scalars, categories or arrays */
	bool		is_text;		/* a category that a transformer reads */
	SqlType		sql_type;		/* that it was trained with */
	double		average;		/* in the training rows, of a number or time: the mean, */
	const char *mode;			/* of a category the most frequent string in UTF-8, or
								 * NULL */
	int			length;			/* and the length of an array; of tokens 0 */
} Feature;

/* The features of a model version, in order. */
typedef struct FeatureSet
{
	int			count;
	Feature    *features;
	const char **names;
	int			nscalars;		/* numeric and timestamp */
	int			ncategories;
	int			narrays;
	bool		has_texts;		/* that a transformer reads */
	bool		has_vectors;	/* texts that are encoded otherwise */
} FeatureSet;

typedef struct FeatureArrays
{
	int32	   *lengths;		/* [capacity]; -1 = null */
	PackBuffer	elements;		/* float64 */
} FeatureArrays;

/*
 * Rows of features.  Setters write to the current row, in which all features
 * are null until they are set.
 */
typedef struct FeatureBatch
{
	const FeatureSet *set;
	int			capacity;		/* rows */
	int			row;			/* the current one, behind the complete ones */
	bool		compact;		/* a frame has been made of it */
	double	   *scalars;		/* [nscalars][capacity] */
	int32	   *codes;			/* [ncategories][capacity] */
	Dictionary *dictionaries;	/* [ncategories] */
	FeatureArrays *arrays;		/* [narrays] */
	MemoryContext scratch;		/* of conversions of one row */
} FeatureBatch;

extern FeatureBatch *feature_batch_create(const FeatureSet *set, int capacity,
										  MemoryContext context);

/* The number of rows that a frame of such features may carry. */
extern int	feature_batch_capacity(const FeatureSet *set);

/* Is it time to send the batch? */
extern bool feature_batch_full(const FeatureBatch *batch);

extern void feature_batch_clear(FeatureBatch *batch);

/* Forgets the current row, after an error in it. */
extern void feature_batch_forget_row(FeatureBatch *batch);

/*
 * Makes a batch for one row of the same features hold this row of another one,
 * of which a frame may have been made.
 */
extern void feature_batch_take_row(FeatureBatch *batch, const FeatureBatch *from, int row);

/*
 * Makes every feature of the current row null.  Inlined, like the next, because
 * every value of a prediction passes here.
 */
static inline void
feature_batch_start_row(FeatureBatch *batch)
{
	const FeatureSet *set = batch->set;

	for (int i = 0; i < set->nscalars; i++)
		batch->scalars[(Size) i * batch->capacity + batch->row] = get_float8_nan();
	for (int i = 0; i < set->ncategories; i++)
		batch->codes[(Size) i * batch->capacity + batch->row] = -1;
	for (int i = 0; i < set->narrays; i++)
		batch->arrays[i].lengths[batch->row] = -1;
}

static inline void
feature_set_number(FeatureBatch *batch, int feature, double value)
{
	Size		index = batch->set->features[feature].index;

	batch->scalars[index * batch->capacity + batch->row] = value;
}

extern void feature_set_string(FeatureBatch *batch, int feature, const char *utf8, int length);

/*
 * Makes room for an array, and returns where its elements go; NaN is a null.
 */
extern double *feature_set_array(FeatureBatch *batch, int feature, int length);

/*
 * Appends the header of a PREDICT frame (in UTF-8), sets its buffers and
 * returns their number.  They are valid until the batch changes.
 * `memory_budget`: bytes of device memory to execute the model in; 0: none.
 * `wish`: the member of the header that asks for more than predictions, or
 * NULL.
 */
extern int	feature_batch_frame(FeatureBatch *batch, int64 memory_budget, const char *wish,
								StringInfo header, WireBuffer **buffers);

/* The names of all features, with commas between them. */
extern char *feature_names(const FeatureSet *set);

/*
 * Raises 42703 for a feature that a row lacks.  The hint is one of the row's
 * names that is not a feature, or `otherwise`.
 */
pg_noreturn extern void feature_missing(const FeatureSet *set, int feature, const char **names,
										int nnames, const char *otherwise);

/* Raises 42804 with a hint; `given` is the type that was given. */
pg_noreturn extern void feature_type_mismatch(const FeatureSet *set, int feature,
											  const char *given);

#endif
