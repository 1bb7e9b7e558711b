/*
 * read_ahead.c: what may be evaluated for rows that are not passed on yet.
 *
 * Nobody must notice that rows are read ahead: no side effect may happen for a
 * row that is never asked for, and an error of a row must come after the rows
 * before it have been passed on.  So:
 *
 * - Nothing volatile is read ahead, nor what locks or changes rows.
 * - An error in a value (class 22) of a data type's own functions, or of ours
 *   that predict, is caught, and raised when its row is due.  To go on without
 *   rolling back a subtransaction is safe only because these functions compute:
 *   where they raise it, they hold no locks and have changed no state.  That is
 *   known of immutable functions of PostgreSQL, and of stable ones that are
 *   stable for the sake of the time zone.
 * - Other functions, those of users, are evaluated ahead only where all rows
 *   are read before the statement returns any.  Then its error, whenever it
 *   comes, is all that it returns.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/transam.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "nodes/nodeFuncs.h"
#include "optimizer/optimizer.h"
#include "utils/lsyscache.h"
#include "utils/syscache.h"
#include "utils/typcache.h"

#include "base/compat.h"
#include "batching/functions.h"
#include "batching/node.h"
#include "batching/plans.h"
#include "batching/read_ahead.h"

typedef struct Judgement
{
	const PlannedStmt *statement;
	ReadAhead	result;
	Node	   *node;			/* whose functions are judged */
} Judgement;

static void
at_most(Judgement *judgement, ReadAhead limit)
{
	judgement->result = Min(judgement->result, limit);
}

/* ---- types ---- */

static bool
is_catalogue_reference(Oid type)
{
	switch (type)
	{
		case REGPROCOID:
		case REGPROCEDUREOID:
		case REGOPEROID:
		case REGOPERATOROID:
		case REGCLASSOID:
		case REGCOLLATIONOID:
		case REGTYPEOID:
		case REGCONFIGOID:
		case REGDICTIONARYOID:
		case REGROLEOID:
		case REGNAMESPACEOID:
			return true;
		default:
			return false;
	}
}

/* Does the type's output depend on nothing but the value and the time zone? */
static bool
is_plain_type(Oid type)
{
	Oid			base = getBaseType(type);
	Oid			element = get_element_type(base);
	TupleDesc	desc;
	bool		plain = true;

	check_stack_depth();
	if (OidIsValid(element))
		return is_plain_type(element);
	if (base == RECORDOID || is_catalogue_reference(base))
		return false;
	if (base < FirstUnpinnedObjectId || get_typtype(base) == TYPTYPE_ENUM)
		return true;
	if (!type_is_rowtype(base))
		return false;
	desc = lookup_rowtype_tupdesc(base, -1);
	for (int i = 0; i < desc->natts && plain; i++)
		plain = TupleDescAttr(desc, i)->attisdropped ||
			is_plain_type(TupleDescAttr(desc, i)->atttypid);
	ReleaseTupleDesc(desc);
	return plain;
}

static bool
is_time_or_json(Oid type)
{
	switch (type)
	{
		case DATEOID:
		case TIMEOID:
		case TIMETZOID:
		case TIMESTAMPOID:
		case TIMESTAMPTZOID:
		case INTERVALOID:
		case JSONOID:
		case JSONBOID:
			return true;
		default:
			return false;
	}
}

static List *
arguments_of(Node *node)
{
	switch (nodeTag(node))
	{
		case T_FuncExpr:
			return ((FuncExpr *) node)->args;
		case T_OpExpr:
		case T_DistinctExpr:
		case T_NullIfExpr:
			return ((OpExpr *) node)->args;
		case T_ScalarArrayOpExpr:
			return ((ScalarArrayOpExpr *) node)->args;
		case T_CoerceViaIO:
			return list_make1(((CoerceViaIO *) node)->arg);
		default:
			return NIL;
	}
}

/*
 * Is a stable function of PostgreSQL stable only because of the time zone, or
 * because it prints values of any type, which are plain here?
 */
static bool
depends_on_time_zone_alone(Node *node)
{
	List	   *arguments = arguments_of(node);
	bool		time = is_time_or_json(exprType(node));
	ListCell   *cell;

	if (!is_plain_type(exprType(node)))
		return false;
	foreach(cell, arguments)
	{
		Node	   *argument = lfirst(cell);

		/* The fields of a row expression are judged by themselves. */
		if (!IsA(argument, RowExpr) && !is_plain_type(exprType(argument)))
			return false;
		time = time || is_time_or_json(exprType(argument));
	}
	return time || IsA(node, CoerceViaIO);
}

