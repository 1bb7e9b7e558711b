/*
 * intervals.c: predict_interval, the prediction of one row with its interval.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "fmgr.h"
#include "funcapi.h"
#include "utils/builtins.h"

#include "base/error_context.h"
#include "predicting/predict_client.h"
#include "predicting/predict_site.h"
#include "rows/model.h"

static CallSite *
interval_site(FunctionCallInfo fcinfo)
{
	CallSite   *site = predict_site_get(fcinfo, 3);

	if (site->model->task != TASK_REGRESSION)
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("model \"%s\" predicts labels, which have no interval", site->name),
				 errhint("Use predict_probabilities.")));
	return site;
}

/* (lower, prediction, upper) for the call site's row */
static Datum
predict_interval(FunctionCallInfo fcinfo, CallSite *site)
{
	float8		coverage = PG_GETARG_FLOAT8(2);
	Predictions answer;
	TupleDesc	desc;
	Datum		values[3];
	bool		nulls[3] = {false, false, false};

	predict_check_coverage(coverage);
	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "predict_interval returns a row");
	predict_site_request(site, &(Wish) {WISH_INTERVAL, coverage}, &answer);
	values[0] = Float8GetDatum(*predict_extra_numbers(&answer, 0, 1));
	values[1] = Float8GetDatum(answer.prediction[0]);
	values[2] = Float8GetDatum(*predict_extra_numbers(&answer, 1, 1));
	return HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc), values, nulls));
}

/* The functions are strict except in memory_budget, the last argument. */
#define INTERVAL_FUNCTION(name, pack, getarg) \
TENSILE_PUBLIC_FUNCTION(name) \
{ \
	CallSite   *site; \
\
	if (PG_ARGISNULL(0) || PG_ARGISNULL(1) || PG_ARGISNULL(2)) \
		PG_RETURN_NULL(); \
	site = interval_site(fcinfo); \
	pack(site, getarg(1)); \
	return predict_interval(fcinfo, site); \
}

INTERVAL_FUNCTION(tensile_predict_interval_record, predict_site_pack_record,
				  PG_GETARG_HEAPTUPLEHEADER)
INTERVAL_FUNCTION(tensile_predict_interval_array, predict_site_pack_numbers,
				  PG_GETARG_ARRAYTYPE_P)
INTERVAL_FUNCTION(tensile_predict_interval_jsonb, predict_site_pack_object,
				  PG_GETARG_JSONB_P)
INTERVAL_FUNCTION(tensile_predict_interval_text, predict_site_pack_text, PG_GETARG_TEXT_PP)
