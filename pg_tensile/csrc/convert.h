/*
 * convert.h: which SQL types can be learnt from, and how their values become float64 numbers or UTF-8 text.
 */
#ifndef TENSILE_CONVERT_H
#define TENSILE_CONVERT_H

#include "postgres.h"

#include "fmgr.h"
#include "utils/date.h"

/* Name of the wire type of an SQL type: "int4", "text", "float4[]", ...; NULL = unsupported. Domains count as their base type. */
extern const char *tensile_wire_type(Oid type);

typedef double (*ToFloat8) (Datum value);

/* The converter of a scalar number, date or time into float64 (NaN for an infinite date); NULL when there is none. */
extern ToFloat8 tensile_to_float8(Oid type);

/* numeric -> float64, correctly rounded; the value may be packed (short header) but not toasted. */
extern double tensile_numeric_float8(const struct varlena *packed);

/* How a value of a type becomes UTF-8 text. */
typedef struct TextConverter
{
	Oid			type;			/* base type */
	FmgrInfo	output;			/* for types that are not strings already */
} TextConverter;

extern void text_converter_init(TextConverter *converter, Oid type, MemoryContext context);
extern const char *text_convert(TextConverter *converter, Datum value, int *length);

/* Microseconds since 2000-01-01; false for the infinite dates, 22008 for those that no timestamp reaches. */
extern bool tensile_date_to_timestamp(DateADT date, int64 *microseconds);

#endif
