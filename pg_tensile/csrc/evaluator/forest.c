/*
 * forest.c: the architecture boosted.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include "evaluator/forest.h"

#define MOST_TREES (1 << 22)
#define MOST_NODES (1 << 22)
#define MOST_DEPTH 32

static void
open_column(ForestColumn *self, ImageReader *reader, const Features *features)
{
	Size		count;

	self->category = (int) image_whole(reader, -1, features->categories.count - 1);
	self->number = (int) image_whole(reader, 0, Max(features->width - 1, 0));
	self->values = image_some(reader, sizeof(float), FOREST_NO_PLACE - 1, &count);
	self->thresholds = (int) count;
	if (self->category < 0 && features->width == 0)
		reader->is_damaged = true;
}

/* Checks that no descent leaves the arrays. */
static void
check_nodes(const Forest *self, ImageReader *reader, Size nodes, Size words)
{
	bool		is_wrong = false;

	for (int i = 0; i < self->trees; i++)
		is_wrong |= self->roots[i] >= nodes || self->depths[i] > MOST_DEPTH;
	for (Size i = 0; i < nodes; i++)
	{
		const ForestNode *node = &self->nodes[i];

		is_wrong |= node->left + (Size) 1 >= nodes && (node->left >= nodes || node->place != FOREST_NO_PLACE ||
													   (self->node_sets != NULL && self->node_sets[i] != 0));
		is_wrong |= node->column % FOREST_ROWS != 0 || node->column / FOREST_ROWS >= Max(self->columns, 1);
	}
	for (Size i = 0; i < nodes && self->node_sets != NULL; i++)
	{
		uint32		start = self->node_sets[i];

		is_wrong |= start + (Size) 2 > words || start + (Size) 2 + self->sets[Min(start, words - 1)] > words;
		is_wrong |= start != 0 && self->nodes[i].place != FOREST_NO_PLACE;
	}
	if (is_wrong || (self->node_sets != NULL && (self->sets[0] != 0 || self->sets[1] != 0)))
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
	else if (node_sets != nodes || words < 2)
		reader->is_damaged = true;
	if (!reader->is_damaged)
		check_nodes(self, reader, nodes, words);
	/* Columns that a node without columns compares, a leaf, exist as well. */
	self->places = palloc0(sizeof(uint16) * FOREST_ROWS * Max(self->columns, 1));
	self->sums = palloc0(sizeof(double) * FOREST_ROWS * outputs);
}

void
forest_close(Forest *self)
{
	pfree(self->column);
	pfree(self->places);
	pfree(self->sums);
}

/* The places of some rows in each column: the number of smaller thresholds, or the code. */
static void
find_places(Forest *self, const FeatureBlock *block, int first, int rows)
{
	for (int i = 0; i < self->columns; i++)
	{
		const ForestColumn *column = &self->column[i];
		uint16	   *places = self->places + (Size) i * FOREST_ROWS;
		const float *values = column->values;
		const float *numbers = block->numbers + (Size) first * block->stride + column->number;
		float		x[FOREST_ROWS];
		uint32		found[FOREST_ROWS] = {0};
		int			length = column->thresholds;

		if (column->category >= 0)
		{
			for (int row = 0; row < rows; row++)
				places[row] = Min(block->codes[(Size) (first + row) * self->categories + column->category],
								  FOREST_NO_PLACE);
			continue;
		}
		for (int row = 0; row < FOREST_ROWS; row++)
			x[row] = numbers[row < rows ? (Size) row * block->stride : 0];
		while (length > 1)
		{
			int			half = length / 2;

			for (int row = 0; row < FOREST_ROWS; row++)
				found[row] += values[found[row] + half - 1] < x[row] ? half : 0;
			length -= half;
		}
		for (int row = 0; row < FOREST_ROWS; row++)
			places[row] = found[row] + (length > 0 && values[found[row]] < x[row]);
	}
}

/* The child of a node. */
static inline uint32
child(const Forest *self, uint32 index, const uint16 *places, int row, bool has_sets)
{
	const ForestNode *node = &self->nodes[index];
	uint32		place = places[node->column + row];
	uint32		right = node->left + (place > node->place);

	if (has_sets)
	{
		/* Both comparisons are made, since which of them counts can be predicted as little as their results. */
		const uint32 *set = self->sets + self->node_sets[index];
		uint32		word = Min(place / 32, set[0]);

		right += (set[1 + word] >> (place % 32)) & 1;
	}
	return right;
}

/* Adds the leaves of all trees for a group of rows. */
static inline void
add_rows(Forest *self, bool has_sets)
{
	const uint16 *places = self->places;
	int			output = 0;

	for (int tree = 0; tree < self->trees; tree++)
	{
		uint32		at[FOREST_ROWS];
		double	   *sums = self->sums + output;

		for (int row = 0; row < FOREST_ROWS; row++)
			at[row] = self->roots[tree];
		for (int level = 0; level < self->depths[tree]; level++)
#pragma GCC unroll 8
			for (int row = 0; row < FOREST_ROWS; row++)
				at[row] = child(self, at[row], places, row, has_sets);
		for (int row = 0; row < FOREST_ROWS; row++)
			sums[row * self->outputs] += self->values[at[row]];
		if (++output == self->outputs)
			output = 0;
	}
}

/* Adds the leaves of all trees for one row of the group, several trees at once. */
static inline void
add_row(Forest *self, int row, bool has_sets)
{
	const uint16 *places = self->places;
	double	   *sums = self->sums + (Size) row * self->outputs;
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
#pragma GCC unroll 8
			for (int i = 0; i < FOREST_ROWS; i++)
				at[i] = child(self, at[i], places, row, has_sets);
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
	for (int first = 0; first < block->rows; first += FOREST_ROWS)
	{
		int			rows = Min(block->rows - first, FOREST_ROWS);

		memset(self->sums, 0, sizeof(double) * FOREST_ROWS * self->outputs);
		find_places(self, block, first, rows);
		if (rows > FOREST_ROWS / 2)
		{
			if (self->node_sets == NULL)
				add_rows(self, false);
			else
				add_rows(self, true);
		}
		else
			for (int row = 0; row < rows; row++)
			{
				if (self->node_sets == NULL)
					add_row(self, row, false);
				else
					add_row(self, row, true);
			}
		for (int row = 0; row < rows; row++)
			for (int i = 0; i < self->outputs; i++)
				y[(Size) (first + row) * stride + i] = (float) self->sums[row * self->outputs + i];
	}
}
