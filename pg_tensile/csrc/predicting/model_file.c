/*
 * model_file.c: export_model and import_model, which use a trainer in the
 * caller's session (session_run.c) for what needs PyTorch.
 *
 * export_model: SQL composes files of the formats tensile and torch, and a
 * trainer those of the format onnx.
 *
 * import_model: tensile_internal._import_model (SECURITY DEFINER) makes all checks that
 * need no PyTorch and adds the version.  The trainer then builds the model,
 * loads the weights and predicts.  Its error undoes the version with the
 * statement, so other sessions see only versions that were checked.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "catalog/namespace.h"
#include "catalog/pg_type.h"
#include "fmgr.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "utils/array.h"
#include "utils/builtins.h"

#include "base/error_context.h"
#include "base/owner.h"
#include "processes/session_run.h"
#include "state/extension.h"

/* Runs the trainer for this spec, and returns the values of its result. */
static Datum *
run_trainer(const char *function, Datum spec, int *nvalues)
{
	SessionRun	run = {.function = function};
	ArrayType  *result = DatumGetArrayTypeP(tensile_session_values(&run, spec));
	Datum	   *values;
	bool	   *nulls;

	deconstruct_array(result, TEXTOID, -1, false, TYPALIGN_INT, &values, &nulls, nvalues);
	for (int i = 0; i < *nvalues; i++)
		if (nulls[i])
			elog(ERROR, "the trainer returned a null");
	return values;
}

/* Calls tensile_internal._export_spec(caller, model, version), version may be null. */
static Datum
export_spec(FunctionCallInfo fcinfo)
{
	Oid			types[] = {OIDOID, TEXTOID, INT4OID};
	NullableDatum arguments[] = {
		{ObjectIdGetDatum(GetUserId()), false}, fcinfo->args[0], fcinfo->args[1]
	};
	NullableDatum spec = tensile_call("_export_spec", lengthof(types), types, arguments);

	if (spec.isnull)
		elog(ERROR, "tensile_internal._export_spec returned null");
	return spec.value;
}

/* The bytes that the values have in base64, one after the other. */
static bytea *
decoded(const Datum *values, int nvalues)
{
	StringInfoData bytes;
	Datum		encoding = CStringGetTextDatum("base64");

	initStringInfo(&bytes);
	appendStringInfoSpaces(&bytes, VARHDRSZ);
	for (int i = 0; i < nvalues; i++)
	{
		bytea	   *part = DatumGetByteaPP(DirectFunctionCall2(binary_decode, values[i],
															   encoding));

		appendBinaryStringInfo(&bytes, VARDATA_ANY(part), VARSIZE_ANY_EXHDR(part));
		pfree(part);
	}
	SET_VARSIZE(bytes.data, bytes.len);
	return (bytea *) bytes.data;
}

/* export_model(model, version, format) -> contents of the file */
TENSILE_PUBLIC_FUNCTION(tensile_export_model)
{
	Datum	   *values;
	int			nvalues;

	if (PG_ARGISNULL(2) || strcmp(text_to_cstring(PG_GETARG_TEXT_PP(2)), "onnx") != 0)
		return tensile_forward_with(fcinfo, 0, NULL, NULL);
	tensile_require_no_session_run("export_model");
	tensile_require_version();
	values = run_trainer("export_model", export_spec(fcinfo), &nvalues);
	PG_RETURN_BYTEA_P(decoded(values, nvalues));
}

/* import_model(contents, model, template) -> number of the version */
TENSILE_PUBLIC_FUNCTION(tensile_import_model)
{
	Datum	   *values;
	Datum		spec;
	int			nvalues;

	tensile_require_no_session_run("import_model");
	tensile_require_version();
	tensile_require_writable(fcinfo);
	spec = tensile_forward_with(fcinfo, 0, NULL, NULL);
	if (fcinfo->isnull)
		elog(ERROR, "tensile_internal._import_model returned null");
	values = run_trainer("import_model", spec, &nvalues);
	if (nvalues != 1)
		elog(ERROR, "the trainer returned %d values for a version", nvalues);
	PG_RETURN_INT32(pg_strtoint32(TextDatumGetCString(values[0])));
}
