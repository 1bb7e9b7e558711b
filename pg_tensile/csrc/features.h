/*
 * features.h: from tuples to the predict layout (docs/internals.md, "Features").
 */
#ifndef TENSILE_FEATURES_H
#define TENSILE_FEATURES_H

#include "postgres.h"

#include "access/tupdesc.h"
#include "lib/stringinfo.h"
#include "utils/array.h"

#include "compat.h"
#include "convert.h"
#include "dictionary.h"
#include "wire.h"

#define FEATURES_MAX_ROWS 8192					/* rows in a PREDICT frame */
#define FEATURES_MAX_BYTES ((Size) 8 * 1024 * 1024) /* bytes in it, approximately */
#define FEATURES_MAX_STRINGS ((Size) 2 * 1024 * 1024)	/* bytes of strings; as JSON they may be six times as long */

typedef enum FeatureKind
{
	FEATURE_NUMERIC,
	FEATURE_TIMESTAMP,
	FEATURE_CATEGORY,
	FEATURE_ARRAY
} FeatureKind;

typedef struct Feature
{
	FeatureKind kind;
	int			index;			/* among the features of its group: scalars, categories, arrays */
} Feature;

/* What a model version was trained on, in order. */
typedef struct FeatureSet
{
	int			count;
	Feature    *features;
	const char **names;
	int			nscalars;		/* numeric and timestamp */
	int			ncategories;
	int			narrays;
} FeatureSet;

typedef struct FeatureArrays
{
	int32	   *lengths;		/* [capacity]; -1 = null */
	PackBuffer	elements;		/* float64 */
} FeatureArrays;

/* Some rows of features. All setters write to the current row, which is null in every feature until they do. */
typedef struct FeatureBatch
{
	const FeatureSet *set;
	int			capacity;		/* rows */
	int			row;			/* the current one = rows that are complete */
	double	   *scalars;		/* [nscalars][capacity] */
	int32	   *codes;			/* [ncategories][capacity] */
	Dictionary *dictionaries;	/* [ncategories], of this batch */
	FeatureArrays *arrays;		/* [narrays] */
	MemoryContext scratch;		/* what converting a row leaves behind */
} FeatureBatch;

/* Where a feature comes from in a tuple, and how it is converted. */
typedef struct FeatureSource
{
	int			attribute;		/* index into the tuple's values */
	ToFloat8	to_float8;		/* numeric, timestamp; the elements of an array */
	TextConverter text;			/* category */
	Oid			element;		/* array: base type of its elements, or bytea itself */
} FeatureSource;

extern FeatureBatch *feature_batch_create(const FeatureSet *set, int capacity, MemoryContext context);
/* How many rows a batch should be made for, and time to send it. */
extern int	feature_batch_capacity(const FeatureSet *set);
extern bool feature_batch_full(const FeatureBatch *batch);
extern void feature_batch_start_row(FeatureBatch *batch);
extern void feature_batch_clear(FeatureBatch *batch);

extern void feature_set_number(FeatureBatch *batch, int feature, double value);
extern void feature_set_string(FeatureBatch *batch, int feature, const char *utf8, int length);
extern double *feature_set_array(FeatureBatch *batch, int feature, int length);
extern void feature_set_array_datum(FeatureBatch *batch, int feature, const FeatureSource *source, Datum value);

/* Finds every feature among the columns by name; 42703, 42702 or 42804 when that can't be done. */
extern FeatureSource *feature_sources_create(const FeatureSet *set, TupleDesc desc, MemoryContext context);
/* One row from a tuple's values. */
extern void feature_batch_add_tuple(FeatureBatch *batch, FeatureSource *sources, const Datum *values, const bool *nulls);

/*
 * The PREDICT frame: its header (UTF-8) is appended; the buffers are valid until the batch changes. `memory_budget`: bytes
 * of device memory to execute the model within; 0: none.
 */
extern int	feature_batch_frame(FeatureBatch *batch, int64 memory_budget, StringInfo header, WireBuffer **buffers);

/* 42804 with a hint; `given` names what was given. */
pg_noreturn extern void feature_type_mismatch(const FeatureSet *set, int feature, const char *given);

#endif
