/*
 * placement.c: where a node that predicts is put into a plan.
 *
 * It is put
 *
 * - on top of a node whose target list has calls,
 * - on top of a scan whose last conditions have them: these become conditions of
 *   the new node, so that their order, and with it the levels of security,
 *   stays as it was, and
 * - between a node that aggregates them and its input.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "nodes/makefuncs.h"
#include "nodes/nodeFuncs.h"
#include "optimizer/clauses.h"
#include "optimizer/plancat.h"

#include "batching/calls.h"
#include "batching/functions.h"
#include "batching/node.h"
#include "batching/placement.h"
#include "batching/read_ahead.h"

/* Makes the node, and adds what its predictions cost. */
static Plan *
make_node(PlanWalk *walk, Plan *input, bool projects, List *target, List *calls, List *qual,
		  NodeUse use)
{
	QualCost	cost = {0, 0};
	ListCell   *cell;

	foreach(cell, calls)
		add_function_cost(NULL, ((FuncExpr *) lfirst(cell))->funcid, NULL, &cost);
	walk->cost += cost.startup + cost.per_tuple * input->plan_rows;
	return predict_node_make(input, projects, target, calls, qual, use, walk->statement,
							 walk->next_id++);
}

/* ---- calls ---- */

/* How harmless the rows of calls have to be. */
static ReadAhead
least_of(RowUse use)
{
	return use.all_are_read ? READ_AHEAD_IF_ALL_ARE_READ : READ_AHEAD_ALWAYS;
}

static bool
has_subplan_of_assignments(Node *node, void *context)
{
	if (node == NULL)
		return false;
	if (IsA(node, SubPlan) && ((SubPlan *) node)->subLinkType == MULTIEXPR_SUBLINK)
		return true;
	return expression_tree_walker(node, has_subplan_of_assignments, context);
}

static ReadAhead
read_ahead_calls(List *calls, const PlannedStmt *statement)
{
	ReadAhead	result = READ_AHEAD_ALWAYS;
	ListCell   *cell;

	foreach(cell, calls)
		result = Min(result, read_ahead_expression((Node *) row_of_call(lfirst(cell)), statement));
	return result;
}

static NodeUse
use_by_node(RowUse use, ReadAhead allowed)
{
	return (NodeUse) {
		.limit = use.limit,
		.errors_wait = allowed == READ_AHEAD_ALWAYS,
		.all_are_read = use.all_are_read,
		.in_workers = use.in_workers
	};
}

/* Innermost calls first. */
Plan *
batch_target(PlanWalk *walk, Plan *plan, RowUse use)
{
	ReadAhead	input;
	List	   *calls;

	while (predict_node_fits(plan) &&
		   (calls = calls_in((Node *) plan->targetlist, walk->statement, least_of(use))) != NIL &&
		   !has_subplan_of_assignments((Node *) plan->targetlist, NULL) &&
		   (input = read_ahead_input(plan, walk->statement)) >= least_of(use))
		plan = make_node(walk, plan, true, plan->targetlist, calls, NIL,
						 use_by_node(use, Min(input, read_ahead_calls(calls, walk->statement))));
	return plan;
}

static bool
is_scan(const Plan *plan)
{
	switch (nodeTag(plan))
	{
		case T_SeqScan:
		case T_SampleScan:
		case T_IndexScan:
		case T_IndexOnlyScan:
		case T_BitmapHeapScan:
		case T_TidScan:
		case T_TidRangeScan:
		case T_SubqueryScan:
		case T_FunctionScan:
		case T_ValuesScan:
		case T_CteScan:
			return true;
		default:
			return false;
	}
}

/*
 * Batches calls in the first condition that has any, if it and those behind it
 * can be evaluated by a node above: no row is predicted for that the conditions
 * before it have removed.
 */
Plan *
batch_conditions(PlanWalk *walk, Plan *plan, RowUse use)
{
	List	   *before = NIL;
	List	   *behind = NIL;
	List	   *calls = NIL;
	List	   *all = plan->qual;
	ReadAhead	input;
	ListCell   *cell;

	if (!is_scan(plan))
		return plan;
	foreach(cell, all)
	{
		if (calls == NIL)
			calls = calls_in(lfirst(cell), walk->statement, least_of(use));
		if (calls == NIL)
			before = lappend(before, lfirst(cell));
		else
			behind = lappend(behind, lfirst(cell));
	}
	if (calls == NIL)
		return plan;
	plan->qual = before;
	input = read_ahead_input(plan, walk->statement);
	if (input < least_of(use))
	{
		plan->qual = all;
		return plan;
	}
	use.limit = (RowLimit) {NULL, NULL};
	return make_node(walk, plan, true, plan->targetlist, calls, behind,
					 use_by_node(use, Min(input, read_ahead_calls(calls, walk->statement))));
}

