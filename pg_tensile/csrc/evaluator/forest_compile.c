/*
 * forest_compile.c: trees of a stored version as the nodes of a forest.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include "evaluator/forest_compile.h"
#include "evaluator/tree.h"

#define MOST_TREES (1 << 17)
#define MOST_SET_WORDS (1 << 25)

typedef struct Column
{
	bool		is_used;
	int			number;			/* among those used */
	int			category;		/* -1: none */
	int			codes;			/* below which all are that some set has */
	int			thresholds;
	float	   *values;
} Column;

typedef struct Builder
{
	Compilation *compilation;
	const Features *features;
	int			count;			/* of trees */
	Tree	   *trees;
	int			columns;
	Column	   *column;
	int			nodes;			/* of all trees, with leaves */
} Builder;

/* Reads a tree and notes which columns it compares. */
static bool
read_tree(Builder *self, const JsonNode *json, Tree *tree)
{
	if (!tree_read(tree, self->compilation, json))
		return false;
	for (int node = 0; node < tree->nodes; node++)
	{
		if (tree->feature[node] < 0 || tree->feature[node] >= self->columns)
			return false;
		self->column[tree->feature[node]].thresholds++;
		self->column[tree->feature[node]].is_used = true;
	}
	self->nodes += 2 * tree->nodes + 1;
	return true;
}

static int
compare_floats(const void *left, const void *right)
{
	float		a = *(const float *) left,
				b = *(const float *) right;

	return (a > b) - (a < b);
}

/* Finds the largest code that a set of a column has. */
static void
collect_codes(Builder *self)
{
	for (int i = 0; i < self->count; i++)
		for (int node = 0; node < self->trees[i].nodes; node++)
		{
			Column	   *column = &self->column[self->trees[i].feature[node]];
			int			cardinality;

			if (column->category < 0)
				continue;
			cardinality = self->features->categories.items[column->category].cardinality;
			json_for_each(code, self->trees[i].codes[node])
				if (code->u.number < cardinality)
					column->codes = Max(column->codes, (int) code->u.number + 1);
			if (column->codes > FOREST_MOST_CODES)
				compilation_unsuitable(self->compilation);
		}
}

/* Makes the distinct thresholds of each column that has no codes. */
static void
collect_thresholds(Builder *self)
{
	for (int i = 0; i < self->columns; i++)
	{
		Column	   *column = &self->column[i];

		column->values = compilation_new(self->compilation, float, column->thresholds);
		column->thresholds = 0;
	}
	for (int i = 0; i < self->count; i++)
		for (int node = 0; node < self->trees[i].nodes; node++)
		{
			Column	   *column = &self->column[self->trees[i].feature[node]];

			if (column->category < 0)
				column->values[column->thresholds++] = (float) self->trees[i].threshold[node];
		}
	for (int i = 0; i < self->columns; i++)
	{
		Column	   *column = &self->column[i];
		int			distinct = 0;

		qsort(column->values, column->thresholds, sizeof(float), compare_floats);
		for (int k = 0; k < column->thresholds; k++)
			if (distinct == 0 || column->values[k] != column->values[distinct - 1])
				column->values[distinct++] = column->values[k];
		column->thresholds = distinct;
		if (distinct >= FOREST_NO_PLACE)
			compilation_unsuitable(self->compilation);
	}
}

static void
write_columns(Builder *self, ImageWriter *writer)
{
	const Features *features = self->features;
	int			used = 0;

	for (int i = 0; i < self->columns; i++)
		if (self->column[i].is_used)
			self->column[i].number = used++;
	if (used > FOREST_MOST_COLUMNS)
		compilation_unsuitable(self->compilation);
	image_write_whole(writer, used);
	for (int i = 0; i < self->columns; i++)
	{
		const Column *column = &self->column[i];
		int			behind =
			i - features->plain - features->categories.count;  /* among elements of arrays */

		if (!column->is_used)
			continue;
		image_write_whole(writer, column->category);
		image_write_whole(writer, column->codes);
		image_write_whole(writer,
						  column->category >= 0 ? 0 : i < features->plain ? features->ranks + i :
						  features->ranks + features->plain + behind);
		image_write_copy(writer, column->values, column->thresholds, sizeof(float));
	}
}

