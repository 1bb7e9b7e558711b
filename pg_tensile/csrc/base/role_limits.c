/*
 * role_limits.c: the settings that limit the jobs of a role.
 *
 * A superuser sets them for a role (ALTER ROLE), a database (ALTER DATABASE)
 * or the server, and nobody else can change them.  A job may be started long
 * after the session that submitted it, so the values of sessions do not
 * count: tensile_internal._role_limit reads those that are stored.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include <limits.h>

#include "fmgr.h"
#include "utils/builtins.h"
#include "utils/guc.h"

#include "base/guc.h"
#include "base/role_limits.h"

PG_FUNCTION_INFO_V1(tensile_setting_number);

static int	tensile_role_max_jobs = 0;
static int	tensile_role_job_memory = 0;
static int	tensile_role_job_time = 0;

void
tensile_define_role_limits(void)
{
	DefineCustomIntVariable("pg_tensile.role_max_jobs",
							"Sets how many jobs of a role may run at once.",
							"Others wait. 0 means no limit but pg_tensile.max_jobs.",
							&tensile_role_max_jobs, 0, 0, TENSILE_MAX_JOBS, PGC_SUSET, 0, NULL,
							NULL, NULL);
	DefineCustomIntVariable("pg_tensile.role_job_memory",
							"Sets how much device memory each job of a role may use.",
							"The job's memory_budget counts if it is less. 0 means no limit.",
							&tensile_role_job_memory, 0, 0, INT_MAX, PGC_SUSET, GUC_UNIT_KB, NULL,
							NULL, NULL);
	DefineCustomIntVariable("pg_tensile.role_job_time",
							"Sets how long each job of a role may train.",
							"The job's max_time counts if it is less. 0 means no limit.",
							&tensile_role_job_time, 0, 0, INT_MAX / 1000, PGC_SUSET, GUC_UNIT_S,
							NULL, NULL, NULL);
}

/*
 * tensile_internal._setting_number(name, value): the value of an integer setting in
 * its own unit, where the text may have another; null if it is no such value.
 */
Datum
tensile_setting_number(PG_FUNCTION_ARGS)
{
	char	   *name = text_to_cstring(PG_GETARG_TEXT_PP(0));
	char	   *value = text_to_cstring(PG_GETARG_TEXT_PP(1));
	int			number;

	if (!parse_int(value, &number, GetConfigOptionFlags(name, false), NULL))
		PG_RETURN_NULL();
	PG_RETURN_INT64(number);
}
