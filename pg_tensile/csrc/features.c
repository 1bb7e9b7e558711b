/*
 * features.c: from tuples to the predict layout (docs/internals.md, "Features").
 *
 * A batch holds some rows of a model's features grouped by kind: a float64 matrix, category codes with a dictionary
 * that is this batch's own, and arrays. The predictor applies what was fitted in training, so nothing here depends on a
 * model's weights; only names and kinds matter.
 *
 * Memory: a batch and everything in it lives in the context it was created in and is used again after
 * feature_batch_clear(). What converting a row leaves behind goes into the batch's scratch context.
 */
#include "postgres.h"

#include "access/tupmacs.h"
#include "catalog/pg_type.h"
#include "utils/builtins.h"
#include "utils/float.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"

#include "compat.h"
#include "features.h"
#include "query.h"

/* ---- batches ---- */

FeatureBatch *
feature_batch_create(const FeatureSet *set, int capacity, MemoryContext context)
{
	FeatureBatch *batch = MemoryContextAllocZero(context, sizeof(FeatureBatch));

	batch->set = set;
	batch->capacity = capacity;
	batch->scratch = AllocSetContextCreate(context, "pg_tensile features of a row", ALLOCSET_SMALL_SIZES);
	batch->scalars = MemoryContextAllocHuge(context, sizeof(double) * set->nscalars * capacity);
	batch->codes = MemoryContextAllocHuge(context, sizeof(int32) * set->ncategories * capacity);
	batch->dictionaries = MemoryContextAlloc(context, sizeof(Dictionary) * set->ncategories);
	batch->arrays = MemoryContextAlloc(context, sizeof(FeatureArrays) * set->narrays);
	for (int i = 0; i < set->ncategories; i++)
		dictionary_init(&batch->dictionaries[i], context);
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
	Size		row_bytes = sizeof(double) * set->nscalars + sizeof(int32) * (set->ncategories + set->narrays);

	return Max(1, Min(FEATURES_MAX_BYTES / Max(row_bytes, 1), FEATURES_MAX_ROWS));
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
	return batch->row >= batch->capacity || array_bytes >= FEATURES_MAX_BYTES || string_bytes >= FEATURES_MAX_STRINGS;
}

/* Every feature of the current row is null from now on. */
void
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

void
feature_batch_clear(FeatureBatch *batch)
{
	batch->row = 0;
	for (int i = 0; i < batch->set->ncategories; i++)
		dictionary_clear(&batch->dictionaries[i]);
	for (int i = 0; i < batch->set->narrays; i++)
		batch->arrays[i].elements.used = 0;
	MemoryContextReset(batch->scratch);
}

void
feature_set_number(FeatureBatch *batch, int feature, double value)
{
	batch->scalars[(Size) batch->set->features[feature].index * batch->capacity + batch->row] = value;
}

void
feature_set_string(FeatureBatch *batch, int feature, const char *utf8, int length)
{
	int			index = batch->set->features[feature].index;

	batch->codes[(Size) index * batch->capacity + batch->row] =
		dictionary_code(&batch->dictionaries[index], utf8, length, bytes_hash(utf8, length));
}

/* Where the elements go; NaN = null. */
double *
feature_set_array(FeatureBatch *batch, int feature, int length)
{
	FeatureArrays *arrays = &batch->arrays[batch->set->features[feature].index];

	arrays->lengths[batch->row] = length;
	return (double *) pack_buffer_extend(&arrays->elements, sizeof(double) * length);
}

static void
set_bytea(FeatureBatch *batch, int feature, Datum value)
{
	struct varlena *bytes = PG_DETOAST_DATUM_PACKED(value);
	const uint8 *from = (const uint8 *) VARDATA_ANY(bytes);
	int			count = VARSIZE_ANY_EXHDR(bytes);
	double	   *to = feature_set_array(batch, feature, count);

	for (int i = 0; i < count; i++)
		to[i] = from[i];
}

/* An array or bytea as float64 elements. */
void
feature_set_array_datum(FeatureBatch *batch, int feature, const FeatureSource *source, Datum value)
{
	ArrayType  *array;
	const char *from;
	const uint8 *present;
	double	   *to;
	int			count;
	int16		width;
	bool		by_value;
	char		align;

	if (source->element == BYTEAOID)
	{
		set_bytea(batch, feature, value);
		return;
	}
	array = DatumGetArrayTypeP(value);
	count = ArrayGetNItems(ARR_NDIM(array), ARR_DIMS(array));
	to = feature_set_array(batch, feature, count);
	from = ARR_DATA_PTR(array);
	present = ARR_NULLBITMAP(array);
	if (source->element == FLOAT8OID && present == NULL)
	{
		memcpy(to, from, sizeof(double) * count);
		return;
	}
	get_typlenbyvalalign(source->element, &width, &by_value, &align);
	for (int i = 0; i < count; i++)
	{
		if (present != NULL && (present[i / 8] & (1 << (i % 8))) == 0)
			to[i] = get_float8_nan();
		else
		{
			to[i] = source->to_float8(fetch_att(from, by_value, width));
			from = att_addlength_pointer(from, width, from);
			from = (const char *) att_align_nominal(from, align);
		}
	}
}

/* ---- tuples ---- */

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
			 errhint("The model was trained with %s there: cast the value.", kind_name(set->features[feature].kind))));
}

