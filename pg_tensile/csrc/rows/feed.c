/*
 * feed.c: sends the rows of a training query to the trainer, in a worker
 * (tensile_worker._feed) or in the session of explain_training (explain.c).
 *
 * The query runs with a DestReceiver that packs every row into a chunk
 * (training_rows.c) and writes every full chunk to the trainer's socket (wire.c).  No
 * row is kept.  The worker commits right afterwards, so that the snapshot
 * lives no longer than this call.
 *
 * The query runs read only, with the settings and rights of the submitter.  It
 * could call tensile_worker._feed again, which is refused, or change settings, which
 * the GUC nest level undoes.  The session of a worker exists as long as the
 * training, so advisory locks, all that functions of the query can leave in it,
 * are released at once.  The session of explain_training belongs to the caller,
 * and keeps them as after any query.
 *
 * Memory: the packer's context is a child of the caller's, and is freed with
 * it after an error.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include <sys/socket.h>

#include "access/xact.h"
#include "fmgr.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "storage/lock.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/jsonb.h"
#include "utils/memutils.h"

#include "base/convert.h"
#include "base/error_context.h"
#include "base/guc.h"
#include "base/query.h"
#include "processes/wait.h"
#include "rows/feed.h"
#include "rows/training_query.h"
#include "rows/training_rows.h"
#include "rows/wire.h"
#include "state/identity.h"
#include "state/shmem.h"

#define TRAINER "the trainer"
#define SEND_BUFFER (2 * 1024 * 1024)

typedef struct FeedReceiver
{
	DestReceiver pub;
	const TrainingQuery *training;
	int			fd;
	int64		job;
	TrainingPacker *packer;
	FrameWriter writer;
	MemoryContext context;
	bool		sending;		/* errors are not the query's */
} FeedReceiver;

PG_FUNCTION_INFO_V1(tensile_feed);
PG_FUNCTION_INFO_V1(tensile_take_interrupt);

void
feed_widen_socket(int fd)
{
	int			size = SEND_BUFFER;

	(void) setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
}

void
feed_send_frame(FrameWriter *writer, int fd, FrameType type, int64 job, const char *header,
				Size header_length, const WireBuffer *buffers, int nbuffers)
{
	long		timeout_ms = tensile_executor_timeout > 0 ? tensile_executor_timeout * 1000L : -1;

	wire_send(writer, fd, TRAINER, timeout_ms, type, job, header, header_length, buffers, nbuffers);
}

/* Sends a frame, whose header is in the server's encoding. */
static void
feed_send(FeedReceiver *receiver, FrameType type, const StringInfo json, const WireBuffer *buffers,
		  int nbuffers)
{
	char	   *utf8 = tensile_to_utf8(json->data, json->len);
	Size		length = utf8 == json->data ? json->len : strlen(utf8);

	receiver->sending = true;
	feed_send_frame(&receiver->writer, receiver->fd, type, receiver->job, utf8, length,
					buffers, nbuffers);
	receiver->sending = false;
}

static void
feed_flush(FeedReceiver *receiver)
{
	MemoryContext old = MemoryContextSwitchTo(receiver->packer->scratch);
	StringInfoData json;
	WireBuffer *buffers;
	int			nbuffers = training_packer_buffers(receiver->packer, &buffers);

	initStringInfo(&json);
	appendStringInfo(&json, "{\"rows\": %d}", receiver->packer->rows);
	feed_send(receiver, FRAME_ROWS, &json, buffers, nbuffers);
	training_packer_clear(receiver->packer);
	MemoryContextSwitchTo(old);
	MemoryContextReset(receiver->packer->scratch);
}

static void
feed_startup(DestReceiver *self, int operation, TupleDesc desc)
{
	FeedReceiver *receiver = (FeedReceiver *) self;
	StringInfoData json;

	receiver->packer = training_packer_create(desc, receiver->context);
	initStringInfo(&json);
	training_packer_describe(receiver->packer, receiver->training->target, &json);
	feed_send(receiver, FRAME_COLUMNS, &json, NULL, 0);
}

static bool
feed_row(TupleTableSlot *slot, DestReceiver *self)
{
	FeedReceiver *receiver = (FeedReceiver *) self;

	training_packer_row(receiver->packer, slot);
	if (training_packer_full(receiver->packer))
	{
		CHECK_FOR_INTERRUPTS();
		feed_flush(receiver);
	}
	return true;
}

static void
feed_end(FeedReceiver *receiver)
{
	StringInfoData json;
	WireBuffer *buffers;
	int			nbuffers;

	if (receiver->packer->rows > 0)
		feed_flush(receiver);
	initStringInfo(&json);
	training_packer_summary(receiver->packer, &json);
	nbuffers = training_packer_dictionaries(receiver->packer, &buffers);
	feed_send(receiver, FRAME_ROWS_END, &json, buffers, nbuffers);
}

