/*
 * predict_client.c: a session's requests to the predictor
 * (docs/internals.md, "Frames": PREDICT, PREDICTION, PASSED, EMBED,
 * EMBEDDING).
 *
 * Answers come in the order of the requests and carry no number, so a
 * connection must not be used while an older answer may still come.  It is
 * `busy` from before a request is sent until its answer was taken, and stays
 * so after an error in between (a cancel, a timeout, a broken frame).  A busy
 * connection is closed and replaced by a new one.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "storage/latch.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/memutils.h"

#include "base/convert.h"
#include "base/library.h"
#include "base/owner.h"
#include "predicting/predict_client.h"
#include "predicting/predict_socket.h"
#include "processes/inference.h"
#include "processes/wait.h"
#include "rows/wire.h"
#include "state/extension.h"

#define RETRY_MS 20				/* between attempts to connect */
#define MAX_ANSWER (64 * 1024 * 1024)

void
predict_client_init(PredictClient *client, MemoryContext context)
{
	memset(client, 0, sizeof(*client));
	client->socket.fd = -1;
	client->context = context;
	frame_writer_init(&client->writer, context);
	frame_reader_init(&client->reader, MAX_ANSWER, context);
}

PredictClient *
predict_session_client(void)
{
	static PredictClient *session_client = NULL;

	if (session_client == NULL)
	{
		PredictClient *client = MemoryContextAlloc(TopMemoryContext, sizeof(PredictClient));

		predict_client_init(client, TopMemoryContext);
		session_client = client;
	}
	return session_client;
}

void
predict_client_close(PredictClient *client)
{
	predict_socket_close(&client->socket);
	client->busy = false;
	client->greeted = false;
	frame_reader_reset(&client->reader);
}

/* ---- errors ---- */

void
predict_client_went_away(PredictClient *client, const char *detail)
{
	predict_client_close(client);
	ereport(ERROR,
			(errcode(ERRCODE_CONNECTION_FAILURE),
			 errmsg("the predictor went away"),
			 detail ? errdetail_internal("%s", detail) : 0,
			 errhint("Try again: the predictor is restarted. "
					 "The server's log may say why it ended.")));
}

/* The header of a frame, whose encoding is UTF-8. */
static Jsonb *
frame_header(const Frame *frame)
{
	char	   *utf8 = pnstrdup(frame->header, frame->header_length);
	char	   *json = pg_any_to_server(utf8, strlen(utf8), PG_UTF8);

	return DatumGetJsonbP(DirectFunctionCall1(jsonb_in, CStringGetDatum(json)));
}

/* Raises the error that the predictor has answered with. */
static void
raise_answer(const Frame *frame)
{
	Jsonb	   *header = frame_header(frame);
	char	   *message = tensile_text_key(&header->root, "message");

	tensile_raise_error(tensile_text_key(&header->root, "sqlstate"),
						message ? message : "the predictor failed without a message",
						tensile_text_key(&header->root, "hint"),
						tensile_text_key(&header->root, "detail"));
}

/* ---- exchanging frames ---- */

/*
 * Sends what the socket takes.  False: the predictor closed the connection
 * before it got anything.
 */
static bool
send_some(PredictClient *client, bool first, bool *sending)
{
	IoResult	result = frame_writer_some(&client->writer, client->socket.fd);

	if (result == IO_CLOSED && first)
		return false;
	if (result == IO_CLOSED)
		predict_client_went_away(client, "It closed the connection while the features were sent.");
	*sending = result != IO_DONE;
	return true;
}

/*
 * Receives what has come.  False: the predictor closed the connection before
 * its greeting.
 */
static bool
receive_some(PredictClient *client, const Frame **frame, bool *receiving)
{
	IoResult	result = frame_reader_next(&client->reader, client->socket.fd, frame);

	if (result == IO_CLOSED && !client->greeted)
		return false;
	if (result == IO_CLOSED)
		predict_client_went_away(client, "It closed the connection before it answered.");
	if (result == IO_MALFORMED)
		predict_client_went_away(client, "It sent something that is not a frame.");
	*receiving = result != IO_DONE;
	return true;
}

/*
 * Sends the frame of the writer (if `sending`) and receives one (if `frame`),
 * both at once.
 */
static bool
exchange(PredictClient *client, bool sending, const Frame **frame, TimestampTz deadline)
{
	bool		receiving = frame != NULL;
	bool		first = true;
	bool		ready = frame_reader_has_some(&client->reader);

	while (sending || receiving)
	{
		if (sending && !send_some(client, first, &sending))
			return false;
		first = false;
		if (receiving && ready && !receive_some(client, frame, &receiving))
			return false;
		if (sending)
			ready = predict_socket_wait(&client->socket,
										WL_SOCKET_WRITEABLE | (receiving ? WL_SOCKET_READABLE : 0),
										deadline);
		else if (receiving)
			ready = predict_socket_watch(&client->socket, deadline);
	}
	return true;
}

static void
read_predictions(PredictClient *client, const Frame *frame, Predictions *answer)
{
	const WireBuffer *buffers = frame->buffers;

	if (frame->type != FRAME_PREDICTION || frame->nbuffers < 4 ||
		buffers[0].length != buffers[3].length || buffers[1].length != buffers[2].length ||
		buffers[1].length != 2 * buffers[3].length)
		predict_client_went_away(client, "Its answer is not a prediction.");
	answer->in_session = false;
	answer->rows = buffers[3].length / sizeof(int32);
	answer->unknown = buffers[0].data;
	answer->held = 0;
	answer->prediction = buffers[1].data;
	answer->probability = buffers[2].data;
	answer->label = buffers[3].data;
	answer->nextras = frame->nbuffers - 4;
	answer->extras = buffers + 4;
}

