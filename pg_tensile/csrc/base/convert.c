/*
 * convert.c: SQL types that models can be trained on, and the conversions of
 * their values to float64 numbers and UTF-8 text.
 *
 * Training (training_column.c) and prediction (predict_features_tuple.c) convert values
 * with the same functions, so that a model sees the same numbers.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "datatype/timestamp.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"
#include "utils/date.h"
#include "utils/float.h"
#include "utils/lsyscache.h"
#include "utils/timestamp.h"

#include "base/compat.h"
#include "base/convert.h"
#include "base/numeric_float8.h"

/* ---- numbers ---- */

/* EXTRACT(EPOCH FROM ...): a year has 365.25 days, a month 30. */
static double
interval_seconds(const Interval *interval)
{
	double		days = interval->day + (interval->month / MONTHS_PER_YEAR) * 365.25 +
		(interval->month % MONTHS_PER_YEAR) * (double) DAYS_PER_MONTH;

	return interval->time / 1e6 + days * SECS_PER_DAY;
}

bool
tensile_date_to_timestamp(DateADT date, int64 *microseconds)
{
	if (DATE_NOT_FINITE(date))
		return false;
	date = Min(date, TIMESTAMP_END_JULIAN - POSTGRES_EPOCH_JDATE - 1);
	*microseconds = date * USECS_PER_DAY;
	return true;
}

#define TO_FLOAT8(name, get) \
static double \
name(Datum value) \
{ \
	return (double) get(value); \
}

TO_FLOAT8(bool_to_float8, DatumGetBool)
TO_FLOAT8(int2_to_float8, DatumGetInt16)
TO_FLOAT8(int4_to_float8, DatumGetInt32)
TO_FLOAT8(int8_to_float8, DatumGetInt64)
TO_FLOAT8(float4_to_float8, DatumGetFloat4)
TO_FLOAT8(float8_to_float8, DatumGetFloat8)

static double
numeric_to_float8(Datum value)
{
	return tensile_numeric_float8(PG_DETOAST_DATUM_PACKED(value));
}

static double
interval_to_float8(Datum value)
{
	return interval_seconds(DatumGetIntervalP(value));
}

static double
time_to_float8(Datum value)
{
	return DatumGetTimeADT(value) / 1e6;
}

static double
date_to_float8(Datum value)
{
	int64		microseconds;

	if (!tensile_date_to_timestamp(DatumGetDateADT(value), &microseconds))
		return get_float8_nan();
	return (double) microseconds;
}

static double
timestamp_to_float8(Datum value)
{
	Timestamp	timestamp = DatumGetTimestamp(value);

	return TIMESTAMP_NOT_FINITE(timestamp) ? get_float8_nan() : (double) timestamp;
}

/* ---- types ---- */

typedef struct NumberType
{
	Oid			type;
	const char *wire_type;
	const char *array_wire_type;	/* of an array of them; NULL: not supported */
	ToFloat8	to_float8;
} NumberType;

static const NumberType number_types[] = {
	{BOOLOID, "bool", "bool[]", bool_to_float8},
	{INT2OID, "int2", "int2[]", int2_to_float8},
	{INT4OID, "int4", "int4[]", int4_to_float8},
	{INT8OID, "int8", "int8[]", int8_to_float8},
	{FLOAT4OID, "float4", "float4[]", float4_to_float8},
	{FLOAT8OID, "float8", "float8[]", float8_to_float8},
	{NUMERICOID, "float8", "float8[]", numeric_to_float8},
	{INTERVALOID, "float8", NULL, interval_to_float8},
	{TIMEOID, "float8", NULL, time_to_float8},
	{DATEOID, "timestamp", NULL, date_to_float8},
	{TIMESTAMPOID, "timestamp", NULL, timestamp_to_float8},
	{TIMESTAMPTZOID, "timestamp", NULL, timestamp_to_float8}
};

/* The entry of a type or of its base type; NULL if it is not a number. */
static const NumberType *
find_number_type(Oid type)
{
	Oid			base = getBaseType(type);

	for (int i = 0; i < lengthof(number_types); i++)
		if (number_types[i].type == base)
			return &number_types[i];
	return NULL;
}

