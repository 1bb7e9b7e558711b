/*
 * predict_socket.h: a session's socket to the predictor.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_PREDICT_SOCKET_H
#define TENSILE_PREDICT_SOCKET_H

#include "datatype/timestamp.h"

typedef struct PredictSocket
{
	int			fd;				/* -1: not connected */
	struct WaitEventSet *waits; /* for the socket, the latch and the postmaster's
								 * death */
	bool		answers_fast;	/* the last answer came within microseconds */
} PredictSocket;

/* The present time plus pg_tensile.predict_timeout. */
extern TimestampTz predict_deadline(void);

/* Milliseconds until the deadline; 57014 when it has passed. */
extern long predict_time_left(TimestampTz deadline, const char *waiting_for);

/* Connects to the predictor; false if it does not listen (yet). */
extern bool predict_socket_open(PredictSocket *self, MemoryContext context);
extern void predict_socket_close(PredictSocket *self);

/* Waits for the WL_ events of the socket; false: try it again. */
extern bool predict_socket_wait(PredictSocket *self, uint32 events, TimestampTz deadline);

/* Waits for an answer in the same way, but at first without going to sleep. */
extern bool predict_socket_watch(PredictSocket *self, TimestampTz deadline);

#endif
