/*
 * memory.h: PostgreSQL's memory for the evaluator in a plain program.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_TEST_MEMORY_H
#define TENSILE_TEST_MEMORY_H

#define MEMORY_MOST_BYTES ((Size) 0x3FFFFFFF)	/* MaxAllocSize of a server */

/* Frees all memory, as the end of a memory context does. */
extern void memory_reset(void);

#endif
