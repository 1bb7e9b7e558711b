/*
 * convert.c: which SQL types can be learnt from, and how their values become float64 numbers or UTF-8 text.
 *
 * Both layouts (pack.c for training, features.c for predicting) convert with the functions here, so that a model sees
 * the same number when it is trained and when it is used.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "datatype/timestamp.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"
#include "utils/date.h"
#include "utils/float.h"
#include "utils/lsyscache.h"
#include "utils/numeric.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "convert.h"

/* ---- types ---- */

/* The wire type of a scalar that is a number, or NULL. */
static const char *
number_wire_type(Oid type)
{
	switch (type)
	{
		case BOOLOID:
			return "bool";
		case INT2OID:
			return "int2";
		case INT4OID:
			return "int4";
		case INT8OID:
			return "int8";
		case FLOAT4OID:
			return "float4";
		case FLOAT8OID:
		case NUMERICOID:
		case INTERVALOID:
		case TIMEOID:
			return "float8";
		case DATEOID:
		case TIMESTAMPOID:
		case TIMESTAMPTZOID:
			return "timestamp";
		default:
			return NULL;
	}
}

static const char *
array_wire_type(Oid element)
{
	switch (element)
	{
		case BOOLOID:
			return "bool[]";
		case INT2OID:
			return "int2[]";
		case INT4OID:
			return "int4[]";
		case INT8OID:
			return "int8[]";
		case FLOAT4OID:
			return "float4[]";
		case FLOAT8OID:
		case NUMERICOID:
			return "float8[]";
		default:
			return NULL;
	}
}

const char *
tensile_wire_type(Oid type)
{
	Oid			base = getBaseType(type);
	const char *name = number_wire_type(base);
	Oid			element;

	if (name != NULL)
		return name;
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
	return OidIsValid(element) ? array_wire_type(getBaseType(element)) : NULL;
}

/* ---- values ---- */

/*
 * The stored form of numeric (numeric.c): a 16-bit header whose two upper bits say what it is, for the long form
 * another 16 bits of weight, then digits in base 10000. Up to 2^53 the digits are exact in a float64 and so are the
 * powers of ten up to 10^22: one multiplication or division then gives the correctly rounded value.
 */
#define NUMERIC_KIND(header) ((header) & 0xC000)
#define NUMERIC_KIND_NEGATIVE 0x4000
#define NUMERIC_KIND_SHORT 0x8000
#define NUMERIC_KIND_SPECIAL 0xC000
#define MAX_EXACT_INTEGER (UINT64CONST(1) << 53)
#define MAX_EXACT_POWER 22

static const double power_of_ten[MAX_EXACT_POWER + 1] = {
	1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11,
	1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22
};

static double
numeric_float8_slow(const struct varlena *packed)
{
	struct varlena *whole = pg_detoast_datum((struct varlena *) packed);

	return DatumGetFloat8(DirectFunctionCall1(numeric_float8_no_overflow, PointerGetDatum(whole)));
}

static double
numeric_float8_fast(const struct varlena *packed)
{
	const char *data = VARDATA_ANY(packed);
	int			length = VARSIZE_ANY_EXHDR(packed);
	uint16		header;
	int			weight;
	int			ndigits;
	bool		negative;
	uint64		digits = 0;
	int			exponent;
	double		result;

	memcpy(&header, data, sizeof(header));
	data += sizeof(header);
	length -= sizeof(header);
	if (NUMERIC_KIND(header) == NUMERIC_KIND_SPECIAL)
		return numeric_float8_slow(packed);
	if (NUMERIC_KIND(header) == NUMERIC_KIND_SHORT)
	{
		negative = (header & 0x2000) != 0;
		weight = (header & 0x003F) | ((header & 0x0040) ? ~0x003F : 0);
	}
	else
	{
		int16		long_weight;

		memcpy(&long_weight, data, sizeof(long_weight));
		data += sizeof(long_weight);
		length -= sizeof(long_weight);
		negative = NUMERIC_KIND(header) == NUMERIC_KIND_NEGATIVE;
		weight = long_weight;
	}

	ndigits = length / (int) sizeof(int16);
	for (int i = 0; i < ndigits; i++)
	{
		int16		digit;

		memcpy(&digit, data + i * sizeof(digit), sizeof(digit));
		if (digits > (MAX_EXACT_INTEGER - digit) / 10000)
			return numeric_float8_slow(packed);
		digits = digits * 10000 + digit;
	}
	exponent = ndigits == 0 ? 0 : 4 * (weight - ndigits + 1);
	if (exponent > MAX_EXACT_POWER || exponent < -MAX_EXACT_POWER)
		return numeric_float8_slow(packed);
	result = exponent >= 0 ? (double) digits * power_of_ten[exponent] : (double) digits / power_of_ten[-exponent];
	return negative ? -result : result;
}