/* ---- expressions ---- */

/* A callback of check_functions_in_node(). */
static bool
judge_function(Oid function, void *context)
{
	Judgement  *judgement = context;
	char		volatility = func_volatile(function);
	bool		computes = function < FirstUnpinnedObjectId ?
		volatility == PROVOLATILE_IMMUTABLE || depends_on_time_zone_alone(judgement->node) :
		batched_function_number(function) >= 0;

	if (volatility == PROVOLATILE_VOLATILE)
		at_most(judgement, READ_AHEAD_NEVER);
	else if (!computes)
		at_most(judgement, READ_AHEAD_IF_ALL_ARE_READ);
	return false;
}

static bool
judge_expression(Node *node, Judgement *judgement)
{
	if (node == NULL)
		return false;
	judgement->node = node;
	(void) check_functions_in_node(node, judge_function, judgement);
	switch (nodeTag(node))
	{
		case T_SubPlan:
			{
				int			number = ((SubPlan *) node)->plan_id - 1;

				at_most(judgement, read_ahead_plan(list_nth(judgement->statement->subplans, number),
												   judgement->statement));
				break;
			}
		case T_NextValueExpr:
		case T_CurrentOfExpr:
			at_most(judgement, READ_AHEAD_NEVER);
			break;
		case T_CoerceToDomain:	/* its constraints can call any function */
		case T_XmlExpr:
		case T_TableFunc:
			at_most(judgement, READ_AHEAD_IF_ALL_ARE_READ);
			break;
		default:
			if (tensile_is_json_value(node))
				at_most(judgement, READ_AHEAD_IF_ALL_ARE_READ);
	}
	if (judgement->result == READ_AHEAD_NEVER)
		return true;
	return expression_tree_walker(node, judge_expression, judgement);
}

ReadAhead
read_ahead_expression(Node *expression, const PlannedStmt *statement)
{
	Judgement	judgement = {statement, READ_AHEAD_ALWAYS, NULL};

	/* The walker wants no node that is not an expression, such as a list, at its top. */
	(void) judge_expression(expression, &judgement);
	return judgement.result;
}

/* ---- plans ---- */

static void
judge(Judgement *judgement, void *expression)
{
	at_most(judgement, read_ahead_expression(expression, judgement->statement));
}

static void
judge_plan(Judgement *judgement, Plan *plan)
{
	if (plan != NULL && judgement->result != READ_AHEAD_NEVER)
		at_most(judgement, read_ahead_plan(plan, judgement->statement));
}

static void
judge_plans(Judgement *judgement, List *plans)
{
	ListCell   *cell;

	foreach(cell, plans)
		judge_plan(judgement, lfirst(cell));
}

