/*
 * training_query.c: checks of a training query that need not run it, when it
 * is submitted, and when it runs:
 *	 1. it is one SELECT that changes nothing, with valid names (query.c);
 *	 2. its columns have unique names and types that can be trained on, and one
 *		of them is the target;
 *	 3. the caller has the privileges: the query is planned, and started as by
 *		EXPLAIN, which checks tables, columns, functions and what views read,
 *		and reads no row.
 *
 * A validation query is checked in the same way.  The rows of both queries are
 * read by one statement, which is composed here (tensile_analyze_training).
 *
 * Locks: those of planning the query, until the end of the transaction.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "catalog/pg_class.h"
#include "catalog/pg_type.h"
#include "executor/executor.h"
#include "nodes/nodeFuncs.h"
#include "optimizer/optimizer.h"
#include "tcop/tcopprot.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"

#include "base/compat.h"
#include "base/convert.h"
#include "base/error_context.h"
#include "base/query.h"
#include "rows/training_query.h"

/* ---- columns ---- */

static void
check_duplicates(const char *const *names, int n)
{
	for (int i = 0; i < n; i++)
		for (int j = 0; j < i; j++)
			if (strcmp(names[i], names[j]) == 0)
				ereport(ERROR,
						(errcode(ERRCODE_DUPLICATE_COLUMN),
						 errmsg("column \"%s\" appears more than once in the " TRAINING_QUERY_NAME,
								names[i]),
						 errhint("Name the columns you need instead of *, "
								 "and give each one its own name with AS.")));
}

static void
check_type(const char *name, Oid type, bool is_target)
{
	const char *wire = tensile_wire_type(type);

	if (wire == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("column \"%s\" has type %s, which cannot be trained on",
						name, format_type_be(type)),
				 errhint("Leave it out, or cast it in the query: to a number, text, date, "
						 "timestamp or an array of numbers.")));
	if (is_target && (strchr(wire, '[') || strcmp(wire, "timestamp") == 0))
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("target \"%s\" has type %s, which cannot be predicted",
						name, format_type_be(type)),
				 errhint("A target is a number, a boolean or a text; a time can be made a number "
						 "with extract(epoch FROM ...).")));
}

/* The columns that a query returns: a list of TargetEntry. */
static List *
returned_columns(const Query *query)
{
	List	   *columns = NIL;
	ListCell   *cell;

	foreach(cell, query->targetList)
		if (!lfirst_node(TargetEntry, cell)->resjunk)
			columns = lappend(columns, lfirst(cell));
	return columns;
}

static bool
has_name(const char *const *names, int n, const char *name)
{
	for (int i = 0; i < n; i++)
		if (strcmp(names[i], name) == 0)
			return true;
	return false;
}

static void
check_split_column(const char *const *names, int n, const TrainingQuery *training)
{
	const char *split_by = training->split_by;

	if (split_by == NULL)
		return;
	if (!has_name(names, n, split_by))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_COLUMN),
				 errmsg("split_by \"%s\" is not a column of the " TRAINING_QUERY_NAME, split_by),
				 tensile_hint_nearest(split_by, names, n,
									  "The query must return the column that divides its rows.")));
	if (strcmp(split_by, training->target) == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("split_by \"%s\" is the target", split_by),
				 errhint("Name another column: a time, or a group whose rows belong together.")));
}

static void
check_columns(List *columns, const TrainingQuery *training)
{
	const char *target = training->target;
	const char **names = palloc(list_length(columns) * sizeof(char *));
	int			n = 0;
	ListCell   *cell;

	foreach(cell, columns)
		names[n++] = lfirst_node(TargetEntry, cell)->resname;
	check_duplicates(names, n);

	foreach(cell, columns)
	{
		TargetEntry *entry = lfirst_node(TargetEntry, cell);

		check_type(entry->resname, exprType((Node *) entry->expr),
				   strcmp(entry->resname, target) == 0);
	}
	if (!has_name(names, n, target))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_COLUMN),
				 errmsg("target \"%s\" is not a column of the " TRAINING_QUERY_NAME, target),
				 tensile_hint_nearest(target, names, n,
									  "The query must return the target besides the features.")));
	if (n < 2)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("the " TRAINING_QUERY_NAME " has no column besides the target"),
				 errhint("Select at least one feature, too.")));
	check_split_column(names, n, training);
	if (training->validation_query != NULL && has_name(names, n, TENSILE_VALIDATION_COLUMN))
		ereport(ERROR,
				(errcode(ERRCODE_DUPLICATE_COLUMN),
				 errmsg("column name \"" TENSILE_VALIDATION_COLUMN "\" is reserved"),
				 errhint("It marks the rows of the validation query: "
						 "give the column another name with AS.")));
}

/* ---- the validation query ---- */

