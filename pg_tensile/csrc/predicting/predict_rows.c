/*
 * predict_rows.c: predictions for every row of a query, in chunks.
 *
 * The query runs read only, as the caller, with a DestReceiver that packs its
 * rows (predict_features.c).  A query that is not given is derived from the
 * training query (prediction_query.c), and runs with the settings of that.  Each
 * chunk is answered by this session if the model can be (session_models.c).
 * Else a full chunk is sent while the predictor computes the one before, so at
 * most two are under way; sending also receives (predict_client_exchange), so
 * that neither side blocks the other.
 *
 * The call has a connection of its own, because the query may call predict,
 * and closes it even after an error.
 *
 * Memory: everything is in the caller's context; results go to a tuplestore,
 * which spills to disk.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include <math.h>

#include "fmgr.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/tuplestore.h"

#include "base/error_context.h"
#include "base/owner.h"
#include "base/query.h"
#include "predicting/answers.h"
#include "predicting/predict_client.h"
#include "predicting/predict_socket.h"
#include "predicting/prediction_query.h"
#include "predicting/session_models.h"
#include "rows/model.h"
#include "rows/predict_features.h"
#include "rows/predict_features_tuple.h"
#include "rows/wire.h"
#include "state/extension.h"
#include "state/predictions.h"

#define QUERY_NAME "query of predict_rows"

typedef struct RowsReceiver
{
	DestReceiver pub;
	const PredictModel *model;
	int64		memory_budget;	/* the argument or the model's own; 0: none */
	PredictClient client;
	FeatureBatch *batch;
	FeatureSource *sources;
	bool		in_session;		/* this session computes the answers */
	int			pending;		/* rows of the chunk sent and not answered; 0: none */
	int64		rows;			/* answered */
	Datum	   *labels;			/* as text */
	Tuplestorestate *results;
	TupleDesc	results_desc;
	MemoryContext context;
	MemoryContext scratch;		/* of one chunk */
} RowsReceiver;

static void
put_results(RowsReceiver *receiver, const Predictions *answer)
{
	const PredictModel *model = receiver->model;
	bool		classifier = model->task != TASK_REGRESSION;

	for (int i = 0; i < answer->rows; i++)
	{
		int32		label = answer->label[i];
		bool		has_label = classifier && label >= 0 && label < model->nlabels;
		Datum		values[4] = {
			Int64GetDatum(++receiver->rows), Float8GetDatum(answer->prediction[i]),
			has_label ? receiver->labels[label] : (Datum) 0, Float8GetDatum(answer->probability[i])
		};
		bool		nulls[4] = {
			false, isnan(answer->prediction[i]), !has_label, isnan(answer->probability[i])
		};

		tuplestore_putvalues(receiver->results, receiver->results_desc, values, nulls);
	}
}

/* The same of an answer of the predictor, which counts for drift itself. */
static void
put_answer(RowsReceiver *receiver, const Predictions *answer)
{
	if (answer->rows != receiver->pending)
		elog(ERROR, "the predictor answered with %d rows instead of %d",
			 answer->rows, receiver->pending);
	tensile_count_predictions(receiver->model->version, answer->rows,
							  predict_unknown(answer, 0, answer->rows));
	put_results(receiver, answer);
	receiver->pending = 0;
}

/* Answers the chunk in this session. */
static void
evaluate_chunk(RowsReceiver *receiver)
{
	Predictions answer;

	predict_answers(receiver->model, receiver->batch, 0, &(Wish) {WISH_NOTHING}, &answer);
	predict_count(receiver->model, receiver->batch, &answer, 0, answer.rows);
	put_results(receiver, &answer);
	feature_batch_clear(receiver->batch);
}

/* Sends the chunk, and receives the answer to the one before. */
static void
send_chunk(RowsReceiver *receiver)
{
	MemoryContext old = MemoryContextSwitchTo(receiver->scratch);
	TimestampTz deadline = predict_deadline();
	bool		answer_due = receiver->pending > 0;
	Predictions answer;
	StringInfoData header;
	WireBuffer *buffers;
	int			nbuffers;

	initStringInfo(&header);
	nbuffers = feature_batch_frame(receiver->batch, receiver->memory_budget, NULL, &header,
								   &buffers);
	if (!predict_client_exchange(&receiver->client, receiver->model->version, &header,
								 buffers, nbuffers, answer_due ? &answer : NULL, deadline))
		predict_client_went_away(&receiver->client, NULL);
	if (answer_due)
		put_answer(receiver, &answer);
	receiver->pending = receiver->batch->row;
	feature_batch_clear(receiver->batch);
	MemoryContextSwitchTo(old);
	MemoryContextReset(receiver->scratch);
}

