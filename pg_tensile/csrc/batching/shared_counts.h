/*
 * shared_counts.h: what the workers of a parallel query have predicted.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_BATCHING_SHARED_COUNTS_H
#define TENSILE_BATCHING_SHARED_COUNTS_H

#include "port/atomics.h"

/* What EXPLAIN ANALYZE shows of a request. */
typedef struct RequestCounts
{
	int64		rows;
	int64		batches;
	int64		microseconds;	/* until the answers came, if time is measured */
	int32		version;		/* the number of the one that has answered; 0: none */
} RequestCounts;

/* The sums of all workers for one request, in the memory that they share. */
typedef struct SharedCounts
{
	pg_atomic_uint64 rows;
	pg_atomic_uint64 batches;
	pg_atomic_uint64 microseconds;
	pg_atomic_uint32 version;
} SharedCounts;

extern void shared_counts_init(SharedCounts *self);

/* In a worker: adds what has been counted, and sets it back. */
extern void shared_counts_add(SharedCounts *self, RequestCounts *counts);
extern RequestCounts shared_counts_read(SharedCounts *self);

#endif
