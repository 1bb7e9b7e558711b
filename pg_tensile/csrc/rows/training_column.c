/*
 * training_column.c: the columns of a training chunk.
 *
 * Every column has a function that stores one value at its native width and
 * returns 64 bits of its content, of which the row's hash is made (training_rows.c).
 * Equal values have equal bits, whatever their dictionary code or row.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include <math.h>

#include "access/tupmacs.h"
#include "catalog/pg_type.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/date.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "base/compat.h"
#include "base/convert.h"
#include "base/numeric_float8.h"
#include "rows/dictionary.h"
#include "rows/training_column.h"

static int
wire_width(const char *wire_type)
{
	switch (wire_type[0])
	{
		case 'b':				/* bool */
		case 'u':				/* uint8 */
			return 1;
		case 'i':
			return wire_type[3] - '0';
		case 'f':
			return wire_type[5] - '0';
		default:				/* timestamp */
			return 8;
	}
}

/* Bits of a number: all zeros and all NaNs are the same. */
static inline uint64
float8_content(double value)
{
	uint64		bits;

	if (isnan(value))
		return UINT64CONST(0x7ff8000000000000);
	value += 0.0;
	memcpy(&bits, &value, sizeof(bits));
	return bits;
}

/* ---- values ---- */

/* Defines a function for values of a C type. */
#define PACK_SCALAR(name, ctype, get, content_of) \
static bool \
name(PackColumn *column, int row, Datum value, uint64 *content) \
{ \
	*content = content_of(((ctype *) column->values)[row] = get(value)); \
	return true; \
}

PACK_SCALAR(pack_bool, uint8, DatumGetBool, (uint64))
PACK_SCALAR(pack_int2, int16, DatumGetInt16, (int64))
PACK_SCALAR(pack_int4, int32, DatumGetInt32, (int64))
PACK_SCALAR(pack_int8, int64, DatumGetInt64, (int64))
PACK_SCALAR(pack_float4, float4, DatumGetFloat4, float8_content)
PACK_SCALAR(pack_float8, float8, DatumGetFloat8, float8_content)

/* For numeric, interval and time. */
static bool
pack_as_float8(PackColumn *column, int row, Datum value, uint64 *content)
{
	return pack_float8(column, row, Float8GetDatum(column->to_float8(value)), content);
}

static bool
pack_timestamp(PackColumn *column, int row, Datum value, uint64 *content)
{
	return !TIMESTAMP_NOT_FINITE(DatumGetTimestamp(value)) &&
		pack_int8(column, row, value, content);
}

static bool
pack_date(PackColumn *column, int row, Datum value, uint64 *content)
{
	int64		microseconds;

	return tensile_date_to_timestamp(DatumGetDateADT(value), &microseconds) &&
		pack_int8(column, row, Int64GetDatum(microseconds), content);
}

static bool
pack_text(PackColumn *column, int row, Datum value, uint64 *content)
{
	int			length;
	const char *string = text_convert(&column->text, value, &length);

	*content = bytes_hash(string, length);
	((int32 *) column->values)[row] = dictionary_code(&column->dictionary, string, length,
														*content);
	return true;
}

/* ---- arrays ---- */

/*
 * Makes room for the elements of one more array, and clears their null bits.
 * Returns where the elements go.
 */
static char *
add_elements(PackColumn *column, int row, int count)
{
	Size		null_bytes = (column->nelements + count + 7) / 8 - column->element_nulls.used;

	((int32 *) column->values)[row] = count;
	memset(pack_buffer_extend(&column->element_nulls, null_bytes), 0, null_bytes);
	column->nelements += count;
	return pack_buffer_extend(&column->elements, (Size) count * column->element_width);
}

/*
 * Copies elements one by one, for arrays of numeric or with nulls, which
 * become zeros.
 */
static void
copy_elements(PackColumn *column, const ArrayType *array, int count, uint64 first, char *to)
{
	const char *from = ARR_DATA_PTR(array);
	const uint8 *present = ARR_NULLBITMAP(array);

	for (int i = 0; i < count; i++, to += column->element_width)
	{
		if (present != NULL && (present[i / 8] & (1 << (i % 8))) == 0)
		{
			set_bit((uint8 *) column->element_nulls.data, first + i);
			memset(to, 0, column->element_width);
		}
		else if (column->element == NUMERICOID)
		{
			double		number = tensile_numeric_float8((const struct varlena *) from);

			memcpy(to, &number, sizeof(number));
			from = att_addlength_pointer(from, -1, from);
			from = (const char *) att_align_nominal(from, TYPALIGN_INT);
		}
		else
		{
			memcpy(to, from, column->element_width);
			from += column->element_width;
		}
	}
}

