/*
 * embed.c: embed and embed_rows, vectors of texts by pretrained transformers.
 *
 * embed() exchanges a frame with the predictor for each text.  embed_rows()
 * runs a query of one column and sends its texts in chunks: a full chunk is
 * sent while the predictor computes the one before, so at most two are under
 * way.  A chunk is small, because one predictor answers all sessions, in turns.
 *
 * The session's connection for embed() is not used while user code runs.  A
 * call of embed_rows() has a connection of its own, because its query may call
 * embed().
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "fmgr.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/tuplestore.h"

#include "base/compat.h"
#include "base/convert.h"
#include "base/error_context.h"
#include "base/query.h"
#include "predicting/predict_client.h"
#include "predicting/predict_socket.h"
#include "rows/dictionary.h"
#include "rows/model.h"
#include "rows/wire.h"
#include "state/extension.h"
#include "state/models_generation.h"

#define QUERY_NAME "query of embed_rows"
#define CHUNK_ROWS 64
#define CHUNK_BYTES ((Size) 8 * 1024 * 1024)

/* Texts of an EMBED frame; NULLs have the length -1. */
typedef struct TextChunk
{
	PackBuffer	lengths;		/* int32 each */
	PackBuffer	bytes;			/* UTF-8, one text after the other */
	int			rows;
} TextChunk;

/* What one call of embed() in a query remembers; in fn_extra. */
typedef struct EmbedSite
{
	ModelsView	view;			/* under which this was filled in */
	text	   *name;
	const PredictModel *model;
	TextConverter converter;
	TextChunk	chunk;
	MemoryContext context;		/* of everything in here */
} EmbedSite;

typedef struct EmbedReceiver
{
	DestReceiver pub;
	int64		number;			/* of the model, for the predictor */
	PredictClient client;
	TextConverter converter;
	TextChunk	chunk;
	bool		nulls[CHUNK_ROWS];	/* of the chunk that is filled */
	bool		pending_nulls[CHUNK_ROWS];	/* of the one that was sent */
	int			pending;		/* rows sent and not answered; 0: none */
	int64		rows;			/* answered */
	Tuplestorestate *results;
	TupleDesc	results_desc;
	MemoryContext context;
	MemoryContext scratch;		/* of one row or answer */
} EmbedReceiver;

/* ---- texts and vectors ---- */

static void
chunk_init(TextChunk *chunk, MemoryContext context)
{
	pack_buffer_init(&chunk->lengths, context);
	pack_buffer_init(&chunk->bytes, context);
	chunk->rows = 0;
}

static void
chunk_clear(TextChunk *chunk)
{
	chunk->lengths.used = chunk->bytes.used = 0;
	chunk->rows = 0;
}

/* Adds a text; NULL is a null. */
static void
chunk_add(TextChunk *chunk, const char *utf8, int length)
{
	if (utf8 != NULL)
	{
		length = tensile_text_prefix(utf8, length);
		memcpy(pack_buffer_extend(&chunk->bytes, length), utf8, length);
	}
	*(int32 *) pack_buffer_extend(&chunk->lengths, sizeof(int32)) = utf8 != NULL ? length : -1;
	chunk->rows++;
}

static void
chunk_frame(const TextChunk *chunk, StringInfo header, WireBuffer buffers[2])
{
	initStringInfo(header);
	appendStringInfo(header, "{\"rows\":%d}", chunk->rows);
	buffers[0] = (WireBuffer) {chunk->lengths.data, chunk->lengths.used};
	buffers[1] = (WireBuffer) {chunk->bytes.data, chunk->bytes.used};
}

static ArrayType *
real_array(const float *values, int count)
{
	Size		size = ARR_OVERHEAD_NONULLS(1) + sizeof(float) * count;
	ArrayType  *array = palloc0(size);

	SET_VARSIZE(array, size);
	array->ndim = 1;
	array->elemtype = FLOAT4OID;
	ARR_DIMS(array)[0] = count;
	ARR_LBOUND(array)[0] = 1;
	memcpy(ARR_DATA_PTR(array), values, sizeof(float) * count);
	return array;
}

/* ---- models ---- */

/* The model, which must be a pretrained transformer. */
static const PredictModel *
pretrained_model(const char *name, MemoryContext context)
{
	const PredictModel *model = predict_model_find(name, context);

	if (!model->pretrained)
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 errmsg("model \"%s\" is not a pretrained transformer and cannot embed texts", name),
				 errhint("Register one with the architecture "
						 "{\"type\": \"pretrained\", \"path\": ...}.")));
	return model;
}

