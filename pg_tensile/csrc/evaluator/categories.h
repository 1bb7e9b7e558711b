/*
 * categories.h: codes of the strings of categories.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_CATEGORIES_H
#define TENSILE_CATEGORIES_H

#include "evaluator/image.h"
#include "evaluator/json.h"

/* A string of the table of a category; a code of 0: there is none. */
typedef struct CategorySlot
{
	uint32		start;			/* of its bytes */
	uint32		length;
	uint32		code;
	uint32		hash;
} CategorySlot;

typedef struct Category
{
	int			cardinality;	/* codes, that of null and other strings (0) included */
	int			known;			/* the codes of the strings of the table are 1 to this */
	int			buckets;		/* codes behind those, of all other strings; 0: these have code 0 */
	int			start;			/* number of all codes of the categories in front of this one */
	const CategorySlot *slots;	/* a power of two */
	uint32		slot_mask;
	const char *strings;
} Category;

typedef struct Categories
{
	int			count;
	Category   *items;
	int			codes;			/* of all categories */
} Categories;

extern void categories_compile(ImageWriter *writer, const JsonNode *features);
extern void categories_open(Categories *self, ImageReader *reader);
extern void categories_close(Categories *self);

/* The code of a string; `unknown`: it counts as one that was never seen in training. */
extern int32 category_code(const Category *self, const char *utf8, int length, bool *unknown);

/* The code that a model sees in place of one that may be null (-1). */
static inline int32
category_clean(const Category *self, int32 code)
{
	return code > 0 && code < self->cardinality ? code : 0;
}

#endif