static void
answer_chunk(RowsReceiver *receiver)
{
	if (receiver->in_session)
		evaluate_chunk(receiver);
	else
		send_chunk(receiver);
}

static void
finish(RowsReceiver *receiver)
{
	Predictions answer;

	if (receiver->batch->row > 0)
		answer_chunk(receiver);
	if (receiver->pending > 0)
	{
		(void) predict_client_exchange(&receiver->client, receiver->model->version, NULL,
									   NULL, 0, &answer, predict_deadline());
		put_answer(receiver, &answer);
	}
}

static void
rows_startup(DestReceiver *self, int operation, TupleDesc desc)
{
	RowsReceiver *receiver = (RowsReceiver *) self;

	receiver->sources = feature_sources_create(&receiver->model->features, desc, receiver->context);
}

static bool
rows_receive(TupleTableSlot *slot, DestReceiver *self)
{
	RowsReceiver *receiver = (RowsReceiver *) self;

	slot_getallattrs(slot);
	feature_batch_add_tuple(receiver->batch, receiver->sources, slot->tts_values, slot->tts_isnull);
	if (feature_batch_full(receiver->batch))
		answer_chunk(receiver);
	return true;
}

/*
 * Predicts for the rows of the query or, without one, of that derived from the
 * training query, over `source`.
 */
static void
predict_query(RowsReceiver *receiver, const char *query, Oid source)
{
	PredictionQuery prediction = {.sql = query};
	int			nest_level;
	Query	   *analyzed;

	if (query == NULL)
		prediction = tensile_prediction_query(receiver->model, source);
	nest_level = NewGUCNestLevel();
	tensile_set_read_only();
	if (query != NULL)
		analyzed = tensile_analyze_select(prediction.sql, QUERY_NAME);
	else
	{
		analyzed = tensile_analyze_prediction_query(&prediction, receiver->model);
		tensile_apply_settings_of_values(prediction.settings);
	}
	receiver->in_session = receiver->memory_budget == 0 && session_model(receiver->model) != NULL;
	if (!receiver->in_session)
		(void) predict_client_connect(&receiver->client, predict_deadline());
	tensile_run_select(analyzed, prediction.sql, &receiver->pub);
	finish(receiver);
	AtEOXact_GUC(false, nest_level);
}

static Datum
predict_rows(FunctionCallInfo fcinfo, const char *query, Oid source)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	RowsReceiver receiver = {
		.pub = tensile_dest_receiver(rows_receive, rows_startup),
		.context = CurrentMemoryContext,
	};
	const PredictModel *model;

	tensile_require_version();
	receiver.results = result->setResult;
	receiver.results_desc = result->setDesc;
	model = predict_model_load(text_to_cstring(PG_GETARG_TEXT_PP(0)), CurrentMemoryContext);
	receiver.model = model;
	receiver.memory_budget = PG_ARGISNULL(2) ? model->memory_budget :
		tensile_parse_budget(PG_GETARG_TEXT_PP(2));
	receiver.labels = palloc(sizeof(Datum) * Max(model->nlabels, 1));
	for (int i = 0; i < model->nlabels; i++)
		receiver.labels[i] = CStringGetTextDatum(model->labels[i]);
	receiver.scratch = AllocSetContextCreate(CurrentMemoryContext, "pg_tensile chunk",
											 ALLOCSET_DEFAULT_SIZES);
	receiver.batch = feature_batch_create(&model->features,
										  feature_batch_capacity(&model->features),
										  CurrentMemoryContext);
	predict_client_init(&receiver.client, CurrentMemoryContext);

	PG_TRY();
	{
		predict_query(&receiver, query, source);
	}
	PG_FINALLY();
	{
		predict_client_close(&receiver.client);
	}
	PG_END_TRY();
	return (Datum) 0;
}

/*
 * predict_rows(model, query, memory_budget) -> (row_number, prediction, label,
 * probability)
 */
TENSILE_PUBLIC_FUNCTION(tensile_predict_rows)
{
	InitMaterializedSRF(fcinfo, 0);
	if (PG_ARGISNULL(0) || PG_ARGISNULL(1))
		return (Datum) 0;
	return predict_rows(fcinfo, text_to_cstring(PG_GETARG_TEXT_PP(1)), InvalidOid);
}

/* predict_table(model, source, memory_budget); the last two may be null */
TENSILE_PUBLIC_FUNCTION(tensile_predict_table)
{
	InitMaterializedSRF(fcinfo, 0);
	if (PG_ARGISNULL(0))
		return (Datum) 0;
	return predict_rows(fcinfo, NULL, PG_ARGISNULL(1) ? InvalidOid : PG_GETARG_OID(1));
}
