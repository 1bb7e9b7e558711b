/*
 * functions.c: the functions whose calls the executor can batch.
 *
 * They are recognized by library and symbol, not by name: another schema may
 * have a function "predict", and ours can be renamed.  Nothing is kept, so
 * nothing can become old: plans list the functions that they depend on, and
 * those without any of users' functions, which most plans are, are not read.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_language.h"
#include "catalog/pg_proc.h"
#include "utils/builtins.h"
#include "utils/syscache.h"

#include "base/library.h"
#include "batching/functions.h"

static const BatchedFunction functions[] = {
	{"tensile_predict_record", RESULT_NUMBER, ROW_RECORD},
	{"tensile_predict_array", RESULT_NUMBER, ROW_NUMBERS},
	{"tensile_predict_jsonb", RESULT_NUMBER, ROW_OBJECT},
	{"tensile_predict_text", RESULT_NUMBER, ROW_TEXT},
	{"tensile_predict_class_record", RESULT_LABEL, ROW_RECORD},
	{"tensile_predict_class_array", RESULT_LABEL, ROW_NUMBERS},
	{"tensile_predict_class_jsonb", RESULT_LABEL, ROW_OBJECT},
	{"tensile_predict_class_text", RESULT_LABEL, ROW_TEXT},
	{"tensile_predict_interval_record", RESULT_INTERVAL, ROW_RECORD},
	{"tensile_predict_interval_array", RESULT_INTERVAL, ROW_NUMBERS},
	{"tensile_predict_interval_jsonb", RESULT_INTERVAL, ROW_OBJECT},
	{"tensile_predict_interval_text", RESULT_INTERVAL, ROW_TEXT},
};

bool
batched_functions_possible(const PlannedStmt *statement)
{
	ListCell   *cell;

	foreach(cell, statement->invalItems)
		if (((PlanInvalItem *) lfirst(cell))->cacheId == PROCOID)
			return true;
	return false;
}

/* Is it the path of this library, with or without folder and suffix? */
static bool
is_this_library(const char *path)
{
	const char *separator = strrchr(path, '/');
	const char *name = separator ? separator + 1 : path;
	Size		length = strlen(TENSILE_LIBRARY);

	return strncmp(name, TENSILE_LIBRARY, length) == 0 &&
		(name[length] == '\0' || name[length] == '.');
}

static int
symbol_number(const char *symbol)
{
	for (int i = 0; i < lengthof(functions); i++)
		if (strcmp(symbol, functions[i].symbol) == 0)
			return i;
	return -1;
}

int
batched_function_number(Oid function)
{
	HeapTuple	tuple;
	Datum		symbol;
	Datum		library;
	bool		no_symbol;
	bool		no_library;
	int			number = -1;

	if (function < FirstUnpinnedObjectId)
		return -1;
	tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(function));
	if (!HeapTupleIsValid(tuple))
		return -1;
	if (((Form_pg_proc) GETSTRUCT(tuple))->prolang == ClanguageId)
	{
		symbol = SysCacheGetAttr(PROCOID, tuple, Anum_pg_proc_prosrc, &no_symbol);
		library = SysCacheGetAttr(PROCOID, tuple, Anum_pg_proc_probin, &no_library);
		if (!no_symbol && !no_library && is_this_library(TextDatumGetCString(library)))
			number = symbol_number(TextDatumGetCString(symbol));
	}
	ReleaseSysCache(tuple);
	return number;
}

const BatchedFunction *
batched_function(int number)
{
	return &functions[number];
}

Expr *
row_of_call(const FuncExpr *call)
{
	return list_nth(call->args, ROW_ARGUMENT);
}
