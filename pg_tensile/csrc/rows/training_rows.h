/*
 * training_rows.h: chunks of training rows (docs/internals.md, "Training columns").
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_TRAINING_ROWS_H
#define TENSILE_TRAINING_ROWS_H

#include "access/tupdesc.h"
#include "executor/tuptable.h"
#include "lib/stringinfo.h"

#include "rows/wire.h"

#define PACK_MAX_ROWS 16384						/* rows in a ROWS frame */
#define PACK_MAX_BYTES ((Size) 8 * 1024 * 1024) /* bytes in it; one row may exceed them */

typedef struct TrainingPacker
{
	int			ncolumns;
	int			narrays;		/* among the columns */
	struct PackColumn *columns;
	int			max_rows;		/* that the fixed parts have room for */
	int			rows;			/* rows in this chunk */
	uint64	   *hashes;			/* of the rows of this chunk */
	uint64		total_rows;		/* rows of all chunks */
	uint64		hash_sum;		/* of all rows, modulo 2^64 */
	MemoryContext context;		/* of everything in here */
	MemoryContext scratch;		/* of conversions of one row */
} TrainingPacker;

extern TrainingPacker *training_packer_create(TupleDesc desc, MemoryContext parent);
extern void training_packer_row(TrainingPacker *packer, TupleTableSlot *slot);
extern bool training_packer_full(const TrainingPacker *packer);

/*
 * Sets the chunk's buffers, valid until the next row, and returns their
 * number.
 */
extern int	training_packer_buffers(TrainingPacker *packer, WireBuffer **buffers);

/* Starts an empty chunk. */
extern void training_packer_clear(TrainingPacker *packer);

/* Sets the buffers of the dictionaries, for ROWS_END. */
extern int	training_packer_dictionaries(TrainingPacker *packer, WireBuffer **buffers);

/* Append the headers of COLUMNS and ROWS_END. */
extern void training_packer_describe(const TrainingPacker *packer, const char *target,
									 StringInfo json);
extern void training_packer_summary(const TrainingPacker *packer, StringInfo json);

#endif