const char *
tensile_wire_type(Oid type)
{
	Oid			base = getBaseType(type);
	const NumberType *number = find_number_type(base);
	Oid			element;

	if (number != NULL)
		return number->wire_type;
	switch (base)
	{
		case TEXTOID:
		case VARCHAROID:
		case BPCHAROID:
		case CHAROID:
		case NAMEOID:
		case UUIDOID:
			return "text";
		case BYTEAOID:
			return "uint8[]";
	}
	if (type_is_enum(base))
		return "text";
	element = get_element_type(base);
	number = OidIsValid(element) ? find_number_type(element) : NULL;
	return number ? number->array_wire_type : NULL;
}

ToFloat8
tensile_to_float8(Oid type)
{
	const NumberType *number = find_number_type(type);

	return number ? number->to_float8 : NULL;
}

/* ---- text ---- */

void
tensile_require_utf8(const char *string, int length)
{
	if (GetDatabaseEncoding() == PG_SQL_ASCII && !pg_verify_mbstr(PG_UTF8, string, length, true))
		ereport(ERROR,
				(errcode(ERRCODE_CHARACTER_NOT_IN_REPERTOIRE),
				 errmsg("a text is not in UTF-8"),
				 errhint("This database has the encoding SQL_ASCII, so pg_tensile takes texts for "
						 "UTF-8: convert them, or leave the column out.")));
}

char *
tensile_to_utf8(const char *string, int length)
{
	tensile_require_utf8(string, length);
	return pg_server_to_any(string, length, PG_UTF8);
}

void
text_converter_init(TextConverter *converter, Oid type, MemoryContext context)
{
	converter->type = getBaseType(type);
	if (converter->type != TEXTOID && converter->type != VARCHAROID &&
		converter->type != BPCHAROID && converter->type != NAMEOID)
	{
		Oid			output;
		bool		variable;

		getTypeOutputInfo(converter->type, &output, &variable);
		fmgr_info_cxt(output, &converter->output, context);
	}
}

/*
 * The text is in the current context or in the value itself.  bpchar loses its
 * trailing blanks, as in every comparison and cast.
 */
const char *
text_convert(TextConverter *converter, Datum value, int *length)
{
	const char *string;
	const char *utf8;

	switch (converter->type)
	{
		case TEXTOID:
		case VARCHAROID:
		case BPCHAROID:
			{
				struct varlena *detoasted = PG_DETOAST_DATUM_PACKED(value);

				string = VARDATA_ANY(detoasted);
				*length = VARSIZE_ANY_EXHDR(detoasted);
				while (converter->type == BPCHAROID && *length > 0 && string[*length - 1] == ' ')
					(*length)--;
				break;
			}
		case NAMEOID:
			string = NameStr(*DatumGetName(value));
			*length = strlen(string);
			break;
		default:
			string = OutputFunctionCall(&converter->output, value);
			*length = strlen(string);
	}
	utf8 = tensile_to_utf8(string, *length);
	if (utf8 != string)
		*length = strlen(utf8);
	return utf8;
}

int
tensile_text_prefix(const char *utf8, int length)
{
	int			bytes = 0;

	if (length <= TEXT_MAX_CHARACTERS)
		return length;
	for (int i = 0; i < TEXT_MAX_CHARACTERS && bytes < length; i++)
		bytes += pg_utf_mblen((const unsigned char *) utf8 + bytes);
	return Min(bytes, length);
}

void
tensile_copy_text(char *target, Size size, const text *source)
{
	int			length = pg_mbcliplen(VARDATA_ANY(source), VARSIZE_ANY_EXHDR(source), size - 1);

	memcpy(target, VARDATA_ANY(source), length);
	target[length] = '\0';
}

char *
tensile_text_argument(FunctionCallInfo fcinfo, int number)
{
	return PG_ARGISNULL(number) ? NULL : text_to_cstring(PG_GETARG_TEXT_PP(number));
}

char *
tensile_text_key(JsonbContainer *object, const char *key)
{
	JsonbValue *value = NULL;

	if (JsonContainerIsObject(object))
		value = getKeyJsonValueFromContainer(object, key, strlen(key), NULL);
	if (value == NULL || value->type != jbvString)
		return NULL;
	return pnstrdup(value->val.string.val, value->val.string.len);
}
