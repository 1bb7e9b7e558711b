/*
 * training_column.h: the columns of a training chunk.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_TRAINING_COLUMN_H
#define TENSILE_TRAINING_COLUMN_H

#include "access/tupdesc.h"

#include "base/convert.h"
#include "rows/dictionary.h"

/* How values travel. */
typedef enum WireClass
{
	WIRE_FIXED,					/* bool, int2 ... float8, timestamp: one number */
	WIRE_TEXT,					/* a code into a dictionary */
	WIRE_ARRAY					/* a length and elements */
} WireClass;

/* A 64-bit finaliser, that of MurmurHash3. */
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

struct PackColumn;

/* Stores the value of a row and its content's bits; false: it is null. */
typedef bool (*PackFunction) (struct PackColumn *column, int row, Datum value, uint64 *content);

typedef struct PackColumn
{
	const char *name;
	const char *wire_type;
	const char *sql_type;		/* name of the base type */
	WireClass	class;
	int			width;			/* of a number, code or length */
	uint64		seed;			/* of the column's number, for the row's hash */
	PackFunction pack;
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
} PackColumn;

static inline void
set_bit(uint8 *bitmap, uint64 bit)
{
	bitmap[bit / 8] |= (uint8) (1 << (bit % 8));
}

extern void pack_column_init(PackColumn *column, int number, Form_pg_attribute attribute,
							 MemoryContext context);

#endif
