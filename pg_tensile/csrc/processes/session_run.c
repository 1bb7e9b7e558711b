/*
 * session_run.c: public functions that run a trainer in the caller's
 * session and transaction: on the rows of a query explain_training
 * (explain.c), evaluate_model and feature_importance (evaluate.c), and without
 * a query import_model and export_model (model_file.c).
 *
 * Phases: the public function makes its checks as the caller, and gets the
 * trainer's spec from a SECURITY DEFINER function.  The supervisor
 * tensile_internal._session_run (PL/Python, as the caller) starts a trainer of that
 * kind, and calls tensile_worker._session_feed to send it the rows of the query.  It
 * returns the values of the result, row by row, or an error.
 *
 * The trainer runs as the server's operating-system user, so users must not
 * be able to start it: no role may execute tensile_internal._session_run, which is
 * called without a check of its ACL.  The functions that the supervisor calls
 * as the caller work only while it runs.  The only user code executed during
 * that time is the query, in which they do not work.
 *
 * The supervisor returns an error in columns, because PL/Python would put the
 * name of the exception before the message.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/parallel.h"
#include "catalog/namespace.h"
#include "catalog/pg_type.h"
#include "executor/executor.h"
#include "fmgr.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "parser/parse_func.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/tuplestore.h"

#include "base/error_context.h"
#include "base/library.h"
#include "base/owner.h"
#include "base/process_kind.h"
#include "processes/session_run.h"
#include "processes/wait.h"
#include "state/slot.h"

PG_FUNCTION_INFO_V1(tensile_session_feed);
PG_FUNCTION_INFO_V1(tensile_session_wait);
PG_FUNCTION_INFO_V1(tensile_session_check);

static SessionRun *current = NULL;

/* Does this session run a supervisor, and no user code? */
static void
require_running(const char *function)
{
	if (current == NULL || current->feeding)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("%s is for the supervisors of pg_tensile only", function),
				 errhint("Use explain_training to see what training on a query would take, "
						 "and evaluate_model to test a model on one.")));
}

/* tensile_internal._session_check(function): for functions in other languages */
Datum
tensile_session_check(PG_FUNCTION_ARGS)
{
	require_running(text_to_cstring(PG_GETARG_TEXT_PP(0)));
	PG_RETURN_VOID();
}

/*
 * tensile_worker._session_wait(fd, timeout_ms, writable): waits inside the caller's
 * transaction
 */
Datum
tensile_session_wait(PG_FUNCTION_ARGS)
{
	uint32		events = WL_SOCKET_READABLE | (PG_GETARG_BOOL(2) ? WL_SOCKET_WRITEABLE : 0);
	int			result;

	require_running("tensile_worker._session_wait");
	result = tensile_wait_socket(PG_GETARG_INT32(0), events, PG_GETARG_INT32(1));
	result = tensile_socket_bits(result);
	PG_RETURN_INT32(result ? result : TENSILE_WAIT_TIMEOUT);
}

/* Keeps the error as it is: PL/Python would lose its context. */
static void
keep_query_error(void)
{
	MemoryContext old = MemoryContextSwitchTo(current->context);

	current->query_error = CopyErrorData();
	MemoryContextSwitchTo(old);
}

/*
 * tensile_worker._session_feed(fd) -> number of rows: sends the rows of the query
 */
Datum
tensile_session_feed(PG_FUNCTION_ARGS)
{
	volatile int64 rows = 0;
	int			nest_level;

	require_running("tensile_worker._session_feed");
	nest_level = NewGUCNestLevel();
	(void) set_config_option("search_path", current->search_path, PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SAVE, true, 0, false);
	current->feeding = true;
	PG_TRY();
	{
		if (current->feed != NULL)
			rows = current->feed(current, PG_GETARG_INT32(0));
	}
	PG_CATCH();
	{
		current->feeding = false;
		if (tensile_in_user_code())
			keep_query_error();
		PG_RE_THROW();
	}
	PG_END_TRY();
	current->feeding = false;
	AtEOXact_GUC(false, nest_level);
	PG_RETURN_INT64(rows);
}

/* ---- the supervisor ---- */

