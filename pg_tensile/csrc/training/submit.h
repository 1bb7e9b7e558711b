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

/* Those of the arguments of train_model or explain_training. */
extern TrainingQuery tensile_training_query(FunctionCallInfo fcinfo);

/*
 * In a public function f with the arguments of train_model and, among them,
 * n_own of its own, the first one at position first_own: checks those of
 * train_model as the caller, and calls tensile_internal._f(caller's OID, arguments of
 * train_model as one jsonb, own arguments, search_path, features that are
 * arrays).
 */
extern Datum tensile_submit(FunctionCallInfo fcinfo, int first_own, int n_own);

#endif
