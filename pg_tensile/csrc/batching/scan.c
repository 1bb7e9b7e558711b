/*
 * scan.c: execution of the node that predicts for the rows of the node below.
 *
 * It collects 1, 2, 4 ... 1,024 rows, packs their features as they come, gets
 * all answers at once, and passes the rows on in their order; where all rows are
 * read in any case, it collects 1,024 at once.  It keeps of a row what is passed
 * on, not the tuple.  The first row is predicted for as if
 * there were no batches: so a query that needs one row costs no more, and the
 * errors that have nothing to do with a row come at the first.
 *
 * Errors come at their row (read_ahead.h).  When a row cannot be packed, its
 * calls are evaluated as they are written when it is due, which raises the
 * error; until then the input stays at that row.  When the input itself raises
 * an error that can wait, it is kept until the rows before have been passed on.
 *
 * An aggregation reads the first row of a group before it returns the group
 * before, and evaluates calls only then.  So below one an error of a call comes
 * when the row behind is asked for; until then the row has a null.
 *
 * Rows are counted when they have been passed on: before the next batch, at the
 * end, and whenever the executor pauses.
 *
 * EvalPlanQual asks for one row at a time, and gets it.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "executor/executor.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "nodes/extensible.h"
#include "nodes/nodeFuncs.h"
#include "utils/datum.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"

#include "base/compat.h"
#include TENSILE_EXPLAIN_FORMAT_H
#include TENSILE_EXPLAIN_STATE_H
#include "batching/functions.h"
#include "batching/node.h"
#include "batching/read_ahead.h"
#include "batching/request.h"

#define NO_ROW (-1)
#define NO_LIMIT INT64CONST(-1)

/* A call and its answers. */
typedef struct Call
{
	Request    *request;
	CallResult	result;
	ExprState  *itself;			/* the call as it is written */
	TupleDesc	desc;			/* of an interval */
} Call;

/* A column of the input that is passed on. */
typedef struct Column
{
	AttrNumber	number;
	int16		length;
	bool		by_value;
	Datum	   *values;			/* [MOST_BATCH_ROWS], in the batch's memory if not by value */
	bool	   *nulls;
} Column;

typedef struct PredictScan
{
	CustomScanState css;
	PredictNode node;
	int			ncalls;
	Call	   *calls;
	List	   *requests;		/* of Request */
	int			ncolumns;
	Column	   *columns;
	int			last_column;
	ExprContext *packing;		/* of the row that is being packed */
	MemoryContext values;		/* of columns of the batch */

	/* The batch. */
	int			target;			/* rows to collect */
	int			rows;
	int			next;			/* row to be passed on */
	int			in_input;		/* row whose tuple the input still has, or NO_ROW */
	bool		ended;			/* the input has no more rows */
	ErrorData  *error;			/* to be raised behind the batch */
	ErrorData  *due;			/* to be raised now */

	bool		started;		/* since the last rescan */
	int64		limit;			/* rows that are asked for at most, or NO_LIMIT */
	int64		passed;			/* rows, since the last rescan */
	ExprState  *limit_count;
	ExprState  *limit_offset;
} PredictScan;

static Node *create_state(CustomScan *scan);
static void begin(CustomScanState *css, EState *estate, int eflags);
static TupleTableSlot *execute(CustomScanState *css);
static void end(CustomScanState *css);
static void rescan(CustomScanState *css);
static void pause_scan(CustomScanState *css);
static void explain(CustomScanState *css, List *ancestors, struct ExplainState *state);

const struct CustomScanMethods predict_scan_methods = {
	.CustomName = PREDICT_NODE_NAME,
	.CreateCustomScanState = create_state,
};

