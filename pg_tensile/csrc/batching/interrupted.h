/*
 * interrupted.h: nodes of a running plan in which an error has been caught.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_INTERRUPTED_H
#define TENSILE_INTERRUPTED_H

#include "nodes/execnodes.h"

/* Do workers compute rows of the node, whose errors come at any time? */
extern bool computed_by_workers(PlanState *node);

/* Ends the measurements that the error has left running. */
extern void stop_measurements(PlanState *node);

/* Does a rescan bring the node into the state of a new one? */
extern bool rescan_starts_anew(PlanState *node);

#endif
