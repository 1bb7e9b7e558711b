/*
 * foreign_code.c: finds code of other roles in a query that somebody else has
 * written, and that is to run with the rights of the current user.
 *
 * Trusted are functions that a superuser or the current user has defined: not
 * those of roles that he is a member of, and not all if he is a superuser.  But
 * a text can do harm with functions of superusers, too, which read files, end
 * sessions or run texts: those that may have effects, being volatile, are
 * refused but for a few.
 *
 * Code stands not only in calls.  An aggregate has functions; a domain has
 * checks, which run wherever a value becomes one of it, as part of a row, too;
 * and the planner evaluates expressions of the indexes, constraints, statistics
 * and partitions of the tables that are read.  The query has to be rewritten for
 * the current user before: views and policies are part of it then.
 *
 * Operator classes, casts of base types, functions of types and selectivity
 * estimators can be made by superusers only.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/table.h"
#include "access/transam.h"
#include "catalog/pg_aggregate.h"
#include "catalog/pg_class.h"
#include "catalog/pg_index.h"
#include "catalog/pg_inherits.h"
#include "catalog/pg_partitioned_table.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_statistic_ext.h"
#include "catalog/pg_type.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "nodes/nodeFuncs.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/relcache.h"
#include "utils/syscache.h"
#include "utils/typcache.h"

#include "base/compat.h"
#include "base/foreign_code.h"

/* Volatile functions without effects, and stable ones that read what a text names. */
static const Oid harmless[] = {TENSILE_F_RANDOM, F_CLOCK_TIMESTAMP, F_TIMEOFDAY, F_GEN_RANDOM_UUID};
static const Oid readers[] = {
	F_TABLE_TO_XML, F_TABLE_TO_XMLSCHEMA, F_TABLE_TO_XML_AND_XMLSCHEMA, F_SCHEMA_TO_XML,
	F_SCHEMA_TO_XMLSCHEMA, F_SCHEMA_TO_XML_AND_XMLSCHEMA, F_DATABASE_TO_XML, F_DATABASE_TO_XMLSCHEMA,
	F_DATABASE_TO_XML_AND_XMLSCHEMA
};

static bool contains_foreign_code(Node *node, void *found);

static bool
is_one_of(Oid oid, const Oid *list, int length)
{
	for (int i = 0; i < length; i++)
		if (list[i] == oid)
			return true;
	return false;
}

static bool
is_trusted(Oid owner)
{
	return owner == GetUserId() || superuser_arg(owner);
}

/* ---- functions ---- */

static bool
is_foreign_function(Oid function, void *found)
{
	HeapTuple	tuple;
	Form_pg_proc form;
	bool		foreign;

	if (!OidIsValid(function) || is_one_of(function, harmless, lengthof(harmless)))
		return false;
	tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(function));
	if (!HeapTupleIsValid(tuple))
		return false;
	form = (Form_pg_proc) GETSTRUCT(tuple);
	foreign = !is_trusted(form->proowner) || is_one_of(function, readers, lengthof(readers)) ||
		(form->provolatile == PROVOLATILE_VOLATILE &&
		 (form->proowner != GetUserId() || superuser()));
	ReleaseSysCache(tuple);
	if (foreign)
		((ForeignCode *) found)->function = function;
	return foreign;
}

/* Are functions of the aggregate foreign?  False for another function. */
static bool
is_foreign_aggregate(Oid function, void *found)
{
	HeapTuple	tuple = SearchSysCache1(AGGFNOID, ObjectIdGetDatum(function));
	Form_pg_aggregate form;
	Oid			parts[8];

	if (!HeapTupleIsValid(tuple))
		return false;
	form = (Form_pg_aggregate) GETSTRUCT(tuple);
	parts[0] = form->aggtransfn;
	parts[1] = form->aggfinalfn;
	parts[2] = form->aggcombinefn;
	parts[3] = form->aggserialfn;
	parts[4] = form->aggdeserialfn;
	parts[5] = form->aggmtransfn;
	parts[6] = form->aggminvtransfn;
	parts[7] = form->aggmfinalfn;
	ReleaseSysCache(tuple);
	for (int i = 0; i < lengthof(parts); i++)
		if (is_foreign_function(parts[i], found))
			return true;
	return false;
}

