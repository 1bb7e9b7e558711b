/*
 * evaluation_rows.h: the rows of a query for trainers that evaluate versions
 * of models.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_EVALUATION_ROWS_H
#define TENSILE_EVALUATION_ROWS_H

#include "access/tupdesc.h"

#include "rows/model.h"

#define EVALUATION_QUERY_NAME "query of rows to evaluate"

/* A trainer behind a socket, and the version that it has. */
typedef struct EvaluationReader
{
	int			fd;
	const PredictModel *model;
} EvaluationReader;

/*
 * Raises 42703, 42702 or 42804 for columns that the version needs and that are
 * missing or wrong.  `by`: name of the column of groups; NULL: none.
 */
extern void evaluation_check_columns(const PredictModel *model, const char *by, TupleDesc desc);

/*
 * Runs the query once, read only, as the current user, and sends its rows to
 * each of the trainers.  Returns their number.
 */
extern int64 evaluation_feed(const char *query, const char *what, const char *by,
							 const EvaluationReader *readers, int nreaders);

#endif
