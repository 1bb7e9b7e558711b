/*
 * evaluation_rows.c: sends the rows of a query to trainers that evaluate
 * versions of models on them.
 *
 * The query returns the features and the target of each version by name; other
 * columns are ignored.  Features are packed as for predictions
 * (predict_features.c), so that the version gets what predict_rows would give
 * it.  The target, and the column by whose values rows are grouped, are packed
 * like training columns (training_rows.c).  A chunk of rows is a PREDICT frame
 * and a ROWS frame behind it.
 *
 * Memory: the buffers of one chunk for each trainer, in the caller's context.
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

#include "base/convert.h"
#include "base/query.h"
#include "rows/evaluation_rows.h"
#include "rows/feed.h"
#include "rows/model.h"
#include "rows/predict_features.h"
#include "rows/predict_features_tuple.h"
#include "rows/training_rows.h"
#include "rows/wire.h"

#define GROUP_NAME "group"		/* of the second column of ROWS */

/* The columns of the query that a version uses. */
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

/* One trainer, and the rows that are on their way to it. */
typedef struct Sink
{
	const EvaluationReader *reader;
	EvaluationColumns columns;
	FeatureBatch *batch;
	TupleTableSlot *slot;		/* target and group of a row */
	TrainingPacker *packer;		/* of them */
	FrameWriter writer;
	MemoryContext scratch;		/* of one row or chunk */
} Sink;

typedef struct EvaluationReceiver
{
	DestReceiver pub;
	const char *by;
	int			nsinks;
	Sink	   *sinks;
	MemoryContext context;
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
	bool		variable;

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
	getTypeOutputInfo(type, &output, &variable);
	fmgr_info_cxt(output, &columns->by_output, context);
}

static void
find_columns(EvaluationColumns *columns, const PredictModel *model, const char *by,
			 TupleDesc desc, MemoryContext context)
{
	Form_pg_attribute target;
	Oid			type;

	columns->features = feature_sources_create(&model->features, desc, context);
	find_target(columns, model, desc);
	find_groups(columns, by, desc, context);
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

void
evaluation_check_columns(const PredictModel *model, const char *by, TupleDesc desc)
{
	EvaluationColumns columns;

	find_columns(&columns, model, by, desc, CurrentMemoryContext);
}

/* ---- rows ---- */

/* Sends a frame, whose header is in the server's encoding. */
static void
send_frame(Sink *sink, FrameType type, const StringInfo json,
		   const WireBuffer *buffers, int nbuffers)
{
	char	   *utf8 = tensile_to_utf8(json->data, json->len);

	feed_send_frame(&sink->writer, sink->reader->fd, type, 0, utf8,
					utf8 == json->data ? json->len : strlen(utf8), buffers, nbuffers);
}

static void
send_chunk(Sink *sink)
{
	MemoryContext old = MemoryContextSwitchTo(sink->scratch);
	StringInfoData header;
	WireBuffer *buffers;
	int			nbuffers;

	CHECK_FOR_INTERRUPTS();
	initStringInfo(&header);
	nbuffers = feature_batch_frame(sink->batch, 0, NULL, &header, &buffers);
	feed_send_frame(&sink->writer, sink->reader->fd, FRAME_PREDICT, 0, header.data, header.len,
					buffers, nbuffers);
	resetStringInfo(&header);
	appendStringInfo(&header, "{\"rows\": %d}", sink->packer->rows);
	nbuffers = training_packer_buffers(sink->packer, &buffers);
	send_frame(sink, FRAME_ROWS, &header, buffers, nbuffers);
	feature_batch_clear(sink->batch);
	training_packer_clear(sink->packer);
	MemoryContextSwitchTo(old);
	MemoryContextReset(sink->scratch);
}

static void
sink_start(Sink *sink, const char *by, TupleDesc desc, MemoryContext context)
{
	const PredictModel *model = sink->reader->model;
	StringInfoData json;

	find_columns(&sink->columns, model, by, desc, context);
	sink->batch = feature_batch_create(&model->features,
									   feature_batch_capacity(&model->features), context);
	sink->packer = training_packer_create(sink->columns.packed, context);
	sink->slot = MakeSingleTupleTableSlot(sink->columns.packed, &TTSOpsVirtual);
	initStringInfo(&json);
	training_packer_describe(sink->packer, model->target, &json);
	send_frame(sink, FRAME_COLUMNS, &json, NULL, 0);
}

static void
receiver_startup(DestReceiver *self, int operation, TupleDesc desc)
{
	EvaluationReceiver *receiver = (EvaluationReceiver *) self;
	MemoryContext old = MemoryContextSwitchTo(receiver->context);

	for (int i = 0; i < receiver->nsinks; i++)
		sink_start(&receiver->sinks[i], receiver->by, desc, receiver->context);
	MemoryContextSwitchTo(old);
}

static void
sink_row(Sink *sink, TupleTableSlot *row)
{
	EvaluationColumns *columns = &sink->columns;
	TupleTableSlot *slot = sink->slot;
	MemoryContext old;

	feature_batch_add_tuple(sink->batch, columns->features, row->tts_values, row->tts_isnull);

	old = MemoryContextSwitchTo(sink->scratch);
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
	training_packer_row(sink->packer, slot);
	MemoryContextSwitchTo(old);
	MemoryContextReset(sink->scratch);

	if (feature_batch_full(sink->batch) || training_packer_full(sink->packer))
		send_chunk(sink);
}

static bool
receive_row(TupleTableSlot *row, DestReceiver *self)
{
	EvaluationReceiver *receiver = (EvaluationReceiver *) self;

	slot_getallattrs(row);
	for (int i = 0; i < receiver->nsinks; i++)
		sink_row(&receiver->sinks[i], row);
	return true;
}

static void
sink_end(Sink *sink)
{
	StringInfoData json;
	WireBuffer *buffers;
	int			nbuffers;

	if (sink->packer->rows > 0)
		send_chunk(sink);
	initStringInfo(&json);
	training_packer_summary(sink->packer, &json);
	nbuffers = training_packer_dictionaries(sink->packer, &buffers);
	send_frame(sink, FRAME_ROWS_END, &json, buffers, nbuffers);
}

int64
evaluation_feed(const char *query, const char *what, const char *by,
				const EvaluationReader *readers, int nreaders)
{
	EvaluationReceiver receiver = {
		.pub = tensile_dest_receiver(receive_row, receiver_startup),
		.by = by,
		.nsinks = nreaders,
		.sinks = palloc0(sizeof(Sink) * nreaders),
		.context = CurrentMemoryContext,
	};
	MemoryContext scratch = AllocSetContextCreate(CurrentMemoryContext,
												  "pg_tensile evaluated row",
												  ALLOCSET_DEFAULT_SIZES);

	for (int i = 0; i < nreaders; i++)
	{
		receiver.sinks[i].reader = &readers[i];
		receiver.sinks[i].scratch = scratch;
		frame_writer_init(&receiver.sinks[i].writer, CurrentMemoryContext);
		feed_widen_socket(readers[i].fd);
	}
	tensile_set_read_only();
	tensile_run_select(tensile_analyze_select(query, what), query, &receiver.pub);
	for (int i = 0; i < nreaders; i++)
		sink_end(&receiver.sinks[i]);
	return receiver.sinks[0].packer->total_rows;
}