/* Calls tensile_internal._session_run(spec, folder), and returns its row. */
static HeapTupleHeader
supervise(Datum spec)
{
	Oid			types[] = {JSONBOID, TEXTOID};
	NullableDatum arguments[] = {
		{spec, false},
		{CStringGetTextDatum(tensile_python_folder()), false},
	};

	return DatumGetHeapTupleHeader(tensile_call("_session_run", 2, types, arguments).value);
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

/* Raises the error of the query again, as PL/Python has not changed it. */
static void
raise_query_error(const SessionRun *run)
{
	TensileUserCode code;

	tensile_user_code_begin(&code, NULL, NULL);
	ReThrowError(run->query_error);
}

/*
 * Raises the error that the supervisor has returned, if any: that of the query,
 * or another one with the trainer's traceback, which is of the user's code.
 */
static void
raise_error(const SessionRun *run, HeapTupleHeader row)
{
	char	   *traceback = text_field(row, "traceback");
	char	   *message = text_field(row, "message");
	TensileUserCode code;

	if (message == NULL)
		return;
	if (run->query_error != NULL && strcmp(run->query_error->message, message) == 0)
		raise_query_error(run);
	if (traceback != NULL)
		tensile_user_code_begin(&code, child_context, traceback);
	tensile_raise_error(text_field(row, "sqlstate"), message,
						text_field(row, "hint"), text_field(row, "detail"));
}

/* Stores the values, all columns of a row after the other, as rows. */
static void
return_rows(FunctionCallInfo fcinfo, Datum result_values)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	ArrayType  *array = DatumGetArrayTypeP(result_values);
	AttInMetadata *input;
	Datum	   *values;
	bool	   *nulls;
	char	  **strings;
	int			nvalues;
	int			ncolumns;

	deconstruct_array(array, TEXTOID, -1, false, TYPALIGN_INT, &values, &nulls, &nvalues);
	InitMaterializedSRF(fcinfo, MAT_SRF_USE_EXPECTED_DESC);
	ncolumns = result->setDesc->natts;
	if (nvalues % ncolumns != 0)
		elog(ERROR, "the trainer returned %d values for rows of %d columns", nvalues, ncolumns);
	input = TupleDescGetAttInMetadata(result->setDesc);
	strings = palloc(sizeof(char *) * ncolumns);
	for (int i = 0; i < nvalues; i += ncolumns)
	{
		HeapTuple	tuple;

		CHECK_FOR_INTERRUPTS();
		for (int j = 0; j < ncolumns; j++)
			strings[j] = nulls[i + j] ? NULL : TextDatumGetCString(values[i + j]);
		tuple = BuildTupleFromCStrings(input, strings);
		tuplestore_puttuple(result->setResult, tuple);
		heap_freetuple(tuple);
		for (int j = 0; j < ncolumns; j++)
			if (strings[j] != NULL)
				pfree(strings[j]);
	}
}

void
tensile_require_no_session_run(const char *function)
{
	if (current != NULL || tensile_process != TENSILE_NO_PROCESS || IsParallelWorker())
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("%s cannot be called by a query that a model reads", function),
				 errhint("Call it by itself.")));
}

Datum
tensile_session_values(SessionRun *run, Datum spec)
{
	HeapTupleHeader volatile row = NULL;
	Datum		values;
	bool		isnull;

	tensile_require_no_session_run(run->function);
	run->search_path = pstrdup(namespace_search_path);
	run->context = CurrentMemoryContext;
	run->query_error = NULL;
	run->feeding = false;
	tensile_session_slot_take(run->function);
	current = run;
	PG_TRY();
	{
		row = supervise(spec);
	}
	PG_CATCH();
	{
		current = NULL;
		tensile_session_slot_free();
		tensile_user_code_failed();
		if (run->query_error != NULL && run->query_error->sqlerrcode == geterrcode())
		{
			MemoryContextSwitchTo(run->context);
			FlushErrorState();
			raise_query_error(run);
		}
		PG_RE_THROW();
	}
	PG_END_TRY();
	current = NULL;
	tensile_session_slot_free();
	tensile_user_code_failed();	/* if it has, PL/Python has caught it */
	raise_error(run, row);
	values = GetAttributeByName(row, "result", &isnull);
	Assert(!isnull);
	return values;
}

void
tensile_session_run(FunctionCallInfo fcinfo, SessionRun *run, Datum spec)
{
	return_rows(fcinfo, tensile_session_values(run, spec));
}
