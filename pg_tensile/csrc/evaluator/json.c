/*
 * json.c: JSON of a stored version as a tree of values.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include <math.h>

#include "common/jsonapi.h"
#include "mb/pg_wchar.h"

#include "evaluator/json.h"

#define MOST_DEPTH 32

typedef struct JsonTree
{
	Compilation *compilation;
	JsonNode   *open[MOST_DEPTH + 1];	/* arrays and objects; the first stands for the whole */
	int			depth;
	const char *name;			/* of the next value */
} JsonTree;

/*
 * Whether the text is one that jsonb or Python's json.dumps() writes: not
 * nested deeply, which the parser's recursion might not survive outside of a
 * server, and without escapes of other than ASCII characters, which it would
 * convert to the server's encoding.
 */
static bool
is_plain(const char *utf8, Size length)
{
	int			depth = 0;
	bool		in_string = false;

	for (Size i = 0; i < length; i++)
	{
		char		c = utf8[i];

		if (c == '\0')
			return false;
		if (in_string)
		{
			if (c == '"')
				in_string = false;
			else if (c == '\\' && ++i < length && utf8[i] == 'u' &&
					 (length - i < 5 || utf8[i + 1] != '0' || utf8[i + 2] != '0' ||
					  utf8[i + 3] > '7'))
				return false;
		}
		else if (c == '"')
			in_string = true;
		else if (c == '[' || c == '{')
		{
			if (++depth > MOST_DEPTH)
				return false;
		}
		else if (c == ']' || c == '}')
			depth--;
	}
	return true;
}

static JsonNode *
added(JsonTree *self, JsonKind kind)
{
	JsonNode   *parent = self->open[self->depth];
	JsonNode   *node = compilation_new(self->compilation, JsonNode, 1);

	node->kind = kind;
	node->name = self->name;
	self->name = NULL;
	if (parent->count++ == 0)
		parent->u.items.first = node;
	else
		parent->u.items.last->next = node;
	parent->u.items.last = node;
	return node;
}

static TensileJsonResult
object_start(void *state)
{
	JsonTree   *self = state;
	JsonNode   *node = added(self, JSON_IS_OBJECT);

	self->open[++self->depth] = node;
	return TENSILE_JSON_SUCCESS;
}

static TensileJsonResult
array_start(void *state)
{
	JsonTree   *self = state;
	JsonNode   *node = added(self, JSON_IS_ARRAY);

	self->open[++self->depth] = node;
	return TENSILE_JSON_SUCCESS;
}

static TensileJsonResult
items_end(void *state)
{
	((JsonTree *) state)->depth--;
	return TENSILE_JSON_SUCCESS;
}

static const char *
kept(JsonTree *self, char *string, int *length)
{
	Size		bytes = strlen(string);
	char	   *copy = compilation_items(self->compilation, bytes + 1, 1);

	memcpy(copy, string, bytes);
	*length = (int) bytes;
	return copy;
}

static TensileJsonResult
field_start(void *state, char *name, bool isnull)
{
	JsonTree   *self = state;
	int			length;

	self->name = kept(self, name, &length);
	pfree(name);
	return TENSILE_JSON_SUCCESS;
}

static TensileJsonResult
scalar(void *state, char *token, JsonTokenType type)
{
	JsonTree   *self = state;
	JsonNode   *node;

	if (type == JSON_TOKEN_STRING)
	{
		node = added(self, JSON_IS_STRING);
		node->u.string = kept(self, token, &node->count);
	}
	else if (type == JSON_TOKEN_NUMBER)
	{
		node = added(self, JSON_IS_NUMBER);
		node->u.number = strtod(token, NULL);
		node->is_integer = strpbrk(token, ".eE") == NULL;
	}
	else if (type == JSON_TOKEN_NULL)
		added(self, JSON_IS_NULL);
	else
		added(self, JSON_IS_BOOLEAN)->u.number = type == JSON_TOKEN_TRUE;
	if (token != NULL)
		pfree(token);
	return TENSILE_JSON_SUCCESS;
}

const JsonNode *
json_parse(Compilation *compilation, const char *utf8, Size length)
{
	JsonNode	whole = {.kind = JSON_IS_ARRAY};
	JsonTree	tree = {.compilation = compilation, .open = {&whole}};
	JsonSemAction actions = {
		.semstate = &tree,
		.object_start = object_start,
		.object_end = items_end,
		.array_start = array_start,
		.array_end = items_end,
		.object_field_start = field_start,
		.scalar = scalar,
	};
	bool		is_valid = false;

	if (length > 0 && length < PG_INT32_MAX && is_plain(utf8, length))
	{
		JsonLexContext *lexer = tensile_json_lexer(utf8, (int) length);

		is_valid = pg_parse_json(lexer, &actions) == JSON_SUCCESS;
		tensile_free_json_lexer(lexer);
	}
	if (!is_valid)
		compilation_damaged(compilation, "its JSON is not valid");
	return is_valid ? whole.u.items.first : NULL;
}

const JsonNode *
json_member(const JsonNode *object, const char *name)
{
	const JsonNode *found = NULL;

	if (!json_is(object, JSON_IS_OBJECT))
		return NULL;
	json_for_each(item, object)
		if (strcmp(item->name, name) == 0)
			found = item;		/* the last one, as in Python */
	return found == NULL || found->kind == JSON_IS_NULL ? NULL : found;
}

bool
json_equals(const JsonNode *node, const char *string)
{
	return json_is(node, JSON_IS_STRING) && strcmp(node->u.string, string) == 0;
}

const JsonNode *
json_array(Compilation *compilation, const JsonNode *node)
{
	static const JsonNode empty = {.kind = JSON_IS_ARRAY};

	if (json_is(node, JSON_IS_ARRAY))
		return node;
	compilation_damaged(compilation, "an array is missing in its JSON");
	return &empty;
}

double
json_number(Compilation *compilation, const JsonNode *node, double missing)
{
	if (node == NULL)
		return missing;
	if (node->kind == JSON_IS_NUMBER || node->kind == JSON_IS_BOOLEAN)
		return node->u.number;
	compilation_damaged(compilation, "a number is missing in its JSON");
	return NAN;
}

int64
json_whole(Compilation *compilation, const JsonNode *node, int64 least, int64 most, int64 missing)
{
	double		number = json_number(compilation, node, (double) missing);

	if (number >= least && number <= most && number == floor(number))
		return (int64) number;
	compilation_damaged(compilation, "a number in its JSON is out of range");
	return missing;
}

bool
json_true(Compilation *compilation, const JsonNode *node)
{
	return json_number(compilation, node, 0.0) != 0.0;
}

double *
json_numbers(Compilation *compilation, const JsonNode *node, int *count)
{
	const JsonNode *array = json_array(compilation, node);
	double	   *numbers = compilation_new(compilation, double, array->count);
	int			place = 0;

	json_for_each(item, array)
		numbers[place++] = json_number(compilation, item, 0.0);
	*count = place;
	return numbers;
}
