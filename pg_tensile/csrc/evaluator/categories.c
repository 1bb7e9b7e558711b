/*
 * categories.c: codes of the strings of categories.
 *
 * The strings of the training rows are in a hash table with open addressing;
 * those that the table lacks are divided over the buckets by the hash of
 * pg_tensile/execution/data/hashing.py.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include "evaluator/blake2b.h"
#include "evaluator/categories.h"

#define MOST_CATEGORIES 65536
#define MOST_CODES (1 << 24)	/* which float32 still tells apart */

/* FNV-1a, with its upper half mixed into the lower one that chooses the slot. */
static uint32
slot_hash(const char *bytes, uint32 length)
{
	uint64		hash = UINT64CONST(0xCBF29CE484222325);

	for (uint32 i = 0; i < length; i++)
		hash = (hash ^ (unsigned char) bytes[i]) * UINT64CONST(0x100000001B3);
	return (uint32) (hash ^ (hash >> 32));
}

static bool
is_category(const JsonNode *feature)
{
	return json_equals(json_member(feature, "kind"), "category");
}

/* The slot of a string, or the free one where it belongs. */
static uint32
slot_of(const CategorySlot *slots, uint32 mask, const char *strings, const char *bytes, uint32 length)
{
	uint32		hash = slot_hash(bytes, length);
	uint32		slot = hash & mask;

	for (uint32 tries = 0; tries <= mask; tries++, slot = (slot + 1) & mask)
	{
		const CategorySlot *candidate = &slots[slot];

		if (candidate->code == 0 || (candidate->hash == hash && candidate->length == length &&
									 memcmp(strings + candidate->start, bytes, length) == 0))
			break;
	}
	return slot;
}

static void
compile_category(ImageWriter *writer, const JsonNode *feature)
{
	Compilation *compilation = writer->compilation;
	const JsonNode *list = json_member(feature, "categories");
	const JsonNode *strings = list == NULL ? NULL : json_array(compilation, list);
	uint32		count = strings == NULL ? 0 : strings->count;
	uint32		mask = 1;
	uint32		code = 0;
	Size		length = 0;
	char	   *bytes;
	CategorySlot *slots;

	image_write_whole(writer, count);
	image_write_whole(writer,
					  json_whole(compilation, json_member(feature, "buckets"), 0, MOST_CODES, 0));
	json_for_each(item, strings)
	{
		if (item->kind != JSON_IS_STRING)
		{
			compilation_damaged(compilation, "a category is not a string");
			return;
		}
		length += item->count;
	}
	while (mask < 2 * count)
		mask = 2 * mask + 1;
	bytes = compilation_items(compilation, length, 1);
	slots = compilation_new(compilation, CategorySlot, mask + 1);
	length = 0;
	json_for_each(item, strings)
	{
		CategorySlot *slot = &slots[slot_of(slots, mask, bytes, item->u.string, item->count)];

		memcpy(bytes + length, item->u.string, item->count);
		slot->start = (uint32) length;
		slot->length = item->count;
		slot->code = ++code;	/* of the last one, if it is there twice */
		slot->hash = slot_hash(item->u.string, item->count);
		length += item->count;
	}
	image_write_copy(writer, bytes, length, 1);
	image_write_copy(writer, slots, mask + 1, sizeof(CategorySlot));
}

void
categories_compile(ImageWriter *writer, const JsonNode *features)
{
	int			count = 0;

	json_for_each(feature, features)
		count += is_category(feature);
	image_write_whole(writer, count);
	json_for_each(feature, features)
		if (is_category(feature))
			compile_category(writer, feature);
}

static void
open_category(Category *self, ImageReader *reader)
{
	Size		length;
	Size		slots;

	self->known = (int) image_whole(reader, 0, MOST_CODES);
	self->buckets = (int) image_whole(reader, 0, MOST_CODES);
	self->cardinality = self->known + 1 + self->buckets;
	self->strings = image_some(reader, 1, IMAGE_MOST_BYTES, &length);
	self->slots = image_some(reader, sizeof(CategorySlot), IMAGE_MOST_BYTES / sizeof(CategorySlot),
							 &slots);
	if (slots == 0 || (slots & (slots - 1)) != 0)
		reader->is_damaged = true;
	if (reader->is_damaged)
		return;
	self->slot_mask = (uint32) (slots - 1);
	for (Size i = 0; i < slots; i++)
	{
		const CategorySlot *slot = &self->slots[i];

		if (slot->code > self->known || (uint64) slot->start + slot->length > length)
			reader->is_damaged = true;
	}
}

void
categories_open(Categories *self, ImageReader *reader)
{
	memset(self, 0, sizeof(*self));
	self->count = (int) image_whole(reader, 0, MOST_CATEGORIES);
	self->items = palloc0(sizeof(Category) * self->count + 1);
	for (int i = 0; i < self->count && !reader->is_damaged; i++)
	{
		open_category(&self->items[i], reader);
		self->items[i].start = self->codes;
		self->codes += self->items[i].cardinality;
		if (self->codes > MOST_CODES)
			reader->is_damaged = true;
	}
}

void
categories_close(Categories *self)
{
	pfree(self->items);
}

int32
category_code(const Category *self, const char *utf8, int length, bool *unknown)
{
	uint32		bytes = Max(length, 0);
	uint32		slot = slot_of(self->slots, self->slot_mask, self->strings, utf8, bytes);
	int32		code = self->slots[slot].code;

	/* Without a free slot, which no table lacks that was compiled, the last one tried is any. */
	if (code == 0 && self->buckets > 0)
		code = self->known + 1 + (int32) (blake2b_hash(utf8, bytes) % self->buckets);
	/*
	 * One bucket is for rare strings, which count as unknown; several divide
	 * strings that are too many.
	 */
	*unknown = code <= 0 || code > self->cardinality - 1 - (self->buckets == 1);
	return code;
}
