/*
 * shared_counts.c: what the workers of a parallel query have predicted.
 *
 * A worker adds its counts before it ends its queue of rows, so the leader has
 * all of them when there are no more rows.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "batching/shared_counts.h"

void
shared_counts_init(SharedCounts *self)
{
	pg_atomic_init_u64(&self->rows, 0);
	pg_atomic_init_u64(&self->batches, 0);
	pg_atomic_init_u64(&self->microseconds, 0);
	pg_atomic_init_u32(&self->version, 0);
}

void
shared_counts_add(SharedCounts *self, RequestCounts *counts)
{
	pg_atomic_fetch_add_u64(&self->rows, counts->rows);
	pg_atomic_fetch_add_u64(&self->batches, counts->batches);
	pg_atomic_fetch_add_u64(&self->microseconds, counts->microseconds);
	if (counts->version != 0)
		pg_atomic_write_u32(&self->version, counts->version);
	*counts = (RequestCounts) {0};
}

RequestCounts
shared_counts_read(SharedCounts *self)
{
	return (RequestCounts) {
		.rows = pg_atomic_read_u64(&self->rows),
		.batches = pg_atomic_read_u64(&self->batches),
		.microseconds = pg_atomic_read_u64(&self->microseconds),
		.version = pg_atomic_read_u32(&self->version)
	};
}
