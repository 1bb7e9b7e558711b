/*
 * json.h: JSON of a stored version as a tree of values, read with PostgreSQL's
 * parser.
 *
 * Each function takes a NULL for a value that there is not.  Those that want a
 * value of one kind report a damaged version if it is another one, and return
 * one that does no harm.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_JSON_H
#define TENSILE_JSON_H

#include "evaluator/compilation.h"

typedef enum JsonKind
{
	JSON_IS_NULL,
	JSON_IS_BOOLEAN,			/* `number` is 0 or 1 */
	JSON_IS_NUMBER,
	JSON_IS_STRING,
	JSON_IS_ARRAY,
	JSON_IS_OBJECT
} JsonKind;

typedef struct JsonNode
{
	uint8		kind;
	bool		is_integer;		/* a number without a point or exponent, whatever its size */
	int32		count;			/* of items; of the string's bytes */
	const char *name;			/* in an object */
	struct JsonNode *next;		/* of the same array or object */
	union
	{
		double		number;
		const char *string;		/* ends with a NUL */
		struct
		{
			struct JsonNode *first;
			struct JsonNode *last;
		}			items;
	}			u;
} JsonNode;

#define json_is(node, kind_) ((node) != NULL && (node)->kind == (kind_))

static inline const JsonNode *
json_first(const JsonNode *node)
{
	return json_is(node, JSON_IS_ARRAY) || json_is(node,
												   JSON_IS_OBJECT) ? node->u.items.first : NULL;
}

/* A loop over the items of an array or object; anything else has none. */
#define json_for_each(item, node) \
	for (const JsonNode *item = json_first(node); item != NULL; item = item->next)

/* NULL, and a damaged version, if the text is not valid. */
extern const JsonNode *json_parse(Compilation *compilation, const char *utf8, Size length);

/* The member with this name that is not null, or NULL. */
extern const JsonNode *json_member(const JsonNode *object, const char *name);

extern bool json_equals(const JsonNode *node, const char *string);

/* The node if it is an array, or else an empty one. */
extern const JsonNode *json_array(Compilation *compilation, const JsonNode *node);

/* A number, or `missing` for NULL; NaN if it is something else. */
extern double json_number(Compilation *compilation, const JsonNode *node, double missing);

/* A whole number in a range, or `missing` for NULL. */
extern int64 json_whole(Compilation *compilation, const JsonNode *node, int64 least, int64 most,
						int64 missing);

/* Whether the node is true; NULL is false. */
extern bool json_true(Compilation *compilation, const JsonNode *node);

/* The numbers of an array, and how many they are. */
extern double *json_numbers(Compilation *compilation, const JsonNode *node, int *count);

#endif