static const CustomExecMethods exec_methods = {
	.CustomName = PREDICT_NODE_NAME,
	.BeginCustomScan = begin,
	.ExecCustomScan = execute,
	.EndCustomScan = end,
	.ReScanCustomScan = rescan,
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

	foreach(cell, self->requests)
		if (request_covers(lfirst(cell), call, function))
			return lfirst(cell);
	request = request_create(call, function, &self->css.ss.ps, self->packing, timed);
	self->requests = lappend(self->requests, request);
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
			call->itself = ExecInitExpr(request_call(expression), &self->css.ss.ps);
			call->request = request_of(self, expression, function, timed);
			if (function->result == RESULT_INTERVAL)
			{
				(void) get_expr_result_type((Node *) expression, NULL, &call->desc);
				call->desc = BlessTupleDesc(call->desc);
			}
		}
}

static void
begin_columns(PredictScan *self)
{
	TupleDesc	desc = ExecGetResultType(outerPlanState(self));
	ListCell   *cell;

	self->ncolumns = list_length(self->node.columns);
	self->columns = palloc0(sizeof(Column) * self->ncolumns);
	foreach(cell, self->node.columns)
	{
		Column	   *column = &self->columns[foreach_current_index(cell)];
		Form_pg_attribute attribute = TupleDescAttr(desc, lfirst_int(cell) - 1);

		column->number = lfirst_int(cell);
		column->length = attribute->attlen;
		column->by_value = attribute->attbyval;
		column->values = palloc(sizeof(Datum) * MOST_BATCH_ROWS);
		column->nulls = palloc(sizeof(bool) * MOST_BATCH_ROWS);
		self->last_column = Max(self->last_column, column->number);
	}
}

static void
begin(CustomScanState *css, EState *estate, int eflags)
{
	PredictScan *self = (PredictScan *) css;
	PlanState  *state = &css->ss.ps;

	outerPlanState(css) = ExecInitNode(outerPlan(state->plan), estate, eflags);
	self->packing = CreateExprContext(estate);
	self->values = AllocSetContextCreate(CurrentMemoryContext, "pg_tensile rows",
										 ALLOCSET_DEFAULT_SIZES);
	begin_calls(self, (estate->es_instrument & INSTRUMENT_TIMER) != 0);
	begin_columns(self);
	self->limit_count = ExecInitExpr((Expr *) self->node.use.limit.count, state);
	self->limit_offset = ExecInitExpr((Expr *) self->node.use.limit.offset, state);
	self->target = 1;
	self->in_input = NO_ROW;
}

/* ---- collecting ---- */

/* A number of rows; NO_LIMIT: there is none, or it is for LIMIT to complain about. */
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

static void
count_passed(PredictScan *self)
{
	ListCell   *cell;

	foreach(cell, self->requests)
		request_count(lfirst(cell));
}

/* The number of rows to collect now. */
static int
rows_to_collect(PredictScan *self)
{
	int64		rows = self->target;
	bool		alone = false;
	ListCell   *cell;

	if (self->limit != NO_LIMIT)
		rows = Max(1, Min(rows, self->limit - self->passed));
	if (self->css.ss.ps.state->es_epq_active != NULL)
		rows = 1;
	foreach(cell, self->requests)
		alone = !request_begin(lfirst(cell), rows) || alone;
	return alone ? 1 : rows;
}

/* Keeps the columns of the row. */
static void
store(PredictScan *self, TupleTableSlot *slot)
{
	MemoryContext old = MemoryContextSwitchTo(self->values);
	int			row = self->rows;

	slot_getsomeattrs(slot, self->last_column);
	for (int i = 0; i < self->ncolumns; i++)
	{
		Column	   *column = &self->columns[i];
		Datum		value = slot->tts_values[column->number - 1];

		column->nulls[row] = slot->tts_isnull[column->number - 1];
		if (!column->nulls[row])
			column->values[row] = column->by_value ? value :
				datumCopy(value, false, column->length);
	}
	MemoryContextSwitchTo(old);
}

/* Collects a row that is predicted for by itself. */
static void
collect_alone(PredictScan *self)
{
	TupleTableSlot *slot = ExecProcNode(outerPlanState(self));
	ListCell   *cell;

	if (TupIsNull(slot))
	{
		self->ended = true;
		return;
	}
	foreach(cell, self->requests)
		request_leave_out(lfirst(cell), 0);
	self->packing->ecxt_outertuple = slot;
	self->in_input = 0;
	self->rows = 1;
}