/* ---- types ---- */

/*
 * Does a value that becomes one of this type run code of another role?  A
 * domain and a row type count even without a constraint: one can be added after
 * this, for ALTER DOMAIN takes no lock that a reader holds.
 */
static bool
is_foreign_type(Oid type, ForeignCode *found)
{
	HeapTuple	tuple;
	Form_pg_type form;
	Oid			owner;
	char		kind;
	Oid			inner;

	check_stack_depth();
	if (type < FirstNormalObjectId)
		return false;
	tuple = SearchSysCache1(TYPEOID, ObjectIdGetDatum(type));
	if (!HeapTupleIsValid(tuple))
		return false;
	form = (Form_pg_type) GETSTRUCT(tuple);
	owner = form->typowner;
	kind = form->typtype;
	inner = kind == TYPTYPE_DOMAIN ? form->typbasetype : form->typelem;
	ReleaseSysCache(tuple);
	if ((kind == TYPTYPE_DOMAIN || kind == TYPTYPE_COMPOSITE || kind == TYPTYPE_RANGE ||
		 kind == TYPTYPE_MULTIRANGE) && !is_trusted(owner))
	{
		found->type = type;
		return true;
	}
	if (kind == TYPTYPE_RANGE)
		inner = get_range_subtype(type);
	else if (kind == TYPTYPE_MULTIRANGE)
		inner = get_multirange_range(type);
	if (OidIsValid(inner) && is_foreign_type(inner, found))
		return true;
	if (kind == TYPTYPE_COMPOSITE)
	{
		TupleDesc	desc = lookup_rowtype_tupdesc_copy(type, -1);

		for (int i = 0; i < desc->natts; i++)
			if (!TupleDescAttr(desc, i)->attisdropped &&
				is_foreign_type(TupleDescAttr(desc, i)->atttypid, found))
				return true;
	}
	return false;
}

static bool
any_foreign_type(List *types, ForeignCode *found)
{
	ListCell   *cell;

	foreach(cell, types)
		if (is_foreign_type(lfirst_oid(cell), found))
			return true;
	return false;
}

/* Is it an expression that makes a value, and not one that reads a column? */
static bool
makes_value(const Node *node)
{
	switch (nodeTag(node))
	{
		case T_Const:
		case T_Param:
		case T_Aggref:
		case T_WindowFunc:
		case T_FuncExpr:
		case T_OpExpr:
		case T_SubscriptingRef:
		case T_FieldSelect:
		case T_FieldStore:
		case T_RelabelType:
		case T_CoerceViaIO:
		case T_ArrayCoerceExpr:
		case T_ConvertRowtypeExpr:
		case T_CaseExpr:
		case T_ArrayExpr:
		case T_RowExpr:
		case T_CoalesceExpr:
		case T_MinMaxExpr:
		case T_XmlExpr:
		case T_CoerceToDomain:
		case T_CoerceToDomainValue:
			return true;
		default:
			return tensile_is_json_value(node);
	}
}

/* ---- tables ---- */

/* In a column of a catalogue's row that holds expressions, or null. */
static bool
contains_foreign_code_of_column(int cache, HeapTuple row, AttrNumber column, void *found)
{
	bool		isnull;
	Datum		expressions = SysCacheGetAttr(cache, row, column, &isnull);

	return !isnull &&
		contains_foreign_code(stringToNode(TextDatumGetCString(expressions)), found);
}

/*
 * The expressions as they are stored: the relation cache simplifies them, which
 * calls their functions.
 */
static bool
contains_foreign_code_of_index(Oid index, void *found)
{
	HeapTuple	row = SearchSysCache1(INDEXRELID, ObjectIdGetDatum(index));
	bool		foreign;

	if (!HeapTupleIsValid(row))
		return false;
	foreign = contains_foreign_code_of_column(INDEXRELID, row, Anum_pg_index_indexprs, found) ||
		contains_foreign_code_of_column(INDEXRELID, row, Anum_pg_index_indpred, found);
	ReleaseSysCache(row);
	return foreign;
}

