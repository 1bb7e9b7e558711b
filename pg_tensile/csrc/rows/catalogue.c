/*
 * catalogue.c: reading the tables of models, whoever the current user is: rows
 * by an index, without a query, or by SPI with the rights of the owner.
 *
 * Columns are found by name, because their order in a database that was
 * upgraded is another one.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/skey.h"
#include "access/stratnum.h"
#include "access/table.h"
#include "catalog/namespace.h"
#include "catalog/pg_class.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "rows/catalogue.h"
#include "state/models_generation.h"

/* A table of the catalogue, which is noted as such. */
static Oid
catalogue_table(const char *name)
{
	Oid			schema = get_namespace_oid("tensile_internal", true);
	Oid			relation = OidIsValid(schema) ? get_relname_relid(name, schema) : InvalidOid;

	if (!OidIsValid(relation))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("the extension pg_tensile is not installed in this database"),
				 errhint("Run CREATE EXTENSION pg_tensile CASCADE.")));
	if (strcmp(name, "models") == 0)
		tensile_watch_models(relation);
	return relation;
}

/* ---- rows of a table ---- */

static AttrNumber
column_number(TupleDesc desc, const char *name)
{
	for (int i = 0; i < desc->natts; i++)
		if (!TupleDescAttr(desc, i)->attisdropped &&
			strcmp(NameStr(TupleDescAttr(desc, i)->attname), name) == 0)
			return i + 1;
	elog(ERROR, "a table of pg_tensile has no column \"%s\"", name);
}

static List *
find_rows(const char *table, const char *index, const CatalogueKey *keys, int nkeys, bool all)
{
	Relation	relation = table_open(catalogue_table(table), AccessShareLock);
	TupleDesc	desc = RelationGetDescr(relation);
	Oid			index_oid = get_relname_relid(index, RelationGetNamespace(relation));
	ScanKeyData *scan_keys = palloc(sizeof(ScanKeyData) * nkeys);
	SysScanDesc scan;
	HeapTuple	tuple;
	List	   *rows = NIL;

	for (int i = 0; i < nkeys; i++)
	{
		AttrNumber	column = column_number(desc, keys[i].column);

		ScanKeyEntryInitialize(&scan_keys[i], 0, column, BTEqualStrategyNumber, InvalidOid,
							   TupleDescAttr(desc, column - 1)->attcollation, keys[i].equal,
							   keys[i].value);
	}
	scan = systable_beginscan(relation, index_oid, OidIsValid(index_oid), GetActiveSnapshot(),
							  nkeys, scan_keys);
	while ((all || rows == NIL) && HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		CatalogueRow *row = palloc(sizeof(CatalogueRow));

		row->tuple = heap_copytuple(tuple);
		row->desc = CreateTupleDescCopyConstr(desc);	/* with defaults of columns that were added */
		rows = lappend(rows, row);
	}
	systable_endscan(scan);
	table_close(relation, AccessShareLock);
	return rows;
}

CatalogueRow *
catalogue_row(const char *table, const char *index, const CatalogueKey *keys, int nkeys)
{
	List	   *rows = find_rows(table, index, keys, nkeys, false);

	return rows == NIL ? NULL : linitial(rows);
}

List *
catalogue_rows(const char *table, const char *index, const CatalogueKey *keys, int nkeys)
{
	return find_rows(table, index, keys, nkeys, true);
}

static Datum
column_value(const CatalogueRow *row, const char *column, bool *isnull)
{
	return heap_getattr(row->tuple, column_number(row->desc, column), row->desc, isnull);
}

Datum
catalogue_value(const CatalogueRow *row, const char *column)
{
	bool		isnull;
	Datum		value = column_value(row, column, &isnull);

	return isnull ? (Datum) 0 : value;
}

bool
catalogue_is_null(const CatalogueRow *row, const char *column)
{
	bool		isnull;

	(void) column_value(row, column, &isnull);
	return isnull;
}

/* ---- queries ---- */

static Oid
catalogue_owner(void)
{
	Oid			relation = catalogue_table("models");
	HeapTuple	tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(relation));
	Oid			owner;

	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for relation %u", relation);
	owner = ((Form_pg_class) GETSTRUCT(tuple))->relowner;
	ReleaseSysCache(tuple);
	return owner;
}

CatalogueAccess
catalogue_open(void)
{
	CatalogueAccess access = {.nest_level = NewGUCNestLevel()};

	(void) set_config_option("search_path", "pg_catalog, pg_temp", PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SAVE, true, 0, false);
	GetUserIdAndSecContext(&access.user, &access.security_context);
	SetUserIdAndSecContext(catalogue_owner(),
						   access.security_context | SECURITY_LOCAL_USERID_CHANGE);
	PushActiveSnapshot(ActiveSnapshotSet() ? GetActiveSnapshot() : GetTransactionSnapshot());
	SPI_connect();
	return access;
}

void
catalogue_close(const CatalogueAccess *access)
{
	SPI_finish();
	PopActiveSnapshot();
	SetUserIdAndSecContext(access->user, access->security_context);
	AtEOXact_GUC(true, access->nest_level);
}

uint64
catalogue_select(const char *query, int nargs, Oid *types, Datum *arguments, const char *nulls)
{
	if (SPI_execute_with_args(query, nargs, types, arguments, nulls, true, 0) != SPI_OK_SELECT)
		elog(ERROR, "could not read the catalogue of models");
	return SPI_processed;
}
