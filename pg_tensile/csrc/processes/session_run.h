/*
 * session_run.h: public functions that run a trainer in the caller's
 * session and transaction (session_run.c).
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_SESSION_RUN_H
#define TENSILE_SESSION_RUN_H

#include "fmgr.h"

/* A call of such a function; usually the first member of a larger struct. */
typedef struct SessionRun
{
	const char *function;		/* name of the public function, for messages */

	/*
	 * Runs the query with the caller's search_path, sends its rows to the
	 * socket, and returns their number.  User code runs in here only.  NULL:
	 * there is no query.
	 */
	int64		(*feed) (struct SessionRun *run, int fd);

	/* For session_run.c */
	const char *search_path;
	bool		feeding;
	MemoryContext context;
	ErrorData  *query_error;	/* that has ended the query; NULL: none */
} SessionRun;

/*
 * Raises 55000 in a query that such a function or a worker reads, and in
 * parallel workers.
 */
extern void tensile_require_no_session_run(const char *function);

/*
 * Starts a trainer for `spec` (jsonb, with the "kind" of child), feeds it,
 * and makes its result that of the public function, a set of rows.  Raises
 * the errors of the trainer.
 */
extern void tensile_session_run(FunctionCallInfo fcinfo, SessionRun *run, Datum spec);

/* The same, but returns the values of the result, a text[]. */
extern Datum tensile_session_values(SessionRun *run, Datum spec);

#endif
