/*
 * extension.c: the extension that a process serves, and its version.
 *
 * Each background process serves the extension that it has found when it
 * started, and that version of it.  What it writes is committed only if that
 * extension still exists: one that was dropped and created again has other
 * jobs with the same numbers.
 *
 * Extensions have no syscache before PostgreSQL 18, so a session keeps the
 * OID and the version of pg_tensile itself.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/indexing.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_extension.h"
#include "commands/dbcommands.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "base/guc.h"
#include "base/library.h"
#include "base/process_kind.h"
#include "state/extension.h"
#include "state/shmem.h"

/* What pg_extension says about pg_tensile, as this session knows it. */
typedef struct Extension
{
	bool		valid;			/* no invalidation has come since it was read */
	uint64		changes;		/* installs and drops counted before it was read */
	Oid			oid;			/* InvalidOid: there is none */
	char		version[NAMEDATALEN];
} Extension;

static Extension extension;
static Oid	my_extension = InvalidOid;	/* that this process serves */

/* ---- what this session knows about the extension ---- */

/* A callback of the syscache of functions. */
static void
forget_extension(Datum arg, int cache, uint32 hash)
{
	extension.valid = false;
}

static void
read_extension(void)
{
	Relation	relation = table_open(ExtensionRelationId, AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;

	ScanKeyInit(&key, Anum_pg_extension_extname, BTEqualStrategyNumber, F_NAMEEQ,
				CStringGetDatum(TENSILE_EXTENSION));
	scan = systable_beginscan(relation, ExtensionNameIndexId, true, NULL, 1, &key);
	tuple = systable_getnext(scan);
	extension.oid = InvalidOid;
	extension.version[0] = '\0';
	if (HeapTupleIsValid(tuple))
	{
		bool		isnull;
		Datum		version = heap_getattr(tuple, Anum_pg_extension_extversion,
										   RelationGetDescr(relation), &isnull);

		extension.oid = ((Form_pg_extension) GETSTRUCT(tuple))->oid;
		strlcpy(extension.version, TextDatumGetCString(version), NAMEDATALEN);
	}
	systable_endscan(scan);
	table_close(relation, AccessShareLock);
}

/*
 * Brings `extension` up to date.  Creating, updating and dropping an extension
 * changes functions, and a session receives that invalidation before it can
 * see the new functions.
 */
static void
look_up_extension(void)
{
	static bool registered = false;
	uint64		changes = pg_atomic_read_u64(&tensile_shared->installs) +
		pg_atomic_read_u64(&tensile_shared->drops);

	if (!registered)
	{
		CacheRegisterSyscacheCallback(PROCOID, forget_extension, (Datum) 0);
		registered = true;
	}
	if (extension.valid && extension.changes == changes)
		return;
	extension.changes = changes - 1;	/* an error below leaves the cache stale */
	extension.valid = true;		/* unless an invalidation comes meanwhile */
	InvalidateCatalogSnapshot();
	read_extension();
	extension.changes = changes;
}

/* ---- the extension that this process serves ---- */

bool
tensile_find_extension(void)
{
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	my_extension = get_extension_oid(TENSILE_EXTENSION, true);
	CommitTransactionCommand();
	return OidIsValid(my_extension);
}

void
tensile_require_extension(void)
{
	if (!OidIsValid(my_extension))
		return;					/* a session, or a process that starts */
	look_up_extension();
	if (extension.oid != my_extension)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("extension \"pg_tensile\" was dropped while the %s worked for it",
						tensile_process_name(tensile_process))));
}

/*
 * The transaction has found the tables that it has written to by their names,
 * and those may belong to another extension by now.
 */
void
tensile_check_commit(void)
{
	if (TransactionIdIsValid(GetTopTransactionIdIfAny()))
		tensile_require_extension();
}

/*
 * Reads the table, not the syscache: the session that drops a role wakes this
 * process when its commit is visible, but before the syscache is told.
 */
