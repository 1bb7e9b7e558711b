/*
 * session_answers.c: answers that the session computes itself.
 *
 * Everything that an answer points to is in one context of the session, which
 * the next answer resets.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include <math.h>

#include "utils/memutils.h"

#include "predicting/session_answers.h"

#define ROUNDING 1e-9			/* of numbers of rows that a coverage needs */

/* ---- features ---- */

static int
array_feature(const FeatureSet *set, int array)
{
	for (int i = 0; i < set->count; i++)
		if (set->features[i].kind == FEATURE_ARRAY && set->features[i].index == array)
			return i;
	elog(ERROR, "the model has no array feature %d", array);
}

pg_noreturn static void
array_mismatch(const FeatureSet *set, const EvaluatorMismatch *mismatch)
{
	ereport(ERROR,
			(errcode(ERRCODE_DATA_EXCEPTION),
			 errmsg("feature \"%s\" has an array of %d elements in row %d, not %d",
					set->names[array_feature(set, mismatch->array)], mismatch->length,
					mismatch->row + 1, mismatch->expected),
			 errhint("The model was trained with arrays of %d elements.", mismatch->expected)));
}

/*
 * Turns a category's strings in the batch into the model's codes, and counts
 * the unknown ones of each row.
 */
static void
encode_category(const Evaluator *evaluator, const FeatureBatch *batch, int category, int32 *codes,
				int32 *unknown)
{
	const Dictionary *dictionary = &batch->dictionaries[category];
	const int32 *places = batch->codes + (Size) category * batch->capacity;
	int32	   *of_string = palloc(sizeof(int32) * Max(dictionary->count, 1));
	bool	   *is_unknown = palloc(sizeof(bool) * Max(dictionary->count, 1));

	for (int32 i = 0; i < dictionary->count; i++)
	{
		int			length;
		const char *string = dictionary_string(dictionary, i, &length);

		of_string[i] = evaluator_code(evaluator, category, string, length, &is_unknown[i]);
	}
	for (int row = 0; row < batch->row; row++)
	{
		bool		is_null = places[row] < 0;

		codes[row] = is_null ? -1 : of_string[places[row]];
		unknown[row] += !is_null && is_unknown[places[row]];
	}
}

static EvaluatorRows
session_rows(const Evaluator *evaluator, const FeatureBatch *batch, int32 *unknown)
{
	const FeatureSet *set = batch->set;
	int32	   *codes = palloc(sizeof(int32) * Max((Size) set->ncategories * batch->capacity, 1));
	EvaluatorArrays *arrays = palloc(sizeof(EvaluatorArrays) * Max(set->narrays, 1));

	for (int i = 0; i < set->ncategories; i++)
		encode_category(evaluator, batch, i, codes + (Size) i * batch->capacity, unknown);
	for (int i = 0; i < set->narrays; i++)
		arrays[i] = (EvaluatorArrays) {
			batch->arrays[i].lengths, (const double *) batch->arrays[i].elements.data
		};
	return (EvaluatorRows) {
		.rows = batch->row,.capacity = batch->capacity,.scalars = batch->scalars,
			.codes = codes,.arrays = arrays
	};
}

/* ---- answers ---- */

static double *
numbers(Size count)
{
	return MemoryContextAllocHuge(CurrentMemoryContext, sizeof(double) * Max(count, 1));
}

/* Raises the error of an interval that the validation rows do not support. */
static void
require_interval(const Evaluator *evaluator, EvaluatorInterval interval, double coverage)
{
	int64		validation_rows = evaluator_interval_rows(evaluator);

	if (interval == INTERVAL_NO_ROWS)
		ereport(ERROR,
				(errcode(ERRCODE_DATA_EXCEPTION),
				 errmsg("the model was trained without validation rows, from which intervals "
						"are derived"),
				 errhint("Train it again with validation above 0.")));
	if (interval == INTERVAL_FEW_ROWS)
		ereport(ERROR,
				(errcode(ERRCODE_DATA_EXCEPTION),
				 errmsg("a coverage of %g needs at least %.0f validation rows, "
						"but the model had " INT64_FORMAT " validation row%s",
						coverage, ceil(coverage / (1.0 - coverage) - ROUNDING),
						validation_rows, validation_rows == 1 ? "" : "s"),
				 errhint("Use a coverage of at most %g, or train with more validation rows.",
						 floor(1e4 * validation_rows / (validation_rows + 1.0)) / 1e4)));
}

/* Fills in what the wish asks for, if the task has it. */
static void
grant_wish(const Evaluator *evaluator, const PredictModel *model, const double *outputs,
		   const Wish *wish, Predictions *answers)
{
	WireBuffer *extras = palloc(sizeof(WireBuffer) * 2);
	int			rows = answers->rows;
	bool		optional = wish->kind == WISH_OPTIONAL_INTERVAL;
	EvaluatorInterval interval;
	double	   *first;
	double	   *second;

	answers->extras = extras;
	answers->nextras = 0;
	if ((wish->kind == WISH_INTERVAL || optional) && model->task == TASK_REGRESSION)
	{
		first = numbers(rows);
		second = numbers(rows);
		interval = evaluator_interval(evaluator, outputs, rows, wish->coverage, first, second);
		if (!optional)
			require_interval(evaluator, interval, wish->coverage);
		if (interval != INTERVAL_READY)
			return;
		extras[answers->nextras++] = (WireBuffer) {first, sizeof(double) * rows};
		extras[answers->nextras++] = (WireBuffer) {second, sizeof(double) * rows};
	}
	else if (wish->kind == WISH_PROBABILITIES && model->task != TASK_REGRESSION)
	{
		Size		count = (Size) rows * evaluator_labels(evaluator);

		first = numbers(count);
		evaluator_probabilities(evaluator, outputs, rows, first);
		extras[answers->nextras++] = (WireBuffer) {first, sizeof(double) * count};
	}
}

static void
fill_answers(Evaluator *evaluator, const PredictModel *model, const FeatureBatch *batch,
			 const Wish *wish, Predictions *answers)
{
	int			rows = batch->row;
	int32	   *unknown = palloc0(sizeof(int32) * Max(rows, 1));
	double	   *outputs = numbers((Size) rows * evaluator_outputs_per_row(evaluator));
	double	   *prediction = numbers(rows);
	double	   *probability = numbers(rows);
	int32	   *label = palloc(sizeof(int32) * Max(rows, 1));
	EvaluatorRows features = session_rows(evaluator, batch, unknown);
	EvaluatorMismatch mismatch;

	if (!evaluator_outputs(evaluator, &features, outputs, &mismatch))
		array_mismatch(batch->set, &mismatch);
	evaluator_answers(evaluator, outputs, rows, prediction, probability, label);
	*answers = (Predictions) {
		.rows = rows,.in_session = true,.unknown = unknown,.prediction = prediction,
			.probability = probability,.label = label
	};
	grant_wish(evaluator, model, outputs, wish, answers);
}

void
session_answers(Evaluator *evaluator, const PredictModel *model, const FeatureBatch *batch,
				const Wish *wish, Predictions *answers)
{
	static MemoryContext context = NULL;
	MemoryContext old;

	if (context == NULL)
		context = AllocSetContextCreate(TopMemoryContext, "pg_tensile answers",
										ALLOCSET_DEFAULT_SIZES);
	MemoryContextReset(context);
	old = MemoryContextSwitchTo(context);
	fill_answers(evaluator, model, batch, wish, answers);
	MemoryContextSwitchTo(old);
}
