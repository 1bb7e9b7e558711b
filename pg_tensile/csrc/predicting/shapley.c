/*
 * shapley.c: shares of the features in the prediction for a row: Shapley
 * values against a row of average features.
 *
 * A feature's share is how much the prediction changes when the feature's
 * value replaces the average one, averaged over orders in which the features
 * are replaced: all orders if they are few, else random ones, the same in
 * every call (Castro, Gomez and Tejada 2009).  A feature is replaced before the
 * preprocessing, so everything that a model gets from one column changes
 * together.  The average of each kind:
 *
 *	 number, time		the mean of the training rows; null if none of them is,
 *						so that a time has no cycles
 *	 category			the most frequent string, or null if that is more frequent
 *	 text				null
 *	 array				the mean in every place
 *	 tokens				no token
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "common/pg_prng.h"
#include "miscadmin.h"
#include "utils/float.h"

#include "predicting/answers.h"
#include "predicting/shapley.h"
#include "state/predictions.h"

/*
 * An explanation takes about as long as predictions for so many rows, but has
 * at least one order of all features.
 */
#define EVALUATIONS 2048
#define ORDERS 64
#define SEED 0

/* Predictions for mixtures of a row and the average one. */
typedef struct Mixtures
{
	const PredictModel *model;
	int64		memory_budget;
	const FeatureBatch *row;
	FeatureBatch *batch;		/* mixtures that have no predictions yet */
	int			label;
	double	   *predictions;	/* of all mixtures before those */
	int			count;			/* of them */
} Mixtures;

/* ---- mixtures ---- */

static void
add_own(FeatureBatch *batch, const FeatureBatch *row, int feature)
{
	const Feature *description = &row->set->features[feature];
	int			index = description->index;
	const char *string;
	int			length;

	switch (description->kind)
	{
		case FEATURE_NUMERIC:
		case FEATURE_TIMESTAMP:
			feature_set_number(batch, feature, row->scalars[(Size) index * row->capacity]);
			break;
		case FEATURE_CATEGORY:
			if (row->codes[(Size) index * row->capacity] < 0)
				break;
			string = dictionary_string(&row->dictionaries[index],
									   row->codes[(Size) index * row->capacity], &length);
			feature_set_string(batch, feature, string, length);
			break;
		case FEATURE_ARRAY:
			length = row->arrays[index].lengths[0];
			if (length >= 0)
				memcpy(feature_set_array(batch, feature, length), row->arrays[index].elements.data,
					   sizeof(double) * length);
			break;
	}
}

static void
add_average(FeatureBatch *batch, int feature)
{
	const Feature *description = &batch->set->features[feature];
	double	   *elements;

	switch (description->kind)
	{
		case FEATURE_NUMERIC:
		case FEATURE_TIMESTAMP:
			feature_set_number(batch, feature, description->average);
			break;
		case FEATURE_CATEGORY:
			if (description->mode != NULL)
				feature_set_string(batch, feature, description->mode, strlen(description->mode));
			break;
		case FEATURE_ARRAY:
			elements = feature_set_array(batch, feature, description->length);
			for (int i = 0; i < description->length; i++)
				elements[i] = get_float8_nan();
			break;
	}
}

/* Adds the predictions for the mixtures that have none, each of the label. */
static void
predict_mixtures(Mixtures *self)
{
	bool		multiclass = self->model->task == TASK_MULTICLASS;
	int			rows = self->batch->row;
	Wish		wish = {multiclass ? WISH_PROBABILITIES : WISH_NOTHING,.is_trial = true};
	const double *probabilities = NULL;
	Predictions answers;

	CHECK_FOR_INTERRUPTS();
	predict_answers(self->model, self->batch, self->memory_budget, &wish, &answers);
	if (multiclass)
		probabilities = predict_extra_numbers(&answers, 0, rows * self->model->nlabels);
	for (int i = 0; i < rows; i++)
		self->predictions[self->count++] = multiclass ?
			probabilities[(Size) i * self->model->nlabels + self->label] : answers.prediction[i];
	feature_batch_clear(self->batch);
}

