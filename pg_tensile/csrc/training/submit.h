/*
 * submit.h: checks of a training query when it is submitted, and when it runs.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_SUBMIT_H
#define TENSILE_SUBMIT_H

#include "fmgr.h"
#include "nodes/parsenodes.h"
#include "utils/jsonb.h"

/* Arguments of train_model and explain_training by position. */
#define TENSILE_ARG_QUERY 1
#define TENSILE_ARG_TARGET 2
#define TENSILE_ARG_OPTIONS 12
#define TENSILE_ARG_SPLIT_BY 13
#define TENSILE_ARG_VALIDATION_QUERY 14
#define TENSILE_N_ARGS 16

/*
 * The column that marks the rows of the validation query, among those of the
 * training query.
 */
#define TENSILE_VALIDATION_COLUMN "tensile_validation"

/* What determines the rows of a training; the last two may be NULL. */
typedef struct TrainingQuery
{
	const char *query;
	const char *target;
	const char *split_by;
	const char *validation_query;
} TrainingQuery;

/* Those of the arguments of train_model or explain_training. */
extern TrainingQuery tensile_training_query(FunctionCallInfo fcinfo);

/*
 * Checks the arguments as the caller, and raises the errors of train_model.
 * Returns the features that are arrays: a text[] of name and type on the wire
 * of each.
 */
extern Datum tensile_check_submission(FunctionCallInfo fcinfo);

/*
 * Plans the query and starts it without reading a row.  Raises 42501 for what
 * the current user may not read or call, and 0A000 for temporary tables.
 */
extern void tensile_check_privileges(const char *sql, const char *what);

/*
 * Checks the query of the option "gate", if there is one (gate.c), beside the
 * analysed training query.
 */
extern void tensile_check_gate(const TrainingQuery *training, const Query *query, Jsonb *options);

/*
 * In a public function f(args): calls tensile._f(caller's OID, args,
 * search_path, arrays).
 */
extern Datum tensile_forward_submission(FunctionCallInfo fcinfo, Datum arrays);

/*
 * Analyses the queries, each by itself, and returns the one that reads all
 * rows, and its text.  Raises an error unless each is one SELECT that changes
 * nothing, for names that appear twice, types that cannot be trained on, a
 * missing or unusable target or split column, a training query without
 * features, and a validation query with other columns.
 */
extern Query *tensile_analyze_training(const TrainingQuery *training, const char **sql);

#endif
