/*
 * predict_client.c: a session's connection to the predictor (docs/internals.md, "Frames": PREDICT, PREDICTION).
 *
 * Answers come in the order of the requests and carry no number, so a connection must never be used again when an
 * answer may still be on its way: it is `busy` from before a request is sent until its answer has been taken, and an
 * error in between (cancel, time-out, broken frame) leaves it so. Whoever wants to use a busy connection closes it and
 * opens another.
 *
 * The predictor's socket is beside the server's own, or among its temporary files, which backups leave out and a start
 * cleans up. Sessions and predictor derive the same path from the same settings.
 *
 * What a client waits for is set up once with the connection: a wait is then one system call, which a prediction of one
 * row notices. There is one time limit for everything a call waits for, pg_tensile.predict_timeout: the start of the inference
 * worker, the loading of the model, the answer. Every wait processes interrupts.
 */
#include "postgres.h"

#include <errno.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/file_utils.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "nodes/pg_list.h"
#include "portability/instr_time.h"
#include "postmaster/postmaster.h"
#include "storage/fd.h"
#include "storage/latch.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/timestamp.h"
#include "utils/varlena.h"
#include "utils/wait_event.h"

#include "owner.h"
#include "pg_tensile.h"
#include "predict_client.h"

#define RETRY_MS 20				/* between attempts to connect while the inference worker starts */
#define MAX_ANSWER (64 * 1024 * 1024)
#define SOCKET_POSITION 0		/* in the wait event set */

PG_FUNCTION_INFO_V1(tensile_predictor_socket);

TimestampTz
predict_deadline(void)
{
	return TimestampTzPlusMilliseconds(GetCurrentTimestamp(), tensile_predict_timeout);
}

void
predict_client_init(PredictClient *client, MemoryContext context)
{
	client->fd = -1;
	client->waits = NULL;
	client->busy = false;
	client->greeted = false;
	client->answers_fast = false;
	client->context = context;
	frame_writer_init(&client->writer, context);
	frame_reader_init(&client->reader, MAX_ANSWER, context);
}

void
predict_client_close(PredictClient *client)
{
	if (client->waits != NULL)
		FreeWaitEventSet(client->waits);
	client->waits = NULL;
	if (client->fd >= 0)
	{
		close(client->fd);
		ReleaseExternalFD();
		client->fd = -1;
	}
	client->busy = false;
	client->greeted = false;
	frame_reader_reset(&client->reader);
}

/* ---- waiting ---- */

static void
timed_out(const char *waiting_for)
{
	ereport(ERROR,
			(errcode(ERRCODE_QUERY_CANCELED),
			 errmsg("prediction canceled due to pg_tensile.predict_timeout (%d ms) while waiting for %s",
					tensile_predict_timeout, waiting_for),
			 errhint("The first prediction after a start loads PyTorch and the model; if it never comes, the server's log says why.")));
}

static long
time_left(TimestampTz deadline, const char *waiting_for)
{
	long		left = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), deadline);

	if (left <= 0)
		timed_out(waiting_for);
	return left;
}

static void
set_up_waits(PredictClient *client)
{
	client->waits = tensile_create_wait_event_set(client->context, 3);
	AddWaitEventToSet(client->waits, WL_SOCKET_READABLE, client->fd, NULL, NULL);
	AddWaitEventToSet(client->waits, WL_LATCH_SET, PGINVALID_SOCKET, MyLatch, NULL);
	AddWaitEventToSet(client->waits, WL_EXIT_ON_PM_DEATH, PGINVALID_SOCKET, NULL, NULL);
}

/* Waits for the socket; true: it is ready, false: look again. */
static bool
wait_for_socket(PredictClient *client, uint32 events, TimestampTz deadline)
{
	WaitEvent	event = {0};
	int			nevents;

	ModifyWaitEvent(client->waits, SOCKET_POSITION, events, NULL);
	nevents = WaitEventSetWait(client->waits, time_left(deadline, "the answer"), &event, 1,
							   tensile_wait_event(TENSILE_WAIT_PREDICTOR));
	if (nevents > 0 && (event.events & WL_LATCH_SET))
		ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
	return nevents > 0 && event.pos == SOCKET_POSITION;
}

/*
 * Waits for an answer. Putting a core to sleep and waking it takes longer than a prediction on many machines, virtual ones
 * above all, so the socket is watched for pg_tensile.predict_spin first, if the last answer came that fast: where cores are
 * scarce or predictions long it did not, and watching would only take time from those who compute.
 */
