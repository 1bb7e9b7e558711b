/*
 * calls.h: calls in expressions that can be batched.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_BATCHING_CALLS_H
#define TENSILE_BATCHING_CALLS_H

#include "nodes/plannodes.h"

#include "batching/read_ahead.h"

/*
 * The calls (FuncExpr) in an expression that are evaluated whenever it is,
 * whose rows may be evaluated ahead: always, or `least` allows less.
 */
extern List *calls_in(Node *expression, const PlannedStmt *statement, ReadAhead least);

/* The same in the arguments of aggregates, which are evaluated for every input row. */
extern List *calls_in_aggregates(Node *expression, const PlannedStmt *statement, ReadAhead least);

/* The row that the call predicts for. */
extern Expr *row_of_call(const FuncExpr *call);

#endif
