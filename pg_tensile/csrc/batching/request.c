/*
 * request.c: predictions that a node requests together: those of one model
 * for one row of features.
 *
 * If the predictor refuses a batch, its rows are answered one by one, when they
 * are due, so that the error comes at the row that causes it.
 *
 * Memory: the request lives as long as its node.  The call site, and in it the
 * batch and the answers, are replaced when the model changes.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "executor/executor.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "portability/instr_time.h"
#include "utils/builtins.h"
#include "utils/memutils.h"

#include "base/compat.h"
#include "batching/functions.h"
#include "batching/request.h"
#include "batching/row_source.h"
#include "predicting/answers.h"
#include "predicting/predict_client.h"
#include "predicting/predict_site.h"
#include "rows/model.h"
#include "rows/predict_features.h"

/* Places of rows that have no answer in the batch. */
#define ROW_IS_NULL (-1)
#define ROW_BY_ITSELF (-2)		/* its calls are evaluated as they are written */

#define FIRST_CAPACITY 64		/* rows; the next is that of a whole batch */

/*
 * The values of a row are as far from each other as the batch has room.  With a
 * power of two, they would all fall into the same few lines of the cache.
 */
#define PADDING 8				/* rows */

struct Request
{
	const FuncExpr *call;		/* the first one */
	const BatchedFunction *function;
	ExprContext *econtext;		/* of rows that are packed */

	ExprState  *model;
	ExprState  *budget;
	ExprState  *coverage;		/* NULL: no interval */
	RowSource  *row;

	CallSite   *site;			/* NULL: none yet */
	bool		proven;			/* a row has been answered by itself */
	FeatureBatch *batch;		/* in batch_context */
	int			capacity;		/* rows that it may have */
	MemoryContext batch_context;
	FeatureBatch *single;		/* the site's own, of one row */
	int			places[MOST_BATCH_ROWS];	/* of the node's rows in the batch */
	Wish		wish;
	Predictions answers;
	double	   *numbers;		/* of the answers: predictions, probabilities, lower, upper */
	int32	   *labels;			/* of the answers: labels, unknown categories */
	bool		one_by_one;		/* the batch was refused */
	int			passed;			/* rows of the batch that have been passed on */
	int			counted;		/* and counted */
	Datum	   *label_texts;	/* in the site's context */

	bool		timed;
	RequestCounts counts;
};

/* ---- calls ---- */

static int
budget_argument(const BatchedFunction *function)
{
	return function->result == RESULT_INTERVAL ? COVERAGE_ARGUMENT + 1 : COVERAGE_ARGUMENT;
}

static Node *
coverage_of(const FuncExpr *call, const BatchedFunction *function)
{
	return function->result == RESULT_INTERVAL ? list_nth(call->args, COVERAGE_ARGUMENT) : NULL;
}

/* Calls for an interval and others can share an answer: it has the prediction, too. */
bool
request_covers(const Request *self, const FuncExpr *call, const BatchedFunction *function)
{
	Node	   *mine = coverage_of(self->call, self->function);
	Node	   *other = coverage_of(call, function);

	return self->function->row == function->row &&
		equal(linitial(self->call->args), linitial(call->args)) &&
		equal(row_of_call(self->call), row_of_call(call)) &&
		equal(list_nth(self->call->args, budget_argument(self->function)),
			  list_nth(call->args, budget_argument(function))) &&
		(other == NULL || equal(mine, other));
}

Request *
request_create(const FuncExpr *call, const BatchedFunction *function, PlanState *node,
			   ExprContext *rows, bool timed)
{
	Request    *self = palloc0(sizeof(Request));
	Node	   *coverage = coverage_of(call, function);

	self->call = call;
	self->function = function;
	self->econtext = rows;
	self->timed = timed;
	self->model = ExecInitExpr(list_nth(call->args, MODEL_ARGUMENT), node);
	self->budget = ExecInitExpr(list_nth(call->args, budget_argument(function)), node);
	if (coverage != NULL)
		self->coverage = ExecInitExpr((Expr *) coverage, node);
	self->row = row_source_create(call, function->row, node, rows);
	self->batch_context = AllocSetContextCreate(CurrentMemoryContext, "pg_tensile batch",
												ALLOCSET_DEFAULT_SIZES);
	return self;
}

