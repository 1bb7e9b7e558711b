/*
 * rows_ahead.h: rows that have been read and not been passed on yet.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_ROWS_AHEAD_H
#define TENSILE_ROWS_AHEAD_H

#include "nodes/execnodes.h"

#include "batching/node.h"
#include "batching/request.h"

#define NO_MORE_ROWS (-1)

typedef struct RowsAhead RowsAhead;

/* Those of an input; `econtext` has the row that is read (ecxt_outertuple). */
extern RowsAhead *rows_ahead_create(PlanState *input, const PredictNode *node,
									ExprContext *econtext);

/* Adds a request to make for each row. */
extern void rows_ahead_add_request(RowsAhead *self, Request *request);
extern List *rows_ahead_requests(const RowsAhead *self);

/* Are there no rows, and may the input have more? */
extern bool rows_ahead_empty(const RowsAhead *self);

/* Reads up to so many rows, and gets all answers to their requests. */
extern void rows_ahead_collect(RowsAhead *self, int rows);

/*
 * Passes the next row on: its number, or NO_MORE_ROWS.  Raises the error that
 * is due.
 */
extern int	rows_ahead_next(RowsAhead *self);

/* The columns of that row that are passed on. */
extern void rows_ahead_columns(const RowsAhead *self, int row, Datum *values, bool *nulls);

/* Counts the rows that have been passed on. */
extern void rows_ahead_count(RowsAhead *self);

/* Forgets all rows, before a rescan of the input. */
extern void rows_ahead_restart(RowsAhead *self);

#endif
