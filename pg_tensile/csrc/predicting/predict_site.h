/*
 * predict_site.h: call sites of functions that predict for one row per call.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_PREDICT_SITE_H
#define TENSILE_PREDICT_SITE_H

#include "access/htup.h"
#include "fmgr.h"
#include "utils/array.h"
#include "utils/jsonb.h"

#include "predicting/answers.h"
#include "rows/model.h"
#include "rows/predict_features.h"
#include "rows/predict_features_tuple.h"
#include "state/models_generation.h"

/* What one call in a query remembers from row to row; in fn_extra. */
typedef struct CallSite
{
	ModelsView	view;			/* under which this was filled in */
	const char *name;
	int			name_length;
	const PredictModel *model;
	text	   *budget;			/* the last argument memory_budget; NULL: none */
	int64		budget_bytes;	/* the same in bytes */
	int64		memory_budget;	/* of this call: the argument or the model's own;
								 * 0: none */
	FeatureBatch *batch;		/* of one row */
	MemoryContext context;		/* of everything in here */

	/* The row type of records, in row_context. */
	MemoryContext row_context;
	uint64		type_identifier;	/* 0: none yet */
	TupleDesc	desc;
	FeatureSource *sources;
	Datum	   *values;			/* of the record packed last */
	bool	   *nulls;
} CallSite;

/*
 * The call site with its model, the first argument; makes sure that the
 * current user may predict with it.
 */
extern CallSite *predict_site_get(FunctionCallInfo fcinfo, int budget_argument);

/* The same for a function of classifiers: 42804 for a regression. */
extern CallSite *predict_site_of_classifier(FunctionCallInfo fcinfo, int budget_argument);

/*
 * The same without a call, in a context that is a child of `parent`: `old` if
 * it is the site of this model as it is now, else a new one instead of it.
 * `budget`: the argument memory_budget; NULL: none.
 */
extern CallSite *predict_site_open(CallSite *old, text *name, text *budget, MemoryContext parent);

/* Is it the site of this model as it is now? */
extern bool predict_site_is_current(const CallSite *site, text *name);

/* Packs the row of the call. */
extern void predict_site_pack_record(CallSite *site, HeapTupleHeader record);
extern void predict_site_pack_object(CallSite *site, Jsonb *object);

/* The same of a text, or json, that is an object. */
extern void predict_site_pack_text(CallSite *site, text *object);

/* The same of an array with a number for each feature, in order. */
extern void predict_site_pack_numbers(CallSite *site, ArrayType *array);

/* The text of a label that is an answer. */
extern const char *predict_site_label(const CallSite *site, int32 label);

/* Gets the answer for the row, and counts it.  `wish`: NULL for predictions alone. */
extern void predict_site_request(CallSite *site, const Wish *wish, Predictions *answer);

#endif