/* Packs the row for all requests, which are counted by `packed`. */
static void
pack(PredictScan *self, TupleTableSlot *slot, volatile int *packed)
{
	ListCell   *cell;

	*packed = 0;
	ResetExprContext(self->packing);
	self->packing->ecxt_outertuple = slot;
	foreach(cell, self->requests)
	{
		request_add(lfirst(cell), self->rows);
		(*packed)++;
	}
}

static bool
is_full(PredictScan *self)
{
	ListCell   *cell;

	foreach(cell, self->requests)
		if (request_full(lfirst(cell)))
			return true;
	return MemoryContextMemAllocated(self->values, false) >= (Size) work_mem * 1024;
}

#define NOT_PACKING (-1)

/* Collects rows until there are `rows` of them; `packed`: requests that have the last one. */
static void
collect_rows(PredictScan *self, int rows, volatile int *packed)
{
	do
	{
		TupleTableSlot *slot;

		*packed = NOT_PACKING;
		CHECK_FOR_INTERRUPTS();
		slot = ExecProcNode(outerPlanState(self));
		if (TupIsNull(slot))
		{
			self->ended = true;
			return;
		}
		pack(self, slot, packed);
		store(self, slot);
		self->rows++;
	} while (self->rows < rows && !is_full(self));
}

/*
 * After an error: keeps it, if it comes from the input, or else the row, whose
 * calls raise it again.
 */
static void
keep_error(PredictScan *self, int packed)
{
	bool		keep = packed == NOT_PACKING || self->node.use.aggregated;
	ListCell   *cell;

	MemoryContextSwitchTo(self->css.ss.ps.state->es_query_cxt);
	if (keep)
		self->error = CopyErrorData();
	FlushErrorState();
	if (packed == NOT_PACKING)
		return;
	foreach(cell, self->requests)
	{
		if (foreach_current_index(cell) < packed)
			continue;
		if (keep)
			request_give_up(lfirst(cell), self->rows);
		else
			request_leave_out(lfirst(cell), self->rows);
	}
	self->in_input = self->rows++;
}

/* Collects the next batch, and gets its answers. */
static void
collect(PredictScan *self)
{
	MemoryContext context = CurrentMemoryContext;
	volatile int packed = NOT_PACKING;
	Oid			user;
	int			security;
	int			rows;
	ListCell   *cell;

	count_passed(self);
	MemoryContextReset(self->values);
	self->rows = 0;
	self->next = 0;
	self->in_input = NO_ROW;
	rows = rows_to_collect(self);
	if (rows == 1)
	{
		collect_alone(self);
		return;
	}
	GetUserIdAndSecContext(&user, &security);
	PG_TRY();
	{
		collect_rows(self, rows, &packed);
	}
	PG_CATCH();
	{
		Oid			user_now;
		int			security_now;

		GetUserIdAndSecContext(&user_now, &security_now);
		if (!self->node.use.errors_wait ||
			!read_ahead_error_can_wait(geterrcode(), packed != NOT_PACKING) ||
			user_now != user || security_now != security)
			PG_RE_THROW();
		keep_error(self, packed);
		MemoryContextSwitchTo(context);
	}
	PG_END_TRY();
	foreach(cell, self->requests)
		request_answer(lfirst(cell));
}

/* ---- passing rows on ---- */

static void
raise_error(PredictScan *self, ErrorData *error)
{
	count_passed(self);
	ReThrowError(error);
}

static void
pass(PredictScan *self, int row)
{
	ListCell   *cell;

	foreach(cell, self->requests)
	{
		ErrorData  *error = request_pass(lfirst(cell), row);

		if (error != NULL && !self->node.use.aggregated)
			raise_error(self, error);
		if (error != NULL)
			self->due = error;
	}
}

