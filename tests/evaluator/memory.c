/*
 * memory.c: PostgreSQL's memory for the evaluator in a plain program.
 *
 * As in a server, what belongs to a context is freed when it is reset, whoever
 * has forgotten it.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres_fe.h"

#include "memory.h"

typedef struct Chunk
{
	struct Chunk *next;
	struct Chunk *before;
} __attribute__((aligned(16))) Chunk;

static Chunk context = {&context, &context};

static void *
linked(Chunk *chunk)
{
	if (chunk == NULL)
		abort();
	chunk->next = context.next;
	chunk->before = &context;
	chunk->next->before = chunk;
	context.next = chunk;
	return chunk + 1;
}

static Chunk *
unlinked(void *pointer)
{
	Chunk	   *chunk = (Chunk *) pointer - 1;

	chunk->next->before = chunk->before;
	chunk->before->next = chunk->next;
	return chunk;
}

void *
palloc(Size size)
{
	if (size > MEMORY_MOST_BYTES)
		abort();				/* an error in a server */
	return linked(malloc(sizeof(Chunk) + size));
}

void *
palloc0(Size size)
{
	return memset(palloc(size), 0, size);
}

void *
repalloc(void *pointer, Size size)
{
	if (size > MEMORY_MOST_BYTES)
		abort();
	return linked(realloc(unlinked(pointer), sizeof(Chunk) + size));
}

void
pfree(void *pointer)
{
	free(unlinked(pointer));
}

char *
pstrdup(const char *string)
{
	Size		size = strlen(string) + 1;

	return memcpy(palloc(size), string, size);
}

void
memory_reset(void)
{
	while (context.next != &context)
		pfree(context.next + 1);
}
