/*
 * scan.h: execution of the node that predicts for the rows of the node below.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_BATCHING_SCAN_H
#define TENSILE_BATCHING_SCAN_H

#include "nodes/extensible.h"

/* To be registered in the postmaster, so that all processes know the node. */
extern const CustomScanMethods predict_scan_methods;

#endif