const char *
request_model(const Request *self)
{
	Node	   *model = list_nth(self->call->args, MODEL_ARGUMENT);

	if (self->site != NULL)
		return self->site->name;
	return IsA(model, Const) && !((Const *) model)->constisnull ?
		TextDatumGetCString(((Const *) model)->constvalue) : NULL;
}

RequestCounts *
request_counts(Request *self)
{
	return &self->counts;
}

/* ---- a batch ---- */

/* A text argument that is the same for all rows; NULL: null. */
static text *
text_argument(Request *self, ExprState *state)
{
	bool		isnull;
	Datum		value = ExecEvalExprSwitchContext(state, self->econtext, &isnull);

	if (isnull)
		return NULL;
	return DatumGetTextPP(value);
}

/* Prepares what depends on the model. */
static void
open_site(Request *self, text *model, text *budget)
{
	CallSite   *old = self->site;

	self->site = NULL;			/* a failure leaves none */
	self->site = predict_site_open(old, model, budget, self->batch_context->parent);
	self->single = self->site->batch;
	self->batch = NULL;
	MemoryContextReset(self->batch_context);
	self->label_texts = NULL;
	row_source_open(self->row, self->site);
}

/* Sets what to ask for; false: the coverage is null. */
static bool
set_wish(Request *self)
{
	bool		isnull = false;
	Datum		coverage;

	self->wish = (Wish) {WISH_NOTHING};
	if (self->coverage == NULL)
		return true;
	coverage = ExecEvalExprSwitchContext(self->coverage, self->econtext, &isnull);
	self->wish = (Wish) {WISH_INTERVAL, isnull ? 0 : DatumGetFloat8(coverage)};
	return !isnull;
}

static int
most_rows(const FeatureSet *set)
{
	Size		row_bytes = sizeof(double) * set->nscalars +
		sizeof(int32) * (set->ncategories + set->narrays);
	int			fit = Min((Size) work_mem * 1024 / Max(row_bytes, 1), MOST_BATCH_ROWS);

	return Max(1, Min(fit, feature_batch_capacity(set)));
}

/* Makes room for this many rows, if a batch may have them. */
static void
make_room(Request *self, int rows)
{
	const FeatureSet *set = &self->site->model->features;
	int			most = most_rows(set);
	MemoryContext old;

	if (self->batch == NULL || self->capacity < Min(rows, most))
	{
		MemoryContextReset(self->batch_context);
		old = MemoryContextSwitchTo(self->batch_context);
		self->capacity = Min(rows <= FIRST_CAPACITY ? FIRST_CAPACITY : MOST_BATCH_ROWS, most);
		self->batch = feature_batch_create(set, self->capacity + PADDING, self->batch_context);
		self->numbers = palloc(sizeof(double) * 4 * self->capacity);
		self->labels = palloc(sizeof(int32) * 2 * self->capacity);
		MemoryContextSwitchTo(old);
	}
	feature_batch_clear(self->batch);
}

bool
request_begin(Request *self, int rows)
{
	text	   *model;
	text	   *budget;
	bool		current;

	self->passed = 0;
	self->counted = 0;
	self->one_by_one = false;
	ResetExprContext(self->econtext);
	model = text_argument(self, self->model);
	current = model != NULL && self->site != NULL && predict_site_is_current(self->site, model);
	if (rows == 1 || model == NULL || (!current && !self->proven) || !set_wish(self))
	{
		self->batch = NULL;
		MemoryContextReset(self->batch_context);
		return false;
	}
	budget = text_argument(self, self->budget);
	if (current)
		self->site = predict_site_open(self->site, model, budget, self->batch_context->parent);
	else
	{
		self->proven = false;
		open_site(self, model, budget);
	}
	make_room(self, rows);
	return true;
}

