/*
 * predict_client.h: a session's connection to the predictor.
 */
#ifndef TENSILE_PREDICT_CLIENT_H
#define TENSILE_PREDICT_CLIENT_H

#include "postgres.h"

#include "datatype/timestamp.h"

#include "wire.h"

typedef struct PredictClient
{
	int			fd;				/* -1: not connected */
	struct WaitEventSet *waits; /* for the socket, the latch and the postmaster's death */
	bool		busy;			/* a request is on its way: the connection can't be used for another */
	bool		greeted;		/* the predictor has answered our HELLO */
	bool		answers_fast;	/* the last answer came within microseconds */
	FrameWriter writer;
	FrameReader reader;
	MemoryContext context;
} PredictClient;

/* The predictor's answer to one PREDICT frame, inside the reader's memory until the next exchange. */
typedef struct Predictions
{
	int			rows;
	int64		unknown;		/* categories never seen in training */
	const double *prediction;
	const double *probability;
	const int32 *label;
} Predictions;

/* Now + pg_tensile.predict_timeout. */
extern TimestampTz predict_deadline(void);

extern void predict_client_init(PredictClient *client, MemoryContext context);
extern void predict_client_close(PredictClient *client);

/* Connects unless it is connected, and starts the inference worker if need be. True: this is a new connection. */
extern bool predict_client_connect(PredictClient *client, TimestampTz deadline);

/*
 * Sends the frame (unless `header` is NULL) and takes the next answer (if `answer`), both at once, so that neither side
 * waits for the other for ever. False: the predictor closed the connection before it got the request.
 */
extern bool predict_client_exchange(PredictClient *client, int64 version, const StringInfo header,
									const WireBuffer *buffers, int nbuffers, Predictions *answer, TimestampTz deadline);

#endif
