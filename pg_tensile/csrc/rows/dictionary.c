/*
 * dictionary.c: buffers that are reused from chunk to chunk, and dictionaries
 * of text columns.
 *
 * A dictionary gives each distinct string a code, in order of first
 * appearance.  The strings are in one buffer, one after the other, as they
 * are sent.  A hash table of codes (open addressing, at most half full) finds
 * them.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "utils/builtins.h"
#include "utils/memutils.h"

#include "rows/dictionary.h"
#include "rows/wire.h"

void
pack_buffer_init(PackBuffer *buffer, MemoryContext context)
{
	memset(buffer, 0, sizeof(*buffer));
	buffer->context = context;
}

void
pack_buffer_grow(PackBuffer *buffer, Size needed)
{
	Size		capacity = Max(buffer->capacity * 2, 1024);

	if (needed > FRAME_MAX_PAYLOAD)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("the data does not fit into a message to the child process"),
				 errdetail("A column of one message would have %zu bytes, more than "
						   UINT64_FORMAT ".", needed, FRAME_MAX_PAYLOAD),
				 errhint("A single row may have at most 1 GB, and so may the distinct strings "
						 "of a column.")));
	while (capacity < needed)
		capacity *= 2;
	buffer->data = buffer->data ? repalloc_huge(buffer->data, capacity)
		: MemoryContextAllocExtended(buffer->context, capacity, MCXT_ALLOC_HUGE);
	buffer->capacity = capacity;
}

#define DICTIONARY_INITIAL_SLOTS 256

static void
dictionary_allocate_slots(Dictionary *dictionary, uint32 nslots)
{
	dictionary->slots = MemoryContextAllocExtended(dictionary->context, nslots * sizeof(int32),
												   MCXT_ALLOC_HUGE);
	memset(dictionary->slots, -1, nslots * sizeof(int32));
	dictionary->mask = nslots - 1;
}

void
dictionary_init(Dictionary *dictionary, const char *name, MemoryContext context)
{
	memset(dictionary, 0, sizeof(*dictionary));
	dictionary->name = name;
	dictionary->context = context;
	pack_buffer_init(&dictionary->bytes, context);
	pack_buffer_init(&dictionary->lengths, context);
	pack_buffer_init(&dictionary->ends, context);
	pack_buffer_init(&dictionary->hashes, context);
	dictionary_allocate_slots(dictionary, DICTIONARY_INITIAL_SLOTS);
}

void
dictionary_clear(Dictionary *dictionary)
{
	dictionary->count = 0;
	dictionary->bytes.used = dictionary->lengths.used = 0;
	dictionary->ends.used = dictionary->hashes.used = 0;
	memset(dictionary->slots, -1, ((Size) dictionary->mask + 1) * sizeof(int32));
}

static void
dictionary_double_slots(Dictionary *dictionary)
{
	const uint64 *hashes = (const uint64 *) dictionary->hashes.data;

	pfree(dictionary->slots);
	dictionary_allocate_slots(dictionary, (dictionary->mask + 1) * 2);
	for (int32 code = 0; code < dictionary->count; code++)
	{
		uint32		slot = hashes[code] & dictionary->mask;

		while (dictionary->slots[slot] >= 0)
			slot = (slot + 1) & dictionary->mask;
		dictionary->slots[slot] = code;
	}
}

const char *
dictionary_string(const Dictionary *dictionary, int32 code, int *length)
{
	*length = ((const int32 *) dictionary->lengths.data)[code];
	return dictionary->bytes.data + ((const uint64 *) dictionary->ends.data)[code] - *length;
}

int32
dictionary_code(Dictionary *dictionary, const char *string, int length, uint64 hash)
{
	uint32		slot = hash & dictionary->mask;
	int32		code;

	for (; (code = dictionary->slots[slot]) >= 0; slot = (slot + 1) & dictionary->mask)
	{
		int			entry_length;
		const char *entry;

		if (((const uint64 *) dictionary->hashes.data)[code] != hash)
			continue;
		entry = dictionary_string(dictionary, code, &entry_length);
		if (entry_length == length && memcmp(entry, string, length) == 0)
			return code;
	}

	code = dictionary->count;
	if (code >= DICTIONARY_MAX_STRINGS)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("text column \"%s\" has more than %d distinct values",
						dictionary->name, DICTIONARY_MAX_STRINGS),
				 errhint("Leave the column out, or group its values into fewer categories, for "
						 "example by hashtext(%s) %% 1000.", quote_identifier(dictionary->name))));
	dictionary->slots[slot] = code;
	dictionary->count++;
	memcpy(pack_buffer_extend(&dictionary->bytes, length), string, length);
	*(int32 *) pack_buffer_extend(&dictionary->lengths, sizeof(int32)) = length;
	*(uint64 *) pack_buffer_extend(&dictionary->ends, sizeof(uint64)) = dictionary->bytes.used;
	*(uint64 *) pack_buffer_extend(&dictionary->hashes, sizeof(uint64)) = hash;
	if ((uint32) dictionary->count * 2 > dictionary->mask)
		dictionary_double_slots(dictionary);
	return code;
}
