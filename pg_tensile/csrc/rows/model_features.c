/*
 * model_features.c: features and labels of a model's version, from the
 * preprocessing that is stored with it (docs/internals.md, "Features").
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "utils/builtins.h"
#include "utils/float.h"
#include "utils/memutils.h"

#include "base/convert.h"
#include "rows/model_features.h"

static JsonbValue *
required_key(JsonbContainer *object, const char *key, enum jbvType type)
{
	JsonbValue *value = NULL;

	if (JsonContainerIsObject(object))
		value = getKeyJsonValueFromContainer(object, key, strlen(key), NULL);
	if (value == NULL || value->type != type)
		ereport(ERROR,
				(errcode(ERRCODE_DATA_CORRUPTED),
				 errmsg("the model version's preprocessing has no usable \"%s\"", key),
				 errhint("Train the model again.")));
	return value;
}

/* The array at that key. */
static JsonbContainer *
required_list(JsonbContainer *object, const char *key)
{
	JsonbContainer *list = required_key(object, key, jbvBinary)->val.binary.data;

	if (!JsonContainerIsArray(list))
		ereport(ERROR,
				(errcode(ERRCODE_DATA_CORRUPTED),
				 errmsg("the model version's preprocessing has no list of \"%s\"", key),
				 errhint("Train the model again.")));
	return list;
}

/* Item i of a list, which must have this type. */
static JsonbValue *
required_item(JsonbContainer *list, int i, enum jbvType type)
{
	JsonbValue *item = getIthJsonbValueFromContainer(list, i);

	if (item == NULL || item->type != type)
		ereport(ERROR,
				(errcode(ERRCODE_DATA_CORRUPTED),
				 errmsg("the model version's preprocessing has an unusable item %d in a list", i),
				 errhint("Train the model again.")));
	return item;
}

static const char *
string_of(const JsonbValue *value, MemoryContext context)
{
	return MemoryContextStrdup(context, pnstrdup(value->val.string.val, value->val.string.len));
}

static FeatureKind
kind_of(const JsonbValue *value)
{
	static const char *const kinds[] = {"numeric", "timestamp", "category", "array"};

	for (int i = 0; i < lengthof(kinds); i++)
		if (strlen(kinds[i]) == value->val.string.len &&
			strncmp(kinds[i], value->val.string.val, value->val.string.len) == 0)
			return (FeatureKind) i;
	ereport(ERROR,
			(errcode(ERRCODE_DATA_CORRUPTED),
			 errmsg("the model version has a feature of the unknown kind \"%.*s\"",
					value->val.string.len, value->val.string.val),
			 errhint("Install the version of pg_tensile that the model was trained with, "
					 "or train it again.")));
}

static SqlType
sql_type_of(JsonbContainer *feature)
{
	static const char *const names[] = {
		"", "real", "real[]", "time without time zone", "interval", "timestamp with time zone", "date",
		"character"
	};
	const char *name = tensile_text_key(feature, "sql_type");

	for (int i = SQL_OTHER + 1; name != NULL && i < lengthof(names); i++)
		if (strcmp(names[i], name) == 0)
			return (SqlType) i;
	return SQL_OTHER;
}

/* A number of the object; 0 without one. */
static double
number_key(JsonbContainer *object, const char *key)
{
	JsonbValue *value = getKeyJsonValueFromContainer(object, key, strlen(key), NULL);

	if (value == NULL || value->type != jbvNumeric)
		return 0;
	return DatumGetFloat8(DirectFunctionCall1(numeric_float8,
											  NumericGetDatum(value->val.numeric)));
}

static bool
has_key(JsonbContainer *object, const char *key)
{
	return getKeyJsonValueFromContainer(object, key, strlen(key), NULL) != NULL;
}

/* Fills in what stands for the feature in an average row. */
static void
read_average(Feature *feature, JsonbContainer *object, bool is_vector, MemoryContext context)
{
	const char *mode = tensile_text_key(object, "mode");

	feature->average = number_key(object, "nulls") > 0 ? number_key(object, "mean")
		: get_float8_nan();
	if (mode != NULL && !feature->is_text && !is_vector)
		feature->mode = MemoryContextStrdup(context, tensile_to_utf8(mode, strlen(mode)));
	if (!has_key(object, "tokens"))
		feature->length = (int) Min(number_key(object, "length"), (double) FEATURES_MAX_BYTES);
}

static void
read_features(PredictModel *model, JsonbContainer *list)
{
	FeatureSet *set = &model->features;

	set->count = JsonContainerSize(list);
	set->features = MemoryContextAllocZero(model->context, sizeof(Feature) * set->count);
	set->names = MemoryContextAlloc(model->context, sizeof(char *) * set->count);
	for (int i = 0; i < set->count; i++)
	{
		JsonbContainer *object = required_item(list, i, jbvBinary)->val.binary.data;
		Feature    *feature = &set->features[i];

		set->names[i] = string_of(required_key(object, "name", jbvString), model->context);
		feature->kind = kind_of(required_key(object, "kind", jbvString));
		feature->is_text = has_key(object, "vocabulary");
		set->has_texts = set->has_texts || feature->is_text;
		set->has_vectors = set->has_vectors || has_key(object, "vectors");
		read_average(feature, object, has_key(object, "vectors"), model->context);
		feature->sql_type = sql_type_of(object);
		feature->index = feature->kind == FEATURE_CATEGORY ? set->ncategories++
			: feature->kind == FEATURE_ARRAY ? set->narrays++ : set->nscalars++;
	}
}

static void
read_labels(PredictModel *model, JsonbContainer *preprocessing)
{
	JsonbContainer *list = required_list(preprocessing, "labels");
	JsonbValue *values = getKeyJsonValueFromContainer(preprocessing, "label_values",
													  strlen("label_values"), NULL);

	model->numeric_labels = values != NULL && values->type == jbvBinary;
	model->nlabels = JsonContainerSize(list);
	model->labels = MemoryContextAlloc(model->context, sizeof(char *) * Max(model->nlabels, 1));
	for (int i = 0; i < model->nlabels; i++)
		model->labels[i] = string_of(required_item(list, i, jbvString), model->context);
}

void
model_features_read(PredictModel *model, const char *task, Jsonb *preprocessing)
{
	JsonbContainer *target = required_key(&preprocessing->root, "target",
										  jbvBinary)->val.binary.data;

	model->target = string_of(required_key(target, "name", jbvString), model->context);
	model->task = strcmp(task, "regression") == 0 ? TASK_REGRESSION
		: strcmp(task, "binary") == 0 ? TASK_BINARY : TASK_MULTICLASS;
	read_features(model, required_list(&preprocessing->root, "features"));
	if (model->task != TASK_REGRESSION)
		read_labels(model, &preprocessing->root);
}
