/*
 * calls.c: calls in expressions that can be batched.
 *
 * A call is taken out of its expression only if it is evaluated whenever the
 * expression is: not under CASE, AND, OR, COALESCE, NULLIF, or whatever else
 * may skip it.  So no row is sent that would not have been, and neither its
 * errors nor the lack of a privilege appear.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "miscadmin.h"
#include "nodes/nodeFuncs.h"
#include "optimizer/clauses.h"
#include "optimizer/optimizer.h"
#include "parser/parse_agg.h"

#include "batching/calls.h"
#include "batching/functions.h"

typedef struct Search
{
	const PlannedStmt *statement;
	ReadAhead	least;
	List	   *calls;
} Search;

Expr *
row_of_call(const FuncExpr *call)
{
	return list_nth(call->args, ROW_ARGUMENT);
}

static bool
has_column(Node *node, void *context)
{
	if (node == NULL)
		return false;
	if (IsA(node, Var) || IsA(node, Aggref) || IsA(node, WindowFunc) || IsA(node, GroupingFunc))
		return true;
	return expression_tree_walker(node, has_column, context);
}

static bool
is_the_same_for_all_rows(Node *argument)
{
	return !has_column(argument, NULL) && !contain_subplans(argument) &&
		!contain_volatile_functions(argument);
}

static bool
can_be_batched(const FuncExpr *call, const Search *search)
{
	Node	   *row = (Node *) row_of_call(call);
	ListCell   *cell;

	foreach(cell, call->args)
		if (foreach_current_index(cell) != ROW_ARGUMENT && !is_the_same_for_all_rows(lfirst(cell)))
			return false;
	return !contain_subplans(row) && !expression_returns_set(row) &&
		read_ahead_expression(row, search->statement) >= search->least;
}

static void find_calls(Node *node, Search *search);

static void
find_calls_in_list(List *list, Search *search)
{
	ListCell   *cell;

	foreach(cell, list)
		find_calls(lfirst(cell), search);
}

/* A call in the arguments of another one comes first: the outer one needs its answer. */
static void
find_calls_in_function(FuncExpr *function, Search *search)
{
	int			before = list_length(search->calls);

	find_calls_in_list(function->args, search);
	if (list_length(search->calls) == before && batched_function_number(function->funcid) >= 0 &&
		can_be_batched(function, search))
		search->calls = list_append_unique(search->calls, function);
}

/* Descends where all parts are evaluated. */
static void
find_calls(Node *node, Search *search)
{
	if (node == NULL)
		return;
	check_stack_depth();
	switch (nodeTag(node))
	{
		case T_List:
			find_calls_in_list((List *) node, search);
			break;
		case T_TargetEntry:
			find_calls((Node *) ((TargetEntry *) node)->expr, search);
			break;
		case T_FuncExpr:
			find_calls_in_function((FuncExpr *) node, search);
			break;
		case T_OpExpr:
		case T_DistinctExpr:
			find_calls_in_list(((OpExpr *) node)->args, search);
			break;
		case T_ScalarArrayOpExpr:
			find_calls_in_list(((ScalarArrayOpExpr *) node)->args, search);
			break;
		case T_BoolExpr:
			if (((BoolExpr *) node)->boolop == NOT_EXPR)
				find_calls_in_list(((BoolExpr *) node)->args, search);
			break;
		case T_RelabelType:
			find_calls((Node *) ((RelabelType *) node)->arg, search);
			break;
		case T_CoerceViaIO:
			find_calls((Node *) ((CoerceViaIO *) node)->arg, search);
			break;
		case T_CoerceToDomain:
			find_calls((Node *) ((CoerceToDomain *) node)->arg, search);
			break;
		case T_NullTest:
			find_calls((Node *) ((NullTest *) node)->arg, search);
			break;
		case T_BooleanTest:
			find_calls((Node *) ((BooleanTest *) node)->arg, search);
			break;
		case T_FieldSelect:
			find_calls((Node *) ((FieldSelect *) node)->arg, search);
			break;
		case T_RowExpr:
			find_calls_in_list(((RowExpr *) node)->args, search);
			break;
		case T_ArrayExpr:
			find_calls_in_list(((ArrayExpr *) node)->elements, search);
			break;
		case T_MinMaxExpr:
			find_calls_in_list(((MinMaxExpr *) node)->args, search);
			break;
		default:
			break;
	}
}

List *
calls_in(Node *expression, const PlannedStmt *statement, ReadAhead least)
{
	Search		search = {statement, least, NIL};

	find_calls(expression, &search);
	return search.calls;
}

static bool
find_aggregates(Node *node, Search *search)
{
	if (node == NULL)
		return false;
	if (IsA(node, Aggref))
	{
		if (((Aggref *) node)->aggfilter == NULL)
			find_calls((Node *) ((Aggref *) node)->args, search);
		return false;
	}
	return expression_tree_walker(node, find_aggregates, search);
}

List *
calls_in_aggregates(Node *expression, const PlannedStmt *statement, ReadAhead least)
{
	Search		search = {statement, least, NIL};

	(void) find_aggregates(expression, &search);
	return search.calls;
}
