/*
 * training_query.h: checks of a training query when it is submitted, and when
 * it runs.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_TRAINING_QUERY_H
#define TENSILE_TRAINING_QUERY_H

#include "nodes/parsenodes.h"
#include "utils/array.h"

/* Of the queries, in messages. */
#define TRAINING_QUERY_NAME "training query"
#define VALIDATION_QUERY_NAME "validation query"

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

/*
 * Analyses the queries, each by itself, and returns the one that reads all
 * rows, and its text.  Raises an error unless each is one SELECT that changes
 * nothing, for names that appear twice, types that cannot be trained on, a
 * missing or unusable target or split column, a training query without
 * features, and a validation query with other columns.
 */
extern Query *tensile_analyze_training(const TrainingQuery *training, const char **sql);

/*
 * The names of the columns that are arrays, a text[].  A target is no array,
 * and the flag of validation rows neither.
 */
extern ArrayType *tensile_array_columns(const Query *query);

/*
 * Plans the query and starts it without reading a row.  Raises 42501 for what
 * the current user may not read or call, and 0A000 for temporary tables.
 */
extern void tensile_check_privileges(const char *sql, const char *what);

#endif