static bool
watch_socket(PredictClient *client, TimestampTz deadline)
{
	instr_time	start;
	instr_time	now;
	char		byte;
	bool		ready = false;

	INSTR_TIME_SET_CURRENT(start);
	do
	{
		ready = client->answers_fast && recv(client->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0;
		if (client->answers_fast && !ready)
			sched_yield();		/* the predictor may be waiting for this very core */
		INSTR_TIME_SET_CURRENT(now);
		INSTR_TIME_SUBTRACT(now, start);
	} while (client->answers_fast && !ready && INSTR_TIME_GET_MICROSEC(now) < tensile_predict_spin);
	if (!ready)
	{
		ready = wait_for_socket(client, WL_SOCKET_READABLE, deadline);
		INSTR_TIME_SET_CURRENT(now);
		INSTR_TIME_SUBTRACT(now, start);
		client->answers_fast = INSTR_TIME_GET_MICROSEC(now) < tensile_predict_spin;
	}
	return ready;
}

static void
went_away(PredictClient *client, const char *detail)
{
	predict_client_close(client);
	ereport(ERROR,
			(errcode(ERRCODE_CONNECTION_FAILURE),
			 errmsg("the predictor went away"),
			 errdetail_internal("%s", detail),
			 errhint("Try again: it is started anew. The server's log may say why it ended.")));
}

/* ---- the predictor's errors ---- */

static char *
json_text(Jsonb *object, const char *key)
{
	JsonbValue *value = getKeyJsonValueFromContainer(&object->root, key, strlen(key), NULL);

	return value != NULL && value->type == jbvString ? pnstrdup(value->val.string.val, value->val.string.len) : NULL;
}

/* A frame's header; frames carry UTF-8. */
static Jsonb *
frame_header(const Frame *frame)
{
	char	   *utf8 = pnstrdup(frame->header, frame->header_length);
	char	   *json = pg_any_to_server(utf8, strlen(utf8), PG_UTF8);

	return DatumGetJsonbP(DirectFunctionCall1(jsonb_in, CStringGetDatum(json)));
}

static void
raise_answer(const Frame *frame)
{
	Jsonb	   *header = frame_header(frame);
	char	   *message = json_text(header, "message");

	tensile_raise_error(json_text(header, "sqlstate"), message ? message : "the predictor failed without a message",
						json_text(header, "hint"), json_text(header, "detail"));
}

/* ---- exchanging frames ---- */

/* Sends what the socket takes; false: the predictor closed the connection before it got anything. */
static bool
send_some(PredictClient *client, bool first, bool *sending)
{
	IoResult	result = frame_writer_some(&client->writer, client->fd);

	if (result == IO_CLOSED && first)
		return false;
	if (result == IO_CLOSED)
		went_away(client, "It closed the connection while the features were sent.");
	*sending = result != IO_DONE;
	return true;
}

/* Takes what has come; false: the predictor closed the connection before it greeted us. */
static bool
receive_some(PredictClient *client, const Frame **frame, bool *receiving)
{
	IoResult	result = frame_reader_next(&client->reader, client->fd, frame);

	if (result == IO_CLOSED && !client->greeted)
		return false;
	if (result == IO_CLOSED)
		went_away(client, "It closed the connection before it answered.");
	if (result == IO_MALFORMED)
		went_away(client, "It sent something that is not a frame.");
	*receiving = result != IO_DONE;
	return true;
}

/* Sends the frame that the writer holds (if `sending`) and takes one frame (if `frame`), both at once. */
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
			ready = wait_for_socket(client, WL_SOCKET_WRITEABLE | (receiving ? WL_SOCKET_READABLE : 0), deadline);
		else if (receiving)
			ready = watch_socket(client, deadline);
	}
	return true;
}

static void
read_predictions(PredictClient *client, const Frame *frame, Predictions *answer)
{
	const WireBuffer *buffers = frame->buffers;

	if (frame->type != FRAME_PREDICTION || frame->nbuffers != 4 || buffers[0].length != sizeof(int64) ||
		buffers[1].length != buffers[2].length || buffers[1].length != 2 * buffers[3].length)
		went_away(client, "Its answer is not a prediction.");
	memcpy(&answer->unknown, buffers[0].data, sizeof(int64));
	answer->rows = buffers[3].length / sizeof(int32);
	answer->prediction = buffers[1].data;
	answer->probability = buffers[2].data;
	answer->label = buffers[3].data;
}