static int
place_of(const Column *column, float threshold)
{
	int			low = 0,
				high = column->thresholds;

	while (low < high)
	{
		int			middle = (low + high) / 2;

		if (column->values[middle] < threshold)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

/* Makes a set of the codes that go right, those that the list lacks. */
static void
fill_set(const Column *column, const JsonNode *codes, uint32 *set)
{
	memset(set, 0xFF, sizeof(uint32) * forest_set_words(column->codes));
	json_for_each(code, codes)
		if (code->u.number < column->codes)
		{
			uint32		number = (uint32) code->u.number;

			set[number / 32] &= ~((uint32) 1 << (number % 32));
		}
}

/* What the nodes are written to. */
typedef struct NodeArrays
{
	ForestNode *nodes;
	double	   *values;
	uint32	   *node_sets;
	uint32	   *sets;
	uint32		next_set;
} NodeArrays;

/* Lays out a tree level by level, so that siblings are neighbours. */
static void
place_tree(Builder *self, const Tree *tree, uint32 start, NodeArrays *arrays)
{
	int			waiting[2 * TREE_MOST_NODES + 1];
	uint32		end = 1;

	waiting[0] = tree->nodes > 0 ? 0 : -1;
	for (uint32 i = 0; i < end; i++)
	{
		int			node = waiting[i];
		const Column *column;
		uint32		left = start + end;
		int			place = FOREST_NO_PLACE;

		if (node < 0)
		{
			arrays->values[start + i] = tree->value[-1 - node];
			arrays->nodes[start + i] = forest_node(0, place, start + i);
			continue;
		}
		waiting[end++] = tree->left[node];
		waiting[end++] = tree->right[node];
		column = &self->column[tree->feature[node]];
		if (column->category < 0)
			place = place_of(column, (float) tree->threshold[node]);
		else
		{
			arrays->node_sets[start + i] = arrays->next_set;
			fill_set(column, tree->codes[node], arrays->sets + arrays->next_set);
			arrays->next_set += forest_set_words(column->codes);
		}
		arrays->nodes[start + i] = forest_node(column->number * FOREST_ROWS, place, left);
	}
}

/*
 * Counts the words of all sets, none if no node has one.  They begin with an
 * empty set, as long as the longest, for nodes that have none, and end with
 * another one, so that a set may begin at any word before it.
 */
static Size
count_set_words(const Builder *self, Size *first)
{
	Size		words = 0;

	*first = 0;
	for (int i = 0; i < self->count; i++)
		for (int node = 0; node < self->trees[i].nodes; node++)
		{
			const Column *column = &self->column[self->trees[i].feature[node]];

			if (column->category < 0)
				continue;
			words += forest_set_words(column->codes);
			*first = Max(*first, forest_set_words(column->codes));
		}
	return words + 2 * *first;
}

static void
write_trees(Builder *self, ImageWriter *writer)
{
	Compilation *compilation = self->compilation;
	uint32	   *roots = compilation_new(compilation, uint32, self->count);
	uint8	   *depths = compilation_new(compilation, uint8, self->count);
	Size		first_set;
	Size		words = count_set_words(self, &first_set);
	NodeArrays	arrays = {.next_set = (uint32) first_set};
	int			nodes = self->nodes + (self->nodes > 0 ? FOREST_SPARE_NODES : 0);
	uint32		start = 0;

	if (words > MOST_SET_WORDS)
		compilation_unsuitable(compilation);
	if (!compilation_ready(compilation))
		return;
	arrays.nodes = compilation_new(compilation, ForestNode, nodes);
	arrays.values = compilation_new(compilation, double, nodes);
	arrays.node_sets = compilation_new(compilation, uint32, nodes);
	arrays.sets = compilation_new(compilation, uint32, words);
	for (int i = 0; i < self->count; i++)
	{
		roots[i] = start;
		depths[i] = self->trees[i].depth;
		place_tree(self, &self->trees[i], start, &arrays);
		start += 2 * self->trees[i].nodes + 1;
	}
	image_write_whole(writer, self->count);
	image_write_copy(writer, roots, self->count, sizeof(uint32));
	image_write_copy(writer, depths, self->count, sizeof(uint8));
	image_write_copy(writer, arrays.nodes, nodes, sizeof(ForestNode));
	image_write_copy(writer, arrays.values, nodes, sizeof(double));
	image_write_copy(writer, arrays.node_sets, words > 0 ? nodes : 0, sizeof(uint32));
	image_write_copy(writer, arrays.sets, words, sizeof(uint32));
}

void
forest_compile(ImageWriter *writer, const ModelSource *source)
{
	Compilation *compilation = source->compilation;
	const Features *features = source->features;
	Builder		self = {.compilation = compilation, .features = features};
	Size		length;
	const char *bytes = weights_bytes(source->weights, source->prefix, "trees", &length);
	const JsonNode *json = compilation_ready(compilation) ? json_parse(compilation, bytes,
																	   length) : NULL;
	const JsonNode *trees;
	int			place = 0;

	self.columns = features->width - features->ranks + features->categories.count;
	if (!compilation_ready(compilation))
		return;
	if (json_whole(compilation, json_member(json, "columns"), 0, PG_INT32_MAX,
				   -1) != self.columns ||
		json_whole(compilation, json_member(json, "outputs"), 0, PG_INT32_MAX,
				   -1) != source->outputs)
		compilation_damaged(compilation, "its trees are for other features or outputs");
	trees = json_array(compilation, json_member(json, "trees"));
	if (trees->count % source->outputs != 0)
		compilation_damaged(compilation, "its trees are not as many for each output");
	if (trees->count > MOST_TREES)
		compilation_unsuitable(compilation);
	if (!compilation_ready(compilation))
		return;
	self.trees = compilation_new(compilation, Tree, trees->count);
	self.column = compilation_new(compilation, Column, self.columns);
	for (int i = 0; i < self.columns; i++)
	{
		int			category = i - features->plain;

		self.column[i].category = category >= 0 && category < features->categories.count ?
			category : -1;
	}
	json_for_each(tree, trees)
	{
		if (!read_tree(&self, tree, &self.trees[place++]))
			compilation_damaged(compilation, "one of its trees is damaged");
		if (!compilation_ready(compilation))
			return;
	}
	self.count = place;
	if (!compilation_weigh(compilation, self.nodes, 1))
		return;
	collect_codes(&self);
	collect_thresholds(&self);
	write_columns(&self, writer);
	write_trees(&self, writer);
}