/* The stored form is private to numeric.c: a release that changes it costs speed, not the right numbers. */
static bool
numeric_layout_is_known(void)
{
	static const char *const samples[] = {"0", "7", "-1.5", "10000", "-123456789.0625", "0.0001", "1e18", "-0.00000000123"};

	for (int i = 0; i < lengthof(samples); i++)
	{
		Datum		value = DirectFunctionCall3(numeric_in, CStringGetDatum(samples[i]), ObjectIdGetDatum(InvalidOid),
												Int32GetDatum(-1));
		const struct varlena *stored = (const struct varlena *) DatumGetPointer(value);

		if (numeric_float8_fast(stored) != numeric_float8_slow(stored))
		{
			ereport(LOG, (errmsg("pg_tensile does not know how this server stores numeric values, and converts them slowly")));
			return false;
		}
	}
	return true;
}

double
tensile_numeric_float8(const struct varlena *packed)
{
	static enum {UNCHECKED, KNOWN, UNKNOWN} layout = UNCHECKED;

	if (layout == UNCHECKED)
		layout = numeric_layout_is_known() ? KNOWN : UNKNOWN;
	return layout == KNOWN ? numeric_float8_fast(packed) : numeric_float8_slow(packed);
}

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
	if (date >= TIMESTAMP_END_JULIAN - POSTGRES_EPOCH_JDATE)
		ereport(ERROR,
				(errcode(ERRCODE_DATETIME_VALUE_OUT_OF_RANGE),
				 errmsg("date out of range for timestamp")));
	*microseconds = date * USECS_PER_DAY;
	return true;
}

static double
bool_to_float8(Datum value)
{
	return DatumGetBool(value) ? 1.0 : 0.0;
}

static double
int2_to_float8(Datum value)
{
	return DatumGetInt16(value);
}

static double
int4_to_float8(Datum value)
{
	return DatumGetInt32(value);
}

static double
int8_to_float8(Datum value)
{
	return (double) DatumGetInt64(value);
}

static double
float4_to_float8(Datum value)
{
	return DatumGetFloat4(value);
}

static double
float8_to_float8(Datum value)
{
	return DatumGetFloat8(value);
}

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

	return tensile_date_to_timestamp(DatumGetDateADT(value), &microseconds) ? (double) microseconds : get_float8_nan();
}

static double
timestamp_to_float8(Datum value)
{
	Timestamp	timestamp = DatumGetTimestamp(value);

	return TIMESTAMP_NOT_FINITE(timestamp) ? get_float8_nan() : (double) timestamp;
}

ToFloat8
tensile_to_float8(Oid type)
{
	switch (getBaseType(type))
	{
		case BOOLOID:
			return bool_to_float8;
		case INT2OID:
			return int2_to_float8;
		case INT4OID:
			return int4_to_float8;
		case INT8OID:
			return int8_to_float8;
		case FLOAT4OID:
			return float4_to_float8;
		case FLOAT8OID:
			return float8_to_float8;
		case NUMERICOID:
			return numeric_to_float8;
		case INTERVALOID:
			return interval_to_float8;
		case TIMEOID:
			return time_to_float8;
		case DATEOID:
			return date_to_float8;
		case TIMESTAMPOID:
		case TIMESTAMPTZOID:
			return timestamp_to_float8;
		default:
			return NULL;
	}
}

void
text_converter_init(TextConverter *converter, Oid type, MemoryContext context)
{
	converter->type = getBaseType(type);
	if (converter->type != TEXTOID && converter->type != VARCHAROID && converter->type != BPCHAROID &&
		converter->type != NAMEOID)
	{
		Oid			output;
		bool		variable;

		getTypeOutputInfo(converter->type, &output, &variable);
		fmgr_info_cxt(output, &converter->output, context);
	}
}

/*
 * The UTF-8 text of a value, not terminated; in the current context or in the value itself. bpchar loses its trailing
 * blanks, as in every comparison and cast.
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
	utf8 = pg_server_to_any(string, *length, PG_UTF8);
	if (utf8 != string)
		*length = strlen(utf8);
	return utf8;
}
