/*
 * evaluator.h: models that a session evaluates itself.
 *
 * The architectures mlp, tabular, linear, boosted and ensembles of them, small
 * enough, without texts and tokens.  A stored version becomes an image, one
 * block of bytes without pointers, which all sessions map; a session opens the
 * image, which checks every bound, and evaluates rows.
 *
 * The specification is the predictor's: Preprocessing.apply, few_rows of the
 * architecture, and answers (pg_tensile/execution).  A row has the same bits
 * in any batch.
 *
 * The files of this folder need no server: they compile as a part of the
 * extension and, with FRONTEND, of a library for trainers and of a plain
 * program, which tests run under sanitizers.  They raise no error; functions
 * that can fail say so.  Memory is palloc'ed, in the current context.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_EVALUATOR_H
#define TENSILE_EVALUATOR_H

#include "evaluator/interface.h"

/* A version as the tables have it: JSON in UTF-8, and a safetensors file. */
typedef struct StoredVersion
{
	const char *architecture;
	Size		architecture_length;
	const char *preprocessing;
	Size		preprocessing_length;
	const char *reference;		/* of drift; NULL: none */
	Size		reference_length;
	const char *weights;
	Size		weight_bytes;
} StoredVersion;

extern int	evaluator_interface(void);

/*
 * Makes the image of a version, palloc'ed, as is a problem.  `identity` is kept
 * in it.
 */
extern EvaluatorStatus evaluator_compile(const StoredVersion *version, uint64 identity,
										 char **image, Size *bytes, const char **problem);

typedef struct Evaluator Evaluator;

/*
 * Opens an image, which must stay as it is, at an address that is a multiple
 * of 64.  NULL, and a problem, if it is not one with this identity or any
 * bound is wrong.
 */
extern Evaluator *evaluator_open(const void *image, Size bytes, uint64 identity,
								 const char **problem);

/* Frees what evaluator_open() has allocated; the image remains. */
extern void evaluator_close(Evaluator *self);

/* The numbers of its features, by kind, that rows have to have. */
extern void evaluator_features(const Evaluator *self, int *scalars, int *categories, int *arrays);

extern int	evaluator_outputs_per_row(const Evaluator *self);
extern int	evaluator_labels(const Evaluator *self);	/* 0: a regression */

/*
 * The code of a category's string, from 0; 0 if there is no such category.
 * `unknown`: it counts as one that was never seen in training.
 */
extern int32 evaluator_code(const Evaluator *self, int category, const char *utf8, int length,
							bool *unknown);

/*
 * Computes the model's outputs [rows][outputs], as float32 numbers in doubles.
 * False: an array has a wrong length.
 */
extern bool evaluator_outputs(Evaluator *self, const EvaluatorRows *rows, double *outputs,
							  EvaluatorMismatch *mismatch);

/*
 * Answers of outputs, each [rows] (docs/internals.md, "Features (PREDICT)"):
 * NaN, and a label of -1, for what the task lacks.
 */
extern void evaluator_answers(const Evaluator *self, const double *outputs, int rows,
							  double *prediction, double *probability, int32 *label);

/* A classifier's probabilities [rows][labels]. */
extern void evaluator_probabilities(const Evaluator *self, const double *outputs, int rows,
									double *probabilities);

/* The number of validation rows that intervals come from. */
extern int64 evaluator_interval_rows(const Evaluator *self);

/* A regression's bounds [rows] with this coverage, in (0, 1). */
extern EvaluatorInterval evaluator_interval(const Evaluator *self, const double *outputs, int rows,
											double coverage, double *lower, double *upper);

/*
 * The number of bins of the version's histograms, of all columns together; 0:
 * it has none.
 */
extern int	evaluator_bins(const Evaluator *self);

/* The bin of each histogram that a row belongs to, among all bins: [histograms]. */
extern int	evaluator_histograms(const Evaluator *self);
extern void evaluator_row_bins(const Evaluator *self, const EvaluatorRows *rows, int row,
							   double prediction, int32 label, int *bins);

#endif
