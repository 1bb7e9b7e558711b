/*
 * tree.c: a tree of a stored version.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include <math.h>

#include "evaluator/tree.h"

/* Reads an array of a tree's numbers; false unless it has this many. */
static bool
read_numbers(Compilation *compilation, const JsonNode *tree, const char *name, int count,
			 bool is_whole, double *numbers)
{
	const JsonNode *array = json_array(compilation, json_member(tree, name));
	int			place = 0;

	if (array->count != count)
		return false;
	json_for_each(item, array)
	{
		double		number = json_is(item, JSON_IS_NUMBER) ? item->u.number : NAN;

		if (!isfinite(number) || (is_whole && (!item->is_integer || fabs(number) > PG_INT32_MAX)))
			return false;
		numbers[place++] = number;
	}
	return true;
}

static bool
read_indices(Compilation *compilation, const JsonNode *tree, const char *name, int count,
			 int *indices)
{
	double		numbers[TREE_MOST_NODES];

	if (!read_numbers(compilation, tree, name, count, true, numbers))
		return false;
	for (int i = 0; i < count; i++)
		indices[i] = (int) numbers[i];
	return true;
}

static bool
read_codes(Compilation *compilation, const JsonNode *tree, Tree *given)
{
	const JsonNode *array = json_array(compilation, json_member(tree, "codes"));
	int			place = 0;

	if (array->count != given->nodes)
		return false;
	json_for_each(item, array)
	{
		given->codes[place] = item->kind == JSON_IS_ARRAY ? item : NULL;
		place++;
		json_for_each(code, json_is(item, JSON_IS_ARRAY) ? item : NULL)
			if (!json_is(code, JSON_IS_NUMBER) || !code->is_integer || code->u.number < 0)
				return false;
	}
	return true;
}

/*
 * Whether every node but the first, and every leaf, has one parent in front of
 * it; finds the depth.
 */
static bool
is_tree(Tree *self)
{
	bool		seen[2 * TREE_MOST_NODES + 1] = {false};
	int			depth[TREE_MOST_NODES] = {0};

	for (int node = 0; node < self->nodes; node++)
		for (int side = 0; side < 2; side++)
		{
			int			child = side == 0 ? self->left[node] : self->right[node];
			int			place = child >= 0 ? child : self->nodes - 1 - child;

			if (child < -self->nodes - 1 || child >= self->nodes ||
				(child >= 0 && child <= node) || seen[place])
				return false;
			seen[place] = true;
			if (child >= 0)
				depth[child] = depth[node] + 1;
			self->depth = Max(self->depth, depth[node] + 1);
		}
	for (int node = 1; node < self->nodes; node++)
		if (!seen[node])
			return false;
	return true;
}

bool
tree_read(Tree *self, Compilation *compilation, const JsonNode *json)
{
	int			nodes = json_array(compilation, json_member(json, "feature"))->count;

	self->nodes = nodes;
	return nodes <= TREE_MOST_NODES &&
		read_numbers(compilation, json, "threshold", nodes, false, self->threshold) &&
		read_numbers(compilation, json, "value", nodes + 1, false, self->value) &&
		read_indices(compilation, json, "feature", nodes, self->feature) &&
		read_indices(compilation, json, "left", nodes, self->left) &&
		read_indices(compilation, json, "right", nodes, self->right) &&
		read_codes(compilation, json, self) && is_tree(self);
}
