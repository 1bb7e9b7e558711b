/*
 * scan.c: execution of the node that predicts for the rows of the node below.
 *
 * It collects 1, 2, 4 ... 1,024 rows (rows_ahead.c), gets all answers at once,
 * and passes the rows on in their order; where all rows are read in any case, it
 * collects 1,024 at once.  The first row is predicted for as if there were no
 * batches: so a query that needs one row costs no more, and the errors that have
 * nothing to do with a row come at the first.
 *
 * Rows are counted when they have been passed on: before the next batch, at the
 * end, and whenever the executor pauses.
 *
 * EvalPlanQual asks for one row at a time, and gets it.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "access/parallel.h"
#include "executor/executor.h"
#include "executor/instrument.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "nodes/extensible.h"
#include "utils/memutils.h"

#include "base/compat.h"
#include TENSILE_EXPLAIN_FORMAT_H
#include TENSILE_EXPLAIN_STATE_H
#include "batching/functions.h"
#include "batching/node.h"
#include "batching/request.h"
#include "batching/row_source.h"
#include "batching/rows_ahead.h"
#include "batching/scan.h"

#define NO_LIMIT INT64CONST(-1)

/* A call and its answers. */
typedef struct Call
{
	Request    *request;
	CallResult	result;
	ExprState  *itself;			/* the call as it is written */
	TupleDesc	desc;			/* of an interval */
} Call;

typedef struct PredictScan
{
	CustomScanState css;
	PredictNode node;
	int			ncalls;
	Call	   *calls;
	RowsAhead  *rows;
	ExprContext *packing;		/* of the row that is read */
	int			target;			/* rows to collect */
	bool		started;		/* since the last rescan */
	int64		limit;			/* rows that are asked for at most, or NO_LIMIT */
	int64		passed;			/* rows, since the last rescan */
	ExprState  *limit_count;
	ExprState  *limit_offset;

	SharedCounts *shared;		/* one for each request; NULL: no parallel query */
	RequestCounts *of_workers;	/* copied from there by the leader */
} PredictScan;

static Node *create_state(CustomScan *scan);
static void begin(CustomScanState *css, EState *estate, int eflags);
static TupleTableSlot *execute(CustomScanState *css);
static void end(CustomScanState *css);
static void rescan(CustomScanState *css);
static void pause_scan(CustomScanState *css);
static void explain(CustomScanState *css, List *ancestors, struct ExplainState *state);
static Size shared_size(CustomScanState *css, ParallelContext *context);
static void begin_shared(CustomScanState *css, ParallelContext *context, void *memory);
static void begin_worker(CustomScanState *css, shm_toc *contents, void *memory);

const CustomScanMethods predict_scan_methods = {
	.CustomName = PREDICT_NODE_NAME,
	.CreateCustomScanState = create_state,
};

static const CustomExecMethods exec_methods = {
	.CustomName = PREDICT_NODE_NAME,
	.BeginCustomScan = begin,
	.ExecCustomScan = execute,
	.EndCustomScan = end,
	.ReScanCustomScan = rescan,
	.EstimateDSMCustomScan = shared_size,
	.InitializeDSMCustomScan = begin_shared,
	.InitializeWorkerCustomScan = begin_worker,
	.ShutdownCustomScan = pause_scan,
	.ExplainCustomScan = explain,
};

/* ---- creation ---- */

static Node *
create_state(CustomScan *scan)
{
	PredictScan *self = palloc0(sizeof(PredictScan));

	NodeSetTag(self, T_CustomScanState);
	self->css.methods = &exec_methods;
	self->node = predict_node_decode(scan);
	return (Node *) self;
}

/* The request that answers the call: one that there is, or a new one. */
static Request *
request_of(PredictScan *self, const FuncExpr *call, const BatchedFunction *function, bool timed)
{
	Request    *request;
	ListCell   *cell;

	foreach(cell, rows_ahead_requests(self->rows))
		if (request_covers(lfirst(cell), call, function))
			return lfirst(cell);
	request = request_create(call, function, &self->css.ss.ps, self->packing, timed);
	rows_ahead_add_request(self->rows, request);
	return request;
}

