/*
 * predict.c: predict and predict_class, one row a call.
 *
 * A call site (one call in a query) remembers the model it used, where each feature comes from in the row type it got,
 * and the memory for one row, so that the usual call reads no catalogue: it checks the models generation and the
 * privilege, packs the row, and exchanges one frame for another with the predictor (predict_client.c).
 *
 * The session has one connection for all of these functions. It is not used while user code runs (features are packed
 * before anything is sent), so calls can't get in each other's way; predict_rows, whose query may call predict, has a
 * connection of its own.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_type.h"
#include "fmgr.h"
#include "mb/pg_wchar.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/float.h"
#include "utils/jsonb.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "utils/typcache.h"

#include "model.h"
#include "owner.h"
#include "pg_tensile.h"
#include "predict_client.h"
#include "query.h"

/* What one call in a query remembers from row to row; in fn_extra. */
typedef struct CallSite
{
	uint64		generation;		/* of the models, when this was filled in */
	const char *name;
	int			name_length;
	const PredictModel *model;
	text	   *budget;			/* the argument memory_budget as it was last, and its bytes; NULL: none */
	int64		budget_bytes;
	int64		memory_budget;	/* of this call, in bytes: the argument, or the model's own; 0: none */
	FeatureBatch *batch;		/* of one row */
	MemoryContext context;		/* all of the above and below */

	/* For records: what follows is for this row type, and in row_context. */
	MemoryContext row_context;
	uint64		type_identifier;	/* 0: none yet */
	TupleDesc	desc;
	FeatureSource *sources;
	Datum	   *values;
	bool	   *nulls;
} CallSite;

static PredictClient *session_client = NULL;

PG_FUNCTION_INFO_V1(tensile_predict_record);
PG_FUNCTION_INFO_V1(tensile_predict_array);
PG_FUNCTION_INFO_V1(tensile_predict_jsonb);
PG_FUNCTION_INFO_V1(tensile_predict_class_record);
PG_FUNCTION_INFO_V1(tensile_predict_class_array);
PG_FUNCTION_INFO_V1(tensile_predict_class_jsonb);

/* ---- call sites ---- */

static CallSite *
new_call_site(FmgrInfo *function, const char *name, int name_length)
{
	CallSite   *old = function->fn_extra;
	uint64		generation = tensile_models_generation();
	MemoryContext context;
	CallSite   *site;

	function->fn_extra = NULL;
	if (old != NULL)
		MemoryContextDelete(old->context);
	/* Below the current context until it is complete, so that a failure leaves nothing for the rest of the query. */
	context = AllocSetContextCreate(CurrentMemoryContext, "pg_tensile predict", ALLOCSET_SMALL_SIZES);
	site = MemoryContextAllocZero(context, sizeof(CallSite));
	site->context = context;
	site->row_context = AllocSetContextCreate(context, "pg_tensile row type", ALLOCSET_SMALL_SIZES);
	site->generation = generation;
	site->name = MemoryContextStrdup(context, pnstrdup(name, name_length));
	site->name_length = name_length;
	site->model = predict_model_get(site->name, context);
	site->batch = feature_batch_create(&site->model->features, 1, context);
	MemoryContextSetParent(context, function->fn_mcxt);
	function->fn_extra = site;
	return site;
}

/* The argument in bytes; parsed again only when it changes. */
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

/* The call site with its model, after making sure that the current user may predict with it. */
static CallSite *
call_site(FunctionCallInfo fcinfo)
{
	CallSite   *site = fcinfo->flinfo->fn_extra;
	text	   *name = PG_GETARG_TEXT_PP(0);

	if (site != NULL && site->generation == tensile_models_generation() &&
		site->name_length == VARSIZE_ANY_EXHDR(name) && memcmp(site->name, VARDATA_ANY(name), site->name_length) == 0)
		predict_model_check_privilege(site->model);
	else
		site = new_call_site(fcinfo->flinfo, VARDATA_ANY(name), VARSIZE_ANY_EXHDR(name));
	site->memory_budget = PG_ARGISNULL(2) ? site->model->memory_budget : parsed_budget(site, PG_GETARG_TEXT_PP(2));
	feature_batch_clear(site->batch);
	return site;
}

/* ---- features: a record ---- */

/* Maps features to the columns of this row type; they may change while a call site lives (ALTER TABLE). */
static void
learn_row_type(CallSite *site, Oid type, int32 typmod, uint64 identifier)
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

