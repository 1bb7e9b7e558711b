/*
 * forest.c: the architecture boosted.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include "evaluator/forest.h"
#include "evaluator/processor.h"

#define MOST_TREES (1 << 22)
#define MOST_NODES (1 << 22)
#define MOST_DEPTH 32

static void
open_column(ForestColumn *self, ImageReader *reader, const Features *features)
{
	Size		count;

	self->category = (int) image_whole(reader, -1, features->categories.count - 1);
	self->codes = (int) image_whole(reader, 0, FOREST_MOST_CODES);
	self->number = (int) image_whole(reader, 0, Max(features->width - 1, 0));
	self->values = image_some(reader, sizeof(float), FOREST_NO_PLACE - 1, &count);
	self->thresholds = (int) count;
	if (self->category < 0 && features->width == 0)
		reader->is_damaged = true;
}

/*
 * Checks that no descent leaves the arrays.  Nodes are many, and each session
 * checks them: so a number is wrong if it makes a difference negative, and the
 * differences are collected without a branch.
 */
static void
check_nodes(const Forest *self, ImageReader *reader, Size nodes, Size words)
{
	int64		last_left = (int64) nodes - 1 - FOREST_SPARE_NODES;
	int64		last_column = (Max(self->columns, 1) - 1) * FOREST_ROWS;
	Size		longest = forest_set_words(0);
	int64		differences = 0;

	for (int i = 0; i < self->trees; i++)
		if (self->roots[i] >= nodes || self->depths[i] > MOST_DEPTH)
			reader->is_damaged = true;
	for (Size i = 0; i < nodes; i++)
	{
		ForestNode	node = self->nodes[i];

		differences |= last_left - forest_left(node);
		differences |= last_column - forest_column(node);
	}
	for (int i = 0; i < self->columns; i++)
		longest = Max(longest, forest_set_words(self->column[i].codes));
	for (Size i = 0; self->node_sets != NULL && i < nodes; i++)
		differences |= (int64) (words - longest) - self->node_sets[i];
	if (differences < 0)
		reader->is_damaged = true;
}

void
forest_open(Forest *self, ImageReader *reader, const Features *features, int outputs)
{
	Size		nodes,
				node_sets,
				words;

	self->outputs = outputs;
	self->categories = features->categories.count;
	self->columns = (int) image_whole(reader, 0, FOREST_MOST_COLUMNS);
	self->column = palloc0(sizeof(ForestColumn) * self->columns + 1);
	for (int i = 0; i < self->columns && !reader->is_damaged; i++)
		open_column(&self->column[i], reader, features);
	self->trees = (int) image_whole(reader, 0, MOST_TREES);
	self->roots = image_array(reader, uint32, self->trees);
	self->depths = image_array(reader, uint8, self->trees);
	self->nodes = image_some(reader, sizeof(ForestNode), MOST_NODES, &nodes);
	self->values = image_array(reader, double, nodes);
	self->node_sets = image_some(reader, sizeof(uint32), MOST_NODES, &node_sets);
	self->sets = image_some(reader, sizeof(uint32), IMAGE_MOST_BYTES / sizeof(uint32), &words);
	if (node_sets == 0)
		self->node_sets = NULL;
	else if (node_sets != nodes)
		reader->is_damaged = true;
	if (!reader->is_damaged)
		check_nodes(self, reader, nodes, words);
}

void
forest_prepare(Forest *self, int rows)
{
	int			groups = (rows + FOREST_ROWS - 1) / FOREST_ROWS;

	/* Leaves compare the first column, if there is none. */
	self->places = palloc0(sizeof(uint32) * FOREST_ROWS * groups * Max(self->columns, 1));
	self->sums = palloc(sizeof(double) * FOREST_ROWS * groups * self->outputs);
}

void
forest_close(Forest *self)
{
	pfree(self->column);
	if (self->places != NULL)
		pfree(self->places);
	if (self->sums != NULL)
		pfree(self->sums);
}

/* The places of a group's rows in each column: the number of smaller thresholds, or the code. */
static void
find_places(const Forest *self, const FeatureBlock *block, int first, int rows, uint32 *group)
{
	for (int i = 0; i < self->columns; i++)
	{
		const ForestColumn *column = &self->column[i];
		uint32	   *places = group + (Size) i * FOREST_ROWS;
		const float *values = column->values;
		const float *numbers = block->numbers + (Size) first * block->stride + column->number;
		float		x[FOREST_ROWS];
		uint32		found[FOREST_ROWS] = {0};
		int			length = column->thresholds;

		if (column->category >= 0)
		{
			const int32 *codes = block->codes + (Size) first * self->categories + column->category;

			for (int row = 0; row < rows; row++)
				places[row] = forest_value(0, Min(codes[row * self->categories], column->codes));
			continue;
		}
		for (int row = 0; row < FOREST_ROWS; row++)
			x[row] = numbers[row < rows ? (Size) row * block->stride : 0];
		while (length > 1)
		{
			int			half = length / 2;

			for (int row = 0; row < FOREST_ROWS; row++)
				found[row] += half * (values[found[row] + half - 1] < x[row]);	/* no branch */
			length -= half;
		}
		for (int row = 0; row < FOREST_ROWS; row++)
			places[row] = forest_value(found[row] + (length > 0 && values[found[row]] < x[row]), 0);
	}
}