static bool
role_exists(Oid role)
{
	Relation	authid = table_open(AuthIdRelationId, AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	bool		exists;

	ScanKeyInit(&key, Anum_pg_authid_oid, BTEqualStrategyNumber, F_OIDEQ, ObjectIdGetDatum(role));
	scan = systable_beginscan(authid, AuthIdOidIndexId, true, NULL, 1, &key);
	exists = HeapTupleIsValid(systable_getnext(scan));
	systable_endscan(scan);
	table_close(authid, AccessShareLock);
	return exists;
}

bool
tensile_still_there(void)
{
	bool		result;

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	InvalidateCatalogSnapshot();
	result = get_extension_oid(TENSILE_EXTENSION, true) == my_extension &&
		(!tensile_in_worker() || role_exists(tensile_my_slot->role));
	CommitTransactionCommand();
	return result;
}

/* ---- version and database ---- */

bool
tensile_version_matches(void)
{
	look_up_extension();
	return !OidIsValid(extension.oid) || strcmp(extension.version, TENSILE_VERSION) == 0;
}

const char *
tensile_extension_version(void)
{
	return extension.version;
}

void
tensile_report_version(int elevel)
{
	ereport(elevel,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("extension \"pg_tensile\" has version %s, "
					"but the server's library has version %s",
					extension.version, TENSILE_VERSION),
			 errhint("Run ALTER EXTENSION pg_tensile UPDATE; if the library is the older one, "
					 "run make install and restart the server first.")));
}

void
tensile_require_version(void)
{
	tensile_require_preload();
	if (!tensile_version_matches())
		tensile_report_version(ERROR);
}

static void
require_unreleased(void)
{
	if (tensile_shared->released == MyDatabaseId)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("pg_tensile has released database \"%s\"",
						get_database_name(MyDatabaseId)),
				 errhint("Its owner or a superuser can call resume_database().")));
}

void
tensile_require_database(void)
{
	char	   *here = get_database_name(MyDatabaseId);

	if (here == NULL || strcmp(here, tensile_database) != 0)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("pg_tensile does not work in database \"%s\"", here ? here : ""),
				 errdetail("pg_tensile.database is \"%s\".", tensile_database),
				 errhint("Connect to that database, or change pg_tensile.database "
						 "in postgresql.conf and reload.")));
	pfree(here);
	require_unreleased();
}

/* Reads the row of this command's own, which no other snapshot shows yet. */
static bool
is_pg_tensile(Oid oid)
{
	Relation	relation = table_open(ExtensionRelationId, AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	bool		result;

	ScanKeyInit(&key, Anum_pg_extension_oid, BTEqualStrategyNumber, F_OIDEQ, ObjectIdGetDatum(oid));
	scan = systable_beginscan(relation, ExtensionOidIndexId, true, SnapshotSelf, 1, &key);
	tuple = systable_getnext(scan);
	result = HeapTupleIsValid(tuple) &&
		strcmp(NameStr(((Form_pg_extension) GETSTRUCT(tuple))->extname), TENSILE_EXTENSION) == 0;
	systable_endscan(scan);
	table_close(relation, AccessShareLock);
	return result;
}

void
tensile_extension_created(Oid oid)
{
	char	   *here;

	if (IsBinaryUpgrade || !is_pg_tensile(oid))
		return;
	here = get_database_name(MyDatabaseId);
	if (here != NULL && strcmp(here, tensile_database) != 0)
		ereport(NOTICE,
				(*tensile_database != '\0' ?
				 errmsg("pg_tensile works in database \"%s\" only, not in \"%s\"",
						tensile_database, here) :
				 errmsg("pg_tensile works in no database, because pg_tensile.database is empty"),
				 errdetail("A server has one scheduler, which shares a device among the jobs of one "
						   "database. Those of other databases are not run."),
				 errhint("To have it work here, set pg_tensile.database = '%s' in postgresql.conf "
						 "and reload.", here)));
}
