/*
 * pack.c: from tuples to the training layout (docs/internals.md, "Training columns").
 *
 * A chunk of rows is packed column by column: every column has a function that stores one value at its native width
 * and returns 64 bits of its content. Those bits, mixed with the column's number, make the row's hash, which neither
 * depends on the order of rows nor on dictionary codes: the child orders, splits and fingerprints rows by it.
 *
 * Memory: fixed-width parts are allocated once for as many rows as a frame may carry; what varies (array elements,
 * strings) lives in buffers that grow and are used again for the next chunk. Whatever converting one row leaves behind
 * (detoasted values, output of type functions) goes into a scratch context that is reset for every row.
 */
#include "postgres.h"

#include <math.h>

#include "access/tupmacs.h"
#include "catalog/pg_type.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/date.h"
#include "utils/json.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "convert.h"
#include "dictionary.h"
#include "pack.h"

/* What a value is on the wire. */
typedef enum WireClass
{
	WIRE_FIXED,					/* bool, int2 ... float8, timestamp: one number */
	WIRE_TEXT,					/* a code into a dictionary */
	WIRE_ARRAY					/* a length and elements */
} WireClass;

/* A 64-bit finaliser (the one of MurmurHash3). */
static inline uint64
mix64(uint64 h)
{
	h ^= h >> 33;
	h *= UINT64CONST(0xff51afd7ed558ccd);
	h ^= h >> 33;
	h *= UINT64CONST(0xc4ceb9fe1a85ec53);
	h ^= h >> 33;
	return h;
}

struct PackColumn
{
	const char *name;
	const char *wire_type;
	WireClass	class;
	int			width;			/* of values: the number, the code or the length */
	uint64		seed;			/* the column's number, for the row's hash */
	/* Stores value `row` and its content's bits; false = null after all. */
	bool		(*pack) (struct PackColumn *column, int row, Datum value, uint64 *content);
	uint8	   *nulls;			/* bitmap */
	char	   *values;			/* [max_rows] of width */

	ToFloat8	to_float8;
	TextConverter text;
	Dictionary	dictionary;

	Oid			element;		/* base type of an array's elements */
	int			element_width;	/* on the wire */
	PackBuffer	elements;
	PackBuffer	element_nulls;	/* bitmap */
	uint64		nelements;
};

static inline void
set_bit(uint8 *bitmap, uint64 bit)
{
	bitmap[bit / 8] |= (uint8) (1 << (bit % 8));
}

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

/* Equal numbers have equal bits: one zero, one NaN. */
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

static bool
pack_bool(PackColumn *column, int row, Datum value, uint64 *content)
{
	*content = ((uint8 *) column->values)[row] = DatumGetBool(value) ? 1 : 0;
	return true;
}

static bool
pack_int2(PackColumn *column, int row, Datum value, uint64 *content)
{
	*content = (int64) (((int16 *) column->values)[row] = DatumGetInt16(value));
	return true;
}

static bool
pack_int4(PackColumn *column, int row, Datum value, uint64 *content)
{
	*content = (int64) (((int32 *) column->values)[row] = DatumGetInt32(value));
	return true;
}

static bool
pack_int8(PackColumn *column, int row, Datum value, uint64 *content)
{
	*content = ((int64 *) column->values)[row] = DatumGetInt64(value);
	return true;
}

static bool
pack_float4(PackColumn *column, int row, Datum value, uint64 *content)
{
	*content = float8_content(((float *) column->values)[row] = DatumGetFloat4(value));
	return true;
}

static bool
pack_float8(PackColumn *column, int row, Datum value, uint64 *content)
{
	*content = float8_content(((double *) column->values)[row] = DatumGetFloat8(value));
	return true;
}

/* numeric, interval, time */
static bool
pack_as_float8(PackColumn *column, int row, Datum value, uint64 *content)
{
	return pack_float8(column, row, Float8GetDatum(column->to_float8(value)), content);
}

static bool
pack_timestamp(PackColumn *column, int row, Datum value, uint64 *content)
{
	return !TIMESTAMP_NOT_FINITE(DatumGetTimestamp(value)) && pack_int8(column, row, value, content);
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
	((int32 *) column->values)[row] = dictionary_code(&column->dictionary, string, length, *content);
	return true;
}

