/*
 * predict_features.c: batches of feature rows in the predict layout
 * (docs/internals.md, "Features").
 *
 * A batch holds rows of a model's features grouped by kind: a matrix of
 * float64, codes of categories with a dictionary of the batch, and arrays.
 * Rows come from tuples (predict_features_tuple.c) or jsonb (predict_features_jsonb.c).  The
 * predictor applies what was fitted in training, so nothing here depends on a
 * model's weights, only on the names and kinds of its features.
 *
 * Memory: a batch with everything in it lives in the context it was created
 * in, and is used again after feature_batch_clear().  Conversions of one row
 * allocate in the batch's scratch context.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "utils/float.h"
#include "utils/memutils.h"

#include "base/convert.h"
#include "base/query.h"
#include "rows/dictionary.h"
#include "rows/predict_features.h"
#include "rows/wire.h"

/* ---- rows ---- */

FeatureBatch *
feature_batch_create(const FeatureSet *set, int capacity, MemoryContext context)
{
	FeatureBatch *batch = MemoryContextAllocZero(context, sizeof(FeatureBatch));

	batch->set = set;
	batch->capacity = capacity;
	batch->scratch = AllocSetContextCreate(context, "pg_tensile features of a row",
										   ALLOCSET_SMALL_SIZES);
	batch->scalars = MemoryContextAllocHuge(context, sizeof(double) * set->nscalars * capacity);
	batch->codes = MemoryContextAllocHuge(context, sizeof(int32) * set->ncategories * capacity);
	batch->dictionaries = MemoryContextAlloc(context, sizeof(Dictionary) * set->ncategories);
	batch->arrays = MemoryContextAlloc(context, sizeof(FeatureArrays) * set->narrays);
	for (int i = 0; i < set->count; i++)
		if (set->features[i].kind == FEATURE_CATEGORY)
			dictionary_init(&batch->dictionaries[set->features[i].index], set->names[i], context);
	for (int i = 0; i < set->narrays; i++)
	{
		batch->arrays[i].lengths = MemoryContextAlloc(context, sizeof(int32) * capacity);
		pack_buffer_init(&batch->arrays[i].elements, context);
	}
	return batch;
}

int
feature_batch_capacity(const FeatureSet *set)
{
	Size		row_bytes = sizeof(double) * set->nscalars +
		sizeof(int32) * (set->ncategories + set->narrays);

	int			most = set->has_texts ? FEATURES_MAX_TEXT_ROWS : FEATURES_MAX_ROWS;

	return Max(1, Min(FEATURES_MAX_BYTES / Max(row_bytes, 1), most));
}

bool
feature_batch_full(const FeatureBatch *batch)
{
	Size		array_bytes = 0;
	Size		string_bytes = 0;

	for (int i = 0; i < batch->set->narrays; i++)
		array_bytes += batch->arrays[i].elements.used;
	for (int i = 0; i < batch->set->ncategories; i++)
		string_bytes += batch->dictionaries[i].bytes.used;
	return batch->row >= batch->capacity || array_bytes >= FEATURES_MAX_BYTES ||
		string_bytes >= FEATURES_MAX_STRINGS;
}

void
feature_batch_clear(FeatureBatch *batch)
{
	batch->row = 0;
	batch->compact = false;
	for (int i = 0; i < batch->set->ncategories; i++)
		dictionary_clear(&batch->dictionaries[i]);
	for (int i = 0; i < batch->set->narrays; i++)
		batch->arrays[i].elements.used = 0;
	MemoryContextReset(batch->scratch);
}

/* The number of an array's elements in the rows before this one. */
static Size
elements_before(const FeatureArrays *array, int row)
{
	Size		elements = 0;

	for (int i = 0; i < row; i++)
		elements += Max(array->lengths[i], 0);
	return elements;
}

void
feature_batch_forget_row(FeatureBatch *batch)
{
	for (int i = 0; i < batch->set->narrays; i++)
		batch->arrays[i].elements.used =
			sizeof(double) * elements_before(&batch->arrays[i], batch->row);
	MemoryContextReset(batch->scratch);
}

void
feature_batch_take_row(FeatureBatch *batch, const FeatureBatch *from, int row)
{
	const FeatureSet *set = batch->set;
	int			stride = from->compact ? from->row : from->capacity;

	feature_batch_clear(batch);
	feature_batch_start_row(batch);
	for (int i = 0; i < set->nscalars; i++)
		batch->scalars[i * batch->capacity] = from->scalars[(Size) i * stride + row];
	for (int i = 0; i < set->ncategories; i++)
	{
		int32		code = from->codes[(Size) i * stride + row];
		const char *string;
		int			length;

		if (code < 0)
			continue;
		string = dictionary_string(&from->dictionaries[i], code, &length);
		batch->codes[i * batch->capacity] =
			dictionary_code(&batch->dictionaries[i], string, length, bytes_hash(string, length));
	}
	for (int i = 0; i < set->narrays; i++)
	{
		const FeatureArrays *array = &from->arrays[i];
		int			length = array->lengths[row];

		batch->arrays[i].lengths[0] = length;
		if (length > 0)
			memcpy(pack_buffer_extend(&batch->arrays[i].elements, sizeof(double) * length),
				   (const double *) array->elements.data + elements_before(array, row),
				   sizeof(double) * length);
	}
	batch->row = 1;
}