static void
put_answers(PredictScan *self, TupleTableSlot *slot, int row)
{
	ExprContext *econtext = self->css.ss.ps.ps_ExprContext;
	MemoryContext old = MemoryContextSwitchTo(econtext->ecxt_per_tuple_memory);

	if (row == self->in_input)
		count_passed(self);		/* it may be the row with an error */
	econtext->ecxt_outertuple = self->packing->ecxt_outertuple;
	pass(self, row);
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

static void
put_columns(PredictScan *self, TupleTableSlot *slot, int row)
{
	for (int i = 0; i < self->ncolumns; i++)
	{
		Column	   *column = &self->columns[i];
		int			place = self->ncalls + i;

		if (row == self->in_input)
			slot->tts_values[place] = slot_getattr(self->packing->ecxt_outertuple, column->number,
												   &slot->tts_isnull[place]);
		else
		{
			slot->tts_values[place] = column->values[row];
			slot->tts_isnull[place] = column->nulls[row];
		}
	}
}

/* The next row in the scan tuple; false: there are no more. */
static bool
next_row(PredictScan *self)
{
	TupleTableSlot *slot = self->css.ss.ss_ScanTupleSlot;

	ExecClearTuple(slot);
	if (!self->started)
		start(self);
	if (self->due != NULL)
		raise_error(self, self->due);
	if (self->next >= self->rows && self->error == NULL && !self->ended)
	{
		if (self->passed > 0)
			self->target = self->node.use.all_are_read ? MOST_BATCH_ROWS :
				Min(self->target * 2, MOST_BATCH_ROWS);
		collect(self);
	}
	if (self->next >= self->rows)
	{
		if (self->error != NULL)
			raise_error(self, self->error);
		count_passed(self);
		return false;
	}
	put_answers(self, slot, self->next);
	put_columns(self, slot, self->next);
	ExecStoreVirtualTuple(slot);
	self->next++;
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

static void
pause_scan(CustomScanState *css)
{
	count_passed((PredictScan *) css);
}

/* Begins again with as many rows as were asked for the last time. */
static void
rescan(CustomScanState *css)
{
	PredictScan *self = (PredictScan *) css;

	count_passed(self);
	self->target = self->passed > 0 ? Min(self->passed, MOST_BATCH_ROWS) : 1;
	self->rows = 0;
	self->next = 0;
	self->in_input = NO_ROW;
	self->ended = false;
	self->error = NULL;
	self->due = NULL;
	self->started = false;
	self->passed = 0;
	if (outerPlanState(css)->chgParam == NULL)
		ExecReScan(outerPlanState(css));
}

static void
end(CustomScanState *css)
{
	count_passed((PredictScan *) css);
	ExecEndNode(outerPlanState(css));
}

/* ---- EXPLAIN ---- */

static void
explain(CustomScanState *css, List *ancestors, struct ExplainState *state)
{
	PredictScan *self = (PredictScan *) css;
	ListCell   *cell;

	ExplainOpenGroup("Predictions", "Predictions", false, state);
	foreach(cell, self->requests)
	{
		Request    *request = lfirst(cell);
		const char *model = request_model(request);
		RequestCounts *counts = request_counts(request);

		ExplainOpenGroup("Prediction", NULL, true, state);
		if (model != NULL)
			ExplainPropertyText("Model", model, state);
		if (state->analyze)
		{
			if (request_version(request) != 0)
				ExplainPropertyInteger("Version", NULL, request_version(request), state);
			ExplainPropertyInteger("Rows", NULL, counts->rows, state);
			ExplainPropertyInteger("Batches", NULL, counts->batches, state);
			if (state->timing)
				ExplainPropertyFloat("Prediction Time", "ms",
									 INSTR_TIME_GET_MILLISEC(counts->time), 3, state);
		}
		ExplainCloseGroup("Prediction", NULL, true, state);
	}
	ExplainCloseGroup("Predictions", "Predictions", false, state);
}