static void
begin_calls(PredictScan *self, bool timed)
{
	ListCell   *cell;
	ListCell   *number;

	self->ncalls = list_length(self->node.calls);
	self->calls = palloc0(sizeof(Call) * self->ncalls);

	/* Intervals first, because they have what the other functions ask for. */
	for (int intervals = 1; intervals >= 0; intervals--)
		forboth(cell, self->node.calls, number, self->node.functions)
		{
			FuncExpr   *expression = lfirst(cell);
			const BatchedFunction *function = batched_function(lfirst_int(number));
			Call	   *call = &self->calls[foreach_current_index(cell)];

			if ((function->result == RESULT_INTERVAL) != (intervals == 1))
				continue;
			call->result = function->result;
			call->itself = ExecInitExpr(row_source_call(expression), &self->css.ss.ps);
			call->request = request_of(self, expression, function, timed);
			if (function->result == RESULT_INTERVAL)
			{
				(void) get_expr_result_type((Node *) expression, NULL, &call->desc);
				call->desc = BlessTupleDesc(call->desc);
			}
		}
}

static void
begin(CustomScanState *css, EState *estate, int eflags)
{
	PredictScan *self = (PredictScan *) css;
	PlanState  *state = &css->ss.ps;

	outerPlanState(css) = ExecInitNode(outerPlan(state->plan), estate, eflags);
	self->packing = CreateExprContext(estate);
	self->rows = rows_ahead_create(outerPlanState(css), &self->node, self->packing);
	begin_calls(self, (estate->es_instrument & INSTRUMENT_TIMER) != 0);
	self->limit_count = ExecInitExpr((Expr *) self->node.use.limit.count, state);
	self->limit_offset = ExecInitExpr((Expr *) self->node.use.limit.offset, state);
	self->target = 1;
}

/* ---- rows ---- */

/* A number of rows; NO_LIMIT for null, and for a negative one, which LIMIT refuses. */
static int64
rows_of(PredictScan *self, ExprState *state)
{
	bool		isnull;
	Datum		value = ExecEvalExprSwitchContext(state, self->packing, &isnull);

	return isnull || DatumGetInt64(value) < 0 ? NO_LIMIT : DatumGetInt64(value);
}

/* Finds out how many rows are asked for, and tells the input, as LIMIT would have. */
static void
start(PredictScan *self)
{
	int64		count;
	int64		offset = 0;

	self->started = true;
	self->limit = NO_LIMIT;
	if (self->limit_count == NULL)
		return;
	count = rows_of(self, self->limit_count);
	if (self->limit_offset != NULL)
		offset = Max(0, rows_of(self, self->limit_offset));
	if (count == NO_LIMIT || count > PG_INT64_MAX - offset)
		return;
	self->limit = count + offset;
	ExecSetTupleBound(self->limit, outerPlanState(self));
}

/* Collects the next batch. */
static void
collect(PredictScan *self)
{
	int64		rows;

	if (self->passed > 0)
		self->target = self->node.use.all_are_read ? MOST_BATCH_ROWS :
			Min(self->target * 2, MOST_BATCH_ROWS);
	rows = self->target;
	if (self->limit != NO_LIMIT)
		rows = Max(1, Min(rows, self->limit - self->passed));
	if (self->css.ss.ps.state->es_epq_active != NULL)
		rows = 1;
	rows_ahead_collect(self->rows, rows);
}

static void
put_answers(PredictScan *self, TupleTableSlot *slot, int row)
{
	ExprContext *econtext = self->css.ss.ps.ps_ExprContext;
	MemoryContext old = MemoryContextSwitchTo(econtext->ecxt_per_tuple_memory);

	econtext->ecxt_outertuple = self->packing->ecxt_outertuple;
	for (int i = 0; i < self->ncalls; i++)
	{
		Call	   *call = &self->calls[i];

		if (request_by_itself(call->request, row))
			slot->tts_values[i] = request_evaluate(call->request, call->itself, econtext,
												   &slot->tts_isnull[i]);
		else
			slot->tts_values[i] = request_result(call->request, call->result, call->desc, row,
												 &slot->tts_isnull[i]);
	}
	MemoryContextSwitchTo(old);
}

/* The next row in the scan tuple; false: there are no more. */
static bool
next_row(PredictScan *self)
{
	TupleTableSlot *slot = self->css.ss.ss_ScanTupleSlot;
	int			row;

	ExecClearTuple(slot);
	if (!self->started)
		start(self);
	if (rows_ahead_empty(self->rows))
		collect(self);
	row = rows_ahead_next(self->rows);
	if (row == NO_MORE_ROWS)
		return false;
	put_answers(self, slot, row);
	rows_ahead_columns(self->rows, row, slot->tts_values + self->ncalls,
					   slot->tts_isnull + self->ncalls);
	ExecStoreVirtualTuple(slot);
	self->passed++;
	return true;
}

