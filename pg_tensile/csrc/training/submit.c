/*
 * submit.c: train_model, as far as it needs the rights and the search_path of
 * the caller.
 *
 * All that can be known about the training query without running it
 * (training_query.c) is checked here, so that the caller gets the error, not the
 * job.  Then tensile_internal._train_model (SECURITY DEFINER), which gets the arguments as
 * one jsonb, checks the rest and inserts the job.  The commit wakes the
 * controller.  explain_training (explain.c) makes the same checks.
 *
 * Memory: the checks have a context that is deleted afterwards.  Locks: those
 * of planning the query, until the end of the transaction.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "catalog/namespace.h"
#include "catalog/pg_type.h"
#include "fmgr.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "optimizer/optimizer.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/syscache.h"

#include "base/convert.h"
#include "base/error_context.h"
#include "base/owner.h"
#include "processes/notify.h"
#include "rows/training_query.h"
#include "state/extension.h"
#include "state/shmem.h"
#include "training/gate.h"
#include "training/submit.h"

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

/*
 * Raises the errors that the arguments of train_model give with the caller's
 * rights; returns the names of the features that are arrays.
 */
static Datum
check_submission(FunctionCallInfo fcinfo)
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
	tensile_check_privileges(training.query, TRAINING_QUERY_NAME);
	if (training.validation_query != NULL)
		tensile_check_privileges(training.validation_query, VALIDATION_QUERY_NAME);
	tensile_check_gate(&training, query, PG_GETARG_JSONB_P(TENSILE_ARG_OPTIONS));
	MemoryContextSwitchTo(caller);
	arrays = PointerGetDatum(tensile_array_columns(query));
	MemoryContextDelete(checks);
	return arrays;
}

/* ---- submission ---- */

/*
 * The arguments as a jsonb object.  Numbers keep all digits, and intervals can be
 * read with other settings than those of the session.
 */
static Datum
arguments_as_jsonb(FunctionCallInfo fcinfo, char *const *names, const Oid *types)
{
	List	   *pairs = NIL;
	int			nest_level = NewGUCNestLevel();
	FuncExpr   *call;
	Expr	   *object;

	for (int i = 0; i < PG_NARGS(); i++)
	{
		pairs = lappend(pairs, makeConst(TEXTOID, -1, InvalidOid, -1,
										 CStringGetTextDatum(names[i]), false, false));
		pairs = lappend(pairs, makeConst(types[i], -1, InvalidOid, get_typlen(types[i]),
										 PG_GETARG_DATUM(i), PG_ARGISNULL(i),
										 get_typbyval(types[i])));
	}
	call = makeFuncExpr(F_JSONB_BUILD_OBJECT_ANY, JSONBOID, pairs, InvalidOid, InvalidOid,
						COERCE_EXPLICIT_CALL);
	(void) set_config_option("extra_float_digits", "1", PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SAVE, true, 0, false);
	(void) set_config_option("IntervalStyle", "postgres", PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SAVE, true, 0, false);
	object = evaluate_expr((Expr *) call, JSONBOID, -1, InvalidOid);
	AtEOXact_GUC(false, nest_level);
	return castNode(Const, object)->constvalue;
}

Datum
tensile_submit(FunctionCallInfo fcinfo, int first_own, int n_own)
{
	LOCAL_FCINFO(training, FUNC_MAX_ARGS);
	Oid			function = fcinfo->flinfo->fn_oid;
	HeapTuple	tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(function));
	Oid		   *types;
	char	  **names;
	char	   *modes;
	int			n_training = 0;
	Oid			call_types[FUNC_MAX_ARGS] = {OIDOID, JSONBOID};
	NullableDatum call[FUNC_MAX_ARGS] = {{ObjectIdGetDatum(GetUserId()), false}};
	int			n_call = 2;

	get_func_arg_info(tuple, &types, &names, &modes);
	ReleaseSysCache(tuple);
	for (int i = 0; i < PG_NARGS(); i++)
		if (i >= first_own && i < first_own + n_own)
		{
			call_types[n_call] = types[i];
			call[n_call++] = fcinfo->args[i];
		}
		else
		{
			training->args[n_training] = fcinfo->args[i];
			types[n_training] = types[i];
			names[n_training++] = names[i];
		}
	InitFunctionCallInfoData(*training, fcinfo->flinfo, n_training, InvalidOid, NULL, NULL);

	call_types[n_call] = TEXTOID;
	call[n_call++] = (NullableDatum) {CStringGetTextDatum(namespace_search_path), false};
	call_types[n_call] = TEXTARRAYOID;
	call[n_call++] = (NullableDatum) {check_submission(training), false};
	call[1] = (NullableDatum) {arguments_as_jsonb(training, names, types), false};
	return tensile_call(psprintf("_%s", get_func_name(function)), n_call, call_types, call).value;
}

/* train_model(model, query, target, ...) -> job */
TENSILE_PUBLIC_FUNCTION(tensile_train_model)
{
	int64		job;

	tensile_require_writable(fcinfo);
	job = DatumGetInt64(tensile_submit(fcinfo, 0, 0));
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
	return tensile_submit(fcinfo, PG_NARGS() - 4, 4);
}

/*
 * tune_model(model, query, target, space, trials, max_time, metric, parallel,
 * halving, epochs, ...) -> tuning: arguments of its own behind the target.
 *
 * wait_for_tuning asks for the negative number, which no job has
 * (_submitted_here).
 */
TENSILE_PUBLIC_FUNCTION(tensile_tune_model)
{
	int64		tuning;

	tensile_require_writable(fcinfo);
	tuning = DatumGetInt64(tensile_submit(fcinfo, TENSILE_ARG_TARGET + 1, 6));
	tensile_submitted_at_commit(-tuning);
	PG_RETURN_INT64(tuning);
}

/* calibrate_device(seconds) -> job */
TENSILE_PUBLIC_FUNCTION(tensile_calibrate)
{
	int64		job;

	tensile_require_preload();
	tensile_require_writable(fcinfo);
	job = DatumGetInt64(tensile_forward_with(fcinfo, 0, NULL, NULL));
	tensile_submitted_at_commit(job);
	PG_RETURN_INT64(job);
}
