/*
 * prediction_query.c: the query for predictions that is derived from the
 * training query of a version.
 *
 * The trainer derives it (pg_tensile/queries/prediction.py), and the worker
 * has it judged here by the server's own parser, as the role that has
 * submitted the job: the query as it was parsed and printed again must mean
 * what the training query means, and the derived query must return the
 * features.  predict_rows runs it with the rights of its caller.
 *
 * Analysing may run code of the query, such as the input functions of its
 * literals' types, so it is done as the query is run: read only, in an
 * operation in which no private function answers.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "executor/executor.h"
#include "fmgr.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/regproc.h"

#include "base/convert.h"
#include "base/foreign_code.h"
#include "base/owner.h"
#include "base/query.h"
#include "predicting/prediction_query.h"
#include "rows/feed.h"
#include "rows/model.h"
#include "rows/predict_features_tuple.h"
#include "state/identity.h"

#define QUERY_NAME "query for predictions"

PG_FUNCTION_INFO_V1(tensile_same_query);
PG_FUNCTION_INFO_V1(tensile_check_prediction_query);

/* ---- the judge, in the worker ---- */

/* Without the place of the statement in its text. */
static Query *
analyze_anywhere(const char *sql)
{
	Query	   *query = tensile_analyze_select(sql, QUERY_NAME);

	query->stmt_location = -1;
	query->stmt_len = 0;
	return query;
}

static int64
are_same(void *argument)
{
	const char **queries = argument;

	return equal(analyze_anywhere(queries[0]), analyze_anywhere(queries[1]));
}

/* tensile_worker._same_query(query, other, settings): do both mean the same? */
Datum
tensile_same_query(PG_FUNCTION_ARGS)
{
	const char *queries[2];

	tensile_require_process(TENSILE_WORKER);
	queries[0] = tensile_text_argument(fcinfo, 0);
	queries[1] = tensile_text_argument(fcinfo, 1);
	PG_RETURN_BOOL(tensile_feed_in_worker(PG_GETARG_JSONB_P(2), are_same, queries) != 0);
}

typedef struct Judged
{
	PredictModel *model;
	const char *training_query;
	const char *query;
} Judged;

static int64
judge(void *argument)
{
	const Judged *judged = argument;
	Query	   *query = tensile_analyze_select(judged->training_query, "training query");

	if (query->hasTargetSRFs)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("a column of the training query is a set of rows")));
	query = tensile_analyze_select(judged->query, QUERY_NAME);
	(void) feature_sources_create(&judged->model->features,
								  ExecCleanTypeFromTL(query->targetList), CurrentMemoryContext);
	return 0;
}

/*
 * tensile_worker._check_prediction_query(version, training_query, query, settings):
 * raises an error unless the query returns the features of the version.  The
 * target of a training query whose columns are sets may determine its rows.
 */
Datum
tensile_check_prediction_query(PG_FUNCTION_ARGS)
{
	Judged		judged;

	tensile_require_process(TENSILE_WORKER);
	judged = (Judged) {
		.model = predict_model_load_id(PG_GETARG_INT64(0), CurrentMemoryContext),
		.training_query = tensile_text_argument(fcinfo, 1),
		.query = tensile_text_argument(fcinfo, 2)
	};
	(void) tensile_feed_in_worker(PG_GETARG_JSONB_P(3), judge, &judged);
	PG_RETURN_VOID();
}

/* ---- predict_rows ---- */

/* Calls tensile_internal._prediction_query, which raises the errors. */
PredictionQuery
tensile_prediction_query(const PredictModel *model, Oid source)
{
	Oid			types[] = {INT8OID, TEXTOID, TEXTOID};
	NullableDatum arguments[] = {
		{Int64GetDatum(model->version), false}, {CStringGetTextDatum(model->name), false}, {0, true}
	};
	NullableDatum result;
	const char *name = OidIsValid(source) ? get_rel_name(source) : NULL;
	PredictionQuery query;
	Jsonb	   *answer;
	JsonbValue *settings;

	if (OidIsValid(source) && name == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("relation with OID %u does not exist", source),
				 errhint("Name a table or a view.")));
	if (name != NULL)
		arguments[2] = (NullableDatum) {
			CStringGetTextDatum(
				quote_qualified_identifier(get_namespace_name(get_rel_namespace(source)), name)),
			false
		};
	result = tensile_call("_prediction_query", lengthof(types), types, arguments);
	if (result.isnull)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("this transaction cannot see the version of model \"%s\"", model->name),
				 errhint("Its snapshot is older: call the function in a new transaction.")));
	answer = DatumGetJsonbP(result.value);
	settings = getKeyJsonValueFromContainer(&answer->root, "settings", strlen("settings"), NULL);
	query.sql = tensile_text_key(&answer->root, "sql");
	query.settings = JsonbValueToJsonb(settings);
	query.author = (Oid) strtoul(tensile_text_key(&answer->root, "author"), NULL, 10);
	return query;
}

/* ---- running it with the rights of its caller ---- */

Query *
tensile_analyze_prediction_query(const PredictionQuery *query, const PredictModel *model)
{
	Query	   *analyzed = tensile_analyze_select_of(query->author, query->sql, QUERY_NAME,
													 query->settings);
	ForeignCode found = tensile_foreign_code(analyzed);

	if (OidIsValid(found.function) || OidIsValid(found.type))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("the query for predictions of model \"%s\" may run code of another role",
						model->name),
				 OidIsValid(found.function) ?
				 errdetail("The function %s would run with your rights.",
						   format_procedure(found.function)) :
				 errdetail("A value becomes one of the type %s, which may have checks that would "
						   "run with your rights.", format_type_be(found.type)),
				 errhint("Read the query in tensile.model_versions, and pass it as the argument "
						 "\"query\" if you trust it.")));
	return analyzed;
}