void
feature_set_string(FeatureBatch *batch, int feature, const char *utf8, int length)
{
	Size		index = batch->set->features[feature].index;

	if (batch->set->features[feature].is_text)
		length = tensile_text_prefix(utf8, length);
	batch->codes[index * batch->capacity + batch->row] =
		dictionary_code(&batch->dictionaries[index], utf8, length, bytes_hash(utf8, length));
}

double *
feature_set_array(FeatureBatch *batch, int feature, int length)
{
	FeatureArrays *arrays = &batch->arrays[batch->set->features[feature].index];

	arrays->lengths[batch->row] = length;
	return (double *) pack_buffer_extend(&arrays->elements, sizeof(double) * length);
}

/* ---- messages ---- */

char *
feature_names(const FeatureSet *set)
{
	StringInfoData names;

	initStringInfo(&names);
	for (int i = 0; i < set->count; i++)
		appendStringInfo(&names, i == 0 ? "%s" : ", %s", set->names[i]);
	return names.data;
}

static bool
is_feature(const FeatureSet *set, const char *name)
{
	for (int i = 0; i < set->count; i++)
		if (strcmp(name, set->names[i]) == 0)
			return true;
	return false;
}

void
feature_missing(const FeatureSet *set, int feature, const char **names, int nnames,
				const char *otherwise)
{
	int			nunused = 0;

	for (int i = 0; i < nnames; i++)
		if (!is_feature(set, names[i]))
			names[nunused++] = names[i];
	ereport(ERROR,
			(errcode(ERRCODE_UNDEFINED_COLUMN),
			 errmsg("feature \"%s\" is missing", set->names[feature]),
			 tensile_hint_nearest(set->names[feature], names, nunused, otherwise)));
}

static const char *
kind_name(FeatureKind kind)
{
	switch (kind)
	{
		case FEATURE_NUMERIC:
			return "a number or boolean";
		case FEATURE_TIMESTAMP:
			return "a date or timestamp";
		case FEATURE_CATEGORY:
			return "a text or another single value";
		case FEATURE_ARRAY:
			return "an array of numbers";
	}
	pg_unreachable();
}

void
feature_type_mismatch(const FeatureSet *set, int feature, const char *given)
{
	ereport(ERROR,
			(errcode(ERRCODE_DATATYPE_MISMATCH),
			 errmsg("feature \"%s\" cannot be of type %s", set->names[feature], given),
			 errhint("The model was trained with %s there: cast the value.",
					 kind_name(set->features[feature].kind))));
}

/* ---- frames ---- */

/* Appends a string of known length; escape_json wants a terminated one. */
static void
append_json_string(StringInfo json, const char *string, int length)
{
	appendStringInfoCharMacro(json, '"');
	for (int i = 0; i < length; i++)
	{
		unsigned char c = string[i];

		if (c == '"' || c == '\\')
		{
			appendStringInfoCharMacro(json, '\\');
			appendStringInfoCharMacro(json, c);
		}
		else if (c < ' ')
			appendStringInfo(json, "\\u%04x", c);
		else
			appendStringInfoCharMacro(json, c);
	}
	appendStringInfoCharMacro(json, '"');
}

static void
append_dictionary(StringInfo json, const Dictionary *dictionary)
{
	appendStringInfoCharMacro(json, '[');
	for (int32 code = 0; code < dictionary->count; code++)
	{
		int			length;
		const char *string = dictionary_string(dictionary, code, &length);

		if (code > 0)
			appendStringInfoCharMacro(json, ',');
		append_json_string(json, string, length);
	}
	appendStringInfoCharMacro(json, ']');
}

/*
 * Makes a matrix [count][rows] of one [count][capacity], in place.  The batch
 * is cleared before it is used again.
 */
static WireBuffer
compact(void *matrix, int count, int rows, int capacity, Size width)
{
	for (int i = 1; i < count && rows < capacity; i++)
		memmove((char *) matrix + (Size) i * rows * width,
				(char *) matrix + (Size) i * capacity * width, rows * width);
	return (WireBuffer) {matrix, (Size) count * rows * width};
}

int
feature_batch_frame(FeatureBatch *batch, int64 memory_budget, const char *wish,
					StringInfo header, WireBuffer **buffers)
{
	const FeatureSet *set = batch->set;
	WireBuffer *next = palloc(sizeof(WireBuffer) * (2 + 2 * set->narrays));

	appendStringInfo(header, "{\"rows\":%d,\"dict\":[", batch->row);
	for (int i = 0; i < set->ncategories; i++)
	{
		if (i > 0)
			appendStringInfoCharMacro(header, ',');
		append_dictionary(header, &batch->dictionaries[i]);
	}
	appendStringInfoCharMacro(header, ']');
	if (memory_budget > 0)
		appendStringInfo(header, ",\"memory_budget\":" INT64_FORMAT, memory_budget);
	if (wish != NULL)
		appendStringInfo(header, ",%s", wish);
	appendStringInfoCharMacro(header, '}');

	batch->compact = true;
	*buffers = next;
	*next++ = compact(batch->scalars, set->nscalars, batch->row, batch->capacity, sizeof(double));
	*next++ = compact(batch->codes, set->ncategories, batch->row, batch->capacity, sizeof(int32));
	for (int i = 0; i < set->narrays; i++)
	{
		*next++ = (WireBuffer) {batch->arrays[i].lengths, sizeof(int32) * batch->row};
		*next++ = (WireBuffer) {batch->arrays[i].elements.data, batch->arrays[i].elements.used};
	}
	return next - *buffers;
}