/* The number by which the predictor knows a model. */
static int64
model_number(const PredictModel *model)
{
	return model->version == NO_VERSION ? model->base : model->version;
}

/* ---- embed ---- */

static EmbedSite *
new_site(FmgrInfo *function, text *name)
{
	EmbedSite  *old = function->fn_extra;
	ModelsView	view = tensile_models_view();
	MemoryContext context;
	EmbedSite  *site;

	function->fn_extra = NULL;
	if (old != NULL)
		MemoryContextDelete(old->context);
	/* A child of the current one until it is complete, as in predict. */
	context = AllocSetContextCreate(CurrentMemoryContext, "pg_tensile embed",
									ALLOCSET_SMALL_SIZES);
	site = MemoryContextAllocZero(context, sizeof(EmbedSite));
	site->context = context;
	site->view = view;
	site->name = MemoryContextAlloc(context, VARSIZE_ANY(name));
	memcpy(site->name, name, VARSIZE_ANY(name));
	site->model = pretrained_model(text_to_cstring(name), context);
	text_converter_init(&site->converter, TEXTOID, context);
	chunk_init(&site->chunk, context);
	MemoryContextSetParent(context, function->fn_mcxt);
	function->fn_extra = site;
	return site;
}

/* The call site, whose model the current user may predict with. */
static EmbedSite *
embed_site(FmgrInfo *function, text *name)
{
	EmbedSite  *site = function->fn_extra;

	if (site == NULL || !tensile_same_view(site->view, tensile_models_view()) ||
		VARSIZE_ANY_EXHDR(site->name) != VARSIZE_ANY_EXHDR(name) ||
		memcmp(VARDATA_ANY(site->name), VARDATA_ANY(name), VARSIZE_ANY_EXHDR(name)) != 0)
		return new_site(function, name);
	predict_model_check_privilege(site->model);
	return site;
}

/*
 * embed(model, text) -> real[], strict.  A connection that broke between two
 * requests is replaced.
 */
TENSILE_PUBLIC_FUNCTION(tensile_embed)
{
	EmbedSite  *site = embed_site(fcinfo->flinfo, PG_GETARG_TEXT_PP(0));
	PredictClient *client = predict_session_client();
	TimestampTz deadline = predict_deadline();
	WireBuffer	buffers[2];
	StringInfoData header;
	Embeddings	answer;
	const char *utf8;
	int			length;
	bool		connected_now;

	utf8 = text_convert(&site->converter, PointerGetDatum(PG_GETARG_TEXT_PP(1)), &length);
	chunk_clear(&site->chunk);
	chunk_add(&site->chunk, utf8, length);
	chunk_frame(&site->chunk, &header, buffers);
	do
	{
		connected_now = predict_client_connect(client, deadline);
		if (predict_client_embed(client, model_number(site->model), &header,
								 buffers, lengthof(buffers), &answer, deadline))
		{
			if (answer.rows != 1)
				elog(ERROR, "the predictor answered with %d rows instead of 1", answer.rows);
			PG_RETURN_ARRAYTYPE_P(real_array(answer.vectors, answer.width));
		}
		predict_client_close(client);
	} while (!connected_now);
	predict_client_went_away(client, NULL);
}

/* ---- embed_rows ---- */

static void
put_embeddings(EmbedReceiver *receiver, const Embeddings *answer)
{
	if (answer->rows != receiver->pending)
		elog(ERROR, "the predictor answered with %d rows instead of %d",
			 answer->rows, receiver->pending);
	for (int i = 0; i < answer->rows; i++)
	{
		bool		nulls[2] = {false, receiver->pending_nulls[i]};
		Datum		values[2] = {Int64GetDatum(++receiver->rows), (Datum) 0};

		if (!nulls[1])
			values[1] = PointerGetDatum(real_array(answer->vectors + (Size) i * answer->width,
												   answer->width));
		tuplestore_putvalues(receiver->results, receiver->results_desc, values, nulls);
	}
	receiver->pending = 0;
}

/*
 * Sends the chunk unless it is empty, and receives the answer to the one before.
 */
