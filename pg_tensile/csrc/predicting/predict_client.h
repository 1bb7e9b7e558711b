/*
 * predict_client.h: a session's requests to the predictor.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_PREDICT_CLIENT_H
#define TENSILE_PREDICT_CLIENT_H

#include "base/compat.h"
#include "predicting/predict_socket.h"
#include "rows/wire.h"

typedef struct PredictClient
{
	PredictSocket socket;
	bool		busy;			/* an answer may still come */
	bool		greeted;		/* the predictor has answered our HELLO */
	FrameWriter writer;
	FrameReader reader;
	MemoryContext context;
} PredictClient;

/*
 * Answers to rows: of a PREDICT frame, in the reader's memory until the next
 * exchange, or of the session itself (session_answers.c).
 */
typedef struct Predictions
{
	int			rows;
	bool		in_session;		/* computed by this session */
	const int32 *unknown;		/* [rows]: categories never seen in training */
	int64		held;			/* the predictor's number of it until its rows have been passed
								 * on; 0: it has counted them */
	const double *prediction;
	const double *probability;
	const int32 *label;
	int			nextras;		/* what the request wished for besides */
	const WireBuffer *extras;
} Predictions;

/* The answer to an EMBED frame, likewise. */
typedef struct Embeddings
{
	int			rows;
	int			width;
	const float *vectors;		/* [rows][width] */
} Embeddings;

extern void predict_client_init(PredictClient *client, MemoryContext context);
extern void predict_client_close(PredictClient *client);

/*
 * The session's client, for functions that send nothing while user code runs.
 */
extern PredictClient *predict_session_client(void);

/*
 * Connects unless it is connected, and starts the inference process if needed.
 * True if the connection is new.
 */
extern bool predict_client_connect(PredictClient *client, TimestampTz deadline);

/*
 * Sends the frame (unless `header` is NULL) and takes the next answer (if
 * `answer`), both at once, so that neither side waits for the other for ever.
 * False: the predictor closed the connection before it got the request.
 */
extern bool predict_client_exchange(PredictClient *client, int64 version, const StringInfo header,
									const WireBuffer *buffers, int nbuffers, Predictions *answer,
									TimestampTz deadline);

/*
 * Says that rows of an answer that is held have been passed on.  Does not wait:
 * if the predictor cannot take it now, it goes without.
 */
extern void predict_client_passed(PredictClient *client, int64 held, int first, int rows);

/* The number of categories never seen in training in some of the rows. */
extern int64 predict_unknown(const Predictions *answer, int first, int rows);

/* A further buffer of the answer, `count` numbers. */
extern const double *predict_extra_numbers(const Predictions *answer, int number, int count);

/* The same exchange with an EMBED frame. */
extern bool predict_client_embed(PredictClient *client, int64 number, const StringInfo header,
								 const WireBuffer *buffers, int nbuffers, Embeddings *answer,
								 TimestampTz deadline);

/* Closes the connection and raises 08006; the detail may be NULL. */
pg_noreturn extern void predict_client_went_away(PredictClient *client, const char *detail);

#endif