/*
 * Bits of an array: of floats by their values, of other types by their bytes,
 * and of the positions of nulls.
 */
static uint64
array_content(const PackColumn *column, const char *elements, int count, uint64 first,
			  bool has_nulls)
{
	uint64		content = count;

	if (column->element == FLOAT4OID)
		for (int i = 0; i < count; i++)
			content = mix64(content ^ float8_content(((const float *) elements)[i]));
	else if (column->element == FLOAT8OID || column->element == NUMERICOID)
		for (int i = 0; i < count; i++)
			content = mix64(content ^ float8_content(((const double *) elements)[i]));
	else
		content = bytes_hash(elements, count * column->element_width);
	for (int i = 0; has_nulls && i < count; i++)
		if (column->element_nulls.data[(first + i) / 8] & (1 << ((first + i) % 8)))
			content = mix64(content + i);
	return content;
}

static bool
pack_array(PackColumn *column, int row, Datum value, uint64 *content)
{
	ArrayType  *array = DatumGetArrayTypeP(value);
	int			count = ArrayGetNItems(ARR_NDIM(array), ARR_DIMS(array));
	uint64		first = column->nelements;
	char	   *to = add_elements(column, row, count);

	if (ARR_HASNULL(array) || column->element == NUMERICOID)
		copy_elements(column, array, count, first, to);
	else
		memcpy(to, ARR_DATA_PTR(array), (Size) count * column->element_width);
	*content = array_content(column, to, count, first, ARR_HASNULL(array));
	return true;
}

static bool
pack_bytea(PackColumn *column, int row, Datum value, uint64 *content)
{
	struct varlena *bytes = PG_DETOAST_DATUM_PACKED(value);
	int			count = VARSIZE_ANY_EXHDR(bytes);
	char	   *to = add_elements(column, row, count);

	memcpy(to, VARDATA_ANY(bytes), count);
	*content = array_content(column, to, count, 0, false);
	return true;
}

/* ---- setup ---- */

static const struct
{
	Oid			type;
	PackFunction pack;
}			scalars[] = {
	{BOOLOID, pack_bool},
	{INT2OID, pack_int2},
	{INT4OID, pack_int4},
	{INT8OID, pack_int8},
	{FLOAT4OID, pack_float4},
	{FLOAT8OID, pack_float8},
	{NUMERICOID, pack_as_float8},
	{INTERVALOID, pack_as_float8},
	{TIMEOID, pack_as_float8},
	{DATEOID, pack_date},
	{TIMESTAMPOID, pack_timestamp},
	{TIMESTAMPTZOID, pack_timestamp}
};

static void
choose_packer(PackColumn *column, Oid base)
{
	for (int i = 0; i < lengthof(scalars); i++)
		if (scalars[i].type == base)
		{
			column->class = WIRE_FIXED;
			column->pack = scalars[i].pack;
			column->to_float8 = tensile_to_float8(base);
			return;
		}
	column->class = strchr(column->wire_type, '[') ? WIRE_ARRAY : WIRE_TEXT;
	if (column->class == WIRE_TEXT)
		column->pack = pack_text;
	else
	{
		column->element = base == BYTEAOID ? base : getBaseType(get_element_type(base));
		column->pack = base == BYTEAOID ? pack_bytea : pack_array;
	}
}

void
pack_column_init(PackColumn *column, int number, Form_pg_attribute attribute,
				 MemoryContext context)
{
	Oid			base = getBaseType(attribute->atttypid);

	column->name = MemoryContextStrdup(context, NameStr(attribute->attname));
	column->wire_type = tensile_wire_type(base);
	if (column->wire_type == NULL)
		elog(ERROR, "column \"%s\" was not checked before packing", column->name);
	column->sql_type = MemoryContextStrdup(context, format_type_be(base));
	column->seed = mix64(number + 1);
	choose_packer(column, base);
	switch (column->class)
	{
		case WIRE_FIXED:
			column->width = wire_width(column->wire_type);
			break;
		case WIRE_TEXT:
			column->width = sizeof(int32);
			text_converter_init(&column->text, base, context);
			dictionary_init(&column->dictionary, column->name, context);
			break;
		case WIRE_ARRAY:
			column->width = sizeof(int32);
			column->element_width = wire_width(column->wire_type);
			pack_buffer_init(&column->elements, context);
			pack_buffer_init(&column->element_nulls, context);
			break;
	}
}
