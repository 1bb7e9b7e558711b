/*
 * node.c: the plan node that predicts for the rows of the node below it.
 *
 * It is a CustomScan.  Its scan tuple has the answers to the calls, and then
 * those columns of the input that are passed on; target list and qual refer to
 * them by INDEX_VAR.  custom_scan_tlist describes the scan tuple for EXPLAIN,
 * so calls there are as they were written; those that are evaluated are in
 * custom_exprs.
 *
 * A call for a whole row of a table takes the columns of the table's tuple,
 * and no composite value is made: the input returns all columns of the table
 * first, in their order, and Var 0 of OUTER_VAR is the row of them.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "access/table.h"
#include "catalog/pg_type.h"
#include "nodes/makefuncs.h"
#include "nodes/nodeFuncs.h"
#include "parser/parsetree.h"
#include "utils/rel.h"

#include "batching/functions.h"
#include "batching/node.h"

typedef struct Builder
{
	bool		projects;		/* the input */
	List	   *calls;			/* as they were */
	List	   *below;			/* target list of the input */
	List	   *columns;		/* of int: its columns in the scan tuple, behind the answers */
	Index		table;			/* whose columns come first in `below`; 0: none */
	bool		explained;		/* translate for EXPLAIN */
} Builder;

/* ---- encoding ---- */

PredictNode
predict_node_decode(const CustomScan *scan)
{
	PredictNode node;
	List	   *limit = lsecond(scan->custom_exprs);
	List	   *flags = lthird(scan->custom_private);

	node.calls = linitial(scan->custom_exprs);
	node.functions = linitial(scan->custom_private);
	node.columns = lsecond(scan->custom_private);
	node.use = (NodeUse) {
		.limit = {linitial(limit), lsecond(limit)},
		.errors_wait = linitial_int(flags) != 0,
		.all_are_read = lsecond_int(flags) != 0,
		.aggregated = lthird_int(flags) != 0,
		.in_workers = scan->scan.plan.parallel_aware
	};
	return node;
}

/* ---- columns ---- */

/* Is it something that only the input can compute? */
static bool
is_column(Node *node)
{
	return IsA(node, Var) || IsA(node, Aggref) || IsA(node, GroupingFunc) || IsA(node, WindowFunc);
}

/* The number of a column that the input returns. */
static int
column_below(Builder *builder, Node *column)
{
	ListCell   *cell;

	if (!builder->projects)
		return castNode(Var, column)->varattno;
	foreach(cell, builder->below)
		if (equal(((TargetEntry *) lfirst(cell))->expr, column))
			return foreach_current_index(cell) + 1;
	builder->below = lappend(builder->below,
							 makeTargetEntry((Expr *) copyObject(column),
											 list_length(builder->below) + 1, NULL, false));
	return list_length(builder->below);
}

static Var *
reference(Node *column, int varno, int number)
{
	return makeVar(varno, number, exprType(column), exprTypmod(column), exprCollation(column), 0);
}

/* Translates an argument of a call: columns of the input. */
static Node *
translate_argument(Node *node, Builder *builder)
{
	if (node == NULL)
		return NULL;
	if (is_column(node))
		return (Node *) reference(node, OUTER_VAR, column_below(builder, node));
	return expression_tree_mutator(node, translate_argument, builder);
}

/*
 * Translates a call.  A row of the table that is scanned is that of the input
 * as it comes, if it is what the call predicts for, not a part of that.
 */
static FuncExpr *
translate_call(const FuncExpr *call, Builder *builder)
{
	Node	   *row = (Node *) row_of_call(call);
	FuncExpr   *translated;

	if (builder->table == 0 || !IsA(row, Var) || ((Var *) row)->varno != builder->table ||
		((Var *) row)->varattno != InvalidAttrNumber)
		return castNode(FuncExpr, translate_argument((Node *) call, builder));
	translated = copyObject((FuncExpr *) call);
	if (!builder->explained)
		lfirst(list_nth_cell(translated->args, ROW_ARGUMENT)) = reference(row, OUTER_VAR, 0);
	return translated;
}

/* The number of the call among those of the node, from 0; -1: none of them. */
static int
call_number(const Builder *builder, Node *node)
{
	ListCell   *cell;

	if (IsA(node, FuncExpr))
		foreach(cell, builder->calls)
			if (equal(lfirst(cell), node))
				return foreach_current_index(cell);
	return -1;
}

/* Translates what is computed of the scan tuple. */
static Node *
translate_target(Node *node, Builder *builder)
{
	int			call;

	if (node == NULL)
		return NULL;
	call = call_number(builder, node);
	if (call >= 0)
		return (Node *) reference(node, INDEX_VAR, call + 1);
	if (is_column(node))
	{
		int			below = column_below(builder, node);
		int			position = 0;

		builder->columns = list_append_unique_int(builder->columns, below);
		while (list_nth_int(builder->columns, position) != below)
			position++;
		return (Node *) reference(node, INDEX_VAR, list_length(builder->calls) + position + 1);
	}
	return expression_tree_mutator(node, translate_target, builder);
}

/* ---- whole rows of a table ---- */

static bool
scans_a_table(const Plan *plan)
{
	switch (nodeTag(plan))
	{
		case T_SeqScan:
		case T_SampleScan:
		case T_IndexScan:
		case T_BitmapHeapScan:
		case T_TidScan:
		case T_TidRangeScan:
			return true;
		default:
			return false;
	}
}

