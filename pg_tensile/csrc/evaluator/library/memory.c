/*
 * memory.c: PostgreSQL's memory for the evaluator as a library, which from
 * PostgreSQL 18 on its own libraries for shared libraries lack.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres_fe.h"

static void *
given(void *memory)
{
	if (memory == NULL)
	{
		fputs("out of memory\n", stderr);
		exit(EXIT_FAILURE);
	}
	return memory;
}

void *
palloc(Size size)
{
	return given(malloc(Max(size, 1)));
}

void *
palloc0(Size size)
{
	return given(calloc(Max(size, 1), 1));
}

void *
repalloc(void *pointer, Size size)
{
	return given(realloc(pointer, Max(size, 1)));
}

void
pfree(void *pointer)
{
	free(pointer);
}

char *
pstrdup(const char *string)
{
	return given(strdup(string));
}
