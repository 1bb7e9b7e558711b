/*
 * planner.c: batches of predictions in plans.
 *
 * A hook takes the finished plan, because no earlier hook sees the target lists
 * of scans and joins.  Where a node computes calls of predict, a node that
 * collects rows (node.c) is put
 *
 * - on top of a node whose target list has them,
 * - on top of a scan whose last conditions have them: these become conditions of
 *   the new node, so that their order, and with it the levels of security,
 *   stays as it was, and
 * - between a node that aggregates them and its input.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "miscadmin.h"
#include "nodes/extensible.h"
#include "nodes/makefuncs.h"
#include "nodes/nodeFuncs.h"
#include "nodes/parsenodes.h"
#include "optimizer/clauses.h"
#include "optimizer/planner.h"

#include "base/compat.h"
#include "base/guc.h"
#include "batching/calls.h"
#include "batching/functions.h"
#include "batching/node.h"
#include "batching/planner.h"
#include "batching/read_ahead.h"

/* What the nodes above do with the rows of a node. */
typedef struct Use
{
	bool		all_are_read;	/* before the statement returns any */
	bool		marks;			/* they may go back to an earlier row */
	RowLimit	limit;
} Use;

typedef struct Walk
{
	PlannedStmt *statement;
	int			next_id;		/* of a plan node */
} Walk;

static planner_hook_type previous_planner = NULL;

static Plan *visit(Walk *walk, Plan *plan, Use use);

/* ---- one node ---- */

/* How harmless the rows of calls have to be. */
static ReadAhead
least_of(Use use)
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
use_by_node(Use use, ReadAhead allowed)
{
	return (NodeUse) {
		.limit = use.limit,
		.errors_wait = allowed == READ_AHEAD_ALWAYS,
		.all_are_read = use.all_are_read
	};
}

/* Batches calls in the target list, innermost ones first. */
static Plan *
batch_target(Walk *walk, Plan *plan, Use use)
{
	ReadAhead	input;
	List	   *calls;

	while (predict_node_fits(plan) &&
		   (calls = calls_in((Node *) plan->targetlist, walk->statement, least_of(use))) != NIL &&
		   !has_subplan_of_assignments((Node *) plan->targetlist, NULL) &&
		   (input = read_ahead_input(plan, walk->statement)) >= least_of(use))
		plan = predict_node_make(plan, true, plan->targetlist, calls, NIL,
								 use_by_node(use, Min(input, read_ahead_calls(calls, walk->statement))),
								 walk->statement, walk->next_id++);
	return plan;
}

/*
 * Batches calls in the first condition that has any, if it and those behind it
 * can be evaluated by a node above: no row is predicted for that the conditions
 * before it have removed.
 */
static Plan *
batch_conditions(Walk *walk, Plan *plan, Use use)
{
	List	   *before = NIL;
	List	   *behind = NIL;
	List	   *calls = NIL;
	List	   *all = plan->qual;
	ReadAhead	input;
	ListCell   *cell;

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
	return predict_node_make(plan, true, plan->targetlist, calls, behind,
							 use_by_node(use, Min(input, read_ahead_calls(calls, walk->statement))),
							 walk->statement, walk->next_id++);
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
static void
batch_aggregates(Walk *walk, Agg *agg, Use use)
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
	plan->lefttree = predict_node_make(input, expanded, input_target(&columns, calls, expanded), calls,
									   NIL, by_node, walk->statement, walk->next_id++);
}

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
static Use
use_of_input(const Plan *plan, Use use)
{
	Use			input = use;

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

static Use
use_of_inner(const Plan *plan, Use use)
{
	Use			inner = use_of_input(plan, use);
	const Join *join = (const Join *) plan;

	if (IsA(plan, MergeJoin))
		inner.marks = !((const MergeJoin *) plan)->skip_mark_restore;
	if (IsA(plan, NestLoop) && (join->inner_unique || join->jointype == JOIN_SEMI || join->jointype == JOIN_ANTI))
		inner.all_are_read = false;
	return inner;
}

static void
visit_all(Walk *walk, List *plans, Use use)
{
	ListCell   *cell;

	foreach(cell, plans)
		if (!((Plan *) lfirst(cell))->async_capable)
			lfirst(cell) = visit(walk, lfirst(cell), use);
}

static void
visit_inputs(Walk *walk, Plan *plan, Use use)
{
	Use			input = use_of_input(plan, use);

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
visit(Walk *walk, Plan *plan, Use use)
{
	check_stack_depth();
	if (IsA(plan, RecursiveUnion))
		return plan;
	visit_inputs(walk, plan, use);
	if (use.marks)
		return plan;
	if (is_scan(plan))
		plan = batch_conditions(walk, plan, use);
	return batch_target(walk, plan, use);
}

/* ---- the hook ---- */

static int
last_id(const Plan *plan, const PlannedStmt *statement);

static int
last_id_of(List *plans, const PlannedStmt *statement)
{
	int			last = 0;
	ListCell   *cell;

	foreach(cell, plans)
		if (lfirst(cell) != NULL)
			last = Max(last, last_id(lfirst(cell), statement));
	return last;
}

/* The largest number of a node in the plan. */
static int
last_id(const Plan *plan, const PlannedStmt *statement)
{
	List	   *inputs = list_make2(plan->lefttree, plan->righttree);
	int			last;

	check_stack_depth();
	switch (nodeTag(plan))
	{
		case T_SubqueryScan:
			inputs = lappend(inputs, ((const SubqueryScan *) plan)->subplan);
			break;
		case T_Append:
			inputs = list_concat(inputs, ((const Append *) plan)->appendplans);
			break;
		case T_MergeAppend:
			inputs = list_concat(inputs, ((const MergeAppend *) plan)->mergeplans);
			break;
		case T_BitmapAnd:
			inputs = list_concat(inputs, ((const BitmapAnd *) plan)->bitmapplans);
			break;
		case T_BitmapOr:
			inputs = list_concat(inputs, ((const BitmapOr *) plan)->bitmapplans);
			break;
		case T_CustomScan:
			inputs = list_concat(inputs, ((const CustomScan *) plan)->custom_plans);
			break;
		default:
			break;
	}
	last = Max(plan->plan_node_id, last_id_of(inputs, statement));
	list_free(inputs);
	return last;
}

static void
batch_predictions(PlannedStmt *statement)
{
	Walk		walk = {.statement = statement};
	const Use	use = {false};
	ListCell   *cell;

	walk.next_id = 1 + Max(last_id(statement->planTree, statement),
						   last_id_of(statement->subplans, statement));
	foreach(cell, statement->subplans)
		if (lfirst(cell) != NULL)
			lfirst(cell) = visit(&walk, lfirst(cell), use);
	statement->planTree = visit(&walk, statement->planTree, use);
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