static void
check_same_column(const TargetEntry *entry, const TargetEntry *expected)
{
	Oid			type = exprType((Node *) entry->expr);
	Oid			expected_type = exprType((Node *) expected->expr);

	if (strcmp(entry->resname, expected->resname) != 0)
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("column %d of the " VALIDATION_QUERY_NAME
						" is \"%s\", but that of the " TRAINING_QUERY_NAME " is \"%s\"",
						entry->resno, entry->resname, expected->resname),
				 errhint("Select the same columns in the same order.")));
	if (getBaseType(type) != getBaseType(expected_type))
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("column \"%s\" has type %s in the " VALIDATION_QUERY_NAME
						", but %s in the " TRAINING_QUERY_NAME,
						entry->resname, format_type_be(type), format_type_be(expected_type)),
				 errhint("Cast it to %s.", format_type_be(expected_type))));
}

static void
check_same_columns(List *columns, List *expected)
{
	ListCell   *cell;
	ListCell   *expected_cell;

	forboth(cell, columns, expected_cell, expected)
		check_same_column(lfirst_node(TargetEntry, cell),
						  lfirst_node(TargetEntry, expected_cell));
	if (list_length(columns) < list_length(expected))
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("column \"%s\" is missing in the " VALIDATION_QUERY_NAME,
						list_nth_node(TargetEntry, expected, list_length(columns))->resname),
				 errhint("Select the same columns in the same order.")));
	if (list_length(columns) > list_length(expected))
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("column \"%s\" of the " VALIDATION_QUERY_NAME
						" is not one of the " TRAINING_QUERY_NAME,
						list_nth_node(TargetEntry, columns, list_length(expected))->resname),
				 errhint("Select the same columns in the same order.")));
}

/* feed.c calls this again, because a table may have changed since. */
Query *
tensile_analyze_training(const TrainingQuery *training, const char **sql)
{
	Query	   *query = tensile_analyze_select(training->query, TRAINING_QUERY_NAME);
	Query	   *validation;

	check_columns(returned_columns(query), training);
	*sql = training->query;
	if (training->validation_query == NULL)
		return query;

	validation = tensile_analyze_select(training->validation_query, VALIDATION_QUERY_NAME);
	check_same_columns(returned_columns(validation), returned_columns(query));
	*sql = psprintf("SELECT q.*, false AS " TENSILE_VALIDATION_COLUMN " FROM %s q"
					" UNION ALL SELECT v.*, true FROM %s v",
					tensile_subquery(query, training->query),
					tensile_subquery(validation, training->validation_query));
	return tensile_analyze_select(*sql, TRAINING_QUERY_NAME);
}

ArrayType *
tensile_array_columns(const Query *query)
{
	List	   *columns = returned_columns(query);
	Datum	   *texts = palloc(list_length(columns) * sizeof(Datum));
	int			n = 0;
	ListCell   *cell;

	foreach(cell, columns)
	{
		TargetEntry *entry = lfirst_node(TargetEntry, cell);

		if (strchr(tensile_wire_type(exprType((Node *) entry->expr)), '[') != NULL)
			texts[n++] = CStringGetTextDatum(entry->resname);
	}
	return construct_array(texts, n, TEXTOID, -1, false, TYPALIGN_INT);
}

/* ---- planning and privileges ---- */

/* The worker is another session, which cannot read temporary tables. */
static void
refuse_temporary_tables(PlannedStmt *plan, const char *what)
{
	ListCell   *cell;

	foreach(cell, plan->relationOids)
		if (get_rel_persistence(lfirst_oid(cell)) == RELPERSISTENCE_TEMP)
			ereport(ERROR,
					(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
					 errmsg("the %s reads the temporary table \"%s\"", what,
							get_rel_name(lfirst_oid(cell))),
					 errhint("The job runs in another session, which cannot see it: "
							 "use an ordinary or an unlogged table.")));
}

static void
query_context(void *arg)
{
	errcontext("%s", (const char *) arg);
}

void
tensile_check_privileges(const char *sql, const char *what)
{
	TensileUserCode code;
	Query	   *query = tensile_analyze_select(sql, what);
	PlannedStmt *plan;
	QueryDesc  *desc;

	tensile_user_code_begin(&code, query_context, unconstify(char *, what));
	PushActiveSnapshot(GetTransactionSnapshot());
	plan = tensile_plan_query(query, sql, CURSOR_OPT_PARALLEL_OK);
	desc = CreateQueryDesc(plan, sql, GetActiveSnapshot(), InvalidSnapshot, None_Receiver,
						   NULL, NULL, 0);
	ExecutorStart(desc, EXEC_FLAG_EXPLAIN_ONLY);
	ExecutorEnd(desc);
	FreeQueryDesc(desc);
	PopActiveSnapshot();
	tensile_user_code_end(&code);
	refuse_temporary_tables(plan, what);
}
