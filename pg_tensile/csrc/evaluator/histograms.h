/*
 * histograms.h: the bins of features and predictions
 * (pg_tensile/execution/data/drift.py).
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_HISTOGRAMS_H
#define TENSILE_HISTOGRAMS_H

#include "evaluator/answers.h"
#include "evaluator/features.h"

/*
 * Bins are null, those between the cuts, or of codes, or of the labels, and
 * for strings and labels all others.
 */
typedef enum HistogramKind
{
	HISTOGRAM_NUMBERS,
	HISTOGRAM_CODES,
	HISTOGRAM_PREDICTIONS,
	HISTOGRAM_LABELS
} HistogramKind;

typedef struct Histogram
{
	HistogramKind kind;
	int			feature;		/* among numbers or categories */
	int			start;			/* the first bin among those of all */
	int			bins;
	int			count;			/* of cuts or labels */
	const double *cuts;			/* ascending */
	const int32 *labels;
} Histogram;

typedef struct Histograms
{
	int			count;
	Histogram  *items;
	int			bins;			/* of all */
} Histograms;

extern void histograms_open(Histograms *self, ImageReader *reader, const Features *features);
extern void histograms_close(Histograms *self);

/* The bin of each histogram that a row belongs to, among those of all. */
extern void histograms_find(const Histograms *self, const EvaluatorRows *rows, int row,
							double prediction, int32 label, int *bins);

#endif
