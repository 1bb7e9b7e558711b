/*
 * materialize.c: materialize_predictions.
 *
 * The work is done in SQL (tensile_worker._materialize_predictions), with the
 * caller's privileges. Functions in SQL have a search_path of their own, so the
 * caller's is passed on, with which its query runs.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/namespace.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "fmgr.h"
#include "funcapi.h"
#include "tcop/pquery.h"
#include "tcop/tcopprot.h"
#include "tcop/utility.h"
#include "utils/builtins.h"

#include "base/compat.h"
#include "base/error_context.h"
#include "base/owner.h"

#define ARGUMENTS 5
#define COUNTS 3

PG_FUNCTION_INFO_V1(tensile_run_statement);

/*
 * tensile_worker._run_statement(statement) -> number of rows: as EXECUTE of PL/pgSQL,
 * but errors of the statement do not have the whole of it as context.  Unlike
 * EXECUTE it could end the transaction, so users cannot call it.
 */
Datum
tensile_run_statement(PG_FUNCTION_ARGS)
{
	char	   *sql = text_to_cstring(PG_GETARG_TEXT_PP(0));
	RawStmt    *parsed;
	QueryCompletion completion = {0};
	TensileUserCode code;
	Portal		portal;
	List	   *plans;

	if (!tensile_in_own_code())
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("tensile_worker._run_statement is for materialize_predictions only")));
	parsed = linitial_node(RawStmt, pg_parse_query(sql));
	tensile_user_code_begin(&code, NULL, NULL);
	plans = pg_plan_queries(pg_analyze_and_rewrite_fixedparams(parsed, sql, NULL, 0, NULL), sql,
							CURSOR_OPT_PARALLEL_OK, NULL);
	portal = CreateNewPortal();
	portal->visible = false;
	PortalDefineQuery(portal, NULL, sql, CreateCommandTag(parsed->stmt), plans, NULL);
	PortalStart(portal, NULL, 0, InvalidSnapshot);
	(void) tensile_portal_run(portal, FETCH_ALL, false, None_Receiver, None_Receiver, &completion);
	PortalDrop(portal, false);
	CommandCounterIncrement();
	tensile_user_code_end(&code);
	PG_RETURN_INT64(completion.nprocessed);
}

/*
 * materialize_predictions(model, query, into_table, key, memory_budget) ->
 * (predicted, unchanged, removed)
 */
TENSILE_PUBLIC_FUNCTION(tensile_materialize_predictions)
{
	Oid			types[ARGUMENTS + 1] = {TEXTOID, TEXTOID, TEXTOID, TEXTARRAYOID, TEXTOID, TEXTOID};
	Datum		values[ARGUMENTS + 1];
	char		nulls[ARGUMENTS + 1];
	Datum		counts[COUNTS];
	bool		count_nulls[COUNTS] = {0};
	TupleDesc	desc;

	tensile_require_writable(fcinfo);
	for (int i = 0; i < ARGUMENTS; i++)
	{
		values[i] = PG_ARGISNULL(i) ? (Datum) 0 : PG_GETARG_DATUM(i);
		nulls[i] = PG_ARGISNULL(i) ? 'n' : ' ';
	}
	values[ARGUMENTS] = CStringGetTextDatum(namespace_search_path);
	nulls[ARGUMENTS] = ' ';
	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "materialize_predictions does not return a row");

	SPI_connect();
	if (SPI_execute_with_args("SELECT * FROM tensile_worker._materialize_predictions($1, $2, $3, $4, $5, $6)",
							  ARGUMENTS + 1, types, values, nulls, false, 1) != SPI_OK_SELECT ||
		SPI_processed != 1)
		elog(ERROR, "tensile_worker._materialize_predictions returned no row");
	for (int i = 0; i < COUNTS; i++)
		counts[i] = SPI_getbinval(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, i + 1, &count_nulls[i]);
	SPI_finish();
	return HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc), counts, count_nulls));
}
