/*
 * submit.h: checks of the arguments of train_model and its relatives.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_SUBMIT_H
#define TENSILE_SUBMIT_H

#include "fmgr.h"

#include "rows/training_query.h"

/* Arguments of train_model and explain_training by position. */
#define TENSILE_ARG_QUERY 1
#define TENSILE_ARG_TARGET 2
#define TENSILE_ARG_OPTIONS 12
#define TENSILE_ARG_SPLIT_BY 13
#define TENSILE_ARG_VALIDATION_QUERY 14
#define TENSILE_N_ARGS 16

/* Those of the arguments of train_model or explain_training. */
extern TrainingQuery tensile_training_query(FunctionCallInfo fcinfo);

/*
 * Checks the arguments as the caller, and raises the errors of train_model.
 * Returns the features that are arrays: a text[] of name and type on the wire
 * of each.
 */
extern Datum tensile_check_submission(FunctionCallInfo fcinfo);

/*
 * In a public function f(args): calls tensile._f(caller's OID, args,
 * search_path, arrays).
 */
extern Datum tensile_forward_submission(FunctionCallInfo fcinfo, Datum arrays);

#endif
