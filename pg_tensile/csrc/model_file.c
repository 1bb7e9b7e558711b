/*
 * model_file.c: import_model, which checks a model file in an executor of the
 * caller's session (session_run.c).
 *
 * tensile._import_model (SECURITY DEFINER) makes all checks that need no
 * PyTorch and adds the version.  The executor then builds the model, loads the
 * weights and predicts.  Its error undoes the version with the statement, so
 * other sessions see only versions that were checked.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "fmgr.h"
#include "utils/array.h"
#include "utils/builtins.h"

#include "extension.h"
#include "owner.h"
#include "session_run.h"

PG_FUNCTION_INFO_V1(tensile_import_model);

/* import_model(contents, name) -> number of the version */
Datum
tensile_import_model(PG_FUNCTION_ARGS)
{
	SessionRun	run = {.function = "import_model"};
	ArrayType  *result;
	Datum	   *values;
	bool	   *nulls;
	int			nvalues;

	tensile_require_no_session_run(run.function);
	tensile_require_version();
	result = DatumGetArrayTypeP(
		tensile_session_values(&run, tensile_forward_with(fcinfo, 0, NULL, NULL)));
	deconstruct_array(result, TEXTOID, -1, false, TYPALIGN_INT, &values, &nulls, &nvalues);
	if (nvalues != 1 || nulls[0])
		elog(ERROR, "the executor returned %d values for a version", nvalues);
	PG_RETURN_INT32(pg_strtoint32(TextDatumGetCString(values[0])));
}