static bool
contains_foreign_code_of_statistics(Oid statistics, void *found)
{
	HeapTuple	row = SearchSysCache1(STATEXTOID, ObjectIdGetDatum(statistics));
	bool		foreign;

	if (!HeapTupleIsValid(row))
		return false;
	foreign = contains_foreign_code_of_column(STATEXTOID, row, Anum_pg_statistic_ext_stxexprs, found);
	ReleaseSysCache(row);
	return foreign;
}

static bool
contains_foreign_code_of_partitions(Oid table, void *found)
{
	HeapTuple	row = SearchSysCache1(PARTRELID, ObjectIdGetDatum(table));
	bool		foreign;

	if (!HeapTupleIsValid(row))
		return false;
	foreign = contains_foreign_code_of_column(PARTRELID, row, Anum_pg_partitioned_table_partexprs,
											  found);
	ReleaseSysCache(row);
	return foreign;
}

/* What the planner may evaluate of a table, a partition included. */
static bool
contains_foreign_code_of_table(Oid table, void *found)
{
	Relation	relation = table_open(table, AccessShareLock);
	TupleConstr *constraints = relation->rd_att->constr;
	bool		foreign = contains_foreign_code_of_partitions(table, found);
	ListCell   *cell;

	for (int i = 0; constraints != NULL && i < constraints->num_check && !foreign; i++)
		foreign = contains_foreign_code(stringToNode(constraints->check[i].ccbin), found);
	if (relation->rd_rel->relhasindex)
		foreach(cell, RelationGetIndexList(relation))
			foreign = foreign || contains_foreign_code_of_index(lfirst_oid(cell), found);
	foreach(cell, RelationGetStatExtList(relation))
		foreign = foreign || contains_foreign_code_of_statistics(lfirst_oid(cell), found);
	table_close(relation, NoLock);
	return foreign;
}

static bool
contains_foreign_code_of_relation(const RangeTblEntry *entry, void *found)
{
	ListCell   *cell;

	if (entry->relkind == RELKIND_VIEW)
		return false;
	foreach(cell, entry->inh ? find_all_inheritors(entry->relid, AccessShareLock, NULL) :
			list_make1_oid(entry->relid))
		if (contains_foreign_code_of_table(lfirst_oid(cell), found))
			return true;
	return false;
}

/* ---- queries ---- */

static bool
contains_foreign_code_of_entry(const RangeTblEntry *entry, void *found)
{
	ListCell   *cell;

	if (entry->rtekind == RTE_RELATION)
		return contains_foreign_code_of_relation(entry, found);
	if (entry->rtekind == RTE_TABLEFUNC)
		return any_foreign_type(entry->tablefunc->coltypes, found);
	if (entry->rtekind == RTE_FUNCTION)
		foreach(cell, entry->functions)
			if (any_foreign_type(lfirst_node(RangeTblFunction, cell)->funccoltypes, found))
				return true;
	return false;
}

static bool
contains_foreign_code(Node *node, void *found)
{
	if (node == NULL)
		return false;
	if (IsA(node, Query))
	{
		ListCell   *cell;

		foreach(cell, ((Query *) node)->rtable)
			if (contains_foreign_code_of_entry(lfirst_node(RangeTblEntry, cell), found))
				return true;
		return query_tree_walker((Query *) node, contains_foreign_code, found, 0);
	}
	if (check_functions_in_node(node, is_foreign_function, found))
		return true;
	if ((IsA(node, Aggref) && is_foreign_aggregate(((Aggref *) node)->aggfnoid, found)) ||
		(IsA(node, WindowFunc) && is_foreign_aggregate(((WindowFunc *) node)->winfnoid, found)))
		return true;
	if (makes_value(node) && is_foreign_type(exprType(node), found))
		return true;
	return expression_tree_walker(node, contains_foreign_code, found);
}

ForeignCode
tensile_foreign_code(Query *rewritten)
{
	ForeignCode found = {InvalidOid, InvalidOid};

	(void) contains_foreign_code((Node *) rewritten, &found);
	return found;
}
