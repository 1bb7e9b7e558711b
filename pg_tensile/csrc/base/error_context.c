/*
 * error_context.c: the lines of context that follow an error of a public
 * function.
 *
 * A public function does its work in other functions, in PL/pgSQL and PL/Python,
 * each of which would add a line.  Those lines mean nothing to a user, so an
 * error leaves a public function with the context of its caller only.  Errors
 * of the user's code, such as functions in a training query, keep the lines of
 * that code: where it runs, the stack of contexts continues with that of the
 * caller, so the lines between are left out of its notices as well.
 *
 * Internal errors (class XX) and exceptions of Python (38) keep all lines, which
 * a report of them needs.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "base/compat.h"
#include "base/error_context.h"
#include "base/process_kind.h"

/* Where this process is. */
typedef struct Place
{
	bool		in_public_function;
	bool		in_user_code;
	ErrorContextCallback *caller;	/* context of the public function's caller */
} Place;

static Place place;

bool
tensile_is_unexpected(int sqlstate)
{
	int			category = ERRCODE_TO_CATEGORY(sqlstate);

	return category == ERRCODE_INTERNAL_ERROR || category == ERRCODE_EXTERNAL_ROUTINE_EXCEPTION;
}

/* Raises the current error again, without the context that it has so far. */
pg_noreturn static void
rethrow_without_context(MemoryContext context)
{
	ErrorData  *error;

	MemoryContextSwitchTo(context);
	error = CopyErrorData();
	FlushErrorState();
	error->context = NULL;
	ThrowErrorData(error);		/* adds the caller's */
	pg_unreachable();
}

/*
 * A public function that our own code calls, as materialize_predictions calls
 * predict_rows, is a part of the one that the user has called.
 */
Datum
tensile_call_public(PGFunction body, FunctionCallInfo fcinfo)
{
	const Place outside = place;
	MemoryContext context = CurrentMemoryContext;
	Datum		result;

	if (place.in_public_function && !place.in_user_code)
		return body(fcinfo);
	place = (Place) {.in_public_function = true,.caller = error_context_stack};
	PG_TRY();
	{
		result = body(fcinfo);
	}
	PG_CATCH();
	{
		bool		strip = !place.in_user_code && !tensile_is_unexpected(geterrcode());

		place = outside;
		if (strip)
			rethrow_without_context(context);
		PG_RE_THROW();
	}
	PG_END_TRY();
	place = outside;
	return result;
}

void
tensile_user_code_begin(TensileUserCode *code, void (*callback) (void *), void *arg)
{
	code->stack = error_context_stack;
	code->nested = place.in_user_code;
	code->callback = (ErrorContextCallback) {place.caller, callback, arg};
	error_context_stack = callback != NULL ? &code->callback : place.caller;
	place.in_user_code = true;
}

void
tensile_user_code_end(const TensileUserCode *code)
{
	error_context_stack = code->stack;
	place.in_user_code = code->nested;
}

bool
tensile_in_user_code(void)
{
	return place.in_user_code;
}

bool
tensile_in_own_code(void)
{
	return !place.in_user_code &&
		(place.in_public_function || tensile_process != TENSILE_NO_PROCESS);
}

void
tensile_user_code_failed(void)
{
	place.in_user_code = false;
}
