/*
 * features.c: from raw values of some rows to the inputs of a model.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include "evaluator/features.h"

/* What only the predictor can turn into numbers: texts, and arrays of tokens. */
static bool
needs_predictor(const JsonNode *feature)
{
	return json_member(feature, "vocabulary") != NULL || json_member(feature, "vectors") != NULL ||
		json_member(feature, "tokens") != NULL;
}

static bool
has_kind(const JsonNode *feature)
{
	static const char *const kinds[] = {"numeric", "timestamp", "category", "array"};

	for (int i = 0; i < lengthof(kinds); i++)
		if (json_equals(json_member(feature, "kind"), kinds[i]))
			return true;
	return false;
}

void
features_compile(ImageWriter *writer, const JsonNode *features)
{
	json_for_each(feature, features)
	{
		if (!has_kind(feature))
			compilation_damaged(writer->compilation, "a feature has no kind");
		if (needs_predictor(feature))
			compilation_unsuitable(writer->compilation);
	}
	if (!compilation_ready(writer->compilation))
		return;
	numbers_compile(writer, features);
	categories_compile(writer, features);
	arrays_compile(writer, features);
}

void
features_open(Features *self, ImageReader *reader)
{
	numbers_open(&self->numbers, reader);
	categories_open(&self->categories, reader);
	arrays_open(&self->arrays, reader);
	self->ranks = self->numbers.ranks;
	self->plain = self->numbers.plain + self->arrays.indicators;
	self->width = self->ranks + self->plain + self->arrays.width;
}

void
features_close(Features *self)
{
	numbers_close(&self->numbers);
	categories_close(&self->categories);
	arrays_close(&self->arrays);
}

void
features_apply(Features *self, const EvaluatorRows *rows, int first, FeatureBlock *block)
{
	float	   *indicators = block->numbers + self->ranks + self->numbers.plain;
	int			categories = self->categories.count;

	numbers_apply(&self->numbers, rows->scalars, rows->capacity, first, block->rows, block->numbers,
				  block->stride);
	arrays_apply(&self->arrays, rows->arrays, first, block->rows, indicators,
				 indicators + self->arrays.indicators, block->stride);
	for (int i = 0; i < categories; i++)
	{
		const int32 *codes = rows->codes + (Size) i * rows->capacity + first;

		for (int row = 0; row < block->rows; row++)
			block->codes[(Size) row * categories + i] = category_clean(&self->categories.items[i],
																	   codes[row]);
	}
}
