/*
 * request.h: predictions that a node requests together: those of one model
 * for one row of features.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_BATCHING_REQUEST_H
#define TENSILE_BATCHING_REQUEST_H

#include "nodes/execnodes.h"
#include "portability/instr_time.h"

#include "batching/functions.h"

#define MOST_BATCH_ROWS 1024

/* What EXPLAIN ANALYZE shows. */
typedef struct RequestCounts
{
	int64		rows;
	int64		batches;
	instr_time	time;			/* until the answers came */
} RequestCounts;

typedef struct Request Request;

/* The call as it is evaluated for a row by itself. */
extern Expr *request_call(const FuncExpr *call);

/* For calls with the same arguments as this one, over the output of the node's input. */
extern Request *request_create(const FuncExpr *call, const BatchedFunction *function,
							   PlanState *node, ExprContext *rows, bool timed);

/* Does the call ask for the same? */
extern bool request_covers(const Request *self, const FuncExpr *call,
						   const BatchedFunction *function);

/* The model as EXPLAIN shows it; NULL: it is not known yet. */
extern const char *request_model(const Request *self);

/* The number of the version that has answered; 0: none. */
extern int	request_version(const Request *self);
extern RequestCounts *request_counts(Request *self);

/*
 * Begins a batch of at most `rows` rows.  Returns whether more than one can be
 * answered at once: the model must have answered one row by itself before,
 * which raises the errors of model and arguments where they belong.
 */
extern bool request_begin(Request *self, int rows);

/* Is the batch full? */
extern bool request_full(const Request *self);

/* Packs the row in the context of rows as row number `row` of the node. */
extern void request_add(Request *self, int row);

/* Row number `row` is evaluated by itself; it may have been in the batch already. */
extern void request_leave_out(Request *self, int row);

/* Row number `row` has no answer, because of an error that is raised later. */
extern void request_give_up(Request *self, int row);

/* Gets the answers to the batch, in which there are `rows` rows with an answer or not. */
extern void request_answer(Request *self);

/*
 * Row number `row` is passed on now.  Returns the error that a row of a batch
 * which was refused has caused, and has no answer then; else NULL.
 */
extern ErrorData *request_pass(Request *self, int row);

/* Is it predicted for by itself?  Then request_evaluate(), else request_result(), has the result of a call. */
extern bool request_by_itself(const Request *self, int row);
extern Datum request_evaluate(Request *self, ExprState *call, ExprContext *econtext, bool *isnull);
extern Datum request_result(Request *self, CallResult result, TupleDesc desc, int row, bool *isnull);

/* Counts the rows that have been passed on. */
extern void request_count(Request *self);

#endif