static void
pack_record(CallSite *site, HeapTupleHeader record)
{
	Oid			type = HeapTupleHeaderGetTypeId(record);
	int32		typmod = HeapTupleHeaderGetTypMod(record);
	uint64		identifier = assign_record_type_identifier(type, typmod);
	HeapTupleData tuple = {.t_len = HeapTupleHeaderGetDatumLength(record),.t_data = record};

	if (site->type_identifier != identifier)
		learn_row_type(site, type, typmod, identifier);
	heap_deform_tuple(&tuple, site->desc, site->values, site->nulls);
	feature_batch_add_tuple(site->batch, site->sources, site->values, site->nulls);
}

/* ---- features: numbers in order ---- */

/* "a, b, c" */
static char *
feature_names(const FeatureSet *set)
{
	StringInfoData names;

	initStringInfo(&names);
	for (int i = 0; i < set->count; i++)
		appendStringInfo(&names, i == 0 ? "%s" : ", %s", set->names[i]);
	return names.data;
}

static void
pack_numbers(CallSite *site, ArrayType *array)
{
	const FeatureSet *set = &site->model->features;
	Datum	   *values;
	bool	   *nulls;
	int			count;

	for (int i = 0; i < set->count; i++)
		if (set->features[i].kind != FEATURE_NUMERIC)
			ereport(ERROR,
					(errcode(ERRCODE_DATATYPE_MISMATCH),
					 errmsg("model \"%s\" cannot be used with an array of numbers: feature \"%s\" is no number",
							site->name, set->names[i]),
					 errhint("Pass a row or a jsonb object with the features: %s.", feature_names(set))));
	deconstruct_array(array, FLOAT8OID, sizeof(float8), FLOAT8PASSBYVAL, TYPALIGN_DOUBLE, &values, &nulls, &count);
	if (count != set->count)
		ereport(ERROR,
				(errcode(ERRCODE_ARRAY_SUBSCRIPT_ERROR),
				 errmsg("model \"%s\" has %d features, but the array has %d elements", site->name, set->count, count),
				 errhint("The features are, in this order: %s.", feature_names(set))));
	feature_batch_start_row(site->batch);
	for (int i = 0; i < count; i++)
		if (!nulls[i])
			feature_set_number(site->batch, i, DatumGetFloat8(values[i]));
	site->batch->row++;
}

/* ---- features: a jsonb object ---- */

static const char *
json_type_name(const JsonbValue *value)
{
	switch (value->type)
	{
		case jbvString:
			return "string";
		case jbvNumeric:
			return "number";
		case jbvBool:
			return "boolean";
		case jbvBinary:
			return JsonContainerIsArray(value->val.binary.data) ? "array" : "object";
		default:
			return "null";
	}
}

/*
 * Microseconds since 2000-01-01 of a date or timestamp; one without a time zone stands for itself, as in a timestamp
 * column, and one with it is converted to UTC, as in a timestamptz column.
 */
static double
parse_timestamp(const char *string)
{
	pg_tz	   *saved = session_timezone;
	TimestampTz timestamp;

	PG_TRY();
	{
		session_timezone = pg_tzset("UTC");
		timestamp = DatumGetTimestampTz(DirectFunctionCall3(timestamptz_in, CStringGetDatum(string),
															ObjectIdGetDatum(InvalidOid), Int32GetDatum(-1)));
	}
	PG_FINALLY();
	{
		session_timezone = saved;
	}
	PG_END_TRY();
	return TIMESTAMP_NOT_FINITE(timestamp) ? get_float8_nan() : (double) timestamp;
}

/* The text of a string, number or boolean; NULL for anything else. */
static const char *
json_scalar_text(const JsonbValue *value)
{
	switch (value->type)
	{
		case jbvString:
			return pnstrdup(value->val.string.val, value->val.string.len);
		case jbvNumeric:
			return DatumGetCString(DirectFunctionCall1(numeric_out, NumericGetDatum(value->val.numeric)));
		case jbvBool:
			return value->val.boolean ? "true" : "false";
		default:
			return NULL;
	}
}

static double
json_number(const JsonbValue *value)
{
	return tensile_numeric_float8((const struct varlena *) value->val.numeric);
}

/* Nested arrays are flattened, as SQL's are. */
static int
count_json_elements(JsonbContainer *array)
{
	JsonbIterator *iterator = JsonbIteratorInit(array);
	JsonbIteratorToken token;
	JsonbValue	value;
	int			count = 0;

	while ((token = JsonbIteratorNext(&iterator, &value, false)) != WJB_DONE)
		count += token == WJB_ELEM;
	return count;
}