/* Does the call predict for the whole row of the table that is scanned, as a value of the table's type? */
static bool
is_row_of_table(const FuncExpr *call, Index table, Oid row_type)
{
	Var		   *row = (Var *) row_of_call(call);

	return IsA(row, Var) && row->varno == table && row->varattno == InvalidAttrNumber &&
		row->vartype == row_type;
}

/* Has the input return all columns of its table first, if a call is for such a row. */
static void
begin_with_table(Builder *builder, const Plan *input, const PlannedStmt *statement)
{
	Index		table = ((const Scan *) input)->scanrelid;
	Relation	relation = table_open(rt_fetch(table, statement->rtable)->relid, NoLock);
	TupleDesc	desc = RelationGetDescr(relation);
	bool		wanted = false;
	ListCell   *cell;

	foreach(cell, builder->calls)
		wanted = wanted || is_row_of_table(lfirst(cell), table, relation->rd_rel->reltype);
	for (int i = 0; wanted && i < desc->natts; i++)
	{
		Form_pg_attribute attribute = TupleDescAttr(desc, i);
		Expr	   *column = attribute->attisdropped ?
			(Expr *) makeNullConst(INT4OID, -1, InvalidOid) :
			(Expr *) makeVar(table, i + 1, attribute->atttypid, attribute->atttypmod,
							 attribute->attcollation, 0);

		builder->below = lappend(builder->below, makeTargetEntry(column, i + 1, NULL, false));
	}
	builder->table = wanted ? table : 0;
	table_close(relation, NoLock);
}

/* ---- the node ---- */

bool
predict_node_fits(const Plan *input)
{
	switch (nodeTag(input))
	{
		case T_WindowAgg:		/* whose conditions refer to its target list */
			return input->qual == NIL && ((const WindowAgg *) input)->runCondition == NIL;
		case T_IndexOnlyScan:
		case T_SubqueryScan:
		case T_FunctionScan:
		case T_TableFuncScan:
		case T_ValuesScan:
		case T_CteScan:
		case T_NamedTuplestoreScan:
		case T_ForeignScan:
		case T_NestLoop:
		case T_MergeJoin:
		case T_HashJoin:
		case T_Agg:
		case T_Group:
		case T_Gather:
		case T_GatherMerge:
			return true;
		case T_Result:
			return outerPlan(input) != NULL;
		case T_CustomScan:
			return is_predict_node(input);
		default:
			return scans_a_table(input);
	}
}

static bool
add_parameters(Node *node, Bitmapset **parameters)
{
	if (node == NULL)
		return false;
	if (IsA(node, Param) && ((Param *) node)->paramkind == PARAM_EXEC)
		*parameters = bms_add_member(*parameters, ((Param *) node)->paramid);
	return expression_tree_walker(node, add_parameters, parameters);
}

/* Describes the scan tuple. */
static List *
scan_target(Builder *builder)
{
	List	   *target = NIL;
	List	   *columns = NIL;
	ListCell   *cell;

	builder->explained = true;
	foreach(cell, builder->calls)
		columns = lappend(columns, translate_call(lfirst(cell), builder));
	foreach(cell, builder->columns)
	{
		TargetEntry *below = list_nth(builder->below, lfirst_int(cell) - 1);

		columns = lappend(columns, reference((Node *) below->expr, OUTER_VAR, lfirst_int(cell)));
	}
	foreach(cell, columns)
		target = lappend(target, makeTargetEntry(lfirst(cell), foreach_current_index(cell) + 1, NULL,
												 false));
	return target;
}

Plan *
predict_node_make(Plan *input, bool projects, List *target, List *calls, List *qual,
				  NodeUse use, const PlannedStmt *statement, int node_id)
{
	CustomScan *scan = makeNode(CustomScan);
	Plan	   *plan = &scan->scan.plan;
	Builder		builder = {.projects = projects,.calls = calls};
	List	   *evaluated = NIL;
	List	   *functions = NIL;
	Bitmapset  *parameters = NULL;
	ListCell   *cell;

	if (!projects)
		builder.below = input->targetlist;
	else if (scans_a_table(input))
		begin_with_table(&builder, input, statement);
	foreach(cell, calls)
	{
		evaluated = lappend(evaluated, translate_call(lfirst(cell), &builder));
		functions = lappend_int(functions,
								batched_function_number(((FuncExpr *) lfirst(cell))->funcid));
	}
	plan->targetlist = (List *) translate_target((Node *) target, &builder);
	plan->qual = (List *) translate_target((Node *) qual, &builder);
	scan->custom_exprs = list_make2(evaluated, list_make2(use.limit.count, use.limit.offset));
	scan->custom_private = list_make3(functions, builder.columns,
									  list_make3_int(use.errors_wait, use.all_are_read,
													 use.aggregated));
	scan->custom_scan_tlist = scan_target(&builder);
	scan->methods = GetCustomScanMethods(PREDICT_NODE_NAME, false);

	plan->startup_cost = input->startup_cost;
	plan->total_cost = input->total_cost;
	plan->plan_rows = input->plan_rows;
	plan->plan_width = input->plan_width;
	plan->parallel_aware = use.in_workers;
	plan->parallel_safe = input->parallel_safe;
	plan->plan_node_id = node_id;
	plan->lefttree = input;
	(void) add_parameters((Node *) list_make3(plan->targetlist, plan->qual, scan->custom_exprs),
						  &parameters);
	plan->extParam = bms_union(input->extParam, parameters);
	plan->allParam = bms_union(input->allParam, parameters);
	input->targetlist = builder.below;
	return plan;
}

Var *
predict_node_column(const FuncExpr *call, int varno, int column)
{
	return reference((Node *) call, varno, column);
}
