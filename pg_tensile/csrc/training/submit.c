/*
 * submit.c: train_model, as far as it needs the rights and the search_path of
 * the caller.
 *
 * All that can be known about the training query without running it
 * (training_query.c) is checked here, so that the caller gets the error, not the
 * job.  Then tensile._train_model (SECURITY DEFINER) checks the rest and inserts
 * the job.  The commit wakes the controller.  explain_training (explain.c) makes
 * the same checks.
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
#include "utils/builtins.h"
#include "utils/memutils.h"

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
	tensile_check_privileges(training.query, TRAINING_QUERY_NAME);
	if (training.validation_query != NULL)
		tensile_check_privileges(training.validation_query, VALIDATION_QUERY_NAME);
	tensile_check_gate(&training, query, PG_GETARG_JSONB_P(TENSILE_ARG_OPTIONS));
	MemoryContextSwitchTo(caller);
	arrays = PointerGetDatum(tensile_array_columns(query));
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
