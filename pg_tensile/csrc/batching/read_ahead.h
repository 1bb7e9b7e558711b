/*
 * read_ahead.h: what may be evaluated for rows that are not passed on yet.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_READ_AHEAD_H
#define TENSILE_READ_AHEAD_H

#include "nodes/plannodes.h"

/* From the least to the most that is allowed. */
typedef enum ReadAhead
{
	READ_AHEAD_NEVER,			/* it has side effects */
	READ_AHEAD_IF_ALL_ARE_READ, /* it may raise an error that cannot wait for its row */
	READ_AHEAD_ALWAYS
} ReadAhead;

extern ReadAhead read_ahead_expression(Node *expression, const PlannedStmt *statement);

/* Of a plan and what is below. */
extern ReadAhead read_ahead_plan(Plan *plan, const PlannedStmt *statement);

/*
 * The same without its target list, but for the aggregates and window
 * functions in there.
 */
extern ReadAhead read_ahead_input(Plan *plan, const PlannedStmt *statement);

/*
 * Can an error in something with READ_AHEAD_ALWAYS wait until its row is due?
 * `packing`: it came while features were evaluated and packed.
 */
extern bool read_ahead_error_can_wait(int sqlstate, bool packing);

#endif
