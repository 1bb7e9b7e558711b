/*
 * attributions.c: explain_prediction, the shares of the features in the
 * prediction of one row.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "fmgr.h"
#include "funcapi.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/jsonb.h"
#include "utils/lsyscache.h"
#include "utils/tuplestore.h"

#include "base/error_context.h"
#include "predicting/predict_site.h"
#include "predicting/shapley.h"
#include "rows/model.h"
#include "rows/predict_features_jsonb.h"

/* The values of the row's features as texts; NULL: none. */
static text **
record_values(CallSite *site)
{
	int			count = site->model->features.count;
	text	  **values = palloc0(sizeof(text *) * count);

	for (int i = 0; i < count; i++)
	{
		int			attribute = site->sources[i].attribute;
		Oid			output;
		bool		variable;

		if (site->nulls[attribute])
			continue;
		getTypeOutputInfo(TupleDescAttr(site->desc, attribute)->atttypid, &output, &variable);
		values[i] = cstring_to_text(OidOutputFunctionCall(output, site->values[attribute]));
	}
	return values;
}

static text **
array_values(ArrayType *array)
{
	Datum	   *elements;
	bool	   *nulls;
	int			count;
	text	  **values;

	deconstruct_array(array, FLOAT8OID, sizeof(float8), FLOAT8PASSBYVAL, TYPALIGN_DOUBLE,
					  &elements, &nulls, &count);
	values = palloc0(sizeof(text *) * count);
	for (int i = 0; i < count; i++)
		if (!nulls[i])
			values[i] = cstring_to_text(OidOutputFunctionCall(F_FLOAT8OUT, elements[i]));
	return values;
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

static text **
object_values(CallSite *site, Jsonb *object)
{
	const FeatureSet *set = &site->model->features;
	text	  **values = palloc(sizeof(text *) * set->count);

	for (int i = 0; i < set->count; i++)
		values[i] = object_value(object, set->names[i]);
	return values;
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
 * Adds a row for each feature of the call site's row, which has these values,
 * and one for what remains of the prediction.
 */
static void
put_attributions(CallSite *site, text **values, ReturnSetInfo *result)
{
	const PredictModel *model = site->model;
	const FeatureSet *set = &model->features;
	Attributions attributions = shapley_attributions(model, site->batch, site->memory_budget);
	text	   *label = NULL;

	for (int i = 0; i < set->count; i++)
		put_attribution(result, set->names[i], values[i], attributions.features[i]);
	if (attributions.label >= 0)
		label = cstring_to_text(predict_site_label(site, attributions.label));
	put_attribution(result, NULL, label, attributions.average);
}

/*
 * No rows for null arguments, except for memory_budget, the last one.
 * `values` is an expression of `site` and `row`.
 */
#define EXPLAIN_FUNCTION(name, type, given, pack, values) \
TENSILE_PUBLIC_FUNCTION(name) \
{ \
	CallSite   *site; \
	type		row; \
\
	InitMaterializedSRF(fcinfo, 0); \
	if (PG_ARGISNULL(0) || PG_ARGISNULL(1)) \
		return (Datum) 0; \
	site = predict_site_get(fcinfo, 2); \
	row = given; \
	pack(site, row); \
	put_attributions(site, values, (ReturnSetInfo *) fcinfo->resultinfo); \
	return (Datum) 0; \
}

EXPLAIN_FUNCTION(tensile_explain_prediction_record, HeapTupleHeader, PG_GETARG_HEAPTUPLEHEADER(1),
				 predict_site_pack_record, record_values(site))
EXPLAIN_FUNCTION(tensile_explain_prediction_array, ArrayType *, PG_GETARG_ARRAYTYPE_P(1),
				 predict_site_pack_numbers, array_values(row))
EXPLAIN_FUNCTION(tensile_explain_prediction_jsonb, Jsonb *, PG_GETARG_JSONB_P(1),
				 predict_site_pack_object, object_values(site, row))
EXPLAIN_FUNCTION(tensile_explain_prediction_text, Jsonb *,
				 feature_object(&site->model->features, PG_GETARG_TEXT_PP(1)),
				 predict_site_pack_object, object_values(site, row))
