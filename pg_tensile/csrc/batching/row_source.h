/*
 * row_source.h: where the row of a call comes from.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_ROW_SOURCE_H
#define TENSILE_ROW_SOURCE_H

#include "nodes/execnodes.h"

#include "batching/functions.h"
#include "predicting/predict_site.h"

typedef struct RowSource RowSource;

/* That of a call over the output of the node's input, which `econtext` has. */
extern RowSource *row_source_create(const FuncExpr *call, CallRow form, PlanState *node,
									ExprContext *econtext);

/* The call as it is evaluated for a row by itself: a row of a table becomes a value. */
extern Expr *row_source_call(const FuncExpr *call);

/* Finds the features of the site's model. */
extern void row_source_open(RowSource *self, const CallSite *site);

/* Packs the row into the site's batch; false: the row is null. */
extern bool row_source_pack(RowSource *self, CallSite *site);

#endif
