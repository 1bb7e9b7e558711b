/*
 * prediction_query.h: the query for predictions that is derived from the
 * training query of a version.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_PREDICTION_QUERY_H
#define TENSILE_PREDICTION_QUERY_H

#include "nodes/parsenodes.h"
#include "utils/jsonb.h"

#include "rows/model.h"

/* A query, and the settings that it needs (query.h); NULL: the session's. */
typedef struct PredictionQuery
{
	const char *sql;
	Jsonb	   *settings;
	Oid			author;			/* role that has trained with it */
} PredictionQuery;

/*
 * That of the model's version.  It reads `source` in place of the table of the
 * training query, unless that is InvalidOid.  Raises 55000 if there is none.
 */
extern PredictionQuery tensile_prediction_query(const PredictModel *model, Oid source);

/*
 * Analyses the query.  Raises 42501 if it would run code of others with the
 * rights of the current user.
 */
extern Query *tensile_analyze_prediction_query(const PredictionQuery *query,
											   const PredictModel *model);

#endif
