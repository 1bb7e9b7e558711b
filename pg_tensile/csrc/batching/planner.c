/*
 * planner.c: batches of predictions in plans.
 *
 * A hook takes the finished plan, because no earlier hook sees the target lists
 * of scans and joins.  Where a node computes calls of predict, one that
 * collects rows is put above or below it (placement.c).
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "jit/jit.h"
#include "miscadmin.h"
#include "nodes/extensible.h"
#include "nodes/parsenodes.h"
#include "optimizer/planner.h"

#include "base/compat.h"
#include "base/guc.h"
#include "batching/functions.h"
#include "batching/placement.h"
#include "batching/planner.h"
#include "batching/plans.h"
#include "batching/scan.h"

static planner_hook_type previous_planner = NULL;

static Plan *visit(PlanWalk *walk, Plan *plan, RowUse use);

/* ---- all nodes ---- */

static bool
is_known_at_start(const Node *number)
{
	return number == NULL || IsA(number, Const) ||
		(IsA(number, Param) && ((const Param *) number)->paramkind == PARAM_EXTERN);
}

/* The limit that a node sets, if it is known when the plan starts. */
static RowLimit
limit_of(const Limit *limit)
{
	if (limit->limitOption != LIMIT_OPTION_COUNT || limit->limitCount == NULL ||
		!is_known_at_start(limit->limitCount) || !is_known_at_start(limit->limitOffset))
		return (RowLimit) {NULL, NULL};
	return (RowLimit) {limit->limitCount, limit->limitOffset};
}

/* How a node with this use uses the rows of its first input. */
static RowUse
use_of_input(const Plan *plan, RowUse use)
{
	RowUse		input = use;

	input.limit = (RowLimit) {NULL, NULL};
	switch (nodeTag(plan))
	{
		case T_Limit:
			input.all_are_read = false;
			input.limit = limit_of((const Limit *) plan);
			break;
		case T_WindowAgg:		/* may end as soon as no further row fits */
			input.all_are_read = use.all_are_read && ((const WindowAgg *) plan)->runCondition == NIL;
			break;
		case T_Gather:
		case T_GatherMerge:
			input.limit = use.limit;
			input.in_workers = true;
			break;
		case T_Result:
		case T_SubqueryScan:
			if (plan->qual == NIL)
				input.limit = use.limit;
			break;
		case T_Hash:
		case T_Sort:
			input.all_are_read = true;
			input.marks = false;
			break;
		case T_Material:
			input.marks = false;
			break;
		case T_Agg:
			input.all_are_read = use.all_are_read || ((const Agg *) plan)->aggstrategy == AGG_PLAIN ||
				((const Agg *) plan)->aggstrategy == AGG_HASHED;
			input.marks = false;
			break;
		case T_MergeJoin:		/* ends when one of its inputs has ended */
		case T_Memoize:
			input.all_are_read = false;
			break;
		case T_ModifyTable:
			input.all_are_read = use.all_are_read || ((const ModifyTable *) plan)->returningLists == NIL;
			break;
		default:
			break;
	}
	return input;
}

static RowUse
use_of_inner(const Plan *plan, RowUse use)
{
	RowUse		inner = use_of_input(plan, use);
	const Join *join = (const Join *) plan;

	if (IsA(plan, MergeJoin))
		inner.marks = !((const MergeJoin *) plan)->skip_mark_restore;
	if (IsA(plan, NestLoop) && (join->inner_unique || join->jointype == JOIN_SEMI || join->jointype == JOIN_ANTI))
		inner.all_are_read = false;
	return inner;
}

static void
visit_all(PlanWalk *walk, List *plans, RowUse use)
{
	ListCell   *cell;

	foreach(cell, plans)
		if (!((Plan *) lfirst(cell))->async_capable)
			lfirst(cell) = visit(walk, lfirst(cell), use);
}

static void
visit_inputs(PlanWalk *walk, Plan *plan, RowUse use)
{
	RowUse		input = use_of_input(plan, use);

	if (IsA(plan, ForeignScan) || IsA(plan, CustomScan) || IsA(plan, BitmapHeapScan))
		return;
	if (plan->lefttree != NULL)
		plan->lefttree = visit(walk, plan->lefttree, input);
	if (plan->righttree != NULL)
		plan->righttree = visit(walk, plan->righttree, use_of_inner(plan, use));
	if (IsA(plan, SubqueryScan))
		((SubqueryScan *) plan)->subplan = visit(walk, ((SubqueryScan *) plan)->subplan, input);
	if (IsA(plan, Append))
		visit_all(walk, ((Append *) plan)->appendplans, input);
	if (IsA(plan, MergeAppend))
		visit_all(walk, ((MergeAppend *) plan)->mergeplans, input);
	if (IsA(plan, Agg) && !input.marks)
		batch_aggregates(walk, (Agg *) plan, input);
}

/* Returns what takes the place of the plan. */
static Plan *
visit(PlanWalk *walk, Plan *plan, RowUse use)
{
	check_stack_depth();
	if (IsA(plan, RecursiveUnion))
		return plan;
	visit_inputs(walk, plan, use);
	if (use.marks)
		return plan;
	plan = batch_conditions(walk, plan, use);
	return batch_target(walk, plan, use);
}

/* ---- the hook ---- */

/*
 * Compiles expressions only where they cost enough without the predictions,
 * which are no expressions any more (as standard_planner() decides it).
 */
static void
choose_compilation(PlannedStmt *statement, Cost cost)
{
	if (statement->jitFlags == PGJIT_NONE)
		return;
	if (cost <= jit_above_cost)
		statement->jitFlags = PGJIT_NONE;
	if (jit_optimize_above_cost < 0 || cost <= jit_optimize_above_cost)
		statement->jitFlags &= ~PGJIT_OPT3;
	if (jit_inline_above_cost < 0 || cost <= jit_inline_above_cost)
		statement->jitFlags &= ~PGJIT_INLINE;
}

static void
batch_predictions(PlannedStmt *statement)
{
	PlanWalk	walk = {.statement = statement};
	const RowUse use = {false};
	ListCell   *cell;

	walk.next_id = 1 + plans_last_id(statement);
	foreach(cell, statement->subplans)
		if (lfirst(cell) != NULL)
			lfirst(cell) = visit(&walk, lfirst(cell), use);
	statement->planTree = visit(&walk, statement->planTree, use);
	choose_compilation(statement, statement->planTree->total_cost - walk.cost);
}

static PlannedStmt *
plan_with_batches(TENSILE_PLANNER_PARAMS)
{
	PlannedStmt *statement = previous_planner ? previous_planner(TENSILE_PLANNER_ARGUMENTS) :
		standard_planner(TENSILE_PLANNER_ARGUMENTS);

	if (tensile_predict_batching && (options & CURSOR_OPT_SCROLL) == 0 &&
		statement->commandType != CMD_UTILITY && batched_functions_possible(statement))
		batch_predictions(statement);
	return statement;
}

void
tensile_install_batching(void)
{
	RegisterCustomScanMethods(&predict_scan_methods);
	previous_planner = planner_hook;
	planner_hook = plan_with_batches;
}
