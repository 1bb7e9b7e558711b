/*
 * step.c: the loop of a supervisor.
 *
 * A supervisor is a coroutine in PL/Python.  A step resumes it by one CALL of
 * tensile_worker._step, and the row that the CALL returns says what the coroutine
 * waits for.  The process waits for that (wait.c), and the next step gets the
 * cause of the end of the wait.
 *
 * The CALL runs through a portal at top level, which allows the procedure to
 * commit; SPI would not.  Between steps there is no transaction: no snapshot
 * is held, no timeout of a transaction runs, and statistics are reported.
 *
 * Memory: plans of the CALL live in a context that is reset after each step.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include <limits.h>

#include "access/xact.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "storage/latch.h"
#include "tcop/dest.h"
#include "tcop/pquery.h"
#include "tcop/tcopprot.h"
#include "utils/backend_status.h"
#include "utils/memutils.h"
#include "utils/portal.h"
#include "utils/snapmgr.h"

#include "base/compat.h"
#include "base/query.h"
#include "processes/step.h"
#include "processes/wait.h"
#include "state/extension.h"

/* Receives the row of a CALL, (fd, timeout_ms, writable): what to wait for. */
typedef struct StepReceiver
{
	DestReceiver pub;
	int			fd;
	long		timeout_ms;
	bool		writable;
	bool		last;			/* no timeout: the supervisor has finished */
} StepReceiver;

static bool
step_row(TupleTableSlot *slot, DestReceiver *self)
{
	StepReceiver *receiver = (StepReceiver *) self;

	slot_getallattrs(slot);
	receiver->last = slot->tts_isnull[1];
	if (receiver->last)
		return true;
	receiver->fd = DatumGetInt32(slot->tts_values[0]);
	receiver->timeout_ms = DatumGetInt32(slot->tts_values[1]);
	receiver->writable = DatumGetBool(slot->tts_values[2]);
	return true;
}

/*
 * Parses, analyses and plans a statement in the current memory context, which
 * has to outlive the commits of the procedure.
 */
static List *
plan_statement(const char *sql)
{
	RawStmt    *parsed = linitial_node(RawStmt, pg_parse_query(sql));
	List	   *queries;
	List	   *plans;

	PushActiveSnapshot(GetTransactionSnapshot());
	queries = pg_analyze_and_rewrite_fixedparams(parsed, sql, NULL, 0, NULL);
	plans = pg_plan_queries(queries, sql, 0, NULL);
	PopActiveSnapshot();
	return plans;
}

/* Runs a CALL like one of a client, so that the procedure may commit. */
static void
run_call(const char *sql, DestReceiver *receiver)
{
	static MemoryContext context = NULL;
	QueryCompletion completion;
	Portal		portal;
	List	   *plans;

	if (context == NULL)
		context = AllocSetContextCreate(TopMemoryContext, "pg_tensile call",
										ALLOCSET_DEFAULT_SIZES);
	debug_query_string = NULL;	/* else the log repeats the statement for each of its lines */
	pgstat_report_activity(STATE_RUNNING, sql);
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	MemoryContextSwitchTo(context);
	plans = plan_statement(sql);
	portal = CreatePortal("", true, true);
	portal->visible = false;
	PortalDefineQuery(portal, NULL, sql, CMDTAG_CALL, plans, NULL);
	PortalStart(portal, NULL, 0, InvalidSnapshot);
	(void) tensile_portal_run(portal, FETCH_ALL, true, receiver, receiver, &completion);
	PortalDrop(portal, false);
	CommitTransactionCommand();
	MemoryContextReset(context);
}

/* Runs one step; `bits` are the causes of the end of the wait before it. */
static void
run_step(int bits, StepReceiver *receiver)
{
	static char sql[64];		/* shown by pg_stat_activity */

	snprintf(sql, sizeof(sql), "CALL tensile_worker._step(%d, -1, 0, false)", bits);
	receiver->last = true;
	run_call(sql, &receiver->pub);
}

/* Ends the transaction in which an error was raised, and returns the error. */
static ErrorData *
recover(void)
{
	ErrorData  *error;

	HOLD_INTERRUPTS();
	MemoryContextSwitchTo(TopMemoryContext);
	error = CopyErrorData();
	FlushErrorState();
	AbortCurrentTransaction();
	PortalErrorCleanup();
	MemoryContextSwitchTo(TopMemoryContext);
	RESUME_INTERRUPTS();
	return error;
}

/*
 * Handles an error that was raised outside of Python.  A cancel request that
 * came after the wait is for the step that it has interrupted: returns true to
 * repeat the step.  After a drop of the extension or the role, errors do not
 * matter, and the step was the last one.  Raises other errors again.
 */
static bool
handle_error(ErrorData *error, StepReceiver *receiver)
{
	receiver->last = false;
	if (error->sqlerrcode == ERRCODE_QUERY_CANCELED)
		return true;
	receiver->last = !tensile_still_there();
	if (!receiver->last)
		ReThrowError(error);
	FreeErrorData(error);
	return false;
}

/* Runs one step, and repeats it after a cancel request. */
static void
complete_step(int first_bits, StepReceiver *receiver)
{
	volatile int bits = first_bits;
	volatile bool again;

	do
	{
		ErrorData  *volatile error = NULL;

		PG_TRY();
		{
			run_step(bits, receiver);
		}
		PG_CATCH();
		{
			error = recover();
		}
		PG_END_TRY();
		again = error != NULL && handle_error(error, receiver);
		bits |= TENSILE_WAIT_CANCEL;
	} while (again);
}

/*
 * Waits for what the step has asked for.  Reports statistics like a session
 * that becomes idle: if the last report was too recent, a while later.
 */
static int
wait_idle(const StepReceiver *request)
{
	uint32		events = WL_SOCKET_READABLE | (request->writable ? WL_SOCKET_WRITEABLE : 0);
	long		timeout_ms = request->timeout_ms;
	long		report_ms = pgstat_report_stat(false);
	int			bits;

	pgstat_report_activity(STATE_IDLE, NULL);
	if (report_ms > 0 && report_ms < timeout_ms)
	{
		bits = tensile_wait_connected(request->fd, events, report_ms);
		if (bits != TENSILE_WAIT_TIMEOUT)
			return bits;
		pgstat_report_stat(true);
		timeout_ms -= report_ms;
	}
	return tensile_wait_connected(request->fd, events, timeout_ms);
}

void
tensile_run_steps(void)
{
	StepReceiver receiver = {.pub = tensile_dest_receiver(step_row, NULL)};
	int			bits = 0;

	for (;;)
	{
		complete_step(bits, &receiver);
		if (receiver.last)
			return;
		bits = wait_idle(&receiver);
	}
}
