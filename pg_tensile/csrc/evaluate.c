/*
 * evaluate.c: evaluate_model and feature_importance, which run an executor in
 * the caller's session on the rows of a query (session_run.c).
 *
 * The query returns the model's features and its target by name; other
 * columns are ignored.  Features are packed as for predictions
 * (predict_features.c), so that the model gets what predict_rows would give
 * it.  The target, and the column by whose values rows are grouped, are packed
 * like training columns (training_rows.c).  A chunk of rows is a PREDICT frame
 * and a ROWS frame behind it.
 *
 * All columns are checked before the executor is started, and once more when
 * the query runs.
 *
 * Memory: the buffers of one chunk, in the caller's context.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "executor/executor.h"
#include "fmgr.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"

#include "convert.h"
#include "extension.h"
#include "feed.h"
#include "model.h"
#include "owner.h"
#include "predict_features.h"
#include "query.h"
#include "session_run.h"
#include "training_rows.h"
#include "wire.h"

#define QUERY_NAME "query of rows to evaluate"
#define GROUP_NAME "group"		/* of the second column of ROWS */

PG_FUNCTION_INFO_V1(tensile_evaluate_model);
PG_FUNCTION_INFO_V1(tensile_feature_importance);

typedef struct Evaluation
{
	SessionRun	run;
	const char *query;
	const char *by;				/* name of the column of groups; NULL: none */
	const PredictModel *model;
} Evaluation;

/* The columns of the query that are used. */
typedef struct EvaluationColumns
{
	FeatureSource *features;
	int			target;			/* index into a tuple's values */
	int			by;				/* -1: none */
	bool		by_is_text;		/* in the training rows' sense */
	bool		by_is_bool;
	FmgrInfo	by_output;		/* unless it is text */
	TupleDesc	packed;			/* of target and groups */
} EvaluationColumns;

typedef struct EvaluationReceiver
{
	DestReceiver pub;
	const Evaluation *evaluation;
	int			fd;
	EvaluationColumns columns;
	FeatureBatch *batch;
	TupleTableSlot *slot;		/* target and group of a row */
	TrainingPacker *packer;		/* of them */
	FrameWriter writer;
	MemoryContext context;
	MemoryContext scratch;		/* of one row or chunk */
} EvaluationReceiver;

/* ---- columns ---- */

/* The index of the column of that name, or -1. */
static int
column_index(TupleDesc desc, const char *name)
{
	int			index = -1;

	for (int i = 0; i < desc->natts; i++)
	{
		if (strcmp(NameStr(TupleDescAttr(desc, i)->attname), name) != 0)
			continue;
		if (index >= 0)
			ereport(ERROR,
					(errcode(ERRCODE_AMBIGUOUS_COLUMN),
					 errmsg("column \"%s\" appears more than once", name),
					 errhint("Give every column its own name with AS.")));
		index = i;
	}
	return index;
}

static void
check_target_type(const PredictModel *model, Oid type)
{
	const char *wire = tensile_wire_type(type);

	if (wire == NULL || strchr(wire, '[') != NULL || strcmp(wire, "timestamp") == 0 ||
		(model->task == TASK_REGRESSION && strcmp(wire, "text") == 0))
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("target \"%s\" cannot be of type %s", model->target, format_type_be(type)),
				 model->task == TASK_REGRESSION ?
				 errhint("The model predicts a number: cast the value.") :
				 errhint("The model predicts labels: cast the value to text, a number or boolean.")));
}

static void
find_target(EvaluationColumns *columns, const PredictModel *model, TupleDesc desc)
{
	const char **names = palloc(desc->natts * sizeof(char *));

	columns->target = column_index(desc, model->target);
	if (columns->target < 0)
	{
		for (int i = 0; i < desc->natts; i++)
			names[i] = NameStr(TupleDescAttr(desc, i)->attname);
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_COLUMN),
				 errmsg("target \"%s\" is missing", model->target),
				 tensile_hint_nearest(model->target, names, desc->natts,
									  "The query must return the target besides the features.")));
	}
	check_target_type(model, TupleDescAttr(desc, columns->target)->atttypid);
}

static void
find_groups(EvaluationColumns *columns, const char *by, TupleDesc desc, MemoryContext context)
{
	const char *wire;
	Oid			type;
	Oid			output;
	bool		varlena;

	columns->by = by == NULL ? -1 : column_index(desc, by);
	if (by == NULL)
		return;
	if (columns->by < 0)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_COLUMN),
				 errmsg("column \"%s\" of the argument \"by\" is missing", by),
				 errhint("The query must return it besides the features and the target.")));
	type = TupleDescAttr(desc, columns->by)->atttypid;
	wire = tensile_wire_type(type);
	if (wire == NULL || strchr(wire, '[') != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("rows cannot be grouped by \"%s\" of type %s", by, format_type_be(type)),
				 errhint("Use a text, number, boolean or date, or cast the value to one.")));
	columns->by_is_text = strcmp(wire, "text") == 0;
	columns->by_is_bool = strcmp(wire, "bool") == 0;
	getTypeOutputInfo(type, &output, &varlena);
	fmgr_info_cxt(output, &columns->by_output, context);
}

