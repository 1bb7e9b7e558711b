/*
 * probabilities.c: predict_probabilities, the probabilities of all classes of
 * one row.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "fmgr.h"
#include "funcapi.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/tuplestore.h"

#include "base/error_context.h"
#include "predicting/answers.h"
#include "predicting/predict_site.h"

typedef struct LabelProbability
{
	int			label;
	double		probability;
} LabelProbability;

/* The more probable label comes first, of equal ones the first. */
static int
compare_labels(const void *a, const void *b)
{
	const LabelProbability *one = a;
	const LabelProbability *other = b;

	if (one->probability != other->probability)
		return one->probability > other->probability ? -1 : 1;
	return one->label - other->label;
}

/* Adds a row for each class, the most probable one first. */
static void
put_probabilities(CallSite *site, ReturnSetInfo *result)
{
	int			count = site->model->nlabels;
	LabelProbability *sorted = palloc(sizeof(LabelProbability) * count);
	const double *probabilities;
	Predictions answer;

	predict_site_request(site, &(Wish) {WISH_PROBABILITIES}, &answer);
	probabilities = predict_extra_numbers(&answer, 0, count);
	for (int i = 0; i < count; i++)
		sorted[i] = (LabelProbability) {i, probabilities[i]};
	qsort(sorted, count, sizeof(LabelProbability), compare_labels);
	for (int i = 0; i < count; i++)
	{
		Datum		values[2] = {
			CStringGetTextDatum(site->model->labels[sorted[i].label]),
			Float8GetDatum(sorted[i].probability)
		};
		bool		nulls[2] = {false, false};

		tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
	}
}

/* No rows for null arguments, except for memory_budget, the last one. */
#define PROBABILITIES_FUNCTION(name, pack, getarg) \
TENSILE_PUBLIC_FUNCTION(name) \
{ \
	CallSite   *site; \
\
	InitMaterializedSRF(fcinfo, 0); \
	if (PG_ARGISNULL(0) || PG_ARGISNULL(1)) \
		return (Datum) 0; \
	site = predict_site_of_classifier(fcinfo, 2); \
	pack(site, getarg(1)); \
	put_probabilities(site, (ReturnSetInfo *) fcinfo->resultinfo); \
	return (Datum) 0; \
}

PROBABILITIES_FUNCTION(tensile_predict_probabilities_record, predict_site_pack_record,
					   PG_GETARG_HEAPTUPLEHEADER)
PROBABILITIES_FUNCTION(tensile_predict_probabilities_array, predict_site_pack_numbers,
					   PG_GETARG_ARRAYTYPE_P)
PROBABILITIES_FUNCTION(tensile_predict_probabilities_jsonb, predict_site_pack_object,
					   PG_GETARG_JSONB_P)
PROBABILITIES_FUNCTION(tensile_predict_probabilities_text, predict_site_pack_text,
					   PG_GETARG_TEXT_PP)