/* Adds the row at which the query failed to the error, and raises it again. */
static void
rethrow_with_row(const FeedReceiver *receiver)
{
	ErrorData  *error;
	char	   *row;

	MemoryContextSwitchTo(receiver->context);
	error = CopyErrorData();
	FlushErrorState();
	row = psprintf("row " UINT64_FORMAT " of the " TRAINING_QUERY_NAME,
				   receiver->packer->total_rows + 1);
	error->detail = error->detail ? psprintf("%s\n%s", error->detail, row) : row;
	ReThrowError(error);
}

static void
feed_query(FeedReceiver *receiver)
{
	const char *sql;
	Query	   *query = tensile_analyze_training(receiver->training, &sql);

	PG_TRY();
	{
		tensile_run_select(query, sql, &receiver->pub);
	}
	PG_CATCH();
	{
		if (receiver->packer == NULL || receiver->sending || geterrcode() == ERRCODE_QUERY_CANCELED)
			PG_RE_THROW();
		rethrow_with_row(receiver);
	}
	PG_END_TRY();
	feed_end(receiver);
}

void
tensile_interrupt_if_woken(void)
{
	pg_memory_barrier();
	if (!tensile_wakeup_pending())
		return;
	tensile_my_slot->interrupted = true;
	ereport(ERROR,
			(errcode(ERRCODE_QUERY_CANCELED),
			 errmsg("canceling the training query because its job has changed")));
}

/*
 * tensile_worker._take_interrupt(): did a change of the job cause the last query
 * cancel in this worker?  False if it was pg_cancel_backend.
 */
Datum
tensile_take_interrupt(PG_FUNCTION_ARGS)
{
	bool		interrupted;

	tensile_require_process(TENSILE_WORKER);
	interrupted = tensile_my_slot->interrupted;
	tensile_my_slot->interrupted = false;
	PG_RETURN_BOOL(interrupted);
}

/*
 * Runs the query and sends its rows; returns their number.  The session stays
 * read only for the rest of this GUC nest level.
 */
static uint64
feed_socket(int fd, int64 job, const TrainingQuery *training)
{
	FeedReceiver receiver = {
		.pub = tensile_dest_receiver(feed_row, feed_startup),
		.fd = fd,
		.job = job,
		.training = training,
		.context = CurrentMemoryContext,
	};

	frame_writer_init(&receiver.writer, CurrentMemoryContext);
	feed_widen_socket(fd);
	tensile_set_read_only();
	feed_query(&receiver);
	return receiver.packer->total_rows;
}

int64
tensile_feed_session(int fd, const TrainingQuery *training)
{
	return feed_socket(fd, 0, training);
}

int64
tensile_feed_in_worker(Jsonb *settings, int64 (*feed) (void *), void *argument)
{
	int			nest_level = NewGUCNestLevel();
	volatile int64 rows = 0;
	Oid			user;
	int			security;

	tensile_apply_settings(settings);
	tensile_set_read_only();
	GetUserIdAndSecContext(&user, &security);
	tensile_my_slot->feeding = true;
	PG_TRY();
	{
		SetUserIdAndSecContext(user, security | SECURITY_RESTRICTED_OPERATION);
		rows = feed(argument);
	}
	PG_FINALLY();
	{
		SetUserIdAndSecContext(user, security);
		tensile_my_slot->feeding = false;
		tensile_user_code_failed();
		LockReleaseSession(USER_LOCKMETHOD);
	}
	PG_END_TRY();
	AtEOXact_GUC(false, nest_level);
	return rows;
}

typedef struct TrainingFeed
{
	int			fd;
	TrainingQuery training;
} TrainingFeed;

static int64
feed_training(void *argument)
{
	const TrainingFeed *feed = argument;

	tensile_interrupt_if_woken();
	return feed_socket(feed->fd, tensile_my_slot->job, &feed->training);
}

/*
 * tensile_worker._feed(fd, query, target, settings, split_by, validation_query) ->
 * number of rows; the last two may be null
 */
Datum
tensile_feed(PG_FUNCTION_ARGS)
{
	TrainingFeed feed;

	if (!tensile_in_worker() || InSecurityRestrictedOperation())
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("tensile_worker._feed is for the workers of pg_tensile only"),
				 errhint("Use train_model to train on a query.")));
	tensile_require_process(TENSILE_WORKER);
	for (int i = 0; i < 4; i++)
		if (PG_ARGISNULL(i))
			PG_RETURN_NULL();

	feed.fd = PG_GETARG_INT32(0);
	feed.training = (TrainingQuery) {
		.query = tensile_text_argument(fcinfo, 1),
		.target = tensile_text_argument(fcinfo, 2),
		.split_by = tensile_text_argument(fcinfo, 4),
		.validation_query = tensile_text_argument(fcinfo, 5)
	};
	PG_RETURN_INT64(tensile_feed_in_worker(PG_GETARG_JSONB_P(3), feed_training, &feed));
}
