/*
 * placement.h: where a node that predicts is put into a plan.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_PLACEMENT_H
#define TENSILE_PLACEMENT_H

#include "nodes/plannodes.h"

#include "batching/node.h"

/* What the nodes above do with the rows of a node. */
typedef struct RowUse
{
	bool		all_are_read;	/* before the statement returns any */
	bool		marks;			/* they may go back to an earlier row */
	bool		in_workers;		/* of a parallel query */
	RowLimit	limit;
} RowUse;

/* A walk through a plan, whose inputs are visited before their node. */
typedef struct PlanWalk
{
	PlannedStmt *statement;
	int			next_id;		/* of a plan node */
	Cost		cost;			/* of the predictions that nodes compute */
} PlanWalk;

/* Batch calls of a node with this use; return what takes its place. */
extern Plan *batch_target(PlanWalk *walk, Plan *plan, RowUse use);
extern Plan *batch_conditions(PlanWalk *walk, Plan *plan, RowUse use);

/* Batches calls in the arguments of aggregates; `use` is that of the input. */
extern void batch_aggregates(PlanWalk *walk, Agg *agg, RowUse use);

#endif