bool
request_full(const Request *self)
{
	return self->batch->row >= self->capacity || feature_batch_full(self->batch);
}

void
request_add(Request *self, int row)
{
	self->places[row] = self->batch->row;
	self->site->batch = self->batch;
	if (!row_source_pack(self->row, self->site))
		self->places[row] = ROW_IS_NULL;
	self->site->batch = self->single;
}

/* Takes back what was packed of the row. */
static void
forget_row(Request *self)
{
	if (self->batch != NULL)
	{
		self->site->batch = self->single;
		feature_batch_forget_row(self->batch);
	}
}

void
request_leave_out(Request *self, int row)
{
	forget_row(self);
	self->places[row] = ROW_BY_ITSELF;
}

void
request_give_up(Request *self, int row)
{
	forget_row(self);
	self->places[row] = ROW_IS_NULL;
}

/* ---- answers ---- */

/* Copies an answer out of the session's memory, in which it is replaced by the next one. */
static void
keep(Request *self, const Predictions *given)
{
	int			rows = given->rows;
	double	   *numbers = self->numbers;

	self->answers = *given;
	self->answers.prediction = memcpy(numbers, given->prediction, sizeof(double) * rows);
	self->answers.probability = memcpy(numbers + rows, given->probability, sizeof(double) * rows);
	self->answers.label = memcpy(self->labels, given->label, sizeof(int32) * rows);
	self->answers.unknown = memcpy(self->labels + rows, given->unknown, sizeof(int32) * rows);
	self->answers.extras = NULL;
	for (int i = 0; self->wish.kind == WISH_INTERVAL && i < 2; i++)
		memcpy(numbers + (2 + i) * rows, predict_extra_numbers(given, i, rows),
			   sizeof(double) * rows);
}

static instr_time
start_time(const Request *self)
{
	instr_time	now;

	INSTR_TIME_SET_ZERO(now);
	if (self->timed)
		INSTR_TIME_SET_CURRENT(now);
	return now;
}

static void
count_batch(Request *self, instr_time start)
{
	instr_time	now = start_time(self);

	INSTR_TIME_SUBTRACT(now, start);
	self->counts.microseconds += INSTR_TIME_GET_MICROSEC(now);
	self->counts.batches++;
	if (self->site != NULL)
		self->counts.version = self->site->model->number;
}

static void
get_answers(Request *self, FeatureBatch *batch)
{
	MemoryContext old = MemoryContextSwitchTo(self->econtext->ecxt_per_tuple_memory);
	instr_time	start = start_time(self);
	Predictions given;

	predict_answers(self->site->model, batch, self->site->memory_budget, &self->wish, &given);
	count_batch(self, start);
	keep(self, &given);
	MemoryContextSwitchTo(old);
}

/*
 * Is it an error of values, of a model's code or of a feature, which a row in
 * the batch may have caused?  Others, such as a cancel, are of the statement.
 */
static bool
refuses_the_batch(int sqlstate)
{
	int			category = ERRCODE_TO_CATEGORY(sqlstate);

	return !predict_session_client()->busy &&
		(category == ERRCODE_TO_CATEGORY(ERRCODE_DATA_EXCEPTION) ||
		 category == ERRCODE_TO_CATEGORY(ERRCODE_EXTERNAL_ROUTINE_EXCEPTION) ||
		 category == ERRCODE_TO_CATEGORY(ERRCODE_UNDEFINED_COLUMN));
}

