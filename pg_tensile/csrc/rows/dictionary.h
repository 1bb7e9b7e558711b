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

#define DICTIONARY_SHORT 8		/* bytes */

/*
 * A hash that tells all strings of one length up to DICTIONARY_SHORT apart:
 * their bytes make a number, and what follows is reversible.
 */
static inline uint64
short_string_hash(const char *string, int length)
{
	uint64		number = 0;

	if (length >= 4)
	{
		uint32		first;
		uint32		last;

		memcpy(&first, string, sizeof(first));
		memcpy(&last, string + length - sizeof(last), sizeof(last));
		number = (uint64) last << 32 | first;
	}
	else if (length > 0)
		number = (uint8) string[0] | (uint32) (uint8) string[length / 2] << 8 |
			(uint32) (uint8) string[length - 1] << 16;
	number *= UINT64CONST(0x9E3779B97F4A7C15);
	number ^= number >> 32;
	number *= UINT64CONST(0xBF58476D1CE4E5B9);
	return number ^ number >> 29;
}

extern void dictionary_init(Dictionary *dictionary, const char *name, MemoryContext context);

/* Forgets the strings and keeps the memory. */
extern void dictionary_clear(Dictionary *dictionary);

/* The code of the string, which may be new; 54000 if there are too many. */
extern int32 dictionary_code(Dictionary *dictionary, const char *string, int length,
							 uint64 hash);

/*
 * The same with a hash that is chosen here, for dictionaries of which all
 * strings are given this way.  Inlined, because every string of a prediction
 * passes here; most are short and known.
 */
static inline int32
dictionary_code_of(Dictionary *dictionary, const char *string, int length)
{
	uint64		hash;

	if (length > DICTIONARY_SHORT)
		return dictionary_code(dictionary, string, length, bytes_hash(string, length));
	hash = short_string_hash(string, length);
	for (uint32 slot = hash & dictionary->mask; dictionary->slots[slot] >= 0;
		 slot = (slot + 1) & dictionary->mask)
	{
		int32		code = dictionary->slots[slot];

		if (((const uint64 *) dictionary->hashes.data)[code] == hash &&
			((const int32 *) dictionary->lengths.data)[code] == length)
			return code;
	}
	return dictionary_code(dictionary, string, length, hash);
}

extern const char *dictionary_string(const Dictionary *dictionary, int32 code, int *length);

#endif
