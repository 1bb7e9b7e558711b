/*
 * weights.c: the tensors of a stored version.
 *
 * A safetensors file begins with the length of a JSON object in 8 bytes; the
 * object has the type, shape and place of each tensor in what follows it.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include "evaluator/json.h"
#include "evaluator/weights.h"

#define MOST_NAME 128

static int64
type_bytes(const char *type)
{
	static const struct
	{
		const char *name;
		int			bytes;
	}			types[] = {
		{"F32", 4}, {"U8", 1}, {"BOOL", 1}, {"I64", 8}, {"F64", 8}, {"F16", 2}, {"BF16", 2},
		{"I8", 1}, {"I16", 2}, {"U16", 2}, {"I32", 4}, {"U32", 4}, {"U64", 8},
	};

	for (int i = 0; i < lengthof(types); i++)
		if (strcmp(type, types[i].name) == 0)
			return types[i].bytes;
	return 0;
}

/* Reads the description of a tensor; `data` are those of all tensors. */
static void
describe(Compilation *compilation, const JsonNode *node, const char *data, Size length,
		 Tensor *tensor)
{
	const JsonNode *type = json_member(node, "dtype");
	const JsonNode *shape = json_array(compilation, json_member(node, "shape"));
	const JsonNode *offsets = json_array(compilation, json_member(node, "data_offsets"));
	int64		start,
				end;
	int64		bytes;

	if (!json_is(type, JSON_IS_STRING) || offsets->count != 2)
	{
		compilation_damaged(compilation, "a tensor has no type or place");
		return;
	}
	start = json_whole(compilation, offsets->u.items.first, 0, length, 0);
	end = json_whole(compilation, offsets->u.items.last, 0, length, 0);
	tensor->name = node->name;
	tensor->type = type->u.string;
	for (int i = 0; i < lengthof(tensor->shape); i++)
		tensor->shape[i] = 1;
	bytes = type_bytes(tensor->type);
	json_for_each(item, shape)
	{
		int64		size = json_whole(compilation, item, 0, length, 0);

		if (tensor->dimensions < lengthof(tensor->shape))
			tensor->shape[tensor->dimensions] = size;
		tensor->dimensions++;
		/* The file's length limits the product as well as each factor. */
		bytes = size != 0 && bytes > (int64) length / size ? (int64) length + 1 : bytes * size;
	}
	if (start > end || end - start != bytes)
	{
		compilation_damaged(compilation, "a tensor has not the length of its shape");
		return;
	}
	tensor->data = data + start;
	tensor->bytes = bytes;
}

void
weights_open(Weights *self, Compilation *compilation, const char *bytes, Size length)
{
	uint64		head = 0;
	const JsonNode *object = NULL;

	memset(self, 0, sizeof(*self));
	self->compilation = compilation;
	if (length >= sizeof(head))
		memcpy(&head, bytes, sizeof(head));
	if (length > PG_INT32_MAX || length < sizeof(head) || head > length - sizeof(head))
		compilation_damaged(compilation, "its weights are cut off");
	else
		object = json_parse(compilation, bytes + sizeof(head), head);
	if (!json_is(object, JSON_IS_OBJECT))
	{
		compilation_damaged(compilation, "its weights have no table of contents");
		return;
	}
	self->tensors = compilation_new(compilation, Tensor, object->count);
	json_for_each(item, object)
	{
		if (strcmp(item->name, "__metadata__") == 0)
			continue;
		describe(compilation, item, bytes + sizeof(head) + head, length - sizeof(head) - head,
				 &self->tensors[self->count]);
		if (!compilation_ready(compilation))
			return;
		self->count++;
	}
}

/* The tensor of a layer, whose name consists of both; NULL: there is none. */
static const Tensor *
found(const Weights *self, const char *layer, const char *name)
{
	char		whole[MOST_NAME];

	snprintf(whole, sizeof(whole), "%s%s", layer, name);
	for (int i = 0; i < self->count; i++)
		if (strcmp(self->tensors[i].name, whole) == 0)
			return &self->tensors[i];
	return NULL;
}

static const Tensor *
taken(Weights *self, const char *layer, const char *name)
{
	const Tensor *tensor = found(self, layer, name);

	if (tensor == NULL)
		compilation_damaged(self->compilation, "a tensor of its model is missing");
	else
		self->taken++;
	return tensor;
}

const float *
weights_floats(Weights *self, const char *layer, const char *name, int64 first, int64 second,
			   int64 third)
{
	int			dimensions = second < 0 ? 1 : third < 0 ? 2 : 3;
	int64		sizes[] = {first, second < 0 ? 1 : second, third < 0 ? 1 : third};
	const Tensor *tensor = taken(self, layer, name);
	float	   *numbers;

	if (tensor != NULL && (tensor->dimensions != dimensions ||
						   memcmp(tensor->shape, sizes, sizeof(sizes)) != 0))
	{
		compilation_damaged(self->compilation, "a tensor has not the shape that its model needs");
		tensor = NULL;
	}
	if (tensor != NULL && strcmp(tensor->type, "F32") != 0)
	{
		compilation_unsuitable(self->compilation);
		tensor = NULL;
	}
	if (!compilation_ready(self->compilation))
		return NULL;
	numbers = compilation_new(self->compilation, float, tensor->bytes / sizeof(float));
	memcpy(numbers, tensor->data, tensor->bytes);
	return numbers;
}

const char *
weights_bytes(Weights *self, const char *layer, const char *name, Size *length)
{
	const Tensor *tensor = taken(self, layer, name);

	*length = 0;
	if (tensor == NULL || strcmp(tensor->type, "U8") != 0)
	{
		compilation_damaged(self->compilation, "a tensor of bytes is missing");
		return NULL;
	}
	*length = tensor->bytes;
	return tensor->data;
}

void
weights_skip(Weights *self, const char *layer, const char *name)
{
	if (found(self, layer, name) != NULL)
		self->taken++;
}
