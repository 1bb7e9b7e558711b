/*
 * predict_site.c: call sites of functions that predict for one row per call.
 *
 * A call site (one call in a query) remembers its model, the source of each
 * feature in the row type, and the memory for one row.  So the usual call
 * reads no catalogue: it checks the view of models and the privilege,
 * packs the row, and gets its answer (answers.c).
 *
 * predict_rows, whose query may call predict, has a connection of its own.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_type.h"
#include "fmgr.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/typcache.h"

#include "base/compat.h"
#include "base/owner.h"
#include "predicting/answers.h"
#include "predicting/predict_site.h"
#include "rows/model.h"
#include "rows/predict_features_jsonb.h"
#include "rows/predict_features_tuple.h"

/* ---- call sites ---- */

static CallSite *
new_call_site(const char *name, int name_length, MemoryContext parent)
{
	ModelsView	view = tensile_models_view();
	MemoryContext context;
	CallSite   *site;

	/*
	 * The context is a child of the current one until the call site is
	 * complete, so that a failure leaves nothing for the rest of the query.
	 */
	context = AllocSetContextCreate(CurrentMemoryContext, "pg_tensile predict",
									ALLOCSET_SMALL_SIZES);
	site = MemoryContextAllocZero(context, sizeof(CallSite));
	site->context = context;
	site->row_context = AllocSetContextCreate(context, "pg_tensile row type", ALLOCSET_SMALL_SIZES);
	site->view = view;
	site->name = MemoryContextStrdup(context, pnstrdup(name, name_length));
	site->name_length = name_length;
	site->model = predict_model_get(site->name, context);
	site->batch = feature_batch_create(&site->model->features, 1, context);
	MemoryContextSetParent(context, parent);
	return site;
}

/* The argument memory_budget in bytes; parsed again only when it changes. */
static int64
parsed_budget(CallSite *site, text *budget)
{
	Size		size = VARSIZE_ANY_EXHDR(budget);

	if (site->budget == NULL || VARSIZE_ANY_EXHDR(site->budget) != size ||
		memcmp(VARDATA_ANY(site->budget), VARDATA_ANY(budget), size) != 0)
	{
		text	   *copy = MemoryContextAlloc(site->context, VARSIZE_ANY(budget));

		site->budget_bytes = tensile_parse_budget(budget);
		memcpy(copy, budget, VARSIZE_ANY(budget));
		if (site->budget != NULL)
			pfree(site->budget);
		site->budget = copy;
	}
	return site->budget_bytes;
}

bool
predict_site_is_current(const CallSite *site, text *name)
{
	return tensile_same_view(site->view, tensile_models_view()) &&
		site->name_length == VARSIZE_ANY_EXHDR(name) &&
		memcmp(site->name, VARDATA_ANY(name), site->name_length) == 0;
}

CallSite *
predict_site_open(CallSite *old, text *name, text *budget, MemoryContext parent)
{
	CallSite   *site = old;

	if (site != NULL && predict_site_is_current(site, name))
		predict_model_check_privilege(site->model);
	else
	{
		if (site != NULL)
			MemoryContextDelete(site->context);
		site = new_call_site(VARDATA_ANY(name), VARSIZE_ANY_EXHDR(name), parent);
	}
	site->memory_budget = budget == NULL ? site->model->memory_budget :
		parsed_budget(site, budget);
	feature_batch_clear(site->batch);
	return site;
}

CallSite *
predict_site_get(FunctionCallInfo fcinfo, int budget_argument)
{
	FmgrInfo   *function = fcinfo->flinfo;
	CallSite   *old = function->fn_extra;

	function->fn_extra = NULL;	/* a failure leaves no site */
	function->fn_extra = predict_site_open(old, PG_GETARG_TEXT_PP(0),
										   PG_ARGISNULL(budget_argument) ? NULL :
										   PG_GETARG_TEXT_PP(budget_argument),
										   function->fn_mcxt);
	return function->fn_extra;
}

