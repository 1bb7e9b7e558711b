/*
 * owner.c: ownership, and calls with the rights of the extension's owner.
 *
 * A SECURITY DEFINER function does not know its caller.  So a public function
 * that changes the tables is in C: it runs as the caller, and passes the
 * caller's OID to a private SECURITY DEFINER function, which no other role may
 * execute.  register_model(name, ...) calls tensile._register_model(caller,
 * name, ...).  fmgr switches user and search_path there and back, also after
 * an error, and no SQL is parsed.
 *
 * Tables store the OID and the name of a role; only both together identify it
 * (docs/internals.md).
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_type.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "parser/parse_func.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/syscache.h"

#include "owner.h"

PG_FUNCTION_INFO_V1(tensile_forward);
PG_FUNCTION_INFO_V1(tensile_owned);
PG_FUNCTION_INFO_V1(tensile_raise);

static List *
private_name(const char *function)
{
	return list_make2(makeString("tensile"), makeString(pstrdup(function)));
}

NullableDatum
tensile_call(const char *name, int nargs, const Oid *types, const NullableDatum *arguments)
{
	LOCAL_FCINFO(call, FUNC_MAX_ARGS);
	FmgrInfo	function;
	NullableDatum result;

	Assert(nargs <= FUNC_MAX_ARGS);
	fmgr_info(LookupFuncName(private_name(name), nargs, types, false), &function);
	InitFunctionCallInfoData(*call, &function, nargs, InvalidOid, NULL, NULL);
	memcpy(call->args, arguments, nargs * sizeof(NullableDatum));
	result.value = FunctionCallInvoke(call);
	result.isnull = call->isnull;
	return result;
}

/*
 * The private function of a public one, tensile._<name>(oid, arguments...,
 * extra...); looked up once for each call in a query.
 */
static FmgrInfo *
private_function(FunctionCallInfo fcinfo, int nextra, const Oid *extra_types)
{
	FmgrInfo   *function = fcinfo->flinfo->fn_extra;

	if (function == NULL)
	{
		Oid			public_oid = fcinfo->flinfo->fn_oid;
		Oid		   *declared;
		Oid			types[FUNC_MAX_ARGS];
		int			nargs;
		char	   *name = get_func_name(public_oid);

		get_func_signature(public_oid, &declared, &nargs);
		types[0] = OIDOID;
		memcpy(types + 1, declared, nargs * sizeof(Oid));
		for (int i = 0; i < nextra; i++)	/* extra_types may be NULL */
			types[1 + nargs + i] = extra_types[i];

		function = MemoryContextAlloc(fcinfo->flinfo->fn_mcxt, sizeof(FmgrInfo));
		fmgr_info_cxt(LookupFuncName(private_name(psprintf("_%s", name)),
									 1 + nargs + nextra, types, false),
					  function, fcinfo->flinfo->fn_mcxt);
		fcinfo->flinfo->fn_extra = function;
	}
	return function;
}

Datum
tensile_forward_with(FunctionCallInfo fcinfo, int nextra, const Oid *extra_types,
					 const NullableDatum *extra)
{
	LOCAL_FCINFO(call, FUNC_MAX_ARGS);
	int			nargs = PG_NARGS();
	Datum		result;

	Assert(1 + nargs + nextra <= FUNC_MAX_ARGS);
	InitFunctionCallInfoData(*call, private_function(fcinfo, nextra, extra_types),
							 1 + nargs + nextra, InvalidOid, NULL, NULL);
	call->args[0].value = ObjectIdGetDatum(GetUserId());
	call->args[0].isnull = false;
	memcpy(call->args + 1, fcinfo->args, nargs * sizeof(NullableDatum));
	if (nextra > 0)
		memcpy(call->args + 1 + nargs, extra, nextra * sizeof(NullableDatum));
	result = FunctionCallInvoke(call);
	fcinfo->isnull = call->isnull;
	return result;
}

/* register_model, drop_model, ...: the private function does everything */
Datum
tensile_forward(PG_FUNCTION_ARGS)
{
	return tensile_forward_with(fcinfo, 0, NULL, NULL);
}

bool
tensile_role_owned(Oid owner, const char *name)
{
	HeapTuple	tuple = SearchSysCache1(AUTHOID, ObjectIdGetDatum(owner));
	bool		same;

	if (!HeapTupleIsValid(tuple))
		return false;
	same = strcmp(NameStr(((Form_pg_authid) GETSTRUCT(tuple))->rolname), name) == 0;
	ReleaseSysCache(tuple);
	return same && has_privs_of_role(GetUserId(), owner);
}

Datum
tensile_owned(PG_FUNCTION_ARGS)
{
	PG_RETURN_BOOL(tensile_role_owned(PG_GETARG_OID(0), NameStr(*PG_GETARG_NAME(1))));
}

/* Calls tensile._parse_budget, as train_model does. */
int64
tensile_parse_budget(text *budget)
{
	Oid			type = TEXTOID;
	NullableDatum argument = {PointerGetDatum(budget), false};

	return DatumGetInt64(tensile_call("_parse_budget", 1, &type, &argument).value);
}

/* The code of a SQLSTATE; an internal error for one that cannot be raised. */
static int
raisable_sqlstate(const char *code)
{
	if (strlen(code) != 5 || strspn(code, "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ") != 5 ||
		strncmp(code, "00", 2) == 0 || strncmp(code, "01", 2) == 0 || strncmp(code, "02", 2) == 0)
		return ERRCODE_INTERNAL_ERROR;
	return MAKE_SQLSTATE(code[0], code[1], code[2], code[3], code[4]);
}

void
tensile_raise_error(const char *sqlstate, const char *message, const char *hint, const char *detail)
{
	ereport(ERROR,
			(errcode(sqlstate ? raisable_sqlstate(sqlstate) : ERRCODE_INTERNAL_ERROR),
			 errmsg_internal("%s", message ? message : "unknown error"),
			 hint ? errhint("%s", hint) : 0,
			 detail ? errdetail_internal("%s", detail) : 0));
}

/*
 * tensile._raise(sqlstate, message, hint, detail): RAISE of PL/pgSQL cannot
 * omit a hint or detail that is null.
 */
Datum
tensile_raise(PG_FUNCTION_ARGS)
{
	char	   *fields[4];

	for (int i = 0; i < 4; i++)
		fields[i] = PG_ARGISNULL(i) ? NULL : text_to_cstring(PG_GETARG_TEXT_PP(i));
	tensile_raise_error(fields[0], fields[1], fields[2], fields[3]);
	PG_RETURN_VOID();
}
