/*
 * drift_counts.h: counts of rows that sessions have predicted, in the bins of
 * their versions' histograms.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_DRIFT_COUNTS_H
#define TENSILE_DRIFT_COUNTS_H

#include "port/atomics.h"

#include "evaluator/evaluator.h"
#include "rows/predict_features.h"
#include "state/images.h"

/* The counts of a version, which all sessions share. */
typedef struct DriftCounts
{
	pg_atomic_uint64 *numbers;	/* of rows in all, and in each bin; NULL: not counted */
	int			bins;
} DriftCounts;

/* Makes the file with that path, of counts that are 0, unless it is there. */
extern void drift_counts_create(const char *path, int bins);

/* Maps the file; without one, nothing is counted. */
extern void drift_counts_map(DriftCounts *self, const char *path, int bins);
extern void drift_counts_unmap(DriftCounts *self);

/*
 * The number of the next rows, at most `rows`, up to the one that counts, and
 * that one; 0: none of them does.
 */
extern int	drift_next(int rows);

/* Counts a row of a batch with these answers. */
extern void drift_count(DriftCounts *self, TensileImage *image, const Evaluator *evaluator,
						const FeatureBatch *batch, int row, double prediction, int32 label);

#endif
