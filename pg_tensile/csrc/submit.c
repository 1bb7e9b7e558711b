/*
 * submit.c: train_model, as far as it needs the rights and the search_path of
 * the caller.
 *
 * All that can be known about the training query without running it is checked
 * here, so that the caller gets the error, not the job:
 *	 1. it is one SELECT that changes nothing, with valid names (query.c);
 *	 2. its columns have unique names and types that can be trained on, and one
 *		of them is the target;
 *	 3. the caller has the privileges: the query is planned, and started as by
 *		EXPLAIN, which checks tables, columns, functions and what views read,
 *		and reads no row.
 * Then tensile._train_model (SECURITY DEFINER) checks the rest and inserts the
 * job.  The commit wakes the controller.  explain_training (explain.c) makes
 * the same checks.
 *
 * Memory: the checks have a context that is deleted afterwards.  Locks: those
 * of planning the query, until the end of the transaction.
 *
 * A validation query is checked in the same way.  The rows of both queries are
 * read by one statement, which is composed here (tensile_analyze_training).
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/namespace.h"
#include "catalog/pg_class.h"
#include "catalog/pg_type.h"
#include "executor/executor.h"
#include "fmgr.h"
#include "nodes/nodeFuncs.h"
#include "optimizer/optimizer.h"
#include "tcop/tcopprot.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "compat.h"
#include "convert.h"
#include "error_context.h"
#include "extension.h"
#include "notify.h"
#include "owner.h"
#include "query.h"
#include "shmem.h"
#include "submit.h"

#define QUERY_NAME "training query"
#define VALIDATION_QUERY_NAME "validation query"

/*
 * The arguments of train_model and explain_training; those without a name may
 * be null, as may those behind them.
 */
static const char *const not_null[] = {
	"model", "query", "target", "epochs", NULL, "optimizer", NULL, "validation",
	"seed", NULL, NULL, "priority", "options"
};

static void
check_nulls(FunctionCallInfo fcinfo)
{
	for (int i = 0; i < lengthof(not_null); i++)
		if (PG_ARGISNULL(i) && not_null[i])
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("argument \"%s\" must not be null", not_null[i]),
					 errhint("Pass a value, or leave the argument out if it has a default.")));
}

/* ---- columns ---- */

static void
check_duplicates(const char *const *names, int n)
{
	for (int i = 0; i < n; i++)
		for (int j = 0; j < i; j++)
			if (strcmp(names[i], names[j]) == 0)
				ereport(ERROR,
						(errcode(ERRCODE_DUPLICATE_COLUMN),
						 errmsg("column \"%s\" appears more than once in the " QUERY_NAME,
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
				 errmsg("split_by \"%s\" is not a column of the " QUERY_NAME, split_by),
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
				 errmsg("target \"%s\" is not a column of the " QUERY_NAME, target),
				 tensile_hint_nearest(target, names, n,
									  "The query must return the target besides the features.")));
	if (n < 2)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("the " QUERY_NAME " has no column besides the target"),
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
						" is \"%s\", but that of the " QUERY_NAME " is \"%s\"",
						entry->resno, entry->resname, expected->resname),
				 errhint("Select the same columns in the same order.")));
	if (getBaseType(type) != getBaseType(expected_type))
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("column \"%s\" has type %s in the " VALIDATION_QUERY_NAME
						", but %s in the " QUERY_NAME,
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
						" is not one of the " QUERY_NAME,
						list_nth_node(TargetEntry, columns, list_length(expected))->resname),
				 errhint("Select the same columns in the same order.")));
}