/*
 * Sends a request (unless `header` is NULL) and receives an answer (unless
 * `answer` is NULL).  Raises the error that is the answer.  False: the
 * connection broke.
 */
static bool
request(PredictClient *client, FrameType type, int64 number, const StringInfo header,
		const WireBuffer *buffers, int nbuffers, const Frame **answer, TimestampTz deadline)
{
	if (header != NULL)
		frame_writer_begin(&client->writer, type, number, header->data, header->len,
						   buffers, nbuffers);
	client->busy = true;
	if (!exchange(client, header != NULL, answer, deadline))
		return false;
	if (answer == NULL)
		return true;
	client->busy = false;
	if ((*answer)->type == FRAME_ERROR)
		raise_answer(*answer);
	return true;
}

bool
predict_client_exchange(PredictClient *client, int64 version, const StringInfo header,
						const WireBuffer *buffers, int nbuffers, Predictions *answer,
						TimestampTz deadline)
{
	const Frame *frame;

	if (!request(client, FRAME_PREDICT, version, header, buffers, nbuffers,
				 answer ? &frame : NULL, deadline))
		return false;
	if (answer != NULL)
		read_predictions(client, frame, answer);
	return true;
}

void
predict_client_passed(PredictClient *client, int64 held, int first, int rows)
{
	char		header[64];

	if (client->busy || client->socket.fd < 0)
		return;
	snprintf(header, sizeof(header), "{\"first\":%d,\"rows\":%d}", first, rows);
	frame_writer_begin(&client->writer, FRAME_PASSED, held, header, strlen(header), NULL, 0);
	/* A connection in the middle of a frame is replaced. */
	client->busy = frame_writer_some(&client->writer, client->socket.fd) != IO_DONE;
}

int64
predict_unknown(const Predictions *answer, int first, int rows)
{
	int64		unknown = 0;

	for (int i = first; i < first + rows; i++)
		unknown += answer->unknown[i];
	return unknown;
}

const double *
predict_extra_numbers(const Predictions *answer, int number, int count)
{
	if (number >= answer->nextras || answer->extras[number].length != sizeof(double) * count)
		elog(ERROR, "the predictor's answer lacks what it was asked for");
	return answer->extras[number].data;
}

static void
read_embeddings(PredictClient *client, const Frame *frame, Embeddings *answer)
{
	const WireBuffer *buffers = frame->buffers;
	int32		sizes[2];

	if (frame->type != FRAME_EMBEDDING || frame->nbuffers != 2 ||
		buffers[0].length != sizeof(sizes))
		predict_client_went_away(client, "Its answer is not an embedding.");
	memcpy(sizes, buffers[0].data, sizeof(sizes));
	if (sizes[0] < 0 || sizes[1] <= 0 ||
		buffers[1].length != (Size) sizes[0] * sizes[1] * sizeof(float))
		predict_client_went_away(client, "Its embeddings are not of the size that they have.");
	answer->rows = sizes[0];
	answer->width = sizes[1];
	answer->vectors = buffers[1].data;
}

bool
predict_client_embed(PredictClient *client, int64 number, const StringInfo header,
					 const WireBuffer *buffers, int nbuffers, Embeddings *answer,
					 TimestampTz deadline)
{
	const Frame *frame;

	if (!request(client, FRAME_EMBED, number, header, buffers, nbuffers,
				 answer ? &frame : NULL, deadline))
		return false;
	if (answer != NULL)
		read_embeddings(client, frame, answer);
	return true;
}

/* ---- connecting ---- */

/*
 * Exchanges greetings.  False: the predictor closed the connection, as one
 * does that is being killed while its socket still accepts connections.
 */
static bool
shake_hands(PredictClient *client, TimestampTz deadline)
{
	StringInfoData json;
	const Frame *frame;
	char	   *version;

	initStringInfo(&json);
	appendStringInfo(&json, "{\"version\": \"%s\", \"python\": null, \"pid\": %d}",
					 TENSILE_VERSION, MyProcPid);
	frame_writer_begin(&client->writer, FRAME_HELLO, 0, json.data, json.len, NULL, 0);
	if (!exchange(client, true, &frame, deadline))
	{
		predict_client_close(client);
		return false;
	}
	if (frame->type == FRAME_ERROR)
		raise_answer(frame);
	if (frame->type != FRAME_HELLO)
		predict_client_went_away(client, "Its first frame is not a greeting.");
	version = tensile_text_key(&frame_header(frame)->root, "version");
	if (version == NULL || strcmp(version, TENSILE_VERSION) != 0)
	{
		predict_client_close(client);
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("the predictor is of version %s, the server's library of version %s",
						version ? version : "unknown", TENSILE_VERSION),
				 errhint("Run make install and restart the server.")));
	}
	client->busy = false;
	client->greeted = true;
	return true;
}

bool
predict_client_connect(PredictClient *client, TimestampTz deadline)
{
	long		remaining;

	if (client->busy)
		predict_client_close(client);
	if (client->socket.fd >= 0)
		return false;

	/*
	 * The predictor of another database knows other models by the same
	 * numbers.
	 */
	tensile_require_database();
	for (;;)
	{
		client->busy = true;	/* until the greeting has been answered */
		if (predict_socket_open(&client->socket, client->context) && shake_hands(client, deadline))
			return true;
		tensile_start_inference();
		remaining = predict_time_left(deadline, "the predictor to start");
		(void) tensile_wait_socket(-1, 0, Min(RETRY_MS, remaining));
	}
}
