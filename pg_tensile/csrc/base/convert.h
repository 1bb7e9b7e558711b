/*
 * convert.h: SQL types that models can be trained on, and the conversions of
 * their values.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_CONVERT_H
#define TENSILE_CONVERT_H

#include "fmgr.h"
#include "utils/date.h"
#include "utils/jsonb.h"

/*
 * The name of an SQL type in frames: "int4", "text", "float4[]", ...; NULL if
 * it is not supported.  A domain is treated as its base type.
 */
extern const char *tensile_wire_type(Oid type);

typedef double (*ToFloat8) (Datum value);

/*
 * The conversion of a scalar number, date or time to float64; NULL if there is
 * none.  Infinite dates become NaN.
 */
extern ToFloat8 tensile_to_float8(Oid type);

/*
 * A text of this database in UTF-8, terminated if it is a copy.  Raises 22021
 * for one in a database with SQL_ASCII that is in another encoding.
 */
extern char *tensile_to_utf8(const char *string, int length);
extern void tensile_require_utf8(const char *string, int length);

/* The conversion of values of a type to UTF-8. */
typedef struct TextConverter
{
	Oid			type;			/* base type */
	FmgrInfo	output;			/* of types that are not strings */
} TextConverter;

extern void text_converter_init(TextConverter *converter, Oid type, MemoryContext context);

/* The text of a value, which is not terminated. */
extern const char *text_convert(TextConverter *converter, Datum value, int *length);

/*
 * Converts a date to microseconds since 2000-01-01; false for infinite dates.
 * A date behind the last timestamp becomes the day of that.
 */
extern bool tensile_date_to_timestamp(DateADT date, int64 *microseconds);

/*
 * Most characters of a text that a pretrained model looks at;
 * pg_tensile/execution/data/texts.py has the same limit.
 */
#define TEXT_MAX_CHARACTERS 65536

/* The bytes of a UTF-8 string that hold its first TEXT_MAX_CHARACTERS. */
extern int	tensile_text_prefix(const char *utf8, int length);

/* Copies a text, cut to whole characters, and terminates it. */
extern void tensile_copy_text(char *target, Size size, const text *source);

/* A text argument of a function, in the server's encoding; NULL for null. */
extern char *tensile_text_argument(FunctionCallInfo fcinfo, int number);

/* The text at that key of a JSON object, or NULL, as well for other types. */
extern char *tensile_text_key(JsonbContainer *object, const char *key);

#endif
