/*
 * query.c: read-only queries given as text, and suggestions for unknown names.
 *
 * train_model checks its query here, the worker when it feeds the rows, and
 * predict_rows when it runs.  Everything happens as the current user.  The
 * checks of the query tree cannot find functions that write; those are stopped
 * at run time by transaction_read_only.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "executor/executor.h"
#include "miscadmin.h"
#include "nodes/nodeFuncs.h"
#include "parser/analyze.h"
#include "tcop/tcopprot.h"
#include "utils/guc.h"
#include "utils/snapmgr.h"
#include "utils/varlena.h"

#include "base/compat.h"
#include "base/convert.h"
#include "base/error_context.h"
#include "base/query.h"

#define MAX_NAME_LENGTH 255		/* limit of varstr_levenshtein */

typedef struct SourceText
{
	const char *text;
	const char *what;
} SourceText;

/*
 * Makes a position in the given query one of an internal query, not of the
 * client's statement.
 */
static void
point_into_query(void *arg)
{
	const SourceText *source = arg;
	int			position = geterrposition();

	if (position > 0)
	{
		errposition(0);
		internalerrposition(position);
		internalerrquery(source->text);
	}
	errcontext("%s", source->what);
}

/*
 * The position, from 1, of a statement behind another one.  Before PostgreSQL
 * 18 its location is that of the white space before it.
 */
static int
start_position(const char *sql, const RawStmt *statement)
{
	int			location = statement->stmt_location;

	return location + strspn(sql + location, " \t\n\r\f\v") + 1;
}

/* The one statement of `sql`, which has to be a SELECT. */
static RawStmt *
one_select(List *statements, const char *sql, const char *what)
{
	RawStmt    *statement;

	if (statements == NIL)
		ereport(ERROR,
				(errcode(ERRCODE_SYNTAX_ERROR),
				 errmsg("the %s is empty", what),
				 errhint("Give one SELECT.")));
	if (list_length(statements) > 1)
		ereport(ERROR,
				(errcode(ERRCODE_SYNTAX_ERROR),
				 errmsg("the %s has more than one statement", what),
				 errhint("Give one SELECT, without anything behind it."),
				 internalerrposition(start_position(sql, lsecond_node(RawStmt, statements))),
				 internalerrquery(sql)));
	statement = linitial_node(RawStmt, statements);
	if (!IsA(statement->stmt, SelectStmt))
		ereport(ERROR,
				(errcode(ERRCODE_SYNTAX_ERROR),
				 errmsg("the %s is not a SELECT", what),
				 errhint("Give one SELECT that returns the rows.")));
	return statement;
}

static bool
has_row_marks(Node *node, void *context)
{
	if (node == NULL)
		return false;
	if (IsA(node, Query))
		return ((Query *) node)->rowMarks != NIL ||
			query_tree_walker((Query *) node, has_row_marks, context, 0);
	return expression_tree_walker(node, has_row_marks, context);
}

static void
refuse_changes(Query *query, const char *what)
{
	const char *change = NULL;

	if (query->commandType != CMD_SELECT)
		change = "SELECT INTO";
	else if (query->hasModifyingCTE)
		change = "INSERT, UPDATE or DELETE in a WITH clause";
	else if (has_row_marks((Node *) query, NULL))
		change = "FOR UPDATE or FOR SHARE";
	if (change != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_READ_ONLY_SQL_TRANSACTION),
				 errmsg("the %s must not change anything, but it has %s", what, change),
				 errhint("It runs read only: give a plain SELECT.")));
}

/* The query before rewriting. */
static Query *
analyze(const char *sql, const char *what)
{
	SourceText	source = {sql, what};
	TensileUserCode code;
	List	   *statements;
	RawStmt    *statement;
	Query	   *query;

	tensile_require_utf8(sql, strlen(sql));	/* supervisors and children get it */
	tensile_user_code_begin(&code, point_into_query, &source);
	statements = pg_parse_query(sql);
	tensile_user_code_end(&code);
	statement = one_select(statements, sql, what);
	tensile_user_code_begin(&code, point_into_query, &source);
	query = parse_analyze_fixedparams(statement, sql, NULL, 0, NULL);
	tensile_user_code_end(&code);
	refuse_changes(query, what);
	return query;
}

static Query *
rewrite(Query *query)
{
	List	   *queries = pg_rewrite_query(query);

	if (list_length(queries) != 1)
		elog(ERROR, "a SELECT was rewritten to %d queries", list_length(queries));
	return linitial_node(Query, queries);
}

Query *
tensile_analyze_select(const char *sql, const char *what)
{
	return rewrite(analyze(sql, what));
}

