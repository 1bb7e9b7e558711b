/*
 * submit.h: checks of a training query when it is submitted, and when it runs.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_SUBMIT_H
#define TENSILE_SUBMIT_H

#include "fmgr.h"
#include "nodes/parsenodes.h"

/* Arguments of train_model and explain_training by position. */
#define TENSILE_ARG_QUERY 1
#define TENSILE_ARG_TARGET 2

/* Checks the arguments as the caller, and raises the errors of train_model. */
extern void tensile_check_submission(FunctionCallInfo fcinfo);

/*
 * In a public function f(args): calls tensile._f(caller's OID, args,
 * search_path).
 */
extern Datum tensile_forward_submission(FunctionCallInfo fcinfo);

/*
 * Raises an error for names that appear twice, types that cannot be trained
 * on, a missing or unusable target, and a query without features.
 */
extern void tensile_check_columns(Query *query, const char *target);

#endif