bool
predict_client_exchange(PredictClient *client, int64 version, const StringInfo header, const WireBuffer *buffers,
						int nbuffers, Predictions *answer, TimestampTz deadline)
{
	const Frame *frame;
	bool		sending = header != NULL;

	if (sending)
		frame_writer_begin(&client->writer, FRAME_PREDICT, version, header->data, header->len, buffers, nbuffers);
	client->busy = true;
	if (!exchange(client, sending, answer ? &frame : NULL, deadline))
		return false;
	if (answer == NULL)
		return true;
	client->busy = false;
	if (frame->type == FRAME_ERROR)
		raise_answer(frame);
	read_predictions(client, frame, answer);
	return true;
}

/* ---- connecting ---- */

/* Where the predictor listens; relative to the data directory if among the temporary files. */
static void
set_socket_path(struct sockaddr_un *address)
{
	List	   *folders = NIL;
	const char *folder = "";
	int			length;

	if (Unix_socket_directories != NULL && SplitDirectoriesString(pstrdup(Unix_socket_directories), ',', &folders) &&
		folders != NIL)
		folder = linitial(folders);
	length = snprintf(address->sun_path, sizeof(address->sun_path), "%s/.s.pg_tensile.%d", folder, PostPortNumber);
	if (*folder == '\0' || *folder == '@' || length >= sizeof(address->sun_path))
		strlcpy(address->sun_path, "base/" PG_TEMP_FILES_DIR "/" PG_TEMP_FILE_PREFIX ".pg_tensile",
				sizeof(address->sun_path));
}

/* tensile._predictor_socket() */
Datum
tensile_predictor_socket(PG_FUNCTION_ARGS)
{
	struct sockaddr_un address;

	tensile_require_process(TENSILE_INFERENCE);
	set_socket_path(&address);
	PG_RETURN_TEXT_P(cstring_to_text(address.sun_path));
}

/* In a folder that others can write to, they could listen before the predictor does. */
static void
check_peer(PredictClient *client)
{
	uid_t		user;
	gid_t		group;

	if (getpeereid(client->fd, &user, &group) == 0 && user == geteuid())
		return;
	predict_client_close(client);
	ereport(ERROR,
			(errcode(ERRCODE_CONNECTION_EXCEPTION),
			 errmsg("the predictor's socket belongs to another operating-system user"),
			 errhint("Put a folder that only the server's user can write to first in unix_socket_directories.")));
}

/* False: nobody listens (yet). */
static bool
try_connect(PredictClient *client)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int			error;

	set_socket_path(&address);

	if (!AcquireExternalFD())
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_RESOURCES),
				 errmsg("too many open files for a connection to the predictor"),
				 errhint("Raise max_files_per_process.")));
	client->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (client->fd < 0)
		ReleaseExternalFD();
	else if (connect(client->fd, (struct sockaddr *) &address, sizeof(address)) == 0)
	{
		check_peer(client);
		return true;
	}
	error = errno;
	predict_client_close(client);
	if (error != ENOENT && error != ECONNREFUSED && error != EAGAIN && error != EINTR)
	{
		errno = error;
		ereport(ERROR,
				(errcode(ERRCODE_CONNECTION_EXCEPTION),
				 errmsg("could not connect to the predictor: %m")));
	}
	return false;
}

/* False: it closed the connection, as a predictor does that is being killed while its socket still takes connections. */
static bool
shake_hands(PredictClient *client, TimestampTz deadline)
{
	StringInfoData json;
	const Frame *frame;
	char	   *version;

	initStringInfo(&json);
	appendStringInfo(&json, "{\"version\": \"%s\", \"python\": null, \"pid\": %d}", TENSILE_VERSION, MyProcPid);
	frame_writer_begin(&client->writer, FRAME_HELLO, 0, json.data, json.len, NULL, 0);
	client->busy = true;
	set_up_waits(client);
	if (!exchange(client, true, &frame, deadline))
	{
		predict_client_close(client);
		return false;
	}
	if (frame->type == FRAME_ERROR)
		raise_answer(frame);
	if (frame->type != FRAME_HELLO)
		went_away(client, "Its first frame is not a greeting.");
	version = json_text(frame_header(frame), "version");
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
	if (client->busy)
		predict_client_close(client);
	if (client->fd >= 0)
		return false;
	tensile_require_database(); /* the predictor of another database knows other models by the same numbers */
	while (!try_connect(client) || !shake_hands(client, deadline))
	{
		tensile_start_inference();
		(void) tensile_wait_socket(-1, 0, Min(RETRY_MS, time_left(deadline, "the predictor to start")));
	}
	return true;
}
