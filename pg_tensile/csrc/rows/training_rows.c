/*
 * training_rows.c: chunks of training rows (docs/internals.md, "Training columns").
 *
 * A chunk of rows is packed column by column (training_column.c).  The content of
 * a row's values, mixed with the numbers of their columns, makes the row's
 * hash, which depends neither on the order of rows nor on dictionary codes.
 * The child orders, splits and fingerprints rows by it.
 *
 * Memory: parts of fixed width are allocated once, for as many rows as a frame
 * may carry.  Array elements and strings are in buffers that grow and are used
 * again for the next chunk.  Conversions of one row allocate in a scratch
 * context that is reset for every row.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "executor/tuptable.h"
#include "utils/json.h"
#include "utils/memutils.h"

#include "rows/dictionary.h"
#include "rows/training_column.h"
#include "rows/training_rows.h"
#include "rows/wire.h"

TrainingPacker *
training_packer_create(TupleDesc desc, MemoryContext parent)
{
	MemoryContext context = AllocSetContextCreate(parent, "pg_tensile training rows",
												  ALLOCSET_DEFAULT_SIZES);
	TrainingPacker *packer = MemoryContextAllocZero(context, sizeof(TrainingPacker));
	Size		row_bits = 8 * sizeof(uint64);

	packer->context = context;
	packer->scratch = AllocSetContextCreate(context, "pg_tensile row", ALLOCSET_DEFAULT_SIZES);
	packer->ncolumns = desc->natts;
	packer->columns = MemoryContextAllocZero(context, sizeof(PackColumn) * desc->natts);
	for (int i = 0; i < desc->natts; i++)
	{
		pack_column_init(&packer->columns[i], i, TupleDescAttr(desc, i), context);
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

/* Is it time to send, because the chunk has the rows or bytes of a frame? */
bool
training_packer_full(const TrainingPacker *packer)
{
	Size		bytes = (Size) packer->rows * sizeof(uint64);

	if (packer->rows >= packer->max_rows)
		return true;
	if (packer->narrays == 0)	/* then max_rows limits the bytes, too */
		return false;
	for (int i = 0; i < packer->ncolumns; i++)
	{
		const PackColumn *column = &packer->columns[i];

		bytes += (Size) packer->rows * column->width +
			column->elements.used + column->element_nulls.used;
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

/*
 * Appends {"columns": [{"name", "type", "sql_type", "target"}]} in the
 * server's encoding.
 */
void
training_packer_describe(const TrainingPacker *packer, const char *target, StringInfo json)
{
	appendStringInfoString(json, "{\"columns\": [");
	for (int i = 0; i < packer->ncolumns; i++)
	{
		const PackColumn *column = &packer->columns[i];

		appendStringInfoString(json, i == 0 ? "{\"name\": " : ", {\"name\": ");
		escape_json(json, column->name);
		appendStringInfo(json, ", \"type\": \"%s\", \"sql_type\": ", column->wire_type);
		escape_json(json, column->sql_type);
		appendStringInfo(json, ", \"target\": %s}",
						 strcmp(column->name, target) == 0 ? "true" : "false");
	}
	appendStringInfoString(json, "]}");
}

/* Appends {"rows", "fingerprint"}. */
void
training_packer_summary(const TrainingPacker *packer, StringInfo json)
{
	appendStringInfo(json,
					 "{\"rows\": " UINT64_FORMAT
					 ", \"fingerprint\": \"" UINT64_FORMAT ":%016llx\"}",
					 packer->total_rows, packer->total_rows, (unsigned long long) packer->hash_sum);
}
