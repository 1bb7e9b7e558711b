/*
 * compat.h: what differs between the major versions of PostgreSQL, 15 to 19. No other file asks for the version.
 *
 * Each macro has the newest version's meaning, without the arguments that only older ones want.
 */
#ifndef TENSILE_COMPAT_H
#define TENSILE_COMPAT_H

/* Part of postgres.h before. */
#if PG_VERSION_NUM >= 160000
#include "varatt.h"
#endif

/* Comes before a declaration. */
#if PG_VERSION_NUM < 180000
#define pg_noreturn pg_attribute_noreturn()
#endif

/* Handlers of signals take a second argument. */
#if PG_VERSION_NUM >= 190000
#define TENSILE_PASS_SIGNAL_ARGS postgres_signal_arg, pg_siginfo
#else
#define TENSILE_PASS_SIGNAL_ARGS postgres_signal_arg
#define PG_SIG_IGN SIG_IGN
#endif

/* Waits of an extension have names of its own. */
#if PG_VERSION_NUM < 170000
#define WaitEventExtensionNew(name) ((void) (name), PG_WAIT_EXTENSION)
#endif

/* Sets belong to a resource owner instead of a memory context. NULL: to none, FreeWaitEventSet() is called by hand. */
#if PG_VERSION_NUM >= 170000
#define tensile_create_wait_event_set(context, nevents) CreateWaitEventSet(NULL, nevents)
#else
#define tensile_create_wait_event_set(context, nevents) CreateWaitEventSet(context, nevents)
#endif

/* No parameters; a state of EXPLAIN became an argument. */
#if PG_VERSION_NUM >= 190000
#define tensile_plan_query(query, text, options) pg_plan_query(query, text, options, NULL, NULL)
#else
#define tensile_plan_query(query, text, options) pg_plan_query(query, text, options, NULL)
#endif

/* The argument run_once, always true, is gone. */
#if PG_VERSION_NUM >= 180000
#define tensile_executor_run(desc, direction, count) ExecutorRun(desc, direction, count)
#define tensile_portal_run(portal, count, dest, alternative, completion) \
	PortalRun(portal, count, true, dest, alternative, completion)
#else
#define tensile_executor_run(desc, direction, count) ExecutorRun(desc, direction, count, true)
#define tensile_portal_run(portal, count, dest, alternative, completion) \
	PortalRun(portal, count, true, true, dest, alternative, completion)
#endif

#endif
