/*
 * predictions.h: counters of predictions, and the models that the predictor
 * has loaded.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_PREDICTIONS_H
#define TENSILE_PREDICTIONS_H

#include "port/atomics.h"

#define TENSILE_MAX_PREDICTIONS 256 /* model versions with counters */
#define TENSILE_MAX_LOADED 256	/* models in tensile.loaded_models */

typedef struct TensilePredictions
{
	int64		version;		/* model_versions.id in that database; 0: free */
	Oid			database;
	pg_atomic_uint64 rows;
	pg_atomic_uint64 requests;
	pg_atomic_uint64 unknown_categories;
	pg_atomic_uint64 last_used; /* a TimestampTz */
} TensilePredictions;

/* Numbers of one model of the predictor: what tensile_internal._report_loaded takes, in order. */
typedef struct TensileLoaded
{
	int64		version;		/* model_versions.id in the predictor's database */
	int64		memory_budget;	/* bytes; 0: executed in one piece */
	int64		device_bytes;
	int64		planned_bytes;	/* 0: executed in one piece */
	int64		host_bytes;
} TensileLoaded;

typedef char TensileDeviceName[NAMEDATALEN];

extern void tensile_count_predictions(int64 version, int64 rows, int64 unknown_categories);

#endif
