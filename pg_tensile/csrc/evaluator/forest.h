/*
 * forest.h: the architecture boosted (pg_tensile/execution/models/trees.py).
 *
 * A node compares the place of a number among the thresholds of its column, so
 * that a row's columns are searched once and nodes are small.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_FOREST_H
#define TENSILE_FOREST_H

#include "evaluator/image.h"
#include "evaluator/model_source.h"

/*
 * The right child stands behind the left one.  A row goes right if its place in
 * the column is above this one, or if the node's set has its code.  A leaf is
 * its own left child, and no place is above its own.
 */
typedef struct ForestNode
{
	uint16		column;			/* times FOREST_ROWS */
	uint16		place;
	uint32		left;
} ForestNode;

/* Rows, or trees of one row, that descend at once, since each step waits for memory. */
#define FOREST_ROWS 8
#define FOREST_MOST_COLUMNS (PG_UINT16_MAX / FOREST_ROWS)
#define FOREST_NO_PLACE PG_UINT16_MAX	/* which none is above */

/* A column that some node compares. */
typedef struct ForestColumn
{
	int			number;			/* among a row's numbers, or -1 for a category */
	int			category;
	int			thresholds;
	const float *values;		/* thresholds, ascending */
} ForestColumn;

typedef struct Forest
{
	int			outputs;
	int			trees;
	int			columns;
	ForestColumn *column;
	const uint32 *roots;		/* [trees] */
	const uint8 *depths;		/* [trees] */
	const ForestNode *nodes;
	const double *values;		/* [nodes], of leaves */
	const uint32 *node_sets;	/* [nodes], where the set of codes begins that go right; NULL: no node has any */
	const uint32 *sets;			/* of each: number of words, the words, and one for larger codes */
	uint16	   *places;			/* workspace [columns][FOREST_ROWS] */
	double	   *sums;			/* workspace [FOREST_ROWS][outputs] */
	int			categories;
} Forest;

extern void forest_open(Forest *self, ImageReader *reader, const Features *features, int outputs);
extern void forest_close(Forest *self);
extern void forest_outputs(Forest *self, const FeatureBlock *block, float *y, int stride);

#endif