/* feed.c calls this again, because a table may have changed since. */
Query *
tensile_analyze_training(const TrainingQuery *training, const char **sql)
{
	Query	   *query = tensile_analyze_select(training->query, QUERY_NAME);
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
	return tensile_analyze_select(*sql, QUERY_NAME);
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

TrainingQuery
tensile_training_query(FunctionCallInfo fcinfo)
{
	return (TrainingQuery) {
		.query = tensile_text_argument(fcinfo, TENSILE_ARG_QUERY),
		.target = tensile_text_argument(fcinfo, TENSILE_ARG_TARGET),
		.split_by = tensile_text_argument(fcinfo, TENSILE_ARG_SPLIT_BY),
		.validation_query = tensile_text_argument(fcinfo, TENSILE_ARG_VALIDATION_QUERY)
	};
}

/* Names; neither the target nor the flag of validation rows can be an array. */
static ArrayType *
array_columns(const Query *query)
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

Datum
tensile_check_submission(FunctionCallInfo fcinfo)
{
	MemoryContext checks = AllocSetContextCreate(CurrentMemoryContext, "pg_tensile submission",
												 ALLOCSET_DEFAULT_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(checks);
	TrainingQuery training;
	const char *sql;
	Query	   *query;
	Datum		arrays;

	tensile_require_version();
	check_nulls(fcinfo);
	training = tensile_training_query(fcinfo);
	query = tensile_analyze_training(&training, &sql);
	tensile_check_privileges(training.query, QUERY_NAME);
	if (training.validation_query != NULL)
		tensile_check_privileges(training.validation_query, VALIDATION_QUERY_NAME);
	tensile_check_gate(&training, query, PG_GETARG_JSONB_P(TENSILE_ARG_OPTIONS));
	MemoryContextSwitchTo(caller);
	arrays = PointerGetDatum(array_columns(query));
	MemoryContextDelete(checks);
	return arrays;
}

Datum
tensile_forward_submission(FunctionCallInfo fcinfo, Datum arrays)
{
	Oid			types[] = {TEXTOID, TEXTARRAYOID};
	NullableDatum extra[] = {
		{CStringGetTextDatum(namespace_search_path), false},
		{arrays, false}
	};

	return tensile_forward_with(fcinfo, 2, types, extra);
}

/* train_model(model, query, target, ...) -> job */
TENSILE_PUBLIC_FUNCTION(tensile_train_model)
{
	int64		job;

	tensile_require_writable(fcinfo);
	job = DatumGetInt64(tensile_forward_submission(fcinfo, tensile_check_submission(fcinfo)));
	tensile_submitted_at_commit(job);
	PG_RETURN_INT64(job);
}

/*
 * schedule_training(model, query, target, ..., every, rows, source, drift), with
 * the arguments of train_model first -> schedule
 */
TENSILE_PUBLIC_FUNCTION(tensile_schedule_training)
{
	tensile_require_writable(fcinfo);
	return tensile_forward_submission(fcinfo, tensile_check_submission(fcinfo));
}

/*
 * tune_model(model, query, target, space, ..., halving, epochs, ...) -> tuning:
 * arguments of its own between the third and the fourth of train_model.
 *
 * The checks take those of train_model.  wait_for_tuning asks for the negative
 * number, which no job has (_submitted_here).
 */
TENSILE_PUBLIC_FUNCTION(tensile_tune_model)
{
	LOCAL_FCINFO(training, TENSILE_N_ARGS);
	int			own = PG_NARGS() - TENSILE_N_ARGS;
	Datum		arrays;
	int64		tuning;

	tensile_require_writable(fcinfo);
	InitFunctionCallInfoData(*training, fcinfo->flinfo, TENSILE_N_ARGS, InvalidOid, NULL, NULL);
	for (int i = 0; i < TENSILE_N_ARGS; i++)
		training->args[i] = fcinfo->args[i <= TENSILE_ARG_TARGET ? i : i + own];
	arrays = tensile_check_submission(training);
	tuning = DatumGetInt64(tensile_forward_submission(fcinfo, arrays));
	tensile_submitted_at_commit(-tuning);
	PG_RETURN_INT64(tuning);
}

/* tensile.calibrate(device_seconds) -> job */
TENSILE_PUBLIC_FUNCTION(tensile_calibrate)
{
	int64		job;

	tensile_require_preload();
	tensile_require_writable(fcinfo);
	job = DatumGetInt64(tensile_forward_with(fcinfo, 0, NULL, NULL));
	tensile_submitted_at_commit(job);
	PG_RETURN_INT64(job);
}