/* Room for the elements of one more array, their nulls cleared; returns where they go. */
static char *
add_elements(PackColumn *column, int row, int count)
{
	Size		null_bytes = (column->nelements + count + 7) / 8 - column->element_nulls.used;

	((int32 *) column->values)[row] = count;
	memset(pack_buffer_extend(&column->element_nulls, null_bytes), 0, null_bytes);
	column->nelements += count;
	return pack_buffer_extend(&column->elements, (Size) count * column->element_width);
}

/* One value after the other, for arrays with nulls or of numeric: `to` gets zeros for a null. */
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

/* 64 bits of an array's elements: floats by value, everything else by bytes; and where its nulls are. */
static uint64
array_content(const PackColumn *column, const char *elements, int count, uint64 first, bool has_nulls)
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

static void
choose_packer(PackColumn *column, Oid base)
{
	switch (base)
	{
		case BOOLOID:
			column->pack = pack_bool;
			break;
		case INT2OID:
			column->pack = pack_int2;
			break;
		case INT4OID:
			column->pack = pack_int4;
			break;
		case INT8OID:
			column->pack = pack_int8;
			break;
		case FLOAT4OID:
			column->pack = pack_float4;
			break;
		case FLOAT8OID:
			column->pack = pack_float8;
			break;
		case NUMERICOID:
		case INTERVALOID:
		case TIMEOID:
			column->to_float8 = tensile_to_float8(base);
			column->pack = pack_as_float8;
			break;
		case DATEOID:
			column->pack = pack_date;
			break;
		case TIMESTAMPOID:
		case TIMESTAMPTZOID:
			column->pack = pack_timestamp;
			break;
		case BYTEAOID:
			column->class = WIRE_ARRAY;
			column->element = base;
			column->pack = pack_bytea;
			break;
		default:
			column->class = strchr(column->wire_type, '[') ? WIRE_ARRAY : WIRE_TEXT;
			column->pack = column->class == WIRE_ARRAY ? pack_array : pack_text;
			if (column->class == WIRE_ARRAY)
				column->element = getBaseType(get_element_type(base));
	}
}

static void
column_init(PackColumn *column, int number, Form_pg_attribute attribute, MemoryContext context)
{
	Oid			base = getBaseType(attribute->atttypid);

	column->name = MemoryContextStrdup(context, NameStr(attribute->attname));
	column->wire_type = tensile_wire_type(base);
	if (column->wire_type == NULL)
		elog(ERROR, "column \"%s\" was not checked before packing", column->name);
	column->seed = mix64(number + 1);
	column->class = WIRE_FIXED;
	choose_packer(column, base);
	switch (column->class)
	{
		case WIRE_FIXED:
			column->width = wire_width(column->wire_type);
			break;
		case WIRE_TEXT:
			column->width = sizeof(int32);
			text_converter_init(&column->text, base, context);
			dictionary_init(&column->dictionary, context);
			break;
		case WIRE_ARRAY:
			column->width = sizeof(int32);
			column->element_width = wire_width(column->wire_type);
			pack_buffer_init(&column->elements, context);
			pack_buffer_init(&column->element_nulls, context);
			break;
	}
}

TrainingPacker *
training_packer_create(TupleDesc desc, MemoryContext parent)
{
	MemoryContext context = AllocSetContextCreate(parent, "pg_tensile training rows", ALLOCSET_DEFAULT_SIZES);
	TrainingPacker *packer = MemoryContextAllocZero(context, sizeof(TrainingPacker));
	Size		row_bits = 8 * sizeof(uint64);

	packer->context = context;
	packer->scratch = AllocSetContextCreate(context, "pg_tensile row", ALLOCSET_DEFAULT_SIZES);
	packer->ncolumns = desc->natts;
	packer->columns = MemoryContextAllocZero(context, sizeof(PackColumn) * desc->natts);
	for (int i = 0; i < desc->natts; i++)
	{
		column_init(&packer->columns[i], i, TupleDescAttr(desc, i), context);
		row_bits += 1 + 8 * packer->columns[i].width;
		packer->narrays += packer->columns[i].class == WIRE_ARRAY;
	}

	packer->max_rows = Min(PACK_MAX_BYTES * 8 / row_bits, PACK_MAX_ROWS);
	packer->hashes = MemoryContextAlloc(context, sizeof(uint64) * packer->max_rows);
	for (int i = 0; i < desc->natts; i++)
	{
		PackColumn *column = &packer->columns[i];

		column->nulls = MemoryContextAllocZero(context, (packer->max_rows + 7) / 8);
		column->values = MemoryContextAlloc(context, (Size) column->width * packer->max_rows);
	}
	return packer;
}

