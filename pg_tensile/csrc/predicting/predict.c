/*
 * predict.c: predict and predict_class, for one row per call.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "fmgr.h"
#include "utils/builtins.h"

#include "base/error_context.h"
#include "predicting/predict_site.h"
#include "rows/model.h"

static Datum
predict_number(FunctionCallInfo fcinfo, CallSite *site)
{
	Predictions answer;

	predict_site_request(site, NULL, &answer);
	PG_RETURN_FLOAT8(answer.prediction[0]);
}

static Datum
predict_label(FunctionCallInfo fcinfo, CallSite *site)
{
	Predictions answer;

	predict_site_request(site, NULL, &answer);
	PG_RETURN_TEXT_P(cstring_to_text(predict_site_label(site, answer.label[0])));
}

/* The call site of predict, which is for models that predict numbers. */
static CallSite *
number_site(FunctionCallInfo fcinfo)
{
	CallSite   *site = predict_site_get(fcinfo, 2);

	if (site->model->task == TASK_MULTICLASS && !site->model->numeric_labels)
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("model \"%s\" predicts labels that are not numbers", site->name),
				 errhint("Use predict_class.")));
	return site;
}

static CallSite *
label_site(FunctionCallInfo fcinfo)
{
	return predict_site_of_classifier(fcinfo, 2);
}

/* The functions are strict except in memory_budget, the last argument. */
#define PREDICT_FUNCTION(name, site_of_call, pack, getarg, result) \
TENSILE_PUBLIC_FUNCTION(name) \
{ \
	CallSite   *site; \
\
	if (PG_ARGISNULL(0) || PG_ARGISNULL(1)) \
		PG_RETURN_NULL(); \
	site = site_of_call(fcinfo); \
	pack(site, getarg(1)); \
	return result(fcinfo, site); \
}

PREDICT_FUNCTION(tensile_predict_record, number_site, predict_site_pack_record,
				 PG_GETARG_HEAPTUPLEHEADER, predict_number)
PREDICT_FUNCTION(tensile_predict_array, number_site, predict_site_pack_numbers,
				 PG_GETARG_ARRAYTYPE_P, predict_number)
PREDICT_FUNCTION(tensile_predict_jsonb, number_site, predict_site_pack_object,
				 PG_GETARG_JSONB_P, predict_number)
PREDICT_FUNCTION(tensile_predict_text, number_site, predict_site_pack_text,
				 PG_GETARG_TEXT_PP, predict_number)
PREDICT_FUNCTION(tensile_predict_class_record, label_site, predict_site_pack_record,
				 PG_GETARG_HEAPTUPLEHEADER, predict_label)
PREDICT_FUNCTION(tensile_predict_class_array, label_site, predict_site_pack_numbers,
				 PG_GETARG_ARRAYTYPE_P, predict_label)
PREDICT_FUNCTION(tensile_predict_class_jsonb, label_site, predict_site_pack_object,
				 PG_GETARG_JSONB_P, predict_label)
PREDICT_FUNCTION(tensile_predict_class_text, label_site, predict_site_pack_text,
				 PG_GETARG_TEXT_PP, predict_label)