Query *
tensile_analyze_select_of(Oid author, const char *sql, const char *what, Jsonb *settings)
{
	int			nest_level = NewGUCNestLevel();
	Oid			user;
	int			security;
	Query	   *query;

	GetUserIdAndSecContext(&user, &security);
	/* an error restores both with the end of its transaction */
	SetUserIdAndSecContext(author, security | SECURITY_LOCAL_USERID_CHANGE |
						   SECURITY_RESTRICTED_OPERATION);
	tensile_apply_settings(settings);
	tensile_set_read_only();
	query = analyze(sql, what);
	AtEOXact_GUC(false, nest_level);
	SetUserIdAndSecContext(user, security);
	return rewrite(query);
}

/*
 * The line break ends a comment at the end of the query.  The text is a whole
 * statement to the parser, so nothing in it can end the parenthesis.
 */
const char *
tensile_subquery(const Query *query, const char *sql)
{
	const char *statement = sql + Max(query->stmt_location, 0);
	int			length = query->stmt_len > 0 ? query->stmt_len : strlen(statement);

	return psprintf("(%.*s\n)", length, statement);
}

/*
 * GUC_ACTION_SAVE, that of functions, is refused for this setting by 16 and
 * later.
 */
void
tensile_set_read_only(void)
{
	(void) set_config_option("transaction_read_only", "on", PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_LOCAL, true, 0, false);
}

static void
apply_settings(Jsonb *settings, bool search_path)
{
	JsonbIterator *iterator = JsonbIteratorInit(&settings->root);
	JsonbIteratorToken token;
	JsonbValue	value;
	char	   *name = NULL;

	while ((token = JsonbIteratorNext(&iterator, &value, true)) != WJB_DONE)
	{
		if (token == WJB_KEY)
			name = pnstrdup(value.val.string.val, value.val.string.len);
		else if (token == WJB_VALUE && name != NULL && !search_path &&
				 strcmp(name, "search_path") == 0)
			continue;
		else if (token == WJB_VALUE && value.type == jbvString && name != NULL)
			(void) set_config_option(name, pnstrdup(value.val.string.val, value.val.string.len),
									 superuser() ? PGC_SUSET : PGC_USERSET, PGC_S_SESSION,
									 GUC_ACTION_SAVE, true, 0, false);
		else if (token == WJB_VALUE)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("settings of a training query must be strings")));
	}
}

void
tensile_apply_settings(Jsonb *settings)
{
	apply_settings(settings, true);
}

void
tensile_apply_settings_of_values(Jsonb *settings)
{
	apply_settings(settings, false);
}

static void
ignore_startup(DestReceiver *self, int operation, TupleDesc desc)
{
}

static void
ignore_end(DestReceiver *self)
{
}

DestReceiver
tensile_dest_receiver(bool (*receive) (TupleTableSlot *, DestReceiver *),
					  void (*startup) (DestReceiver *, int, TupleDesc))
{
	return (DestReceiver) {
		.receiveSlot = receive,.rStartup = startup ? startup : ignore_startup,
		.rShutdown = ignore_end,.rDestroy = ignore_end,.mydest = DestNone
	};
}

void
tensile_run_select(Query *query, const char *sql, DestReceiver *dest)
{
	TensileUserCode code;
	PlannedStmt *plan;
	QueryDesc  *desc;

	tensile_user_code_begin(&code, NULL, NULL);
	plan = tensile_plan_query(query, sql, CURSOR_OPT_PARALLEL_OK);
	PushActiveSnapshot(GetTransactionSnapshot());
	desc = CreateQueryDesc(plan, sql, GetActiveSnapshot(), InvalidSnapshot, dest, NULL, NULL, 0);
	ExecutorStart(desc, 0);
	tensile_executor_run(desc, ForwardScanDirection, 0);
	ExecutorFinish(desc);
	ExecutorEnd(desc);
	FreeQueryDesc(desc);
	PopActiveSnapshot();
	tensile_user_code_end(&code);
}

const char *
tensile_nearest_name(const char *name, const char *const *names, int nnames)
{
	int			length = strlen(name);
	int			limit = Min(3, length / 2 + 1);
	const char *nearest = NULL;

	for (int i = 0; i < nnames; i++)
	{
		int			candidate_length = strlen(names[i]);
		int			distance;

		if (length > MAX_NAME_LENGTH || candidate_length > MAX_NAME_LENGTH)
			continue;
		distance = varstr_levenshtein_less_equal(name, length, names[i], candidate_length,
												 1, 1, 1, limit, true);
		if (distance > 0 && distance <= limit)
		{
			nearest = names[i];
			limit = distance - 1;
		}
	}
	return nearest;
}

int
tensile_hint_nearest(const char *name, const char *const *names, int nnames, const char *otherwise)
{
	const char *nearest = tensile_nearest_name(name, names, nnames);

	return nearest ? errhint("Did you mean \"%s\"?", nearest) : errhint("%s", otherwise);
}
