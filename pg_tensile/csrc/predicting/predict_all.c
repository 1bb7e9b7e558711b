/*
 * predict_all.c: predict_all, everything about the prediction of one row.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include <math.h>

#include "common/shortest_dec.h"
#include "fmgr.h"
#include "utils/builtins.h"
#include "utils/json.h"
#include "utils/jsonb.h"

#include "base/error_context.h"
#include "predicting/answers.h"
#include "predicting/predict_site.h"

/* Appends a member of an object; JSON has no number for what is not finite. */
static void
append_number(StringInfo json, const char *key, double number)
{
	if (json->data[json->len - 1] != '{')
		appendStringInfoChar(json, ',');
	escape_json(json, key);
	appendStringInfo(json, ":%s", isfinite(number) ? double_to_shortest_decimal(number) : "null");
}

static void
append_regression(StringInfo json, CallSite *site, double coverage)
{
	Predictions answer;

	predict_site_request(site, &(Wish) {WISH_OPTIONAL_INTERVAL, coverage}, &answer);
	append_number(json, "value", answer.prediction[0]);
	if (answer.nextras == 0)
		return;
	appendStringInfoString(json, ",\"interval\":{");
	append_number(json, "lower", *predict_extra_numbers(&answer, 0, 1));
	append_number(json, "upper", *predict_extra_numbers(&answer, 1, 1));
	append_number(json, "coverage", coverage);
	appendStringInfoChar(json, '}');
}

static void
append_classes(StringInfo json, CallSite *site)
{
	const PredictModel *model = site->model;
	const double *probabilities;
	Predictions answer;

	predict_site_request(site, &(Wish) {WISH_PROBABILITIES}, &answer);
	probabilities = predict_extra_numbers(&answer, 0, model->nlabels);
	appendStringInfoString(json, "\"label\":");
	escape_json(json, predict_site_label(site, answer.label[0]));
	append_number(json, "probability", answer.probability[0]);
	if (model->task == TASK_BINARY || model->numeric_labels)
		append_number(json, "value", answer.prediction[0]);
	appendStringInfoString(json, ",\"probabilities\":{");
	for (int i = 0; i < model->nlabels; i++)
		append_number(json, model->labels[i], probabilities[i]);
	appendStringInfoChar(json, '}');
}

static Datum
predict_all(CallSite *site, double coverage)
{
	StringInfoData json;

	initStringInfo(&json);
	appendStringInfoChar(&json, '{');
	if (site->model->task == TASK_REGRESSION)
		append_regression(&json, site, coverage);
	else
		append_classes(&json, site);
	appendStringInfoChar(&json, '}');
	return DirectFunctionCall1(jsonb_in, CStringGetDatum(json.data));
}

/* The functions are strict except in memory_budget, the last argument. */
#define PREDICT_ALL_FUNCTION(name, pack, getarg) \
TENSILE_PUBLIC_FUNCTION(name) \
{ \
	CallSite   *site; \
\
	if (PG_ARGISNULL(0) || PG_ARGISNULL(1) || PG_ARGISNULL(2)) \
		PG_RETURN_NULL(); \
	predict_check_coverage(PG_GETARG_FLOAT8(2)); \
	site = predict_site_get(fcinfo, 3); \
	pack(site, getarg(1)); \
	return predict_all(site, PG_GETARG_FLOAT8(2)); \
}

PREDICT_ALL_FUNCTION(tensile_predict_all_record, predict_site_pack_record,
					 PG_GETARG_HEAPTUPLEHEADER)
PREDICT_ALL_FUNCTION(tensile_predict_all_array, predict_site_pack_numbers, PG_GETARG_ARRAYTYPE_P)
PREDICT_ALL_FUNCTION(tensile_predict_all_jsonb, predict_site_pack_object, PG_GETARG_JSONB_P)
PREDICT_ALL_FUNCTION(tensile_predict_all_text, predict_site_pack_text, PG_GETARG_TEXT_PP)
