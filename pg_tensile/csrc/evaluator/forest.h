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
 * A node in a word, which is loaded at once: its column times FOREST_ROWS in 16
 * bits, a place in the next 16 and the left child in the upper 32.  The right
 * child stands behind the left one.  A row goes right if its place in the
 * column is above the node's, or if the node's set has its code.  A leaf is its
 * own left child, and no place is above its own.
 */
typedef uint64 ForestNode;

#define forest_node(column, place, left) \
	((ForestNode) (column) | (ForestNode) (place) << 16 | (ForestNode) (left) << 32)
#define forest_column(node) ((uint16) (node))
#define forest_place(node) ((uint16) ((node) >> 16))
#define forest_left(node) ((uint32) ((node) >> 32))

/* What a node compares: a place in the upper 16 bits, or a code in the lower ones. */
#define forest_value(place, code) ((uint32) (place) << 16 | (uint32) (code))

/* Rows, or trees of one row, that descend at once, since each step waits for memory. */
#define FOREST_ROWS 8
#define FOREST_MOST_COLUMNS (PG_UINT16_MAX / FOREST_ROWS)
#define FOREST_NO_PLACE PG_UINT16_MAX	/* which none is above */
#define FOREST_MOST_CODES PG_UINT16_MAX

/* The words of a set of the codes of a column, and of all larger ones. */
#define forest_set_words(codes) ((Size) (codes) / 32 + 1)

/*
 * Nodes after the last one, because a node has its left child, the right one,
 * and, in a damaged image, one behind.
 */
#define FOREST_SPARE_NODES 2

/* A column that some node compares. */
typedef struct ForestColumn
{
	int			number;			/* among a row's numbers, or -1 for a category */
	int			category;
	int			codes;			/* of a category, that some set has; larger ones are as this one */
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
	const uint32 *node_sets;	/* [nodes], where the set of codes begins; NULL: there are none */
	const uint32 *sets;			/* words of the codes that go right; the first set is empty, and
								 * behind the last one are as many as the longest has */
	uint32	   *places;			/* workspace [groups][columns][FOREST_ROWS]: forest_value() */
	double	   *sums;			/* workspace [rows][outputs] */
	int			categories;
} Forest;

extern void forest_open(Forest *self, ImageReader *reader, const Features *features, int outputs);

/* Allocates the workspace for this number of rows. */
extern void forest_prepare(Forest *self, int rows);
extern void forest_close(Forest *self);
extern void forest_outputs(Forest *self, const FeatureBlock *block, float *y, int stride);

#endif
