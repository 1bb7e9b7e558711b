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
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "compat.h"
#include "convert.h"
#include "extension.h"
#include "notify.h"
#include "owner.h"
#include "query.h"
#include "shmem.h"
#include "submit.h"

PG_FUNCTION_INFO_V1(tensile_train_model);
PG_FUNCTION_INFO_V1(tensile_calibrate);

#define QUERY_NAME "training query"

/*
 * The arguments of train_model and explain_training; those without a name may
 * be null.
 */
static const char *const not_null[] = {
	"model", "query", "target", "epochs", "batch_size", "optimizer", "learning_rate", "validation",
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

/* feed.c calls this again, because a table may have changed since. */
void
tensile_check_columns(Query *query, const char *target)
{
	const char **names = palloc(list_length(query->targetList) * sizeof(char *));
	int			n = 0;
	bool		has_target = false;
	ListCell   *cell;

	foreach(cell, query->targetList)
	{
		TargetEntry *entry = lfirst_node(TargetEntry, cell);

		if (!entry->resjunk)
			names[n++] = entry->resname;
	}
	check_duplicates(names, n);

	foreach(cell, query->targetList)
	{
		TargetEntry *entry = lfirst_node(TargetEntry, cell);
		bool		is_target;

		if (entry->resjunk)
			continue;
		is_target = strcmp(entry->resname, target) == 0;
		has_target |= is_target;
		check_type(entry->resname, exprType((Node *) entry->expr), is_target);
	}
	if (!has_target)
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
}

/* ---- planning and privileges ---- */

/* The worker is another session, which cannot read temporary tables. */
static void
refuse_temporary_tables(PlannedStmt *plan)
{
	ListCell   *cell;

	foreach(cell, plan->relationOids)
		if (get_rel_persistence(lfirst_oid(cell)) == RELPERSISTENCE_TEMP)
			ereport(ERROR,
					(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
					 errmsg("the " QUERY_NAME " reads the temporary table \"%s\"",
							get_rel_name(lfirst_oid(cell))),
					 errhint("The job runs in another session, which cannot see it: "
							 "use an ordinary or an unlogged table.")));
}

static void
query_context(void *arg)
{
	errcontext(QUERY_NAME);
}

/*
 * Plans the query and starts it without reading a row.  Raises 42501 for what
 * the current user may not read or call.
 */
static void
check_privileges(Query *query, const char *sql)
{
	ErrorContextCallback context = {error_context_stack, query_context, NULL};
	PlannedStmt *plan;
	QueryDesc  *desc;

	error_context_stack = &context;
	PushActiveSnapshot(GetTransactionSnapshot());
	plan = tensile_plan_query(query, sql, CURSOR_OPT_PARALLEL_OK);
	refuse_temporary_tables(plan);
	desc = CreateQueryDesc(plan, sql, GetActiveSnapshot(), InvalidSnapshot, None_Receiver,
						   NULL, NULL, 0);
	ExecutorStart(desc, EXEC_FLAG_EXPLAIN_ONLY);
	ExecutorEnd(desc);
	FreeQueryDesc(desc);
	PopActiveSnapshot();
	error_context_stack = context.previous;
}

void
tensile_check_submission(FunctionCallInfo fcinfo)
{
	MemoryContext checks = AllocSetContextCreate(CurrentMemoryContext, "pg_tensile submission",
												 ALLOCSET_DEFAULT_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(checks);
	char	   *sql;
	Query	   *query;

	tensile_require_version();
	check_nulls(fcinfo);
	sql = text_to_cstring(PG_GETARG_TEXT_PP(TENSILE_ARG_QUERY));
	query = tensile_analyze_select(sql, QUERY_NAME);
	tensile_check_columns(query, text_to_cstring(PG_GETARG_TEXT_PP(TENSILE_ARG_TARGET)));
	check_privileges(query, sql);
	MemoryContextSwitchTo(caller);
	MemoryContextDelete(checks);
}

Datum
tensile_forward_submission(FunctionCallInfo fcinfo)
{
	Oid			type = TEXTOID;
	NullableDatum search_path = {CStringGetTextDatum(namespace_search_path), false};

	return tensile_forward_with(fcinfo, 1, &type, &search_path);
}

/* train_model(model, query, target, ...) -> job */
Datum
tensile_train_model(PG_FUNCTION_ARGS)
{
	int64		job;

	tensile_check_submission(fcinfo);
	job = DatumGetInt64(tensile_forward_submission(fcinfo));
	tensile_submitted_at_commit(job);
	PG_RETURN_INT64(job);
}

/* tensile.calibrate(device_seconds) -> job */
Datum
tensile_calibrate(PG_FUNCTION_ARGS)
{
	int64		job;

	tensile_require_preload();
	job = DatumGetInt64(tensile_forward_with(fcinfo, 0, NULL, NULL));
	tensile_submitted_at_commit(job);
	PG_RETURN_INT64(job);
}