static void
set_json_array(CallSite *site, int feature, JsonbContainer *array)
{
	double	   *to = feature_set_array(site->batch, feature, count_json_elements(array));
	JsonbIterator *iterator = JsonbIteratorInit(array);
	JsonbIteratorToken token;
	JsonbValue	value;

	while ((token = JsonbIteratorNext(&iterator, &value, false)) != WJB_DONE)
	{
		if (token == WJB_BEGIN_OBJECT || (token == WJB_ELEM && value.type == jbvString))
			feature_type_mismatch(&site->model->features, feature, "array of something else than numbers");
		if (token != WJB_ELEM)
			continue;
		*to++ = value.type == jbvNumeric ? json_number(&value)
			: value.type == jbvBool ? (double) value.val.boolean : get_float8_nan();
	}
}

static void
set_json_value(CallSite *site, int feature, const JsonbValue *value)
{
	FeatureKind kind = site->model->features.features[feature].kind;
	const char *string;

	if (value->type == jbvNull)
		return;
	if (kind == FEATURE_NUMERIC && value->type == jbvNumeric)
		feature_set_number(site->batch, feature, json_number(value));
	else if (kind == FEATURE_NUMERIC && value->type == jbvBool)
		feature_set_number(site->batch, feature, value->val.boolean ? 1.0 : 0.0);
	else if (kind == FEATURE_TIMESTAMP && value->type == jbvString)
		feature_set_number(site->batch, feature, parse_timestamp(json_scalar_text(value)));
	else if (kind == FEATURE_CATEGORY && (string = json_scalar_text(value)) != NULL)
	{
		string = pg_server_to_any(string, strlen(string), PG_UTF8);
		feature_set_string(site->batch, feature, string, strlen(string));
	}
	else if (kind == FEATURE_ARRAY && value->type == jbvBinary && JsonContainerIsArray(value->val.binary.data))
		set_json_array(site, feature, value->val.binary.data);
	else
		feature_type_mismatch(&site->model->features, feature, psprintf("jsonb %s", json_type_name(value)));
}

/* Raises for the first key that is no feature. */
static void
unknown_key(const FeatureSet *set, JsonbContainer *object)
{
	JsonbIterator *iterator = JsonbIteratorInit(object);
	JsonbIteratorToken token;
	JsonbValue	key;

	while ((token = JsonbIteratorNext(&iterator, &key, true)) != WJB_DONE)
	{
		char	   *name;
		bool		known = false;

		if (token != WJB_KEY)
			continue;
		name = pnstrdup(key.val.string.val, key.val.string.len);
		for (int i = 0; i < set->count && !known; i++)
			known = strcmp(set->names[i], name) == 0;
		if (!known)
			ereport(ERROR,
					(errcode(ERRCODE_UNDEFINED_COLUMN),
					 errmsg("the model has no feature \"%s\"", name),
					 tensile_hint_nearest(name, set->names, set->count,
										  psprintf("The features are: %s.", feature_names(set)))));
	}
}

static void
pack_object(CallSite *site, Jsonb *jsonb)
{
	const FeatureSet *set = &site->model->features;
	MemoryContext old;

	if (!JB_ROOT_IS_OBJECT(jsonb))
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("features given as jsonb must be an object"),
				 errhint("Pass {\"name\": value, ...} with the features: %s.", feature_names(set))));
	old = MemoryContextSwitchTo(site->batch->scratch);
	if (JB_ROOT_COUNT(jsonb) > set->count)
		unknown_key(set, &jsonb->root);
	feature_batch_start_row(site->batch);
	for (int i = 0; i < set->count; i++)
	{
		JsonbValue	storage;
		JsonbValue *value = getKeyJsonValueFromContainer(&jsonb->root, set->names[i], strlen(set->names[i]), &storage);

		if (value == NULL)
		{
			unknown_key(set, &jsonb->root);
			ereport(ERROR,
					(errcode(ERRCODE_UNDEFINED_COLUMN),
					 errmsg("feature \"%s\" is missing", set->names[i]),
					 errhint("Every feature must be there; null is allowed. The features are: %s.", feature_names(set))));
		}
		set_json_value(site, i, value);
	}
	site->batch->row++;
	MemoryContextSwitchTo(old);
}

/* ---- asking the predictor ---- */

