/*
 * predict_features_jsonb.c: features given as a jsonb object.
 *
 * The object has one key for each feature; others are ignored, as columns are.
 * Values become the same numbers and strings as those of columns do
 * (predict_features_tuple.c), so that to_jsonb of a row is as good as the row.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"
#include "utils/date.h"
#include "utils/float.h"
#include "utils/jsonb.h"
#include "utils/timestamp.h"

#include "base/convert.h"
#include "base/numeric_float8.h"
#include "rows/predict_features.h"
#include "rows/predict_features_jsonb.h"

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

/* The value of a type with a modifier. */
static Datum
parse(PGFunction input, const char *string)
{
	return DirectFunctionCall3(input, CStringGetDatum(string), ObjectIdGetDatum(InvalidOid),
							   Int32GetDatum(-1));
}

/*
 * Microseconds since 2000-01-01 of a date or timestamp.  One with a time zone
 * is converted to UTC, like a column of type timestamptz.  One without is taken
 * as it is, like a column of type timestamp; but if the feature was trained
 * with a timestamptz, it is a time in the session's zone, as everywhere in SQL.
 * A feature that was trained with dates has days.
 */
static double
parse_timestamp(const char *string, SqlType type)
{
	pg_tz	   *saved = session_timezone;
	TimestampTz timestamp;

	if (type == SQL_DATE)
		return tensile_to_float8(DATEOID) (parse(date_in, string));
	PG_TRY();
	{
		if (type != SQL_TIMESTAMPTZ)
			session_timezone = pg_tzset("UTC");
		timestamp = DatumGetTimestampTz(parse(timestamptz_in, string));
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

/*
 * The number that a string stands for: one that JSON has no number for, a time
 * or an interval.  False: it stands for none.
 */
static bool
string_number(const JsonbValue *value, SqlType type, double *number)
{
	static const char *const names[] = {"NaN", "Infinity", "-Infinity"};
	const char *string = json_scalar_text(value);

	for (int i = 0; i < lengthof(names); i++)
		if (strcmp(string, names[i]) == 0)
		{
			*number = get_float8_nan();
			return true;
		}
	if (type == SQL_TIME)
		*number = tensile_to_float8(TIMEOID) (parse(time_in, string));
	else if (type == SQL_INTERVAL)
		*number = tensile_to_float8(INTERVALOID) (parse(interval_in, string));
	else
		return false;
	return true;
}

/* A number of a feature of type real has the precision of that type. */
static double
as_trained(double number, SqlType type)
{
	return type == SQL_FLOAT4 || type == SQL_FLOAT4_ARRAY ? (double) (float) number : number;
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
	SqlType		type = batch->set->features[feature].sql_type;
	double	   *to = feature_set_array(batch, feature, count_json_elements(array));
	JsonbIterator *iterator = JsonbIteratorInit(array);
	JsonbIteratorToken token;
	JsonbValue	value;

	while ((token = JsonbIteratorNext(&iterator, &value, false)) != WJB_DONE)
	{
		double		number = get_float8_nan();

		if (token == WJB_BEGIN_OBJECT || (token == WJB_ELEM && value.type == jbvString &&
										  !string_number(&value, SQL_OTHER, &number)))
			feature_type_mismatch(batch->set, feature, "array of something other than numbers");
		if (token != WJB_ELEM)
			continue;
		if (value.type == jbvNumeric)
			number = as_trained(json_number(&value), type);
		else if (value.type == jbvBool)
			number = value.val.boolean;
		*to++ = number;
	}
}

/* A bytea in its hexadecimal or escape format. */
static void
set_json_bytea(FeatureBatch *batch, int feature, const char *string)
{
	bytea	   *bytes = DatumGetByteaPP(DirectFunctionCall1(byteain, CStringGetDatum(string)));
	int			count = VARSIZE_ANY_EXHDR(bytes);
	double	   *to = feature_set_array(batch, feature, count);

	for (int i = 0; i < count; i++)
		to[i] = ((const uint8 *) VARDATA_ANY(bytes))[i];
}

static void
set_json_value(FeatureBatch *batch, int feature, const JsonbValue *value)
{
	FeatureKind kind = batch->set->features[feature].kind;
	SqlType		type = batch->set->features[feature].sql_type;
	const char *string;
	double		number;

	if (value->type == jbvNull)
		return;
	if (kind == FEATURE_NUMERIC && value->type == jbvNumeric)
		feature_set_number(batch, feature, as_trained(json_number(value), type));
	else if (kind == FEATURE_NUMERIC && value->type == jbvString &&
			 string_number(value, type, &number))
		feature_set_number(batch, feature, number);
	else if (kind == FEATURE_NUMERIC && value->type == jbvBool)
		feature_set_number(batch, feature, value->val.boolean ? 1.0 : 0.0);
	else if (kind == FEATURE_TIMESTAMP && value->type == jbvString)
		feature_set_number(batch, feature, parse_timestamp(json_scalar_text(value), type));
	else if (kind == FEATURE_CATEGORY && (string = json_scalar_text(value)) != NULL)
	{
		int			length = strlen(string);

		while (type == SQL_BPCHAR && length > 0 && string[length - 1] == ' ')
			length--;
		string = tensile_to_utf8(pnstrdup(string, length), length);
		feature_set_string(batch, feature, string, strlen(string));
	}
	else if (kind == FEATURE_ARRAY && value->type == jbvBinary &&
			 JsonContainerIsArray(value->val.binary.data))
		set_json_array(batch, feature, value->val.binary.data);
	else if (kind == FEATURE_ARRAY && value->type == jbvString)
		set_json_bytea(batch, feature, json_scalar_text(value));
	else
		feature_type_mismatch(batch->set, feature, psprintf("jsonb %s", json_type_name(value)));
}

/* Raises the error of a feature without a key. */
static void
missing_key(const FeatureSet *set, int feature, Jsonb *object)
{
	JsonbIterator *iterator = JsonbIteratorInit(&object->root);
	const char **names = palloc(sizeof(char *) * Max(JB_ROOT_COUNT(object), 1));
	int			nnames = 0;
	JsonbIteratorToken token;
	JsonbValue	key;

	while ((token = JsonbIteratorNext(&iterator, &key, true)) != WJB_DONE)
		if (token == WJB_KEY)
			names[nnames++] = pnstrdup(key.val.string.val, key.val.string.len);
	feature_missing(set, feature, names, nnames,
					psprintf("Every feature must be there; null is allowed. The features are: %s.",
							 feature_names(set)));
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
	feature_batch_start_row(batch);
	for (int i = 0; i < set->count; i++)
	{
		JsonbValue	storage;
		JsonbValue *value = getKeyJsonValueFromContainer(&jsonb->root, set->names[i],
														 strlen(set->names[i]), &storage);

		if (value == NULL)
			missing_key(set, i, jsonb);
		set_json_value(batch, i, value);
	}
	batch->row++;
	MemoryContextSwitchTo(old);
}

Jsonb *
feature_object(const FeatureSet *set, text *given)
{
	static const char blanks[] = " \t\n\r";
	const char *json = text_to_cstring(given);
	const char *start = json + strspn(json, blanks);
	const char *inside = *start == '{' ? start + 1 + strspn(start + 1, blanks) : NULL;

	if (inside == NULL || strchr("\"}", *inside) == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_TEXT_REPRESENTATION),
				 errmsg("features given as text or json must be a JSON object"),
				 inside != NULL ?
				 errhint("Cast an array of numbers: '{1, 2}'::float8[]. An object is "
						 "{\"name\": value, ...} with the features: %s.", feature_names(set)) :
				 errhint("Pass {\"name\": value, ...} with the features: %s.",
						 feature_names(set))));
	return DatumGetJsonbP(DirectFunctionCall1(jsonb_in, CStringGetDatum(json)));
}
