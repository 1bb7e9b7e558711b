/*
 * compilation.c: the state of the compilation of a stored version.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include "evaluator/compilation.h"

#define CHUNK_BYTES ((Size) 64 * 1024)

struct CompilationChunk
{
	CompilationChunk *next;
};

void
compilation_damaged(Compilation *self, const char *problem)
{
	if (self->status != EVALUATOR_READY)
		return;
	self->status = EVALUATOR_DAMAGED;
	self->problem = pstrdup(problem);
}

void
compilation_unsuitable(Compilation *self)
{
	if (self->status == EVALUATOR_READY)
		self->status = EVALUATOR_UNSUITABLE;
}

bool
compilation_weigh(Compilation *self, int64 rows, int64 columns)
{
	/* Neither factor may overflow the product: a larger one is too large alone. */
	if (rows > EVALUATOR_MOST_WEIGHTS || columns > EVALUATOR_MOST_WEIGHTS ||
		(self->weights += rows * columns) > EVALUATOR_MOST_WEIGHTS)
	{
		self->weights = EVALUATOR_MOST_WEIGHTS;
		compilation_unsuitable(self);
	}
	return compilation_ready(self);
}

/*
 * Items are counted from bytes of the version or after compilation_weigh(), so
 * the product is small.
 */
void *
compilation_items(Compilation *self, Size count, Size item_bytes)
{
	Size		bytes = MAXALIGN(Max(count, 1) * item_bytes);
	Size		head = MAXALIGN(sizeof(CompilationChunk));
	void	   *items;

	if (bytes > self->free_bytes)
	{
		Size		room = Max(bytes, CHUNK_BYTES);
		CompilationChunk *chunk = palloc(head + room);

		chunk->next = self->chunks;
		self->chunks = chunk;
		self->free = (char *) chunk + head;
		self->free_bytes = room;
	}
	items = self->free;
	self->free += bytes;
	self->free_bytes -= bytes;
	return memset(items, 0, bytes);
}

void
compilation_end(Compilation *self)
{
	while (self->chunks != NULL)
	{
		CompilationChunk *next = self->chunks->next;

		pfree(self->chunks);
		self->chunks = next;
	}
	self->free_bytes = 0;
}
