/*
 * rows_ahead.c: rows that have been read and not been passed on yet.
 *
 * Their features are packed as they come.  What is kept of a row is the columns
 * that are passed on, not the tuple.
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
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "executor/executor.h"
#include "miscadmin.h"
#include "utils/datum.h"
#include "utils/memutils.h"

#include "batching/interrupted.h"
#include "batching/node.h"
#include "batching/read_ahead.h"
#include "batching/request.h"
#include "batching/rows_ahead.h"

#define NO_ROW (-1)

/* A column of the input that is passed on. */
typedef struct Column
{
	AttrNumber	number;
	int16		length;
	bool		by_value;
	Datum	   *values;			/* [MOST_BATCH_ROWS], in the memory of values if not by value */
	bool	   *nulls;
} Column;

struct RowsAhead
{
	PlanState  *input;
	bool		has_workers;	/* the input, whose errors come at any time */
	NodeUse		use;
	ExprContext *econtext;		/* of the row that is read */
	List	   *requests;		/* of Request */
	int			ncolumns;
	Column	   *columns;
	int			last_column;
	MemoryContext context;
	MemoryContext values;		/* of columns of the rows */

	int			rows;
	int			next;			/* row to be passed on */
	int			in_input;		/* row whose tuple the input still has, or NO_ROW */
	bool		ended;			/* the input has no more rows */
	ErrorData  *error;			/* to be raised behind the rows */
	bool		interrupted;	/* the error is one of the input */
	ErrorData  *due;			/* to be raised now */
};

static void
begin_columns(RowsAhead *self, const List *numbers)
{
	TupleDesc	desc = ExecGetResultType(self->input);
	ListCell   *cell;

	self->ncolumns = list_length(numbers);
	self->columns = palloc0(sizeof(Column) * self->ncolumns);
	foreach(cell, numbers)
	{
		Column	   *column = &self->columns[foreach_current_index(cell)];
		Form_pg_attribute attribute = TupleDescAttr(desc, lfirst_int(cell) - 1);

		column->number = lfirst_int(cell);
		column->length = attribute->attlen;
		column->by_value = attribute->attbyval;
		self->last_column = Max(self->last_column, column->number);
	}
}

RowsAhead *
rows_ahead_create(PlanState *input, const PredictNode *node, ExprContext *econtext)
{
	RowsAhead  *self = palloc0(sizeof(RowsAhead));

	self->input = input;
	self->has_workers = computed_by_workers(input);
	self->use = node->use;
	self->econtext = econtext;
	self->context = CurrentMemoryContext;
	self->values = AllocSetContextCreate(self->context, "pg_tensile rows", ALLOCSET_DEFAULT_SIZES);
	self->in_input = NO_ROW;
	begin_columns(self, node->columns);
	return self;
}

void
rows_ahead_add_request(RowsAhead *self, Request *request)
{
	self->requests = lappend(self->requests, request);
}

List *
rows_ahead_requests(const RowsAhead *self)
{
	return self->requests;
}

void
rows_ahead_count(RowsAhead *self)
{
	ListCell   *cell;

	foreach(cell, self->requests)
		request_count(lfirst(cell));
}

static void
raise_error(RowsAhead *self, ErrorData *error)
{
	rows_ahead_count(self);
	ReThrowError(error);
}

static void
forget_rows(RowsAhead *self)
{
	rows_ahead_count(self);
	MemoryContextReset(self->values);
	self->rows = 0;
	self->next = 0;
	self->in_input = NO_ROW;
	self->ended = false;
	self->error = NULL;
	self->interrupted = false;
	self->due = NULL;
}

void
rows_ahead_restart(RowsAhead *self)
{
	if (self->interrupted && !rescan_starts_anew(self->input))
		raise_error(self, self->error);
	forget_rows(self);
}

/* ---- reading ---- */