void
training_packer_row(TrainingPacker *packer, TupleTableSlot *slot)
{
	MemoryContext old = MemoryContextSwitchTo(packer->scratch);
	int			row = packer->rows;
	uint64		hash = 0;

	slot_getallattrs(slot);
	for (int i = 0; i < packer->ncolumns; i++)
	{
		PackColumn *column = &packer->columns[i];
		uint64		content;

		if (!slot->tts_isnull[i] && column->pack(column, row, slot->tts_values[i], &content))
			hash += mix64(content ^ column->seed);
		else
		{
			set_bit(column->nulls, row);
			memset(column->values + (Size) row * column->width, 0, column->width);
			hash += column->seed;
		}
	}
	hash = mix64(hash);
	packer->hashes[row] = hash;
	packer->hash_sum += hash;
	packer->total_rows++;
	packer->rows++;
	MemoryContextSwitchTo(old);
	MemoryContextReset(packer->scratch);
}

/* Time to send: the rows or bytes of a frame are reached. */
bool
training_packer_full(const TrainingPacker *packer)
{
	Size		bytes = (Size) packer->rows * sizeof(uint64);

	if (packer->rows >= packer->max_rows)
		return true;
	if (packer->narrays == 0)	/* max_rows stands for the bytes, too */
		return false;
	for (int i = 0; i < packer->ncolumns; i++)
	{
		const PackColumn *column = &packer->columns[i];

		bytes += (Size) packer->rows * column->width + column->elements.used + column->element_nulls.used;
	}
	return bytes >= PACK_MAX_BYTES;
}

int
training_packer_buffers(TrainingPacker *packer, WireBuffer **buffers)
{
	WireBuffer *next = palloc(sizeof(WireBuffer) * (1 + 4 * packer->ncolumns));

	*buffers = next;
	*next++ = (WireBuffer) {packer->hashes, sizeof(uint64) * packer->rows};
	for (int i = 0; i < packer->ncolumns; i++)
	{
		const PackColumn *column = &packer->columns[i];

		*next++ = (WireBuffer) {column->nulls, (packer->rows + 7) / 8};
		*next++ = (WireBuffer) {column->values, (Size) column->width * packer->rows};
		if (column->class == WIRE_ARRAY)
		{
			*next++ = (WireBuffer) {column->element_nulls.data, column->element_nulls.used};
			*next++ = (WireBuffer) {column->elements.data, column->elements.used};
		}
	}
	return next - *buffers;
}

void
training_packer_clear(TrainingPacker *packer)
{
	for (int i = 0; i < packer->ncolumns; i++)
	{
		PackColumn *column = &packer->columns[i];

		memset(column->nulls, 0, (packer->rows + 7) / 8);
		column->elements.used = column->element_nulls.used = column->nelements = 0;
	}
	packer->rows = 0;
}

int
training_packer_dictionaries(TrainingPacker *packer, WireBuffer **buffers)
{
	WireBuffer *next = palloc(sizeof(WireBuffer) * (2 * packer->ncolumns));

	*buffers = next;
	for (int i = 0; i < packer->ncolumns; i++)
	{
		const Dictionary *dictionary = &packer->columns[i].dictionary;

		if (packer->columns[i].class != WIRE_TEXT)
			continue;
		*next++ = (WireBuffer) {dictionary->lengths.data, dictionary->lengths.used};
		*next++ = (WireBuffer) {dictionary->bytes.data, dictionary->bytes.used};
	}
	return next - *buffers;
}

/* {"columns": [{"name", "type", "target"}]} in the server's encoding. */
void
training_packer_describe(const TrainingPacker *packer, const char *target, StringInfo json)
{
	appendStringInfoString(json, "{\"columns\": [");
	for (int i = 0; i < packer->ncolumns; i++)
	{
		const PackColumn *column = &packer->columns[i];

		appendStringInfoString(json, i == 0 ? "{\"name\": " : ", {\"name\": ");
		escape_json(json, column->name);
		appendStringInfo(json, ", \"type\": \"%s\", \"target\": %s}", column->wire_type,
						 strcmp(column->name, target) == 0 ? "true" : "false");
	}
	appendStringInfoString(json, "]}");
}

/* {"rows", "fingerprint"} */
void
training_packer_summary(const TrainingPacker *packer, StringInfo json)
{
	appendStringInfo(json, "{\"rows\": " UINT64_FORMAT ", \"fingerprint\": \"" UINT64_FORMAT ":%016llx\"}",
					 packer->total_rows, packer->total_rows, (unsigned long long) packer->hash_sum);
}
