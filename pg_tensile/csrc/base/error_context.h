/*
 * error_context.h: the lines of context that follow an error of a public
 * function.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_ERROR_CONTEXT_H
#define TENSILE_ERROR_CONTEXT_H

#include "fmgr.h"

/*
 * Begins the definition of a function in C that users call, in place of
 * PG_FUNCTION_INFO_V1 and the head: its errors have no context of our own.
 */
#define TENSILE_PUBLIC_FUNCTION(name) \
	PG_FUNCTION_INFO_V1(name); \
	static Datum name##_body(FunctionCallInfo fcinfo); \
	Datum \
	name(PG_FUNCTION_ARGS) \
	{ \
		return tensile_call_public(name##_body, fcinfo); \
	} \
	static Datum \
	name##_body(FunctionCallInfo fcinfo)

extern Datum tensile_call_public(PGFunction body, FunctionCallInfo fcinfo);

/* A place where code of the user runs; filled in by tensile_user_code_begin(). */
typedef struct TensileUserCode
{
	ErrorContextCallback callback;
	ErrorContextCallback *stack;	/* to be restored */
	bool		nested;			/* in other code of the user */
} TensileUserCode;

/*
 * Surround code that can call functions of the user: errors that are raised in
 * there have the context of those functions, that of `callback` (which may be
 * NULL), and that of the caller of the public function.
 */
extern void tensile_user_code_begin(TensileUserCode *code, void (*callback) (void *), void *arg);
extern void tensile_user_code_end(const TensileUserCode *code);

/* Is it the SQLSTATE of a fault of ours, and not of something a user did? */
extern bool tensile_is_unexpected(int sqlstate);

/* Has the present error been raised by code of the user? */
extern bool tensile_in_user_code(void);

/*
 * Does this process run a public function or a supervisor, and no code of the
 * user?
 */
extern bool tensile_in_own_code(void);

/* Ends all code of the user after an error in it that is not raised further. */
extern void tensile_user_code_failed(void);

#endif