/* Makes room for the columns of a batch. */
static void
make_room(RowsAhead *self)
{
	for (int i = 0; i < self->ncolumns && self->columns[i].values == NULL; i++)
	{
		self->columns[i].values = MemoryContextAlloc(self->context,
													 sizeof(Datum) * MOST_BATCH_ROWS);
		self->columns[i].nulls = MemoryContextAlloc(self->context, sizeof(bool) * MOST_BATCH_ROWS);
	}
}

/* Keeps the columns of the row. */
static void
store(RowsAhead *self, TupleTableSlot *slot)
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
collect_alone(RowsAhead *self)
{
	TupleTableSlot *slot = ExecProcNode(self->input);
	ListCell   *cell;

	if (TupIsNull(slot))
	{
		self->ended = true;
		return;
	}
	foreach(cell, self->requests)
		request_leave_out(lfirst(cell), 0);
	self->econtext->ecxt_outertuple = slot;
	self->in_input = 0;
	self->rows = 1;
}

/* Packs the row for all requests, which are counted by `packed`. */
static void
pack(RowsAhead *self, TupleTableSlot *slot, volatile int *packed)
{
	ListCell   *cell;

	*packed = 0;
	ResetExprContext(self->econtext);
	self->econtext->ecxt_outertuple = slot;
	foreach(cell, self->requests)
	{
		request_add(lfirst(cell), self->rows);
		(*packed)++;
	}
}

static bool
is_full(RowsAhead *self)
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
collect_rows(RowsAhead *self, int rows, volatile int *packed)
{
	do
	{
		TupleTableSlot *slot;

		*packed = NOT_PACKING;
		CHECK_FOR_INTERRUPTS();
		slot = ExecProcNode(self->input);
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
keep_error(RowsAhead *self, int packed)
{
	bool		keep = packed == NOT_PACKING || self->use.aggregated;
	ListCell   *cell;

	MemoryContextSwitchTo(self->context);
	if (keep)
		self->error = CopyErrorData();
	FlushErrorState();
	if (packed == NOT_PACKING)
	{
		stop_measurements(self->input);
		self->interrupted = true;
		return;
	}
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

void
rows_ahead_collect(RowsAhead *self, int rows)
{
	MemoryContext context = CurrentMemoryContext;
	volatile int packed = NOT_PACKING;
	Oid			user;
	int			security;
	bool		alone = false;
	ListCell   *cell;

	forget_rows(self);
	foreach(cell, self->requests)
		alone = !request_begin(lfirst(cell), rows) || alone;
	if (alone)
	{
		collect_alone(self);
		return;
	}
	make_room(self);
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
		if (!self->use.errors_wait || (self->has_workers && packed == NOT_PACKING) ||
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

/* ---- passing on ---- */

bool
rows_ahead_empty(const RowsAhead *self)
{
	return self->next >= self->rows && self->error == NULL && self->due == NULL && !self->ended;
}

int
rows_ahead_next(RowsAhead *self)
{
	int			row = self->next;
	ListCell   *cell;

	if (self->due != NULL)
		raise_error(self, self->due);
	if (row >= self->rows && self->error != NULL)
		raise_error(self, self->error);
	if (row >= self->rows || row == self->in_input)
		rows_ahead_count(self);	/* the row may be the one with an error */
	if (row >= self->rows)
		return NO_MORE_ROWS;
	self->next++;
	foreach(cell, self->requests)
	{
		ErrorData  *error = request_pass(lfirst(cell), row);

		if (error != NULL && !self->use.aggregated)
			raise_error(self, error);
		if (error != NULL)
			self->due = error;
	}
	return row;
}

void
rows_ahead_columns(const RowsAhead *self, int row, Datum *values, bool *nulls)
{
	for (int i = 0; i < self->ncolumns; i++)
	{
		Column	   *column = &self->columns[i];

		if (row == self->in_input)
			values[i] = slot_getattr(self->econtext->ecxt_outertuple, column->number,
												   &nulls[i]);
		else
		{
			values[i] = column->values[row];
			nulls[i] = column->nulls[row];
		}
	}
}
