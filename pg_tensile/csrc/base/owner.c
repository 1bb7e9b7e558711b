/*
 * owner.c: ownership, and calls with the rights of the extension's owner.
 *
 * A SECURITY DEFINER function does not know its caller.  So a public function
 * that changes the tables is in C: it runs as the caller, and passes the
 * caller's OID to a private SECURITY DEFINER function, which no other role may
 * execute.  register_model(name, ...) calls tensile_internal._register_model(caller,
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
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/namespace.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "parser/parse_func.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/syscache.h"

#include "base/error_context.h"
#include "base/owner.h"

PG_FUNCTION_INFO_V1(tensile_owned);
PG_FUNCTION_INFO_V1(tensile_raise);

/* The private function or procedure with that name and these arguments. */
static Oid
private_oid(const char *name, int nargs, const Oid *types)
{
	Oid			schema = get_namespace_oid("tensile_internal", true);
	Oid			found;

	if (!OidIsValid(schema))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("extension \"pg_tensile\" is older than the server's library"),
				 errhint("Run ALTER EXTENSION pg_tensile UPDATE.")));
	found = GetSysCacheOid3(PROCNAMEARGSNSP, Anum_pg_proc_oid, CStringGetDatum(name),
							PointerGetDatum(buildoidvector(types, nargs)), ObjectIdGetDatum(schema));
	/* Finds no procedures, but has the message. */
	return OidIsValid(found) ? found :
		LookupFuncName(list_make2(makeString("tensile_internal"), makeString(pstrdup(name))), nargs,
					   types, false);
}

NullableDatum
tensile_call(const char *name, int nargs, const Oid *types, const NullableDatum *arguments)
{
	LOCAL_FCINFO(call, FUNC_MAX_ARGS);
	FmgrInfo	function;
	NullableDatum result;

	Assert(nargs <= FUNC_MAX_ARGS);
	fmgr_info(private_oid(name, nargs, types), &function);
	InitFunctionCallInfoData(*call, &function, nargs, InvalidOid, NULL, NULL);
	memcpy(call->args, arguments, nargs * sizeof(NullableDatum));
	result.value = FunctionCallInvoke(call);
	result.isnull = call->isnull;
	return result;
}

/*
 * The private function of a public one, tensile_internal._<name>(oid, arguments...,
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
		fmgr_info_cxt(private_oid(psprintf("_%s", name), 1 + nargs + nextra, types), function,
					  fcinfo->flinfo->fn_mcxt);
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
	Node	   *context = fcinfo->context;
	Datum		result;

	Assert(1 + nargs + nextra <= FUNC_MAX_ARGS);
	if (context != NULL && !IsA(context, CallContext))	/* that of a procedure, which may commit */
		context = NULL;
	InitFunctionCallInfoData(*call, private_function(fcinfo, nextra, extra_types),
							 1 + nargs + nextra, InvalidOid, context, NULL);
	call->args[0].value = ObjectIdGetDatum(GetUserId());
	call->args[0].isnull = false;
	memcpy(call->args + 1, fcinfo->args, nargs * sizeof(NullableDatum));
	if (nextra > 0)
		memcpy(call->args + 1 + nargs, extra, nextra * sizeof(NullableDatum));
	result = FunctionCallInvoke(call);
	fcinfo->isnull = call->isnull;
	return result;
}

void
tensile_require_writable(FunctionCallInfo fcinfo)
{
	if (!XactReadOnly)
		return;
	ereport(ERROR,
			(errcode(ERRCODE_READ_ONLY_SQL_TRANSACTION),
			 errmsg("%s cannot be called in a read-only transaction",
					get_func_name(fcinfo->flinfo->fn_oid)),
			 RecoveryInProgress() ?
			 errhint("It changes tables of pg_tensile, and this server is a standby: "
					 "call it on the primary.") :
			 errhint("It changes tables of pg_tensile: call it in a READ WRITE transaction.")));
}

/* register_model, drop_model, ...: the private function does everything */
TENSILE_PUBLIC_FUNCTION(tensile_forward)
{
	tensile_require_writable(fcinfo);
	return tensile_forward_with(fcinfo, 0, NULL, NULL);
}

/* wait_for_job, ...: the same for functions that change nothing */
TENSILE_PUBLIC_FUNCTION(tensile_forward_reading)
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

/* Calls tensile_internal._parse_budget, as train_model does. */
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
 * tensile_worker._raise(sqlstate, message, hint, detail): RAISE of PL/pgSQL cannot
 * omit a hint or detail that is null.
 */
Datum
tensile_raise(PG_FUNCTION_ARGS)
{
	char	   *fields[4];

	for (int i = 0; i < 4; i++)
		fields[i] = PG_ARGISNULL(i) ? NULL : text_to_cstring(PG_GETARG_TEXT_PP(i));
	tensile_user_code_failed(); /* this may be about an error that was caught */
	tensile_raise_error(fields[0], fields[1], fields[2], fields[3]);
	PG_RETURN_VOID();
}
