/*
 * plans.h: all nodes of a plan.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_PLANS_H
#define TENSILE_PLANS_H

#include "nodes/plannodes.h"

/* The largest number of a node. */
extern int	plans_last_id(const PlannedStmt *statement);

/* The number of nodes that read the common table expression with this number. */
extern int	plans_readers(const PlannedStmt *statement, int cte_plan);

#endif
