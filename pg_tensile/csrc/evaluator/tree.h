/*
 * tree.h: a tree of a stored version (pg_tensile/execution/models/trees.py).
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_TREE_H
#define TENSILE_TREE_H

#include "evaluator/json.h"

#define TREE_MOST_NODES 31			/* of a tree: 32 leaves */

/* A tree as its JSON has it. */
typedef struct Tree
{
	int			nodes;
	int			feature[TREE_MOST_NODES];
	double		threshold[TREE_MOST_NODES];
	const JsonNode *codes[TREE_MOST_NODES];
	int			left[TREE_MOST_NODES];	/* below 0: -1 - leaf */
	int			right[TREE_MOST_NODES];
	double		value[TREE_MOST_NODES + 1];
	int			depth;
} Tree;

/* Reads a tree; false unless every row reaches one leaf of it. */
extern bool tree_read(Tree *self, Compilation *compilation, const JsonNode *json);

#endif
