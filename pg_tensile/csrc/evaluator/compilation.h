/*
 * compilation.h: the state of the compilation of a stored version: what it has
 * found, and its memory.
 *
 * What reads a version goes on after a problem with values that do no harm, so
 * that the first problem is the one that is reported, at the end.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_COMPILATION_H
#define TENSILE_COMPILATION_H

#include "evaluator/interface.h"

typedef struct CompilationChunk CompilationChunk;

typedef struct Compilation
{
	EvaluatorStatus status;
	const char *problem;		/* palloc'ed, outlives this */
	int64		weights;		/* that the image has so far */
	CompilationChunk *chunks;
	char	   *free;			/* of the newest chunk */
	Size		free_bytes;
} Compilation;

/* The first of these calls counts. */
extern void compilation_damaged(Compilation *self, const char *problem);
extern void compilation_unsuitable(Compilation *self);

static inline bool
compilation_ready(const Compilation *self)
{
	return self->status == EVALUATOR_READY;
}

/* Counts weights; too many of them make a version unsuitable.  Returns whether it is ready. */
extern bool compilation_weigh(Compilation *self, int64 rows, int64 columns);

/* Memory for some items, zeros, until compilation_end(). */
extern void *compilation_items(Compilation *self, Size count, Size item_bytes);

#define compilation_new(self, type, count) ((type *) compilation_items(self, count, sizeof(type)))

/* Frees the memory. */
extern void compilation_end(Compilation *self);

#endif