static void
send_chunk(EmbedReceiver *receiver)
{
	MemoryContext old = MemoryContextSwitchTo(receiver->scratch);
	TimestampTz deadline = predict_deadline();
	bool		answer_due = receiver->pending > 0;
	bool		sending = receiver->chunk.rows > 0;
	WireBuffer	buffers[2];
	StringInfoData header;
	Embeddings	answer;

	chunk_frame(&receiver->chunk, &header, buffers);
	if (!predict_client_embed(&receiver->client, receiver->number, sending ? &header : NULL,
							  buffers, lengthof(buffers), answer_due ? &answer : NULL, deadline))
		predict_client_went_away(&receiver->client, NULL);
	if (answer_due)
		put_embeddings(receiver, &answer);
	receiver->pending = receiver->chunk.rows;
	memcpy(receiver->pending_nulls, receiver->nulls, sizeof(receiver->nulls));
	chunk_clear(&receiver->chunk);
	MemoryContextSwitchTo(old);
	MemoryContextReset(receiver->scratch);
}

static void
embed_startup(DestReceiver *self, int operation, TupleDesc desc)
{
	EmbedReceiver *receiver = (EmbedReceiver *) self;
	Oid			type = desc->natts == 1 ? TupleDescAttr(desc, 0)->atttypid : InvalidOid;
	const char *wire_type = desc->natts == 1 ? tensile_wire_type(getBaseType(type)) : NULL;

	if (desc->natts != 1)
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("the query of embed_rows has %d columns instead of one", desc->natts),
				 errhint("Select the texts only; row_number numbers them in the query's order.")));
	if (wire_type == NULL || strcmp(wire_type, "text") != 0)
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("the column of embed_rows cannot be of type %s", format_type_be(type)),
				 errhint("Select a text, or cast the column to text.")));
	text_converter_init(&receiver->converter, getBaseType(type), receiver->context);
}

static bool
embed_receive(TupleTableSlot *slot, DestReceiver *self)
{
	EmbedReceiver *receiver = (EmbedReceiver *) self;
	TextChunk  *chunk = &receiver->chunk;
	MemoryContext old = MemoryContextSwitchTo(receiver->scratch);
	const char *utf8 = NULL;
	int			length = 0;

	slot_getallattrs(slot);
	receiver->nulls[chunk->rows] = slot->tts_isnull[0];
	if (!slot->tts_isnull[0])
		utf8 = text_convert(&receiver->converter, slot->tts_values[0], &length);
	chunk_add(chunk, utf8, length);
	MemoryContextSwitchTo(old);
	MemoryContextReset(receiver->scratch);
	if (chunk->rows == CHUNK_ROWS || chunk->bytes.used >= CHUNK_BYTES)
		send_chunk(receiver);
	return true;
}

static void
embed_query(EmbedReceiver *receiver, const char *sql)
{
	int			nest_level = NewGUCNestLevel();
	Query	   *query;

	tensile_set_read_only();
	query = tensile_analyze_select(sql, QUERY_NAME);
	(void) predict_client_connect(&receiver->client, predict_deadline());
	tensile_run_select(query, sql, &receiver->pub);
	while (receiver->chunk.rows > 0 || receiver->pending > 0)
		send_chunk(receiver);
	AtEOXact_GUC(false, nest_level);
}

/* embed_rows(model, query) -> (row_number, embedding) */
TENSILE_PUBLIC_FUNCTION(tensile_embed_rows)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	EmbedReceiver receiver = {
		.pub = tensile_dest_receiver(embed_receive, embed_startup),
		.context = CurrentMemoryContext,
	};
	const char *name;

	InitMaterializedSRF(fcinfo, 0);
	if (PG_ARGISNULL(0) || PG_ARGISNULL(1))
		return (Datum) 0;
	tensile_require_version();
	receiver.results = result->setResult;
	receiver.results_desc = result->setDesc;
	name = text_to_cstring(PG_GETARG_TEXT_PP(0));
	receiver.number = model_number(pretrained_model(name, CurrentMemoryContext));
	receiver.scratch = AllocSetContextCreate(CurrentMemoryContext, "pg_tensile texts",
											 ALLOCSET_DEFAULT_SIZES);
	chunk_init(&receiver.chunk, CurrentMemoryContext);
	predict_client_init(&receiver.client, CurrentMemoryContext);

	PG_TRY();
	{
		embed_query(&receiver, text_to_cstring(PG_GETARG_TEXT_PP(1)));
	}
	PG_FINALLY();
	{
		predict_client_close(&receiver.client);
	}
	PG_END_TRY();
	return (Datum) 0;
}
