/*
 * node.h: the plan node that predicts for the rows of the node below it.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_BATCHING_NODE_H
#define TENSILE_BATCHING_NODE_H

#include "nodes/plannodes.h"

#define PREDICT_NODE_NAME "Predict"

/* The most rows that the node above asks for: LIMIT and OFFSET; NULL: no limit. */
typedef struct RowLimit
{
	Node	   *count;
	Node	   *offset;
} RowLimit;

/* How rows are read ahead and passed on. */
typedef struct NodeUse
{
	RowLimit	limit;
	bool		errors_wait;	/* errors of the input can wait until their row is due */
	bool		all_are_read;	/* before the statement returns any row */
	bool		aggregated;		/* the node above looks at a row before it evaluates calls */
} NodeUse;

/* What a node has in its CustomScan. */
typedef struct PredictNode
{
	List	   *calls;			/* of FuncExpr, over the columns of the input (OUTER_VAR) */
	List	   *functions;		/* of int: numbers of batched functions, for each call */
	List	   *columns;		/* of int: columns of the input that are passed on */
	NodeUse		use;
} PredictNode;

extern PredictNode predict_node_decode(const CustomScan *scan);

/*
 * Puts a node with these calls on top of `input`, which returns the columns
 * of `target` (TargetEntry).  If `input` projects, the target and the calls
 * are in terms of what the target list of `input` is made of, and it gets
 * another one; else they refer to the columns of `input` (OUTER_VAR).  `qual`:
 * conditions in the same terms for the rows that are passed on.
 */
extern Plan *predict_node_make(Plan *input, bool projects, List *target, List *calls, List *qual,
							   NodeUse use, const PlannedStmt *statement, int node_id);

/* The expression that stands for call number `call` of the node in its terms. */
extern Var *predict_node_column(const FuncExpr *call, int varno, int column);

/* Can the node compute expressions of its input's columns? */
extern bool predict_node_fits(const Plan *input);

extern bool is_predict_node(const Plan *plan);

/* In the postmaster: makes the node known to all processes. */
extern const struct CustomScanMethods predict_scan_methods;

#endif