/* Raises 42703, 42702 or 42804 for columns that are missing or wrong. */
static void
find_columns(EvaluationColumns *columns, const Evaluation *evaluation, TupleDesc desc,
			 MemoryContext context)
{
	const PredictModel *model = evaluation->model;
	Form_pg_attribute target;
	Oid			type;

	columns->features = feature_sources_create(&model->features, desc, context);
	find_target(columns, model, desc);
	find_groups(columns, evaluation->by, desc, context);
	target = TupleDescAttr(desc, columns->target);
	columns->packed = CreateTemplateTupleDesc(columns->by < 0 ? 1 : 2);
	TupleDescInitEntry(columns->packed, 1, model->target, target->atttypid, -1, 0);
	if (columns->by < 0)
		return;
	type = columns->by_is_text ? TupleDescAttr(desc, columns->by)->atttypid : TEXTOID;
	TupleDescInitEntry(columns->packed, 2, GROUP_NAME, type, -1, 0);
}

/* The value of the column of groups as a text, unless it is one. */
static Datum
group_datum(EvaluationColumns *columns, Datum value)
{
	if (columns->by_is_text)
		return value;
	if (columns->by_is_bool)
		return CStringGetTextDatum(DatumGetBool(value) ? "true" : "false");
	return CStringGetTextDatum(OutputFunctionCall(&columns->by_output, value));
}

/* ---- rows ---- */

/* Sends a frame, whose header is in the server's encoding. */
static void
send_frame(EvaluationReceiver *receiver, FrameType type, const StringInfo json,
		   const WireBuffer *buffers, int nbuffers)
{
	char	   *utf8 = pg_server_to_any(json->data, json->len, PG_UTF8);

	feed_send_frame(&receiver->writer, receiver->fd, type, 0, utf8,
					utf8 == json->data ? json->len : strlen(utf8), buffers, nbuffers);
}

static void
send_chunk(EvaluationReceiver *receiver)
{
	MemoryContext old = MemoryContextSwitchTo(receiver->scratch);
	StringInfoData header;
	WireBuffer *buffers;
	int			nbuffers;

	CHECK_FOR_INTERRUPTS();
	initStringInfo(&header);
	nbuffers = feature_batch_frame(receiver->batch, 0, NULL, &header, &buffers);
	feed_send_frame(&receiver->writer, receiver->fd, FRAME_PREDICT, 0, header.data, header.len,
					buffers, nbuffers);
	resetStringInfo(&header);
	appendStringInfo(&header, "{\"rows\": %d}", receiver->packer->rows);
	nbuffers = training_packer_buffers(receiver->packer, &buffers);
	send_frame(receiver, FRAME_ROWS, &header, buffers, nbuffers);
	feature_batch_clear(receiver->batch);
	training_packer_clear(receiver->packer);
	MemoryContextSwitchTo(old);
	MemoryContextReset(receiver->scratch);
}

static void
receiver_startup(DestReceiver *self, int operation, TupleDesc desc)
{
	EvaluationReceiver *receiver = (EvaluationReceiver *) self;
	const PredictModel *model = receiver->evaluation->model;
	MemoryContext old = MemoryContextSwitchTo(receiver->context);
	StringInfoData json;

	find_columns(&receiver->columns, receiver->evaluation, desc, receiver->context);
	receiver->batch = feature_batch_create(&model->features,
										   feature_batch_capacity(&model->features),
										   receiver->context);
	receiver->packer = training_packer_create(receiver->columns.packed, receiver->context);
	receiver->slot = MakeSingleTupleTableSlot(receiver->columns.packed, &TTSOpsVirtual);
	initStringInfo(&json);
	training_packer_describe(receiver->packer, model->target, &json);
	send_frame(receiver, FRAME_COLUMNS, &json, NULL, 0);
	MemoryContextSwitchTo(old);
}