CallSite *
predict_site_of_classifier(FunctionCallInfo fcinfo, int budget_argument)
{
	CallSite   *site = predict_site_get(fcinfo, budget_argument);

	if (site->model->task == TASK_REGRESSION)
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("model \"%s\" is a regression and has no classes", site->name),
				 errhint("Use predict.")));
	return site;
}

/* ---- features ---- */

/*
 * Maps features to the columns of this row type, which may change during the
 * life of a call site (ALTER TABLE).
 */
static void
look_up_row_type(CallSite *site, Oid type, int32 typmod, uint64 identifier)
{
	MemoryContext old;
	TupleDesc	desc;

	site->type_identifier = 0;
	MemoryContextReset(site->row_context);
	desc = lookup_rowtype_tupdesc(type, typmod);
	old = MemoryContextSwitchTo(site->row_context);
	site->desc = CreateTupleDescCopy(desc);
	ReleaseTupleDesc(desc);
	site->sources = feature_sources_create(&site->model->features, site->desc, site->row_context);
	site->values = palloc(sizeof(Datum) * site->desc->natts);
	site->nulls = palloc(sizeof(bool) * site->desc->natts);
	site->type_identifier = identifier;
	MemoryContextSwitchTo(old);
}

void
predict_site_pack_record(CallSite *site, HeapTupleHeader record)
{
	Oid			type = HeapTupleHeaderGetTypeId(record);
	int32		typmod = HeapTupleHeaderGetTypMod(record);
	uint64		identifier = assign_record_type_identifier(type, typmod);
	HeapTupleData tuple = {.t_len = HeapTupleHeaderGetDatumLength(record),.t_data = record};

	if (site->type_identifier != identifier)
		look_up_row_type(site, type, typmod, identifier);
	heap_deform_tuple(&tuple, site->desc, site->values, site->nulls);
	feature_batch_add_tuple(site->batch, site->sources, site->values, site->nulls);
}

void
predict_site_pack_numbers(CallSite *site, ArrayType *array)
{
	const FeatureSet *set = &site->model->features;
	Datum	   *values;
	bool	   *nulls;
	int			count;

	for (int i = 0; i < set->count; i++)
		if (set->features[i].kind != FEATURE_NUMERIC)
			ereport(ERROR,
					(errcode(ERRCODE_DATATYPE_MISMATCH),
					 errmsg("model \"%s\" cannot be used with an array of numbers: "
							"feature \"%s\" is not a number", site->name, set->names[i]),
					 errhint("Pass a row or a jsonb object with the features: %s.",
							 feature_names(set))));
	deconstruct_array(array, FLOAT8OID, sizeof(float8), FLOAT8PASSBYVAL, TYPALIGN_DOUBLE,
					  &values, &nulls, &count);
	if (count != set->count)
		ereport(ERROR,
				(errcode(ERRCODE_ARRAY_SUBSCRIPT_ERROR),
				 errmsg("model \"%s\" has %d features, but the array has %d elements",
						site->name, set->count, count),
				 errhint("The features are, in this order: %s.", feature_names(set))));
	feature_batch_start_row(site->batch);
	for (int i = 0; i < count; i++)
		if (!nulls[i])
			feature_set_number(site->batch, i, DatumGetFloat8(values[i]));
	site->batch->row++;
}

void
predict_site_pack_object(CallSite *site, Jsonb *object)
{
	feature_batch_add_object(site->batch, object);
}

void
predict_site_pack_text(CallSite *site, text *object)
{
	predict_site_pack_object(site, feature_object(&site->model->features, object));
}

/* ---- predictions ---- */

const char *
predict_site_label(const CallSite *site, int32 label)
{
	if (label < 0 || label >= site->model->nlabels)
		elog(ERROR, "the predictor answered with label %d of %d", label, site->model->nlabels);
	return site->model->labels[label];
}

void
predict_site_request(CallSite *site, const Wish *wish, Predictions *answer)
{
	static const Wish nothing = {WISH_NOTHING};

	predict_answers(site->model, site->batch, site->memory_budget, wish ? wish : &nothing, answer);
	predict_count(site->model, site->batch, answer, 0, 1);
}
