/*
 * planner.h: batches of predictions in plans.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_BATCHING_PLANNER_H
#define TENSILE_BATCHING_PLANNER_H

extern void tensile_install_batching(void);

#endif
