/*
 * functions.h: the functions whose calls the executor can batch.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_BATCHING_FUNCTIONS_H
#define TENSILE_BATCHING_FUNCTIONS_H

#include "nodes/plannodes.h"

typedef enum CallResult
{
	RESULT_NUMBER,				/* predict */
	RESULT_LABEL,				/* predict_class */
	RESULT_INTERVAL				/* predict_interval */
} CallResult;

typedef enum CallRow
{
	ROW_RECORD,
	ROW_NUMBERS,				/* float8[] */
	ROW_OBJECT,					/* jsonb */
	ROW_TEXT					/* json, or a text that is an object */
} CallRow;

/* The arguments are model, row, coverage (of an interval) and memory_budget. */
typedef struct BatchedFunction
{
	const char *symbol;			/* in this library */
	CallResult	result;
	CallRow		row;
} BatchedFunction;

#define MODEL_ARGUMENT 0
#define ROW_ARGUMENT 1
#define COVERAGE_ARGUMENT 2		/* of predict_interval */

/* Cheap: does the plan call any function that is not PostgreSQL's own? */
extern bool batched_functions_possible(const PlannedStmt *statement);

/* The number of the function, as batched_function() takes it; -1: another one. */
extern int	batched_function_number(Oid function);
extern const BatchedFunction *batched_function(int number);

/* The row that a call predicts for. */
extern Expr *row_of_call(const FuncExpr *call);

#endif