void
request_answer(Request *self)
{
	MemoryContext old = CurrentMemoryContext;

	if (self->batch == NULL || self->batch->row == 0)
		return;
	ResetExprContext(self->econtext);
	if (self->batch->row == 1)
	{
		get_answers(self, self->batch);
		return;
	}
	PG_TRY();
	{
		get_answers(self, self->batch);
	}
	PG_CATCH();
	{
		if (!refuses_the_batch(geterrcode()))
			PG_RE_THROW();
		MemoryContextSwitchTo(old);
		FlushErrorState();
		self->one_by_one = true;
	}
	PG_END_TRY();
}

bool
request_by_itself(const Request *self, int row)
{
	return self->places[row] == ROW_BY_ITSELF;
}

Datum
request_evaluate(Request *self, ExprState *call, ExprContext *econtext, bool *isnull)
{
	instr_time	start = start_time(self);
	Datum		result = ExecEvalExpr(call, econtext, isnull);

	count_batch(self, start);
	self->proven = true;
	return result;
}

static Datum
label_text(Request *self, int32 label)
{
	const PredictModel *model = self->site->model;
	MemoryContext old;

	if (label < 0 || label >= model->nlabels)
		elog(ERROR, "the predictor answered with label %d of %d", label, model->nlabels);
	if (self->label_texts == NULL)
	{
		old = MemoryContextSwitchTo(self->site->context);
		self->label_texts = palloc(sizeof(Datum) * model->nlabels);
		for (int i = 0; i < model->nlabels; i++)
			self->label_texts[i] = CStringGetTextDatum(model->labels[i]);
		MemoryContextSwitchTo(old);
	}
	return self->label_texts[label];
}

/* Answers a row of a batch that was refused; returns its error, if it is the one. */
static ErrorData *
answer_alone(Request *self, int batch_row)
{
	MemoryContext context = CurrentMemoryContext;
	ErrorData  *volatile error = NULL;

	feature_batch_take_row(self->single, self->batch, batch_row);
	PG_TRY();
	{
		get_answers(self, self->single);
	}
	PG_CATCH();
	{
		if (!refuses_the_batch(geterrcode()))
			PG_RE_THROW();
		MemoryContextSwitchTo(self->batch_context);
		error = CopyErrorData();
		FlushErrorState();
		MemoryContextSwitchTo(context);
	}
	PG_END_TRY();
	return error;
}

Datum
request_result(Request *self, CallResult result, TupleDesc desc, int row, bool *isnull)
{
	int			batch_row = self->places[row];
	int			rows = self->answers.rows;
	Datum		values[3];
	bool		nulls[3] = {false, false, false};

	*isnull = batch_row == ROW_IS_NULL;
	if (*isnull)
		return (Datum) 0;
	if (self->one_by_one)
		batch_row = 0;
	switch (result)
	{
		case RESULT_NUMBER:
			return Float8GetDatum(self->answers.prediction[batch_row]);
		case RESULT_LABEL:
			return label_text(self, self->answers.label[batch_row]);
		case RESULT_INTERVAL:
			values[0] = Float8GetDatum(self->numbers[2 * rows + batch_row]);
			values[1] = Float8GetDatum(self->answers.prediction[batch_row]);
			values[2] = Float8GetDatum(self->numbers[3 * rows + batch_row]);
			return HeapTupleGetDatum(heap_form_tuple(desc, values, nulls));
	}
	pg_unreachable();
}

ErrorData *
request_pass(Request *self, int row)
{
	int			batch_row = self->places[row];
	ErrorData  *error = NULL;

	if (batch_row >= 0 && self->one_by_one)
		error = answer_alone(self, batch_row);
	if (error != NULL)
	{
		self->places[row] = ROW_IS_NULL;
		return error;
	}
	self->counts.rows++;
	if (batch_row >= 0)
		self->passed++;
	if (self->one_by_one)
		request_count(self);
	return NULL;
}

void
request_count(Request *self)
{
	int			rows = self->passed - self->counted;

	if (rows > 0)
		predict_count(self->site->model, self->one_by_one ? self->single : self->batch,
					  &self->answers, self->one_by_one ? 0 : self->counted, rows);
	self->counted = self->passed;
}