static TupleTableSlot *
execute(CustomScanState *css)
{
	PredictScan *self = (PredictScan *) css;
	PlanState  *state = &css->ss.ps;
	ExprContext *econtext = state->ps_ExprContext;

	for (;;)
	{
		CHECK_FOR_INTERRUPTS();
		ResetExprContext(econtext);
		if (!next_row(self))
			return state->ps_ProjInfo ? ExecClearTuple(state->ps_ResultTupleSlot) : NULL;
		econtext->ecxt_scantuple = css->ss.ss_ScanTupleSlot;
		if (state->qual == NULL || ExecQual(state->qual, econtext))
			return state->ps_ProjInfo ? ExecProject(state->ps_ProjInfo) : css->ss.ss_ScanTupleSlot;
		InstrCountFiltered1(css, 1);
	}
}

/* ---- the rest of a node's life ---- */

/* In a worker, this comes before the end of its rows. */
static void
pause_scan(CustomScanState *css)
{
	PredictScan *self = (PredictScan *) css;
	ListCell   *cell;

	rows_ahead_count(self->rows);
	if (self->shared == NULL)
		return;
	foreach(cell, rows_ahead_requests(self->rows))
	{
		SharedCounts *shared = &self->shared[foreach_current_index(cell)];

		if (IsParallelWorker())
			shared_counts_add(shared, request_counts(lfirst(cell)));
		else
			self->of_workers[foreach_current_index(cell)] = shared_counts_read(shared);
	}
}

/* Begins again with as many rows as were asked for the last time. */
static void
rescan(CustomScanState *css)
{
	PredictScan *self = (PredictScan *) css;

	rows_ahead_restart(self->rows);
	self->target = self->passed > 0 ? Min(self->passed, MOST_BATCH_ROWS) : 1;
	self->started = false;
	self->passed = 0;
	if (outerPlanState(css)->chgParam == NULL)
		ExecReScan(outerPlanState(css));
}

static void
end(CustomScanState *css)
{
	rows_ahead_count(((PredictScan *) css)->rows);
	ExecEndNode(outerPlanState(css));
}

/* ---- parallel queries ---- */

static Size
shared_size(CustomScanState *css, ParallelContext *context)
{
	return sizeof(SharedCounts) * list_length(rows_ahead_requests(((PredictScan *) css)->rows));
}

static void
begin_shared(CustomScanState *css, ParallelContext *context, void *memory)
{
	PredictScan *self = (PredictScan *) css;
	int			count = list_length(rows_ahead_requests(self->rows));

	self->shared = memory;
	for (int i = 0; i < count; i++)
		shared_counts_init(&self->shared[i]);
	self->of_workers = MemoryContextAllocZero(css->ss.ps.state->es_query_cxt,
											  sizeof(RequestCounts) * count);
}

static void
begin_worker(CustomScanState *css, shm_toc *contents, void *memory)
{
	((PredictScan *) css)->shared = memory;
}

/* ---- EXPLAIN ---- */

/* What this process and its workers have counted. */
static RequestCounts
all_counts(PredictScan *self, int request)
{
	RequestCounts counts = *request_counts(list_nth(rows_ahead_requests(self->rows), request));

	if (self->of_workers != NULL)
	{
		const RequestCounts *of_workers = &self->of_workers[request];

		counts.rows += of_workers->rows;
		counts.batches += of_workers->batches;
		counts.microseconds += of_workers->microseconds;
		if (counts.version == 0)
			counts.version = of_workers->version;
	}
	return counts;
}

static void
explain(CustomScanState *css, List *ancestors, struct ExplainState *state)
{
	PredictScan *self = (PredictScan *) css;
	ListCell   *cell;

	ExplainOpenGroup("Predictions", "Predictions", false, state);
	foreach(cell, rows_ahead_requests(self->rows))
	{
		Request    *request = lfirst(cell);
		const char *model = request_model(request);
		RequestCounts counts = all_counts(self, foreach_current_index(cell));

		ExplainOpenGroup("Prediction", NULL, true, state);
		if (model != NULL)
			ExplainPropertyText("Model", model, state);
		if (state->analyze)
		{
			if (counts.version != 0)
				ExplainPropertyInteger("Version", NULL, counts.version, state);
			ExplainPropertyInteger("Rows", NULL, counts.rows, state);
			ExplainPropertyInteger("Batches", NULL, counts.batches, state);
			if (state->timing)
				ExplainPropertyFloat("Prediction Time", "ms", counts.microseconds / 1000.0, 3,
									 state);
		}
		ExplainCloseGroup("Prediction", NULL, true, state);
	}
	ExplainCloseGroup("Predictions", "Predictions", false, state);
}
