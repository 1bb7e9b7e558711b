/*
 * pack.h: from tuples to the training layout (docs/internals.md, "Training columns").
 */
#ifndef TENSILE_PACK_H
#define TENSILE_PACK_H

#include "postgres.h"

#include "access/tupdesc.h"
#include "executor/tuptable.h"
#include "lib/stringinfo.h"

#include "wire.h"

#define PACK_MAX_ROWS 16384						/* rows in a ROWS frame */
#define PACK_MAX_BYTES ((Size) 8 * 1024 * 1024) /* bytes in a ROWS frame; one row may exceed them */

typedef struct PackColumn PackColumn;
typedef struct TrainingPacker
{
	int			ncolumns;
	int			narrays;		/* of them */
	PackColumn *columns;
	int			max_rows;		/* rows that fit into the fixed parts of a chunk */
	int			rows;			/* rows in this chunk */
	uint64	   *hashes;			/* of the rows of this chunk */
	uint64		total_rows;		/* rows of all chunks */
	uint64		hash_sum;		/* of all rows, modulo 2^64 */
	MemoryContext context;		/* everything that lives as long as the packer */
	MemoryContext scratch;		/* what converting one row leaves behind */
} TrainingPacker;

extern TrainingPacker *training_packer_create(TupleDesc desc, MemoryContext parent);
extern void training_packer_row(TrainingPacker *packer, TupleTableSlot *slot);
extern bool training_packer_full(const TrainingPacker *packer);
/* The chunk's buffers, valid until the next row; and an empty chunk afterwards. */
extern int	training_packer_buffers(TrainingPacker *packer, WireBuffer **buffers);
extern void training_packer_clear(TrainingPacker *packer);
/* The dictionaries' buffers, for ROWS_END. */
extern int	training_packer_dictionaries(TrainingPacker *packer, WireBuffer **buffers);
/* Headers of COLUMNS and ROWS_END. */
extern void training_packer_describe(const TrainingPacker *packer, const char *target, StringInfo json);
extern void training_packer_summary(const TrainingPacker *packer, StringInfo json);

#endif
