/*
 * predict_features_jsonb.c: features given as a jsonb object.
 *
 * The object has one key for each feature, and no others.  Values become the
 * same numbers and strings as those of columns do (predict_features_tuple.c).
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "mb/pg_wchar.h"
#include "utils/builtins.h"
#include "utils/float.h"
#include "utils/jsonb.h"
#include "utils/timestamp.h"

#include "convert.h"
#include "predict_features.h"
#include "query.h"

static const char *
json_type_name(const JsonbValue *value)
{
	switch (value->type)
	{
		case jbvString:
			return "string";
		case jbvNumeric:
			return "number";
		case jbvBool:
			return "boolean";
		case jbvBinary:
			return JsonContainerIsArray(value->val.binary.data) ? "array" : "object";
		default:
			return "null";
	}
}

/*
 * Microseconds since 2000-01-01 of a date or timestamp.  One without a time
 * zone is taken as it is, like a column of type timestamp; one with a time
 * zone is converted to UTC, like a column of type timestamptz.
 */
static double
parse_timestamp(const char *string)
{
	pg_tz	   *saved = session_timezone;
	TimestampTz timestamp;

	PG_TRY();
	{
		session_timezone = pg_tzset("UTC");
		timestamp = DatumGetTimestampTz(DirectFunctionCall3(timestamptz_in,
															CStringGetDatum(string),
															ObjectIdGetDatum(InvalidOid),
															Int32GetDatum(-1)));
	}
	PG_FINALLY();
	{
		session_timezone = saved;
	}
	PG_END_TRY();
	return TIMESTAMP_NOT_FINITE(timestamp) ? get_float8_nan() : (double) timestamp;
}

/* The text of a string, number or boolean; NULL for other values. */
static const char *
json_scalar_text(const JsonbValue *value)
{
	switch (value->type)
	{
		case jbvString:
			return pnstrdup(value->val.string.val, value->val.string.len);
		case jbvNumeric:
			return DatumGetCString(DirectFunctionCall1(numeric_out,
													   NumericGetDatum(value->val.numeric)));
		case jbvBool:
			return value->val.boolean ? "true" : "false";
		default:
			return NULL;
	}
}

static double
json_number(const JsonbValue *value)
{
	return tensile_numeric_float8((const struct varlena *) value->val.numeric);
}

/* Counts the elements of an array; nested arrays are flattened, as in SQL. */
static int
count_json_elements(JsonbContainer *array)
{
	JsonbIterator *iterator = JsonbIteratorInit(array);
	JsonbIteratorToken token;
	JsonbValue	value;
	int			count = 0;

	while ((token = JsonbIteratorNext(&iterator, &value, false)) != WJB_DONE)
		count += token == WJB_ELEM;
	return count;
}

static void
set_json_array(FeatureBatch *batch, int feature, JsonbContainer *array)
{
	double	   *to = feature_set_array(batch, feature, count_json_elements(array));
	JsonbIterator *iterator = JsonbIteratorInit(array);
	JsonbIteratorToken token;
	JsonbValue	value;

	while ((token = JsonbIteratorNext(&iterator, &value, false)) != WJB_DONE)
	{
		if (token == WJB_BEGIN_OBJECT || (token == WJB_ELEM && value.type == jbvString))
			feature_type_mismatch(batch->set, feature, "array of something other than numbers");
		if (token != WJB_ELEM)
			continue;
		*to++ = value.type == jbvNumeric ? json_number(&value)
			: value.type == jbvBool ? (double) value.val.boolean : get_float8_nan();
	}
}

static void
set_json_value(FeatureBatch *batch, int feature, const JsonbValue *value)
{
	FeatureKind kind = batch->set->features[feature].kind;
	const char *string;

	if (value->type == jbvNull)
		return;
	if (kind == FEATURE_NUMERIC && value->type == jbvNumeric)
		feature_set_number(batch, feature, json_number(value));
	else if (kind == FEATURE_NUMERIC && value->type == jbvBool)
		feature_set_number(batch, feature, value->val.boolean ? 1.0 : 0.0);
	else if (kind == FEATURE_TIMESTAMP && value->type == jbvString)
		feature_set_number(batch, feature, parse_timestamp(json_scalar_text(value)));
	else if (kind == FEATURE_CATEGORY && (string = json_scalar_text(value)) != NULL)
	{
		string = pg_server_to_any(string, strlen(string), PG_UTF8);
		feature_set_string(batch, feature, string, strlen(string));
	}
	else if (kind == FEATURE_ARRAY && value->type == jbvBinary &&
			 JsonContainerIsArray(value->val.binary.data))
		set_json_array(batch, feature, value->val.binary.data);
	else
		feature_type_mismatch(batch->set, feature, psprintf("jsonb %s", json_type_name(value)));
}

/* Raises an error for the first key that is not a feature, if there is one. */
static void
check_keys(const FeatureSet *set, JsonbContainer *object)
{
	JsonbIterator *iterator = JsonbIteratorInit(object);
	JsonbIteratorToken token;
	JsonbValue	key;

	while ((token = JsonbIteratorNext(&iterator, &key, true)) != WJB_DONE)
	{
		char	   *name;
		bool		is_feature = false;

		if (token != WJB_KEY)
			continue;
		name = pnstrdup(key.val.string.val, key.val.string.len);
		for (int i = 0; i < set->count && !is_feature; i++)
			is_feature = strcmp(set->names[i], name) == 0;
		if (!is_feature)
			ereport(ERROR,
					(errcode(ERRCODE_UNDEFINED_COLUMN),
					 errmsg("the model has no feature \"%s\"", name),
					 tensile_hint_nearest(name, set->names, set->count,
										  psprintf("The features are: %s.", feature_names(set)))));
	}
}

void
feature_batch_add_object(FeatureBatch *batch, Jsonb *jsonb)
{
	const FeatureSet *set = batch->set;
	MemoryContext old;

	if (!JB_ROOT_IS_OBJECT(jsonb))
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("features given as jsonb must be an object"),
				 errhint("Pass {\"name\": value, ...} with the features: %s.",
						 feature_names(set))));
	old = MemoryContextSwitchTo(batch->scratch);
	if (JB_ROOT_COUNT(jsonb) > set->count)
		check_keys(set, &jsonb->root);
	feature_batch_start_row(batch);
	for (int i = 0; i < set->count; i++)
	{
		JsonbValue	storage;
		JsonbValue *value = getKeyJsonValueFromContainer(&jsonb->root, set->names[i],
														 strlen(set->names[i]), &storage);

		if (value == NULL)
		{
			check_keys(set, &jsonb->root);
			ereport(ERROR,
					(errcode(ERRCODE_UNDEFINED_COLUMN),
					 errmsg("feature \"%s\" is missing", set->names[i]),
					 errhint("Every feature must be there; null is allowed. The features are: %s.",
							 feature_names(set))));
		}
		set_json_value(batch, i, value);
	}
	batch->row++;
	MemoryContextSwitchTo(old);
}