static FeatureSource
source_of_type(const FeatureSet *set, int feature, Oid type, MemoryContext context)
{
	FeatureKind kind = set->features[feature].kind;
	Oid			base = getBaseType(type);
	const char *wire_type = tensile_wire_type(base);
	bool		is_array = wire_type != NULL && strchr(wire_type, '[') != NULL;
	bool		is_timestamp = wire_type != NULL && strcmp(wire_type, "timestamp") == 0;
	FeatureSource source = {0};
	bool		fits;

	switch (kind)
	{
		case FEATURE_NUMERIC:
		case FEATURE_TIMESTAMP:
			source.to_float8 = tensile_to_float8(base);
			fits = source.to_float8 != NULL && is_timestamp == (kind == FEATURE_TIMESTAMP);
			break;
		case FEATURE_CATEGORY:
			fits = !OidIsValid(get_element_type(base)) && base != BYTEAOID && !type_is_rowtype(base);
			if (fits)
				text_converter_init(&source.text, base, context);
			break;
		default:
			fits = is_array;
			if (fits)
			{
				source.element = base == BYTEAOID ? base : getBaseType(get_element_type(base));
				source.to_float8 = tensile_to_float8(source.element);
			}
	}
	if (!fits)
		feature_type_mismatch(set, feature, format_type_be(type));
	return source;
}

/* The columns that are no features are those that a missing feature may be meant by. */
static void
missing_feature(const FeatureSet *set, int feature, TupleDesc desc)
{
	const char **unused = palloc(sizeof(char *) * desc->natts);
	int			nunused = 0;

	for (int i = 0; i < desc->natts; i++)
	{
		const char *name = NameStr(TupleDescAttr(desc, i)->attname);
		bool		used = TupleDescAttr(desc, i)->attisdropped;

		for (int j = 0; j < set->count && !used; j++)
			used = strcmp(name, set->names[j]) == 0;
		if (!used)
			unused[nunused++] = name;
	}
	ereport(ERROR,
			(errcode(ERRCODE_UNDEFINED_COLUMN),
			 errmsg("feature \"%s\" is missing", set->names[feature]),
			 tensile_hint_nearest(set->names[feature], unused, nunused,
								  "The row must have a column with the name of every feature that the model was trained on.")));
}

FeatureSource *
feature_sources_create(const FeatureSet *set, TupleDesc desc, MemoryContext context)
{
	FeatureSource *sources = MemoryContextAllocZero(context, sizeof(FeatureSource) * Max(set->count, 1));

	for (int feature = 0; feature < set->count; feature++)
	{
		int			found = -1;

		for (int i = 0; i < desc->natts; i++)
		{
			Form_pg_attribute attribute = TupleDescAttr(desc, i);

			if (attribute->attisdropped || strcmp(NameStr(attribute->attname), set->names[feature]) != 0)
				continue;
			if (found >= 0)
				ereport(ERROR,
						(errcode(ERRCODE_AMBIGUOUS_COLUMN),
						 errmsg("feature \"%s\" appears more than once", set->names[feature]),
						 errhint("Give every column its own name with AS.")));
			found = i;
		}
		if (found < 0)
			missing_feature(set, feature, desc);
		sources[feature] = source_of_type(set, feature, TupleDescAttr(desc, found)->atttypid, context);
		sources[feature].attribute = found;
	}
	return sources;
}

void
feature_batch_add_tuple(FeatureBatch *batch, FeatureSource *sources, const Datum *values, const bool *nulls)
{
	MemoryContext old = MemoryContextSwitchTo(batch->scratch);

	feature_batch_start_row(batch);
	for (int i = 0; i < batch->set->count; i++)
	{
		FeatureSource *source = &sources[i];
		Datum		value = values[source->attribute];
		const char *string;
		int			length;

		if (nulls[source->attribute])
			continue;
		switch (batch->set->features[i].kind)
		{
			case FEATURE_NUMERIC:
			case FEATURE_TIMESTAMP:
				feature_set_number(batch, i, source->to_float8(value));
				break;
			case FEATURE_CATEGORY:
				string = text_convert(&source->text, value, &length);
				feature_set_string(batch, i, string, length);
				break;
			case FEATURE_ARRAY:
				feature_set_array_datum(batch, i, source, value);
				break;
		}
	}
	batch->row++;
	MemoryContextSwitchTo(old);
	MemoryContextReset(batch->scratch);
}

/* ---- frames ---- */

/* A string of known length as JSON; escape_json wants a terminated one. */
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

/* A matrix [count][rows] out of one [count][capacity]; the batch is cleared before it is used again. */
static WireBuffer
close_ranks(void *matrix, int count, int rows, int capacity, Size width)
{
	for (int i = 1; i < count && rows < capacity; i++)
		memmove((char *) matrix + (Size) i * rows * width, (char *) matrix + (Size) i * capacity * width, rows * width);
	return (WireBuffer) {matrix, (Size) count * rows * width};
}

int
feature_batch_frame(FeatureBatch *batch, int64 memory_budget, StringInfo header, WireBuffer **buffers)
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
	if (memory_budget > 0)
		appendStringInfo(header, "],\"memory_budget\":" INT64_FORMAT "}", memory_budget);
	else
		appendStringInfoString(header, "]}");

	*buffers = next;
	*next++ = close_ranks(batch->scalars, set->nscalars, batch->row, batch->capacity, sizeof(double));
	*next++ = close_ranks(batch->codes, set->ncategories, batch->row, batch->capacity, sizeof(int32));
	for (int i = 0; i < set->narrays; i++)
	{
		*next++ = (WireBuffer) {batch->arrays[i].lengths, sizeof(int32) * batch->row};
		*next++ = (WireBuffer) {batch->arrays[i].elements.data, batch->arrays[i].elements.used};
	}
	return next - *buffers;
}
