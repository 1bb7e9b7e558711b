/*
 * numeric_float8.c: a fast conversion of numeric to float64.
 *
 * It reads the stored form, which is private to PostgreSQL's numeric.c: a
 * 16-bit header whose two upper bits say what it is, for the long form another
 * 16 bits of weight, then digits in base 10000.  Digits up to 2^53 are exact
 * in a float64, and so are powers of ten up to 10^22, so that one
 * multiplication or division gives the correctly rounded value.  Other values
 * take the slow way through numeric.c.
 *
 * Each process compares some samples first: a release that changes the stored
 * form costs speed, not the right numbers.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "fmgr.h"
#include "utils/builtins.h"
#include "utils/numeric.h"

#include "base/compat.h"
#include "base/numeric_float8.h"

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
	result = exponent >= 0 ? (double) digits * power_of_ten[exponent] :
		(double) digits / power_of_ten[-exponent];
	return negative ? -result : result;
}

static bool
numeric_layout_is_known(void)
{
	static const char *const samples[] = {
		"0", "7", "-1.5", "10000", "-123456789.0625", "0.0001", "1e18", "-0.00000000123"
	};

	for (int i = 0; i < lengthof(samples); i++)
	{
		Datum		value = DirectFunctionCall3(numeric_in, CStringGetDatum(samples[i]),
												ObjectIdGetDatum(InvalidOid),
												Int32GetDatum(-1));
		const struct varlena *stored = (const struct varlena *) DatumGetPointer(value);

		if (numeric_float8_fast(stored) != numeric_float8_slow(stored))
		{
			ereport(LOG,
					(errmsg("pg_tensile does not know how this server stores numeric values, "
							"and converts them slowly")));
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
