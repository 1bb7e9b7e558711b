/*
 * restore.c: a trigger of the tables that a dump contains.
 *
 * pg_restore loads the data of an extension's tables in the order in which
 * pg_dump has written it, which respects foreign keys; but several processes of
 * it (--jobs) know nothing of that order, because the dependencies between
 * these tables are not in the dump.  So foreign keys are not checked for rows
 * that COPY brings: nothing but a restore copies into these tables, on which no
 * role has privileges, and the dump has all rows.
 *
 * A trigger before the statement makes this a session of a replica, in which
 * the triggers of foreign keys do not fire, and one behind it ends that.  The
 * tables' own triggers fire always.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "commands/trigger.h"
#include "fmgr.h"
#include "tcop/tcopprot.h"
#include "utils/guc.h"

PG_FUNCTION_INFO_V1(tensile_restore);

static void
set_replication_role(const char *role)
{
	(void) set_config_option("session_replication_role", role, PGC_SUSET, PGC_S_SESSION,
							 GUC_ACTION_LOCAL, true, 0, false);
}

/* Has the client sent a COPY? */
static bool
is_copy(void)
{
	const char *query = debug_query_string;

	return query != NULL && pg_strncasecmp(query + strspn(query, " \t\n\r"), "copy ", 5) == 0;
}

/* tensile_internal._restore(): before and after each statement that inserts */
Datum
tensile_restore(PG_FUNCTION_ARGS)
{
	static bool restoring = false;

	if (!CALLED_AS_TRIGGER(fcinfo))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("function \"%s\" was not called by trigger manager", "_restore")));
	if (TRIGGER_FIRED_BEFORE(((TriggerData *) fcinfo->context)->tg_event))
	{
		restoring = SessionReplicationRole == SESSION_REPLICATION_ROLE_ORIGIN && is_copy();
		if (restoring)
			set_replication_role("replica");
	}
	else if (restoring)
	{
		restoring = false;
		set_replication_role("origin");
	}
	return PointerGetDatum(NULL);
}