static bool
receive_row(TupleTableSlot *row, DestReceiver *self)
{
	EvaluationReceiver *receiver = (EvaluationReceiver *) self;
	EvaluationColumns *columns = &receiver->columns;
	TupleTableSlot *slot = receiver->slot;
	MemoryContext old;

	slot_getallattrs(row);
	feature_batch_add_tuple(receiver->batch, columns->features, row->tts_values, row->tts_isnull);

	old = MemoryContextSwitchTo(receiver->scratch);
	ExecClearTuple(slot);
	slot->tts_values[0] = row->tts_values[columns->target];
	slot->tts_isnull[0] = row->tts_isnull[columns->target];
	if (columns->by >= 0)
	{
		slot->tts_isnull[1] = row->tts_isnull[columns->by];
		slot->tts_values[1] = slot->tts_isnull[1] ? (Datum) 0 :
			group_datum(columns, row->tts_values[columns->by]);
	}
	ExecStoreVirtualTuple(slot);
	training_packer_row(receiver->packer, slot);
	MemoryContextSwitchTo(old);
	MemoryContextReset(receiver->scratch);

	if (feature_batch_full(receiver->batch) || training_packer_full(receiver->packer))
		send_chunk(receiver);
	return true;
}

static int64
feed_evaluation(SessionRun *run, int fd)
{
	const Evaluation *evaluation = (Evaluation *) run;
	EvaluationReceiver receiver = {
		.pub = tensile_dest_receiver(receive_row, receiver_startup),
		.evaluation = evaluation,
		.fd = fd,
		.context = CurrentMemoryContext,
	};
	StringInfoData json;
	WireBuffer *buffers;
	int			nbuffers;

	receiver.scratch = AllocSetContextCreate(CurrentMemoryContext, "pg_tensile evaluated row",
											 ALLOCSET_DEFAULT_SIZES);
	frame_writer_init(&receiver.writer, CurrentMemoryContext);
	feed_widen_socket(fd);
	tensile_set_read_only();
	tensile_run_select(tensile_analyze_select(evaluation->query, QUERY_NAME), evaluation->query,
					   &receiver.pub);
	if (receiver.packer->rows > 0)
		send_chunk(&receiver);
	initStringInfo(&json);
	training_packer_summary(receiver.packer, &json);
	nbuffers = training_packer_dictionaries(receiver.packer, &buffers);
	send_frame(&receiver, FRAME_ROWS_END, &json, buffers, nbuffers);
	return receiver.packer->total_rows;
}

/* ---- the functions ---- */

static void
require_argument(FunctionCallInfo fcinfo, int number, const char *name)
{
	if (PG_ARGISNULL(number))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("argument \"%s\" must not be null", name),
				 errhint("Pass a value, or leave the argument out if it has a default.")));
}

/*
 * Runs the function, whose first arguments are model and query, on this
 * version of the model, or the deployed one (0).
 */
static Datum
evaluate(FunctionCallInfo fcinfo, const char *function, const char *by, int32 version)
{
	Evaluation	evaluation = {.run = {.function = function,.feed = feed_evaluation},.by = by};
	EvaluationColumns columns;
	Query	   *query;
	Oid			type = INT8OID;
	NullableDatum version_id = {0};
	Datum		spec;

	tensile_require_no_session_run(function);
	tensile_require_version();
	require_argument(fcinfo, 0, "model");
	require_argument(fcinfo, 1, "query");
	evaluation.query = tensile_text_argument(fcinfo, 1);
	evaluation.model = predict_model_load_version(tensile_text_argument(fcinfo, 0), version,
												  CurrentMemoryContext);
	query = tensile_analyze_select(evaluation.query, QUERY_NAME);
	find_columns(&columns, &evaluation, ExecCleanTypeFromTL(query->targetList),
				 CurrentMemoryContext);

	version_id.value = Int64GetDatum(evaluation.model->version);
	spec = tensile_forward_with(fcinfo, 1, &type, &version_id);
	if (fcinfo->isnull)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("this transaction cannot see the version of model \"%s\"",
						evaluation.model->name),
				 errhint("Its snapshot is older: call the function in a new transaction.")));
	tensile_session_run(fcinfo, &evaluation.run, spec);
	return (Datum) 0;
}

/*
 * evaluate_model(model, query, by, version, memory_budget) -> (group_value,
 * metric, label, predicted, quantile, value)
 */
Datum
tensile_evaluate_model(PG_FUNCTION_ARGS)
{
	int32		version = PG_ARGISNULL(3) ? 0 : PG_GETARG_INT32(3);

	if (!PG_ARGISNULL(3) && version <= 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("a model has no version %d", version),
				 errhint("Versions are numbered from 1; see tensile.model_versions.")));
	return evaluate(fcinfo, "evaluate_model", tensile_text_argument(fcinfo, 2), version);
}

/*
 * feature_importance(model, query, repeats, metric, seed) -> (feature,
 * importance, deviation, metric)
 */
Datum
tensile_feature_importance(PG_FUNCTION_ARGS)
{
	require_argument(fcinfo, 2, "repeats");
	require_argument(fcinfo, 4, "seed");
	return evaluate(fcinfo, "feature_importance", NULL, 0);
}
