/*
 * lineage.c: the tables and columns that a training query reads.
 *
 * The server's own parser resolves the query's names. The analysed and
 * rewritten query lists the permissions that it needs (RTEPermissionInfo): which
 * columns of which relations, views and what they read included, and what
 * policies of row-level security read. What functions read is not known.
 *
 * The worker calls this in the transaction that reads the rows. Locks of the
 * analysis are kept until its end, so both see the same definitions.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/sysattr.h"
#include "catalog/pg_class.h"
#include "fmgr.h"
#include "nodes/nodeFuncs.h"
#include "nodes/parsenodes.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/json.h"
#include "utils/jsonb.h"
#include "utils/lsyscache.h"
#include "utils/syscache.h"

#include "base/compat.h"
#include "base/convert.h"
#include "base/query.h"
#include "rows/feed.h"
#include "state/identity.h"

PG_FUNCTION_INFO_V1(tensile_training_sources);

/* A relation, and the columns of it that are read, as in RTEPermissionInfo. */
typedef struct Source
{
	Oid			relation;
	Bitmapset  *columns;
} Source;

/* ---- the walk ---- */

static void
add_source(List **sources, Oid relation, const Bitmapset *columns)
{
	Source	   *source;
	ListCell   *cell;

	foreach(cell, *sources)
	{
		source = lfirst(cell);
		if (source->relation == relation)
		{
			source->columns = bms_add_members(source->columns, columns);
			return;
		}
	}
	source = palloc(sizeof(Source));
	source->relation = relation;
	source->columns = bms_copy(columns);
	*sources = lappend(*sources, source);
}

static bool
collect_sources(Node *node, void *sources)
{
	ListCell   *cell;

	if (node == NULL)
		return false;
	if (!IsA(node, Query))
		return expression_tree_walker(node, collect_sources, sources);
	foreach(cell, tensile_permissions((Query *) node))
	{
		const TensilePermission *permission = lfirst(cell);

		if (OidIsValid(permission->relid) && permission->requiredPerms & ACL_SELECT)
			add_source(sources, permission->relid, permission->selectedCols);
	}
	return query_tree_walker((Query *) node, collect_sources, sources, 0);
}

/* ---- JSON ---- */

static const char *
kind_of_relation(Oid relation)
{
	switch (get_rel_relkind(relation))
	{
		case RELKIND_VIEW:
			return "view";
		case RELKIND_MATVIEW:
			return "materialized view";
		case RELKIND_FOREIGN_TABLE:
			return "foreign table";
		case RELKIND_PARTITIONED_TABLE:
			return "partitioned table";
		case RELKIND_SEQUENCE:
			return "sequence";
		default:
			return "table";
	}
}

/* Is the column read?  A reference to the whole row reads all columns. */
static bool
is_read(const Source *source, AttrNumber number)
{
	return bms_is_member(number - FirstLowInvalidHeapAttributeNumber, source->columns) ||
		bms_is_member(InvalidAttrNumber - FirstLowInvalidHeapAttributeNumber, source->columns);
}

static int
number_of_columns(Oid relation)
{
	HeapTuple	tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(relation));
	int			number = 0;

	if (HeapTupleIsValid(tuple))
	{
		number = ((Form_pg_class) GETSTRUCT(tuple))->relnatts;
		ReleaseSysCache(tuple);
	}
	return number;
}

static void
append_columns(StringInfo json, const Source *source)
{
	int			count = number_of_columns(source->relation);
	const char *separator = "";

	appendStringInfoString(json, "[");
	for (AttrNumber number = 1; number <= count; number++)
	{
		/* A dropped column has no type. */
		if (!is_read(source, number) || !OidIsValid(get_atttype(source->relation, number)))
			continue;
		appendStringInfoString(json, separator);
		escape_json(json, get_attname(source->relation, number, false));
		separator = ", ";
	}
	appendStringInfoString(json, "]");
}

static void
append_sources(StringInfo json, const char *sql, const char *purpose)
{
	List	   *sources = NIL;
	ListCell   *cell;

	(void) collect_sources((Node *) tensile_analyze_select(sql, "training query"), &sources);
	foreach(cell, sources)
	{
		const Source *source = lfirst(cell);
		const char *schema = get_namespace_name(get_rel_namespace(source->relation));

		if (json->len > 1)
			appendStringInfoString(json, ", ");
		appendStringInfo(json, "{\"purpose\": \"%s\", \"relation\": %u, \"schema\": ", purpose,
						 source->relation);
		escape_json(json, schema ? schema : "");
		appendStringInfoString(json, ", \"name\": ");
		escape_json(json, get_rel_name(source->relation));
		appendStringInfo(json, ", \"kind\": \"%s\", \"columns\": ",
						 kind_of_relation(source->relation));
		append_columns(json, source);
		appendStringInfoString(json, "}");
	}
}

typedef struct SourcesOf
{
	const char *query;
	const char *validation_query;	/* or NULL */
	StringInfoData json;
} SourcesOf;

static int64
append_all_sources(void *argument)
{
	SourcesOf  *sources = argument;

	appendStringInfoString(&sources->json, "[");
	append_sources(&sources->json, sources->query, "training");
	if (sources->validation_query != NULL)
		append_sources(&sources->json, sources->validation_query, "validation");
	appendStringInfoString(&sources->json, "]");
	return 0;
}

/*
 * tensile_worker._training_sources(query, settings, validation_query) -> [{"purpose",
 * "relation", "schema", "name", "kind", "columns"}]; the last argument may be
 * null
 */
Datum
tensile_training_sources(PG_FUNCTION_ARGS)
{
	SourcesOf	sources = {0};

	tensile_require_process(TENSILE_WORKER);
	if (PG_ARGISNULL(0) || PG_ARGISNULL(1))
		PG_RETURN_NULL();
	sources.query = tensile_text_argument(fcinfo, 0);
	sources.validation_query = tensile_text_argument(fcinfo, 2);
	initStringInfo(&sources.json);
	(void) tensile_feed_in_worker(PG_GETARG_JSONB_P(1), append_all_sources, &sources);
	PG_RETURN_TEXT_P(cstring_to_text_with_len(sources.json.data, sources.json.len));
}