/* ---- the input of aggregates ---- */

typedef struct Columns
{
	List	   *input;			/* target list of the input */
	Bitmapset  *used;			/* columns of the input */
	List	   *calls;			/* that become columns behind them */
} Columns;

/* Replaces columns of the input by what they are made of. */
static Node *
expand_columns(Node *node, Columns *columns)
{
	if (node == NULL)
		return NULL;
	if (IsA(node, Var) && ((Var *) node)->varno == OUTER_VAR)
		return copyObject((Node *) ((TargetEntry *) list_nth(columns->input,
															 ((Var *) node)->varattno - 1))->expr);
	return expression_tree_mutator(node, expand_columns, columns);
}

/* Replaces calls by columns. */
static Node *
use_columns(Node *node, Columns *columns)
{
	ListCell   *cell;

	if (node == NULL)
		return NULL;
	if (IsA(node, FuncExpr))
		foreach(cell, columns->calls)
			if (equal(lfirst(cell), node))
				return (Node *) predict_node_column(lfirst(cell), OUTER_VAR,
													list_length(columns->input) +
													foreach_current_index(cell) + 1);
	if (IsA(node, Var) && ((Var *) node)->varno == OUTER_VAR)
		columns->used = bms_add_member(columns->used, ((Var *) node)->varattno);
	return expression_tree_mutator(node, use_columns, columns);
}

static void
use_numbers(Columns *columns, const AttrNumber *numbers, int count)
{
	for (int i = 0; i < count; i++)
		columns->used = bms_add_member(columns->used, numbers[i]);
}

/* Columns that an aggregation groups or sorts by. */
static void
use_groups(Columns *columns, const Agg *agg)
{
	ListCell   *cell;

	use_numbers(columns, agg->grpColIdx, agg->numCols);
	foreach(cell, agg->chain)
	{
		const Agg  *next = lfirst_node(Agg, cell);
		const Plan *sort = next->plan.lefttree;

		use_numbers(columns, next->grpColIdx, next->numCols);
		if (sort != NULL)
			use_numbers(columns, ((const Sort *) sort)->sortColIdx, ((const Sort *) sort)->numCols);
	}
}

/* What an aggregation needs of its input: columns as they were, and calls behind them. */
static List *
input_target(const Columns *columns, List *calls, bool expanded)
{
	List	   *target = NIL;
	ListCell   *cell;

	foreach(cell, columns->input)
	{
		TargetEntry *entry = copyObject(lfirst_node(TargetEntry, cell));
		Node	   *column = (Node *) entry->expr;

		if (!bms_is_member(entry->resno, columns->used))
			entry->expr = (Expr *) makeNullConst(exprType(column), exprTypmod(column),
												 exprCollation(column));
		else if (!expanded)
			entry->expr = (Expr *) makeVar(OUTER_VAR, entry->resno, exprType(column),
										   exprTypmod(column), exprCollation(column), 0);
		target = lappend(target, entry);
	}
	foreach(cell, calls)
		target = lappend(target, makeTargetEntry(copyObject(lfirst(cell)), list_length(target) + 1,
												 NULL, false));
	return target;
}

/*
 * Batches calls in the arguments of aggregates.  The columns of a table are
 * expanded, so that no whole rows have to be made of them.
 */
void
batch_aggregates(PlanWalk *walk, Agg *agg, RowUse use)
{
	Plan	   *plan = &agg->plan;
	Plan	   *input = plan->lefttree;
	Columns		columns = {.input = input->targetlist};
	List	   *targets = list_make2(plan->targetlist, plan->qual);
	List	   *calls;
	ReadAhead	allowed;
	NodeUse		by_node;
	bool		expanded;

	columns.calls = calls_in_aggregates((Node *) targets, walk->statement, least_of(use));
	if (columns.calls == NIL)
		return;
	calls = (List *) expand_columns((Node *) columns.calls, &columns);
	expanded = predict_node_fits(input) && !contain_subplans((Node *) input->targetlist) &&
		read_ahead_calls(calls, walk->statement) >= least_of(use);
	if (!expanded)
		calls = columns.calls;
	allowed = Min(read_ahead_calls(calls, walk->statement),
				  expanded ? read_ahead_input(input, walk->statement) :
				  read_ahead_plan(input, walk->statement));
	if (allowed < least_of(use))
		return;
	targets = (List *) use_columns((Node *) targets, &columns);
	use_groups(&columns, agg);
	plan->targetlist = linitial(targets);
	plan->qual = lsecond(targets);
	by_node = use_by_node(use, allowed);
	by_node.aggregated = true;
	plan->lefttree = make_node(walk, input, expanded, input_target(&columns, calls, expanded), calls, NIL,
							   by_node);
}
