/*
 * feed.h: frames and rows of a query for a trainer.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_FEED_H
#define TENSILE_FEED_H

#include "utils/jsonb.h"

#include "rows/training_query.h"
#include "rows/wire.h"

/*
 * Lets a whole frame wait in the socket while the trainer decodes the one
 * before.  The kernel may allow less.
 */
extern void feed_widen_socket(int fd);

/* Sends a frame to the trainer; 08006 when it takes nothing for too long. */
extern void feed_send_frame(FrameWriter *writer, int fd, FrameType type, int64 job,
							const char *header, Size header_length, const WireBuffer *buffers,
							int nbuffers);

/*
 * From now on a change that may end the job interrupts the query; one that
 * came just before, after the worker had looked at its job, does so here.
 */
extern void tensile_interrupt_if_woken(void);

/*
 * In a worker: calls `feed`, which analyses or runs queries of the submitter,
 * with the submitter's settings ({"name": "value"}), read only, in a
 * security-restricted operation: functions for workers are refused, and the
 * session cannot be changed.  A change that may end the job interrupts the
 * query.  What it leaves in the session is released.
 */
extern int64 tensile_feed_in_worker(Jsonb *settings, int64 (*feed) (void *), void *argument);

/*
 * Runs the query of explain_training, read only, as the current user.  Sends
 * its rows to the socket and returns their number.
 */
extern int64 tensile_feed_session(int fd, const TrainingQuery *training);

#endif
