/*
 * predict_socket.c: a session's socket to the predictor, and how it waits.
 *
 * The wait event set is made once for a connection.  A wait is then a single
 * system call, which matters for predictions of one row.  One deadline
 * (pg_tensile.predict_timeout) covers everything that a call waits for: the
 * start of the inference process, the model, and the answer.  Every wait
 * processes interrupts.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include <errno.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "miscadmin.h"
#include "portability/instr_time.h"
#include "storage/fd.h"
#include "storage/latch.h"
#include "utils/timestamp.h"

#include "base/compat.h"
#include "base/guc.h"
#include "predicting/predict_socket.h"
#include "processes/inference.h"
#include "processes/wait.h"

#define SOCKET_POSITION 0		/* in the wait event set */

/* ---- waiting ---- */

TimestampTz
predict_deadline(void)
{
	return TimestampTzPlusMilliseconds(GetCurrentTimestamp(), tensile_predict_timeout);
}

long
predict_time_left(TimestampTz deadline, const char *waiting_for)
{
	long		remaining = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), deadline);

	if (remaining <= 0)
		ereport(ERROR,
				(errcode(ERRCODE_QUERY_CANCELED),
				 errmsg("prediction canceled due to pg_tensile.predict_timeout (%d ms) "
						"while waiting for %s",
						tensile_predict_timeout, waiting_for),
				 errhint("The first prediction after a start loads PyTorch and the model; "
						 "if it never comes, the server's log says why.")));
	return remaining;
}

bool
predict_socket_wait(PredictSocket *self, uint32 events, TimestampTz deadline)
{
	WaitEvent	event = {0};
	int			nevents;

	ModifyWaitEvent(self->waits, SOCKET_POSITION, events, NULL);
	nevents = WaitEventSetWait(self->waits, predict_time_left(deadline, "the answer"), &event, 1,
							   tensile_wait_event(TENSILE_WAIT_PREDICTOR));
	if (nevents > 0 && (event.events & WL_LATCH_SET))
		ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
	return nevents > 0 && event.pos == SOCKET_POSITION;
}

/*
 * On many machines, virtual ones above all, putting a core to sleep and waking
 * it takes longer than a prediction.  So the socket is polled for
 * pg_tensile.predict_spin first, if the last answer came within that time.
 * Where it did not, because cores are scarce or predictions long, polling
 * would only take time from the processes that compute.
 */
bool
predict_socket_watch(PredictSocket *self, TimestampTz deadline)
{
	instr_time	start;
	instr_time	now;
	char		byte;
	bool		ready = false;

	INSTR_TIME_SET_CURRENT(start);
	do
	{
		ready = self->answers_fast && recv(self->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0;
		if (self->answers_fast && !ready)
			sched_yield();		/* the predictor may need this core */
		INSTR_TIME_SET_CURRENT(now);
		INSTR_TIME_SUBTRACT(now, start);
	} while (self->answers_fast && !ready &&
			 INSTR_TIME_GET_MICROSEC(now) < tensile_predict_spin);
	if (!ready)
	{
		ready = predict_socket_wait(self, WL_SOCKET_READABLE, deadline);
		INSTR_TIME_SET_CURRENT(now);
		INSTR_TIME_SUBTRACT(now, start);
		self->answers_fast = INSTR_TIME_GET_MICROSEC(now) < tensile_predict_spin;
	}
	return ready;
}

/* ---- connecting ---- */

/*
 * Makes sure that the predictor listens, not another user who can write to the
 * folder and was there first.
 */
static void
check_peer(PredictSocket *self)
{
	uid_t		user;
	gid_t		group;

	if (getpeereid(self->fd, &user, &group) == 0 && user == geteuid())
		return;
	predict_socket_close(self);
	ereport(ERROR,
			(errcode(ERRCODE_CONNECTION_EXCEPTION),
			 errmsg("the predictor's socket belongs to another operating-system user"),
			 errhint("Put a folder that only the server's user can write to first "
					 "in unix_socket_directories.")));
}

static void
set_up_waits(PredictSocket *self, MemoryContext context)
{
	self->waits = tensile_create_wait_event_set(context, 3);
	AddWaitEventToSet(self->waits, WL_SOCKET_READABLE, self->fd, NULL, NULL);
	AddWaitEventToSet(self->waits, WL_LATCH_SET, PGINVALID_SOCKET, MyLatch, NULL);
	AddWaitEventToSet(self->waits, WL_EXIT_ON_PM_DEATH, PGINVALID_SOCKET, NULL, NULL);
}

bool
predict_socket_open(PredictSocket *self, MemoryContext context)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int			error;

	tensile_set_predictor_address(&address);
	if (!AcquireExternalFD())
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_RESOURCES),
				 errmsg("too many open files for a connection to the predictor"),
				 errhint("Raise max_files_per_process.")));
	self->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (self->fd < 0)
		ReleaseExternalFD();
	else if (connect(self->fd, (struct sockaddr *) &address, sizeof(address)) == 0)
	{
		check_peer(self);
		set_up_waits(self, context);
		return true;
	}
	error = errno;
	predict_socket_close(self);
	if (error != ENOENT && error != ECONNREFUSED && error != EAGAIN && error != EINTR)
	{
		errno = error;
		ereport(ERROR,
				(errcode(ERRCODE_CONNECTION_EXCEPTION),
				 errmsg("could not connect to the predictor: %m")));
	}
	return false;
}

void
predict_socket_close(PredictSocket *self)
{
	if (self->waits != NULL)
		FreeWaitEventSet(self->waits);
	self->waits = NULL;
	if (self->fd >= 0)
	{
		close(self->fd);
		ReleaseExternalFD();
		self->fd = -1;
	}
}