/* Judges what a node has besides target list, qual and two inputs; unknown nodes are not read ahead. */
static void
judge_node(Judgement *judgement, Plan *plan)
{
	switch (nodeTag(plan))
	{
		case T_SeqScan:
		case T_NamedTuplestoreScan:
		case T_Sort:
		case T_IncrementalSort:
		case T_Material:
		case T_Unique:
		case T_SetOp:
		case T_Group:
		case T_Agg:
		case T_Gather:
		case T_GatherMerge:
		case T_ProjectSet:
			break;
		case T_SampleScan:
			judge(judgement, ((SampleScan *) plan)->tablesample);
			break;
		case T_IndexScan:
			judge(judgement, ((IndexScan *) plan)->indexqualorig);
			judge(judgement, ((IndexScan *) plan)->indexorderbyorig);
			break;
		case T_IndexOnlyScan:
			judge(judgement, ((IndexOnlyScan *) plan)->indexqual);
			judge(judgement, ((IndexOnlyScan *) plan)->indexorderby);
			break;
		case T_BitmapIndexScan:
			judge(judgement, ((BitmapIndexScan *) plan)->indexqualorig);
			break;
		case T_BitmapAnd:
			judge_plans(judgement, ((BitmapAnd *) plan)->bitmapplans);
			break;
		case T_BitmapOr:
			judge_plans(judgement, ((BitmapOr *) plan)->bitmapplans);
			break;
		case T_BitmapHeapScan:
			judge(judgement, ((BitmapHeapScan *) plan)->bitmapqualorig);
			break;
		case T_TidScan:
			judge(judgement, ((TidScan *) plan)->tidquals);
			break;
		case T_TidRangeScan:
			judge(judgement, ((TidRangeScan *) plan)->tidrangequals);
			break;
		case T_SubqueryScan:
			judge_plan(judgement, ((SubqueryScan *) plan)->subplan);
			break;
		case T_FunctionScan:
			judge(judgement, ((FunctionScan *) plan)->functions);
			break;
		case T_TableFuncScan:
			judge(judgement, ((TableFuncScan *) plan)->tablefunc);
			break;
		case T_ValuesScan:
			judge(judgement, ((ValuesScan *) plan)->values_lists);
			break;
		case T_CteScan:
			judge_plan(judgement, list_nth(judgement->statement->subplans,
										   ((CteScan *) plan)->ctePlanId - 1));
			/* After an error that waits, another reader would go on behind its row. */
			if (plans_readers(judgement->statement, ((CteScan *) plan)->ctePlanId) > 1)
				at_most(judgement, READ_AHEAD_IF_ALL_ARE_READ);
			break;
		case T_ForeignScan:
			if (((ForeignScan *) plan)->operation != CMD_SELECT)
				at_most(judgement, READ_AHEAD_NEVER);
			judge(judgement, ((ForeignScan *) plan)->fdw_exprs);
			break;
		case T_NestLoop:
		case T_MergeJoin:
		case T_HashJoin:
			judge(judgement, ((Join *) plan)->joinqual);
			if (IsA(plan, MergeJoin))
				judge(judgement, ((MergeJoin *) plan)->mergeclauses);
			if (IsA(plan, HashJoin))
				judge(judgement, ((HashJoin *) plan)->hashclauses);
			break;
		case T_Hash:
			judge(judgement, ((Hash *) plan)->hashkeys);
			break;
		case T_Memoize:
			judge(judgement, ((Memoize *) plan)->param_exprs);
			break;
		case T_WindowAgg:
			judge(judgement, ((WindowAgg *) plan)->runCondition);
			judge(judgement, ((WindowAgg *) plan)->startOffset);
			judge(judgement, ((WindowAgg *) plan)->endOffset);
			break;
		case T_Limit:
			judge(judgement, ((Limit *) plan)->limitOffset);
			judge(judgement, ((Limit *) plan)->limitCount);
			break;
		case T_Result:
			judge(judgement, ((Result *) plan)->resconstantqual);
			break;
		case T_Append:
			judge_plans(judgement, ((Append *) plan)->appendplans);
			break;
		case T_MergeAppend:
			judge_plans(judgement, ((MergeAppend *) plan)->mergeplans);
			break;
		case T_CustomScan:
			judge(judgement, ((CustomScan *) plan)->custom_exprs);
			if (!is_predict_node(plan))
				at_most(judgement, READ_AHEAD_NEVER);
			break;
		default:				/* among them LockRows, ModifyTable, RecursiveUnion */
			at_most(judgement, READ_AHEAD_NEVER);
	}
}

/* Judges all but the target list. */
static Judgement
judged_without_target(Plan *plan, const PlannedStmt *statement)
{
	Judgement	judgement = {statement, READ_AHEAD_ALWAYS, NULL};

	check_stack_depth();
	judge_node(&judgement, plan);
	judge(&judgement, plan->qual);
	judge(&judgement, plan->initPlan);
	judge_plan(&judgement, plan->lefttree);
	judge_plan(&judgement, plan->righttree);
	return judgement;
}

ReadAhead
read_ahead_plan(Plan *plan, const PlannedStmt *statement)
{
	Judgement	judgement = judged_without_target(plan, statement);

	judge(&judgement, plan->targetlist);
	return judgement.result;
}

static bool
judge_aggregates(Node *node, Judgement *judgement)
{
	if (node == NULL)
		return false;
	if (IsA(node, Aggref) || IsA(node, WindowFunc))
	{
		judge(judgement, node);
		return false;
	}
	return expression_tree_walker(node, judge_aggregates, judgement);
}

ReadAhead
read_ahead_input(Plan *plan, const PlannedStmt *statement)
{
	Judgement	judgement = judged_without_target(plan, statement);

	(void) judge_aggregates((Node *) plan->targetlist, &judgement);
	return judgement.result;
}

/* ---- errors ---- */

bool
read_ahead_error_can_wait(int sqlstate, bool packing)
{
	int			category = ERRCODE_TO_CATEGORY(sqlstate);

	/* A feature that is missing or of another type is of class 42; a model is not looked up then. */
	return category == ERRCODE_TO_CATEGORY(ERRCODE_DATA_EXCEPTION) ||
		(packing && category == ERRCODE_TO_CATEGORY(ERRCODE_UNDEFINED_COLUMN));
}
