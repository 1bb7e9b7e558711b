/*
 * dictionary.h: buffers that are reused from chunk to chunk, and dictionaries
 * of text columns.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_DICTIONARY_H
#define TENSILE_DICTIONARY_H

#include "common/hashfn.h"

#define DICTIONARY_MAX_STRINGS 1000000

typedef struct PackBuffer
{
	char	   *data;
	Size		used;
	Size		capacity;
	MemoryContext context;
} PackBuffer;

extern void pack_buffer_init(PackBuffer *buffer, MemoryContext context);

/* Makes room for `needed` bytes; 54000 if a frame cannot carry them. */
extern void pack_buffer_grow(PackBuffer *buffer, Size needed);

/* Appends `size` bytes, and returns where they go, which is not NULL for no bytes either. */
static inline char *
pack_buffer_extend(PackBuffer *buffer, Size size)
{
	char	   *start;

	if (buffer->data == NULL || size > buffer->capacity - buffer->used)
		pack_buffer_grow(buffer, buffer->used + size);
	start = buffer->data + buffer->used;
	buffer->used += size;
	return start;
}

/* Gives each string a code, in order of first appearance. */
typedef struct Dictionary
{
	const char *name;			/* of the column */
	int32		count;
	PackBuffer	bytes;			/* of the strings, one after the other */
	PackBuffer	lengths;		/* int32 each */
	PackBuffer	ends;			/* uint64 each: end of the string in bytes */
	PackBuffer	hashes;			/* uint64 each */
	int32	   *slots;			/* open addressing: code, or -1 */
	uint32		mask;			/* number of slots - 1 */
	MemoryContext context;
} Dictionary;

static inline uint64
bytes_hash(const char *string, int length)
{
	return hash_bytes_extended((const unsigned char *) string, length, length);
}

extern void dictionary_init(Dictionary *dictionary, const char *name, MemoryContext context);

/* Forgets the strings and keeps the memory. */
extern void dictionary_clear(Dictionary *dictionary);

/* The code of the string, which may be new; 54000 if there are too many. */
extern int32 dictionary_code(Dictionary *dictionary, const char *string, int length,
							 uint64 hash);
extern const char *dictionary_string(const Dictionary *dictionary, int32 code, int *length);

#endif
