/*
 * evaluate.c: evaluate_model and feature_importance, which run a trainer in
 * the caller's session on the rows of a query (session_run.c,
 * evaluation_rows.c); and schedule_evaluation.
 *
 * All columns are checked before the trainer is started, and once more when
 * the query runs.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "catalog/namespace.h"
#include "catalog/pg_type.h"
#include "executor/executor.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "utils/builtins.h"

#include "base/convert.h"
#include "base/error_context.h"
#include "base/library.h"
#include "base/owner.h"
#include "base/query.h"
#include "processes/session_run.h"
#include "rows/evaluation_rows.h"
#include "rows/model.h"
#include "rows/training_query.h"
#include "state/extension.h"

/* Installed beside the extension's library; pg_tensile/execution/evaluator.py loads it. */
#define EVALUATOR_LIBRARY TENSILE_LIBRARY "_evaluator" DLSUFFIX

PG_FUNCTION_INFO_V1(tensile_evaluator);

typedef struct Evaluation
{
	SessionRun	run;
	const char *query;
	const char *by;				/* name of the column of groups; NULL: none */
	const PredictModel *model;
} Evaluation;

/*
 * tensile_internal._evaluator(version) -> the path of the library with which a
 * trainer evaluates the version as a session does; null: PyTorch has to
 */
Datum
tensile_evaluator(PG_FUNCTION_ARGS)
{
	const PredictModel *model = predict_model_load_id(PG_GETARG_INT64(0), CurrentMemoryContext);

	if (!predict_model_is_evaluated(model))
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(cstring_to_text(psprintf("%s/%s", tensile_library_folder(), EVALUATOR_LIBRARY)));
}

static int64
feed_evaluation(SessionRun *run, int fd)
{
	const Evaluation *evaluation = (Evaluation *) run;
	EvaluationReader reader = {.fd = fd,.model = evaluation->model};

	return evaluation_feed(evaluation->query, EVALUATION_QUERY_NAME, evaluation->by, &reader, 1);
}

static void
require_argument(FunctionCallInfo fcinfo, int number, const char *name)
{
	if (PG_ARGISNULL(number))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("argument \"%s\" must not be null", name),
				 errhint("Pass a value, or leave the argument out if it has a default.")));
}

/*
 * Runs the function, whose first arguments are model and query, on this
 * version of the model, or the deployed one (0).
 */
static Datum
evaluate(FunctionCallInfo fcinfo, const char *function, const char *by, int32 version)
{
	Evaluation	evaluation = {.run = {.function = function,.feed = feed_evaluation},.by = by};
	Query	   *query;
	Oid			type = INT8OID;
	NullableDatum version_id = {0};
	Datum		spec;

	tensile_require_no_session_run(function);
	tensile_require_version();
	require_argument(fcinfo, 0, "model");
	require_argument(fcinfo, 1, "query");
	evaluation.query = tensile_text_argument(fcinfo, 1);
	evaluation.model = predict_model_load_version(tensile_text_argument(fcinfo, 0), version,
												  CurrentMemoryContext);
	query = tensile_analyze_select(evaluation.query, EVALUATION_QUERY_NAME);
	evaluation_check_columns(evaluation.model, by, ExecCleanTypeFromTL(query->targetList));

	version_id.value = Int64GetDatum(evaluation.model->version);
	spec = tensile_forward_with(fcinfo, 1, &type, &version_id);
	if (fcinfo->isnull)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("this transaction cannot see the version of model \"%s\"",
						evaluation.model->name),
				 errhint("Its snapshot is older: call the function in a new transaction.")));
	tensile_session_run(fcinfo, &evaluation.run, spec);
	return (Datum) 0;
}

/*
 * evaluate_model(model, query, by, version, memory_budget) -> (group_value,
 * metric, label, predicted, quantile, value, baseline)
 */
TENSILE_PUBLIC_FUNCTION(tensile_evaluate_model)
{
	int32		version = PG_ARGISNULL(3) ? 0 : PG_GETARG_INT32(3);

	if (!PG_ARGISNULL(3) && version <= 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("a model has no version %d", version),
				 errhint("Versions are numbered from 1; see tensile.model_versions.")));
	return evaluate(fcinfo, "evaluate_model", tensile_text_argument(fcinfo, 2), version);
}

/*
 * feature_importance(model, query, repeats, metric, seed) -> (feature,
 * importance, deviation, metric)
 */
TENSILE_PUBLIC_FUNCTION(tensile_feature_importance)
{
	require_argument(fcinfo, 2, "repeats");
	require_argument(fcinfo, 4, "seed");
	return evaluate(fcinfo, "feature_importance", NULL, 0);
}

/*
 * schedule_evaluation(model, query, every, metric) -> schedule.  The query is
 * checked as the caller.
 */
TENSILE_PUBLIC_FUNCTION(tensile_schedule_evaluation)
{
	Oid			type = TEXTOID;
	NullableDatum search_path = {CStringGetTextDatum(namespace_search_path), false};
	const char *sql;
	PredictModel *model;
	Query	   *query;

	tensile_require_version();
	tensile_require_writable(fcinfo);
	require_argument(fcinfo, 0, "model");
	require_argument(fcinfo, 1, "query");
	require_argument(fcinfo, 2, "every");
	sql = tensile_text_argument(fcinfo, 1);
	model = predict_model_load(tensile_text_argument(fcinfo, 0), CurrentMemoryContext);
	query = tensile_analyze_select(sql, EVALUATION_QUERY_NAME);
	evaluation_check_columns(model, NULL, ExecCleanTypeFromTL(query->targetList));
	tensile_check_privileges(sql, EVALUATION_QUERY_NAME);
	return tensile_forward_with(fcinfo, 1, &type, &search_path);
}
