/*
 * attributions.c: explain_prediction, the shares of the features in the
 * prediction of one row.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "fmgr.h"
#include "funcapi.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/lsyscache.h"
#include "utils/tuplestore.h"

#include "base/error_context.h"
#include "predicting/predict_site.h"
#include "predicting/shapley.h"
#include "rows/model.h"

/* A feature's value as text; NULL: none. */
static text *
record_value(CallSite *site, int feature)
{
	int			attribute = site->sources[feature].attribute;
	Oid			output;
	bool		variable;

	if (site->nulls[attribute])
		return NULL;
	getTypeOutputInfo(TupleDescAttr(site->desc, attribute)->atttypid, &output, &variable);
	return cstring_to_text(OidOutputFunctionCall(output, site->values[attribute]));
}

static text *
object_value(Jsonb *object, const char *feature)
{
	LOCAL_FCINFO(call, 2);
	Datum		value;

	InitFunctionCallInfoData(*call, NULL, 2, InvalidOid, NULL, NULL);
	call->args[0].value = JsonbPGetDatum(object);
	call->args[0].isnull = false;
	call->args[1].value = CStringGetTextDatum(feature);
	call->args[1].isnull = false;
	value = jsonb_object_field_text(call);
	return call->isnull ? NULL : DatumGetTextPP(value);
}

static void
put_attribution(ReturnSetInfo *result, const char *feature, text *value, double attribution)
{
	Datum		values[3] = {
		feature ? CStringGetTextDatum(feature) : (Datum) 0, PointerGetDatum(value),
		Float8GetDatum(attribution)
	};
	bool		nulls[3] = {feature == NULL, value == NULL, false};

	tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
}

/*
 * Adds a row for each feature of the call site's row, and one for what
 * remains of the prediction.  `object`: the row, or NULL if it is a record.
 */
static void
explain_prediction(CallSite *site, Jsonb *object, ReturnSetInfo *result)
{
	const PredictModel *model = site->model;
	const FeatureSet *set = &model->features;
	Attributions attributions = shapley_attributions(model, site->batch, site->memory_budget);
	text	   *label = NULL;

	for (int i = 0; i < set->count; i++)
	{
		text	   *value = object ? object_value(object, set->names[i]) : record_value(site, i);

		put_attribution(result, set->names[i], value, attributions.features[i]);
	}
	if (attributions.label >= 0)
		label = cstring_to_text(model->labels[attributions.label]);
	put_attribution(result, NULL, label, attributions.average);
}

TENSILE_PUBLIC_FUNCTION(tensile_explain_prediction_record)
{
	CallSite   *site;

	InitMaterializedSRF(fcinfo, 0);
	if (PG_ARGISNULL(0) || PG_ARGISNULL(1))
		return (Datum) 0;
	site = predict_site_get(fcinfo, 2);
	predict_site_pack_record(site, PG_GETARG_HEAPTUPLEHEADER(1));
	explain_prediction(site, NULL, (ReturnSetInfo *) fcinfo->resultinfo);
	return (Datum) 0;
}

TENSILE_PUBLIC_FUNCTION(tensile_explain_prediction_jsonb)
{
	Jsonb	   *object;
	CallSite   *site;

	InitMaterializedSRF(fcinfo, 0);
	if (PG_ARGISNULL(0) || PG_ARGISNULL(1))
		return (Datum) 0;
	object = PG_GETARG_JSONB_P(1);
	site = predict_site_get(fcinfo, 2);
	predict_site_pack_object(site, object);
	explain_prediction(site, object, (ReturnSetInfo *) fcinfo->resultinfo);
	return (Datum) 0;
}
