/*
 * catalogue.c: reading the tables of models by SPI, with the rights of their
 * owner.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "catalog/namespace.h"
#include "catalog/pg_class.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "rows/catalogue.h"
#include "state/models_generation.h"

static Oid
catalogue_owner(void)
{
	Oid			relation = get_relname_relid("models", get_namespace_oid("tensile_internal", true));
	HeapTuple	tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(relation));
	Oid			owner;

	if (!HeapTupleIsValid(tuple))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("the extension pg_tensile is not installed in this database"),
				 errhint("Run CREATE EXTENSION pg_tensile CASCADE.")));
	owner = ((Form_pg_class) GETSTRUCT(tuple))->relowner;
	tensile_watch_models(relation);
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
