/*
 * compat.h: differences between the major versions of PostgreSQL, 15 to 19.
 * No other file tests the version.
 *
 * Each macro has the meaning of the newest version, without arguments that
 * only older ones want.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_COMPAT_H
#define TENSILE_COMPAT_H

/* Part of postgres.h before 16. */
#if PG_VERSION_NUM >= 160000
#include "varatt.h"
#endif

/* Stands before a declaration. */
#if PG_VERSION_NUM < 180000
#define pg_noreturn pg_attribute_noreturn()
#endif

/* Libraries tell their name and version from 18 on (pg_get_loaded_modules). */
#if PG_VERSION_NUM >= 180000
#define TENSILE_MODULE_MAGIC(module, number) PG_MODULE_MAGIC_EXT(.name = module, .version = number)
#else
#define TENSILE_MODULE_MAGIC(module, number) PG_MODULE_MAGIC
#endif

/* Shared memory is registered with callbacks from 19 on, instead of two hooks. */
#if PG_VERSION_NUM >= 190000
#define TENSILE_HAS_SHMEM_CALLBACKS
#endif

/* Background workers may give way to ALTER DATABASE and the like from 19 on. */
#if PG_VERSION_NUM < 190000
#define BGWORKER_INTERRUPTIBLE 0
#endif

/* Signal handlers have a second argument from 19 on, which says whose signal it is (0: not known). */
#if PG_VERSION_NUM >= 190000
#define TENSILE_PASS_SIGNAL_ARGS postgres_signal_arg, pg_siginfo
#define TENSILE_SIGNAL_SENDER ((pid_t) pg_siginfo->pid)
#else
#define TENSILE_PASS_SIGNAL_ARGS postgres_signal_arg
#define TENSILE_SIGNAL_SENDER ((pid_t) 0)
#define PG_SIG_IGN SIG_IGN
#endif

/* Waits of an extension have names of their own from 17 on. */
#if PG_VERSION_NUM < 170000
#define WaitEventExtensionNew(name) ((void) (name), PG_WAIT_EXTENSION)
#endif

/*
 * From 17 on, wait event sets belong to a resource owner, or (NULL) have to be
 * freed by FreeWaitEventSet(), instead of a memory context.
 */
#if PG_VERSION_NUM >= 170000
#define tensile_create_wait_event_set(context, nevents) CreateWaitEventSet(NULL, nevents)
#else
#define tensile_create_wait_event_set(context, nevents) CreateWaitEventSet(context, nevents)
#endif

/* The state of EXPLAIN became an argument in 19. */
#if PG_VERSION_NUM >= 190000
#define tensile_plan_query(query, text, options) pg_plan_query(query, text, options, NULL, NULL)
#else
#define tensile_plan_query(query, text, options) pg_plan_query(query, text, options, NULL)
#endif

/* The state of transaction numbers, and the number of this process's transaction. */
#if PG_VERSION_NUM >= 170000
#define tensile_transaction_state TransamVariables
#define tensile_local_transaction (MyProc->vxid.lxid)
#else
#define tensile_transaction_state ShmemVariableCache
#define tensile_local_transaction (MyProc->lxid)
#endif

/* The same of the planner and its hook. */
#if PG_VERSION_NUM >= 190000
#define TENSILE_PLANNER_PARAMS \
	Query *query, const char *source, int options, ParamListInfo params, struct ExplainState *explain
#define TENSILE_PLANNER_ARGUMENTS query, source, options, params, explain
#else
#define TENSILE_PLANNER_PARAMS \
	Query *query, const char *source, int options, ParamListInfo params
#define TENSILE_PLANNER_ARGUMENTS query, source, options, params
#endif

/* What prints properties in EXPLAIN has headers of its own from 18 on. */
#if PG_VERSION_NUM >= 180000
#define TENSILE_EXPLAIN_FORMAT_H "commands/explain_format.h"
#define TENSILE_EXPLAIN_STATE_H "commands/explain_state.h"
#else
#define TENSILE_EXPLAIN_FORMAT_H "commands/explain.h"
#define TENSILE_EXPLAIN_STATE_H "commands/explain.h"
#endif

/* Is the time of a node being measured, as from InstrStartNode() to InstrStopNode()? */
#if PG_VERSION_NUM >= 190000
#define tensile_is_measuring(instrument) (!INSTR_TIME_IS_ZERO((instrument)->instr.starttime))
#else
#define tensile_is_measuring(instrument) (!INSTR_TIME_IS_ZERO((instrument)->starttime))
#endif

/* random() has overloads from 17 on. */
#if PG_VERSION_NUM >= 170000
#define TENSILE_F_RANDOM F_RANDOM_
#else
#define TENSILE_F_RANDOM F_RANDOM
#endif

/* Expressions of SQL/JSON that make a value. */
#if PG_VERSION_NUM >= 170000
#define tensile_is_json_value(node) (IsA(node, JsonExpr) || IsA(node, JsonConstructorExpr))
#elif PG_VERSION_NUM >= 160000
#define tensile_is_json_value(node) IsA(node, JsonConstructorExpr)
#else
#define tensile_is_json_value(node) false
#endif

/*
 * What a query needs of the relations that it reads: a list of its own from 16
 * on.
 */
#if PG_VERSION_NUM >= 160000
#define TensilePermission RTEPermissionInfo
#define tensile_permissions(query) ((query)->rteperminfos)
#else
#define TensilePermission RangeTblEntry
#define tensile_permissions(query) ((query)->rtable)
#endif

/* The argument run_once, always true, was removed in 18. */
#if PG_VERSION_NUM >= 180000
#define tensile_executor_run(desc, direction, count) ExecutorRun(desc, direction, count)
#define tensile_portal_run(portal, count, top_level, dest, alternative, completion) \
	PortalRun(portal, count, top_level, dest, alternative, completion)
#else
#define tensile_executor_run(desc, direction, count) ExecutorRun(desc, direction, count, true)
#define tensile_portal_run(portal, count, top_level, dest, alternative, completion) \
	PortalRun(portal, count, top_level, true, dest, alternative, completion)
#endif

/* Callbacks of the JSON parser have a result from 16 on. */
#if PG_VERSION_NUM >= 160000
#define TensileJsonResult JsonParseErrorType
#define TENSILE_JSON_SUCCESS JSON_SUCCESS
#else
#define TensileJsonResult void
#define TENSILE_JSON_SUCCESS
#endif

/* The state of the JSON parser, for UTF-8 with its escapes; freed from 17 on by a function. */
#if PG_VERSION_NUM >= 170000
#define tensile_json_lexer(text, length) \
	makeJsonLexContextCstringLen(NULL, unconstify(char *, text), length, PG_UTF8, true)
#define tensile_free_json_lexer(lexer) freeJsonLexContext(lexer)
#else
#define tensile_json_lexer(text, length) \
	makeJsonLexContextCstringLen(unconstify(char *, text), length, PG_UTF8, true)
#define tensile_free_json_lexer(lexer) \
	(pfree((lexer)->strval->data), pfree((lexer)->strval), pfree(lexer))
#endif

#endif