/* Adds a mixture of these features of the row and the average of all others. */
static void
add_mixture(Mixtures *self, const bool *own)
{
	feature_batch_start_row(self->batch);
	for (int i = 0; i < self->batch->set->count; i++)
	{
		if (own[i])
			add_own(self->batch, self->row, i);
		else
			add_average(self->batch, i);
	}
	self->batch->row++;
	if (feature_batch_full(self->batch))
		predict_mixtures(self);
}

/* ---- orders ---- */

/* The number of all orders of some features, or `most` if there are more. */
static int
count_orders(int features, int most)
{
	int			orders = 1;

	for (int i = 2; i <= features && orders < most; i++)
		orders *= i;
	return Min(orders, most);
}

/* The next order in lexicographic order. */
static void
next_order(int *order, int count)
{
	int			i = count - 2;
	int			j = count - 1;
	int			swapped;

	while (i >= 0 && order[i] > order[i + 1])
		i--;
	if (i < 0)
		return;
	while (order[j] < order[i])
		j--;
	swapped = order[i];
	order[i] = order[j];
	order[j] = swapped;
	for (int left = i + 1, right = count - 1; left < right; left++, right--)
	{
		swapped = order[left];
		order[left] = order[right];
		order[right] = swapped;
	}
}

static void
shuffle(int *order, int count, pg_prng_state *state)
{
	for (int i = count - 1; i > 0; i--)
	{
		int			j = (int) pg_prng_uint64_range(state, 0, i);
		int			swapped = order[i];

		order[i] = order[j];
		order[j] = swapped;
	}
}

/* The orders in which features are replaced, [orders][features]. */
static int *
make_orders(int features, int *norders)
{
	int			most = Min(Max(EVALUATIONS / Max(features, 1), 1), ORDERS);
	bool		all = count_orders(features, most + 1) <= most;
	int		   *orders;
	pg_prng_state state;

	*norders = count_orders(features, most);
	orders = palloc(sizeof(int) * features * (*norders));
	pg_prng_seed(&state, SEED);
	for (int i = 0; i < features; i++)
		orders[i] = i;
	for (int k = 0; k < *norders; k++)
	{
		int		   *order = orders + (Size) k * features;

		if (k > 0)
			memcpy(order, order - features, sizeof(int) * features);
		if (all && k > 0)
			next_order(order, features);
		else if (!all)
			shuffle(order, features, &state);
	}
	return orders;
}

/* ---- attributions ---- */

Attributions
shapley_attributions(const PredictModel *model, FeatureBatch *row, int64 memory_budget)
{
	int			features = model->features.count;
	int			norders;
	int		   *orders = make_orders(features, &norders);
	bool	   *own = palloc0(sizeof(bool) * features);
	Mixtures	mixtures = {
		.model = model,.memory_budget = memory_budget,.row = row,
			.batch = feature_batch_create(&model->features, feature_batch_capacity(&model->features),
										  CurrentMemoryContext),
			.predictions = palloc(sizeof(double) * (1 + (Size) norders * features))
	};
	Attributions result = {.label = -1,.features = palloc0(sizeof(double) * features)};
	Predictions answer;

	predict_answers(model, row, memory_budget, &(Wish) {WISH_NOTHING,.is_trial = true}, &answer);
	/* The row counts as one that predict has answered, except for drift. */
	tensile_count_predictions(model->version, 1, predict_unknown(&answer, 0, 1));
	if (model->task != TASK_REGRESSION)
		result.label = mixtures.label = model->task == TASK_BINARY ? 1 : answer.label[0];
	if (result.label >= model->nlabels)
		elog(ERROR, "the predictor answered with label %d of %d", result.label, model->nlabels);

	add_mixture(&mixtures, own);	/* the average row, with which each order begins */
	for (int k = 0; k < norders; k++)
	{
		memset(own, 0, sizeof(bool) * features);
		for (int i = 0; i < features; i++)
		{
			own[orders[(Size) k * features + i]] = true;
			add_mixture(&mixtures, own);
		}
	}
	if (mixtures.batch->row > 0)
		predict_mixtures(&mixtures);

	result.average = mixtures.predictions[0];
	for (int k = 0; k < norders; k++)
	{
		double		before = result.average;

		for (int i = 0; i < features; i++)
		{
			double		after = mixtures.predictions[1 + (Size) k * features + i];

			result.features[orders[(Size) k * features + i]] += (after - before) / norders;
			before = after;
		}
	}
	return result;
}
