/*
 * explain.c: explain_training, the EXPLAIN of a training job, which runs in
 * the caller's session and transaction.
 *
 * Phases: the checks of train_model (submit.c, as the caller; then
 * tensile._explain_training, SECURITY DEFINER) return the executor's spec.
 * The supervisor tensile._explain (PL/Python, as the caller) starts an
 * executor for a dry run, and calls tensile._explain_feed to send it the rows
 * of the query.  It returns lines of text, or an error.
 *
 * The executor runs as the server's operating-system user, so users must not
 * be able to start it: no role may execute tensile._explain, which is called
 * without a check of its ACL.  tensile._explain_wait and
 * tensile._explain_feed, which the supervisor calls as the caller, work only
 * while it runs.  The only user code executed during that time is the training
 * query, in which neither works.
 *
 * The supervisor returns an error in columns, because PL/Python would put the
 * name of the exception before the message.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "access/parallel.h"
#include "catalog/namespace.h"
#include "catalog/pg_type.h"
#include "executor/executor.h"
#include "fmgr.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "parser/parse_func.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/tuplestore.h"

#include "explain.h"
#include "owner.h"
#include "pg_tensile.h"
#include "process.h"
#include "slot.h"
#include "submit.h"
#include "wait.h"

PG_FUNCTION_INFO_V1(tensile_explain_training);
PG_FUNCTION_INFO_V1(tensile_explain_feed);
PG_FUNCTION_INFO_V1(tensile_explain_wait);

typedef struct Explanation
{
	TrainingQuery training;
	const char *search_path;
	bool		feeding;		/* the query runs */
} Explanation;

static Explanation *current = NULL;

bool
tensile_explaining(void)
{
	return current != NULL && !current->feeding;
}

static void
require_explaining(const char *function)
{
	if (!tensile_explaining())
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("%s is for explain_training only", function),
				 errhint("Use explain_training to see what training on a query would take.")));
}

/*
 * tensile._explain_wait(fd, timeout_ms, writable): waits inside the caller's
 * transaction
 */
Datum
tensile_explain_wait(PG_FUNCTION_ARGS)
{
	uint32		events = WL_SOCKET_READABLE | (PG_GETARG_BOOL(2) ? WL_SOCKET_WRITEABLE : 0);
	int			result;

	require_explaining("tensile._explain_wait");
	result = tensile_wait_socket(PG_GETARG_INT32(0), events, PG_GETARG_INT32(1));
	result = tensile_socket_bits(result);
	PG_RETURN_INT32(result ? result : TENSILE_WAIT_TIMEOUT);
}

/*
 * tensile._explain_feed(fd) -> number of rows: sends the rows of the explained
 * query
 */
Datum
tensile_explain_feed(PG_FUNCTION_ARGS)
{
	volatile int64 rows = 0;

	require_explaining("tensile._explain_feed");
	current->feeding = true;
	PG_TRY();
	{
		rows = tensile_feed_session(PG_GETARG_INT32(0), &current->training, current->search_path);
	}
	PG_FINALLY();
	{
		current->feeding = false;
	}
	PG_END_TRY();
	PG_RETURN_INT64(rows);
}

/* ---- the supervisor ---- */

/* Calls tensile._explain(spec, folder), and returns its row. */
static HeapTupleHeader
supervise(Datum spec)
{
	Oid			types[] = {JSONBOID, TEXTOID};
	List	   *name = list_make2(makeString("tensile"), makeString("_explain"));
	Oid			function = LookupFuncName(name, 2, types, false);
	Datum		folder = CStringGetTextDatum(tensile_python_folder());

	return DatumGetHeapTupleHeader(OidFunctionCall2(function, spec, folder));
}

static char *
text_field(HeapTupleHeader row, const char *name)
{
	bool		isnull;
	Datum		value = GetAttributeByName(row, name, &isnull);

	return isnull ? NULL : TextDatumGetCString(value);
}

static void
child_context(void *arg)
{
	errcontext("%s", (const char *) arg);
}

/*
 * Raises the error that the supervisor has returned, if any, with the
 * executor's traceback.
 */
static void
raise_error(HeapTupleHeader row)
{
	char	   *traceback = text_field(row, "traceback");
	ErrorContextCallback callback = {error_context_stack, child_context, traceback};

	if (text_field(row, "message") == NULL)
		return;
	if (traceback != NULL)
		error_context_stack = &callback;
	tensile_raise_error(text_field(row, "sqlstate"), text_field(row, "message"),
						text_field(row, "hint"), text_field(row, "detail"));
}

static void
return_lines(FunctionCallInfo fcinfo, HeapTupleHeader row)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	bool		isnull;
	ArrayType  *lines = DatumGetArrayTypeP(GetAttributeByName(row, "lines", &isnull));
	Datum	   *values;
	bool	   *nulls;
	int			nlines;

	Assert(!isnull);
	deconstruct_array(lines, TEXTOID, -1, false, TYPALIGN_INT, &values, &nulls, &nlines);
	InitMaterializedSRF(fcinfo, MAT_SRF_USE_EXPECTED_DESC);
	for (int i = 0; i < nlines; i++)
		tuplestore_putvalues(result->setResult, result->setDesc, &values[i], &nulls[i]);
}

/*
 * explain_training(model, query, target, ...), with the arguments of
 * train_model
 */
Datum
tensile_explain_training(PG_FUNCTION_ARGS)
{
	Explanation explanation = {0};
	HeapTupleHeader volatile row = NULL;
	Datum		arrays;
	Datum		spec;

	if (current != NULL || tensile_process != TENSILE_NO_PROCESS || IsParallelWorker())
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("explain_training cannot be called by a training query"),
				 errhint("Call it by itself.")));
	arrays = tensile_check_submission(fcinfo);
	explanation.training = tensile_training_query(fcinfo);
	explanation.search_path = pstrdup(namespace_search_path);
	spec = tensile_forward_submission(fcinfo, arrays);

	tensile_session_slot_take();
	current = &explanation;
	PG_TRY();
	{
		row = supervise(spec);
	}
	PG_FINALLY();
	{
		current = NULL;
		tensile_session_slot_free();
	}
	PG_END_TRY();
	raise_error(row);
	return_lines(fcinfo, row);
	return (Datum) 0;
}