/* The child of a node. */
static pg_attribute_always_inline uint32
child(const Forest *self, uint32 index, const uint32 *places, int row, bool has_sets)
{
	ForestNode	node = self->nodes[index];
	uint32		value = places[forest_column(node) + row];

	/* The node has its column where a value has a code, which changes no comparison of places. */
	uint32		next = forest_left(node) + (value > (uint32) node);

	if (has_sets)
	{
		/* Both comparisons are made: which of them counts can be predicted as little as they. */
		uint32		code = (uint16) value;

		next += (self->sets[self->node_sets[index] + code / 32] >> (code % 32)) & 1;
	}
	return next;
}

/*
 * Adds the leaves of all trees for groups of rows.  A tree is done with all of
 * them before the next one, since all trees together do not stay in the cache.
 */
static pg_attribute_always_inline void
add_groups(Forest *self, int groups, bool has_sets)
{
	Size		group_places = (Size) FOREST_ROWS * self->columns;
	int			output = 0;

	for (int tree = 0; tree < self->trees; tree++)
	{
		const uint32 *places = self->places;
		double	   *sums = self->sums + output;

		for (int group = 0; group < groups; group++)
		{
			uint32		at[FOREST_ROWS];

			for (int row = 0; row < FOREST_ROWS; row++)
				at[row] = self->roots[tree];
			for (int level = 0; level < self->depths[tree]; level++)
				UNROLLED(for (int row = 0; row < FOREST_ROWS; row++))
					at[row] = child(self, at[row], places, row, has_sets);
			for (int row = 0; row < FOREST_ROWS; row++, sums += self->outputs)
				*sums += self->values[at[row]];
			places += group_places;
		}
		if (++output == self->outputs)
			output = 0;
	}
}

/*
 * Adds the leaves of all trees for one row, several trees at once, in a
 * function that has all registers.
 */
static pg_noinline void
add_row(const Forest *self, const uint32 *places, double *sums, bool has_sets)
{
	int			output = 0;

	for (int tree = 0; tree < self->trees; tree += FOREST_ROWS)
	{
		int			trees = Min(self->trees - tree, FOREST_ROWS);
		uint32		at[FOREST_ROWS];
		int			depth = 0;

		for (int i = 0; i < FOREST_ROWS; i++)
		{
			int			own = tree + Min(i, trees - 1);

			at[i] = self->roots[own];
			depth = Max(depth, self->depths[own]);
		}
		for (int level = 0; level < depth; level++)
			UNROLLED(for (int i = 0; i < FOREST_ROWS; i++))
				at[i] = child(self, at[i], places, 0, has_sets);
		for (int i = 0; i < trees; i++)
		{
			sums[output] += self->values[at[i]];
			if (++output == self->outputs)
				output = 0;
		}
	}
}

void
forest_outputs(Forest *self, const FeatureBlock *block, float *y, int stride)
{
	int			groups = (block->rows + FOREST_ROWS - 1) / FOREST_ROWS;
	int			rest = block->rows % FOREST_ROWS;
	Size		group_places = (Size) FOREST_ROWS * self->columns;

	memset(self->sums, 0, sizeof(double) * FOREST_ROWS * groups * self->outputs);
	for (int group = 0; group < groups; group++)
	{
		int			first = group * FOREST_ROWS;

		find_places(self, block, first, Min(block->rows - first, FOREST_ROWS),
					self->places + group * group_places);
	}
	/* A few rows of a last group, or alone, take less time one by one. */
	if (rest > 0 && rest <= FOREST_ROWS / 2)
		groups--;
	else
		rest = 0;
	if (self->node_sets == NULL)
		add_groups(self, groups, false);
	else
		add_groups(self, groups, true);
	for (int row = 0; row < rest; row++)
	{
		const uint32 *places = self->places + groups * group_places + row;
		double	   *sums = self->sums + (Size) (groups * FOREST_ROWS + row) * self->outputs;

		if (self->node_sets == NULL)
			add_row(self, places, sums, false);
		else
			add_row(self, places, sums, true);
	}
	for (int row = 0; row < block->rows; row++)
		for (int i = 0; i < self->outputs; i++)
			y[(Size) row * stride + i] = (float) self->sums[(Size) row * self->outputs + i];
}
