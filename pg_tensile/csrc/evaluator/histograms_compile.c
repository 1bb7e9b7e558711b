/*
 * histograms_compile.c: the statistics of a version's training rows.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include <math.h>

#include "evaluator/histograms_compile.h"

#define MOST_NUMBER_BINS 40
#define MOST_CATEGORIES 50
#define LARGEST_COUNT 9007199254740992.0

/* What a histogram has to be. */
typedef struct Expected
{
	HistogramKind kind;
	int			feature;
	const JsonNode *name;
	const char *type;
	int			bins;			/* 0: those of its edges or labels */
	int			labels;			/* of the version */
} Expected;

static bool
is_list(const JsonNode *node)
{
	if (!json_is(node, JSON_IS_ARRAY))
		return false;
	json_for_each(item, node)
		if (item->kind != JSON_IS_NUMBER)
			return false;
	return true;
}

/* Whether a list has whole numbers from 0 to a limit. */
static bool
has_counts(const JsonNode *list, double most)
{
	if (!is_list(list))
		return false;
	json_for_each(item, list)
		if (!item->is_integer || !(item->u.number >= 0.0 && item->u.number <= most))
			return false;
	return true;
}

/* Whether edges ascend, none of them there thrice. */
static bool
has_edges(const JsonNode *list)
{
	double		last = 0.0,
				before = 0.0;
	int			place = 0;

	if (!is_list(list))
		return false;
	json_for_each(item, list)
	{
		double		edge = item->u.number;

		if (!isfinite(edge) || (place > 0 && edge < last) || (place > 1 && edge == before))
			return false;
		before = last;
		last = edge;
		place++;
	}
	return true;
}

static bool
has_distinct_labels(const JsonNode *list, int labels)
{
	if (!has_counts(list, labels - 1))
		return false;
	json_for_each(item, list)
		json_for_each(other, item->next == NULL ? NULL : list)
			if (other != item && other->u.number == item->u.number)
				return false;
	return true;
}

static bool
fits(const JsonNode *given, const Expected *expected)
{
	static const char *const keys[] = {"name", "kind", "counts", "edges", "labels"};
	const JsonNode *name = json_member(given, "name");
	const JsonNode *counts = json_member(given, "counts");
	const JsonNode *edges = json_member(given, "edges");
	const JsonNode *labels = json_member(given, "labels");
	bool		has_number = expected->kind == HISTOGRAM_NUMBERS ||
		expected->kind == HISTOGRAM_PREDICTIONS;
	int			bins = expected->bins;

	if (!json_is(given, JSON_IS_OBJECT))
		return false;
	json_for_each(item, given)
	{
		bool		is_known = false;

		for (int i = 0; i < lengthof(keys); i++)
			is_known |= strcmp(item->name, keys[i]) == 0;
		if (!is_known)
			return false;
	}
	if (!json_is(name, JSON_IS_STRING) || !json_is(expected->name, JSON_IS_STRING) ||
		strcmp(name->u.string, expected->name->u.string) != 0 ||
		!json_equals(json_member(given, "kind"), expected->type) || !has_counts(counts,
																				LARGEST_COUNT) ||
		has_number != (edges != NULL) || (expected->kind == HISTOGRAM_LABELS) != (labels != NULL))
		return false;
	if (edges != NULL)
	{
		bins = edges->count + 2;
		if (bins > MOST_NUMBER_BINS || !has_edges(edges))
			return false;
	}
	if (labels != NULL &&
		(labels->count != bins - 1 || !has_distinct_labels(labels, expected->labels)))
		return false;
	return counts->count == bins;
}

/* Writes the cuts: the first of two equal edges is the next smaller number. */
static void
write_cuts(ImageWriter *writer, const JsonNode *edges)
{
	double	   *cuts = image_write_items(writer, edges == NULL ? 0 : edges->count, sizeof(double));

	json_for_each(item, edges)
	{
		bool		is_twice = item->next != NULL && item->next->u.number == item->u.number;

		*cuts++ = is_twice ? nextafter(item->u.number, -INFINITY) : item->u.number;
	}
}

static void
write_histogram(ImageWriter *writer, const JsonNode *given, const Expected *expected)
{
	const JsonNode *labels = json_member(given, "labels");
	int32	   *numbers;

	image_write_whole(writer, expected->kind);
	image_write_whole(writer, expected->feature);
	write_cuts(writer, json_member(given, "edges"));
	numbers = image_write_items(writer, labels == NULL ? 0 : labels->count, sizeof(int32));
	json_for_each(item, labels)
		*numbers++ = (int32) item->u.number;
	image_write_whole(writer, json_member(given, "counts")->count);
}

/* The histogram of a feature that has one, in their order; returns whether it has. */
static bool
expect_feature(const JsonNode *feature, int *numbers, int *categories, Expected *expected)
{
	const JsonNode *kind = json_member(feature, "kind");

	*expected = (Expected) {.name = json_member(feature, "name"), .type = "feature"};
	if (json_equals(kind, "category"))
	{
		const JsonNode *strings = json_member(feature, "categories");

		expected->kind = HISTOGRAM_CODES;
		expected->feature = (*categories)++;
		expected->bins = Min(strings == NULL ? 0 : strings->count, MOST_CATEGORIES) + 2;
		return true;
	}
	if (!json_equals(kind, "numeric") && !json_equals(kind, "timestamp"))
		return false;
	expected->kind = HISTOGRAM_NUMBERS;
	expected->feature = (*numbers)++;
	if (json_equals(kind, "timestamp"))
		expected->type = "time";
	return true;
}

static void
expect_prediction(const JsonNode *preprocessing, Expected *expected)
{
	const JsonNode *labels = json_member(preprocessing, "labels");

	*expected = (Expected) {
		.kind = HISTOGRAM_PREDICTIONS,
		.name = json_member(json_member(preprocessing, "target"), "name"),
		.type = "prediction",
		.labels = labels == NULL ? 0 : labels->count,
	};
	if (json_equals(json_member(preprocessing, "task"), "multiclass"))
	{
		expected->kind = HISTOGRAM_LABELS;
		expected->bins = Min(expected->labels, MOST_CATEGORIES) + 1;
	}
}

void
histograms_compile(ImageWriter *writer, const JsonNode *reference, const JsonNode *preprocessing)
{
	const JsonNode *columns = json_member(reference, "columns");
	const JsonNode *features = json_member(preprocessing, "features");
	int			given = json_is(columns, JSON_IS_ARRAY) ? columns->count : 0;
	Expected   *expected;
	int			count = 0;
	int			numbers = 0,
				categories = 0;
	int			place = 0;
	bool		is_right;

	expected = compilation_new(writer->compilation, Expected, features->count + 1);
	json_for_each(feature, features)
		if (expect_feature(feature, &numbers, &categories, &expected[count]))
			count++;
	if (given == count + 1)
		expect_prediction(preprocessing, &expected[count++]);
	is_right = given == count;
	json_for_each(item, is_right ? columns : NULL)
		is_right &= fits(item, &expected[place++]);
	image_write_whole(writer, is_right ? count : 0);
	place = 0;
	json_for_each(item, is_right ? columns : NULL)
		write_histogram(writer, item, &expected[place++]);
}