/* One answer for the call site's row. A connection that broke between two requests is replaced silently. */
static void
ask(CallSite *site, Predictions *answer)
{
	TimestampTz deadline = predict_deadline();
	StringInfoData header;
	WireBuffer *buffers;
	int			nbuffers;
	bool		connected_now;

	if (session_client == NULL)
	{
		PredictClient *client = MemoryContextAlloc(TopMemoryContext, sizeof(PredictClient));

		predict_client_init(client, TopMemoryContext);
		session_client = client;
	}
	initStringInfo(&header);
	nbuffers = feature_batch_frame(site->batch, site->memory_budget, &header, &buffers);
	do
	{
		connected_now = predict_client_connect(session_client, deadline);
		if (predict_client_exchange(session_client, site->model->version, &header, buffers, nbuffers, answer, deadline))
		{
			if (answer->rows != 1)
				elog(ERROR, "the predictor answered with %d rows instead of 1", answer->rows);
			tensile_count_predictions(site->model->version, 1, answer->unknown);
			return;
		}
		predict_client_close(session_client);
	} while (!connected_now);
	ereport(ERROR,
			(errcode(ERRCODE_CONNECTION_FAILURE),
			 errmsg("the predictor went away"),
			 errhint("Try again: it is started anew. The server's log may say why it ended.")));
}

static Datum
predict_number(FunctionCallInfo fcinfo, CallSite *site)
{
	Predictions answer;

	ask(site, &answer);
	PG_RETURN_FLOAT8(answer.prediction[0]);
}

static Datum
predict_label(FunctionCallInfo fcinfo, CallSite *site)
{
	Predictions answer;

	ask(site, &answer);
	if (answer.label[0] < 0 || answer.label[0] >= site->model->nlabels)
		elog(ERROR, "the predictor answered with label %d of %d", answer.label[0], site->model->nlabels);
	PG_RETURN_TEXT_P(cstring_to_text(site->model->labels[answer.label[0]]));
}

/* predict is for models whose predictions are numbers. */
static CallSite *
number_site(FunctionCallInfo fcinfo)
{
	CallSite   *site = call_site(fcinfo);

	if (site->model->task == TASK_MULTICLASS && !site->model->numeric_labels)
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("model \"%s\" predicts labels that are not numbers", site->name),
				 errhint("Use predict_class.")));
	return site;
}

/* predict_class is for classifiers. */
static CallSite *
label_site(FunctionCallInfo fcinfo)
{
	CallSite   *site = call_site(fcinfo);

	if (site->model->task == TASK_REGRESSION)
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("model \"%s\" is a regression and has no classes", site->name),
				 errhint("Use predict.")));
	return site;
}

/* Strict but for memory_budget, the last argument. */
#define RETURN_NULL_FOR_NULLS() \
	do { \
		if (PG_ARGISNULL(0) || PG_ARGISNULL(1)) \
			PG_RETURN_NULL(); \
	} while (0)

Datum
tensile_predict_record(PG_FUNCTION_ARGS)
{
	CallSite   *site;

	RETURN_NULL_FOR_NULLS();
	site = number_site(fcinfo);
	pack_record(site, PG_GETARG_HEAPTUPLEHEADER(1));
	return predict_number(fcinfo, site);
}

Datum
tensile_predict_array(PG_FUNCTION_ARGS)
{
	CallSite   *site;

	RETURN_NULL_FOR_NULLS();
	site = number_site(fcinfo);
	pack_numbers(site, PG_GETARG_ARRAYTYPE_P(1));
	return predict_number(fcinfo, site);
}

Datum
tensile_predict_jsonb(PG_FUNCTION_ARGS)
{
	CallSite   *site;

	RETURN_NULL_FOR_NULLS();
	site = number_site(fcinfo);
	pack_object(site, PG_GETARG_JSONB_P(1));
	return predict_number(fcinfo, site);
}

Datum
tensile_predict_class_record(PG_FUNCTION_ARGS)
{
	CallSite   *site;

	RETURN_NULL_FOR_NULLS();
	site = label_site(fcinfo);
	pack_record(site, PG_GETARG_HEAPTUPLEHEADER(1));
	return predict_label(fcinfo, site);
}

Datum
tensile_predict_class_array(PG_FUNCTION_ARGS)
{
	CallSite   *site;

	RETURN_NULL_FOR_NULLS();
	site = label_site(fcinfo);
	pack_numbers(site, PG_GETARG_ARRAYTYPE_P(1));
	return predict_label(fcinfo, site);
}

Datum
tensile_predict_class_jsonb(PG_FUNCTION_ARGS)
{
	CallSite   *site;

	RETURN_NULL_FOR_NULLS();
	site = label_site(fcinfo);
	pack_object(site, PG_GETARG_JSONB_P(1));
	return predict_label(fcinfo, site);
}
