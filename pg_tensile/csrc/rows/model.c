/*
 * model.c: what a session knows about models that it predicts with: features,
 * labels, owner and grants.
 *
 * Models are read by SPI as the owner of tensile_internal.models, because callers see
 * only grants of their own, and with a new snapshot, because an older one
 * could show a version that is no longer deployed.  They are kept until
 * tensile_models_generation() changes; then all of them are forgotten.
 * Privileges are checked in every call, by what is kept.
 *
 * In parallel mode no new snapshot can be taken.  A model that is read then
 * belongs to the calling query and is not kept.
 *
 * Reading, keeping and checking stay in one file, because they share the
 * structure of a model and its memory.
 *
 * Memory: each model has a context of its own; those of models that are kept
 * are children of the cache's context.  A call holds its model by a callback of
 * its context, because the model may be forgotten in the middle of the call's
 * statement.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/namespace.h"
#include "catalog/pg_class.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "nodes/pg_list.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/jsonb.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "base/convert.h"
#include "base/owner.h"
#include "base/query.h"
#include "rows/model.h"
#include "rows/predict_features.h"
#include "state/extension.h"
#include "state/models_generation.h"

static MemoryContext cache_context = NULL;	/* of everything that is kept */
static List *cached_models = NIL;	/* of PredictModel */
static uint64 cached_generation;

#define NO_MODEL 0

#define MODEL_COLUMNS \
	"SELECT m.owner_id, m.owner::text, v.id, v.task, v.preprocessing, m.id, m.memory_budget, " \
	"coalesce(v.architecture, m.architecture)->>'type' = 'pretrained', " \
	"tensile_worker._base_number(m.id, m.architecture), v.version " \

#define MODEL_QUERY \
	MODEL_COLUMNS \
	"FROM tensile_internal.models m LEFT JOIN tensile_internal.model_versions v " \
	"ON v.model_id = m.id AND v.version = coalesce($2, m.deployed_version) " \
	"AND v.weight_bytes IS NOT NULL " \
	"WHERE m.name = $1"
#define ID_QUERY \
	MODEL_COLUMNS \
	"FROM tensile_internal.models m JOIN tensile_internal.model_versions v ON v.model_id = m.id WHERE v.id = $3"
#define GRANTS_QUERY \
	"SELECT grantee, grantee_name::text FROM tensile_internal.model_grants " \
	"WHERE model_id = $1 AND privilege = 'predict' AND grantee IS NOT NULL"
#define NAMES_QUERY "SELECT name FROM tensile_internal.models"

/* ---- reading preprocessing ---- */

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

static void
read_features(PredictModel *model, JsonbContainer *list)
{
	FeatureSet *set = &model->features;

	set->count = JsonContainerSize(list);
	set->features = MemoryContextAlloc(model->context, sizeof(Feature) * set->count);
	set->names = MemoryContextAlloc(model->context, sizeof(char *) * set->count);
	for (int i = 0; i < set->count; i++)
	{
		JsonbContainer *object = required_item(list, i, jbvBinary)->val.binary.data;
		Feature    *feature = &set->features[i];

		set->names[i] = string_of(required_key(object, "name", jbvString), model->context);
		feature->kind = kind_of(required_key(object, "kind", jbvString));
		feature->is_text = getKeyJsonValueFromContainer(object, "vocabulary", strlen("vocabulary"),
														NULL) != NULL;
		set->has_texts = set->has_texts || feature->is_text;
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

static void
read_preprocessing(PredictModel *model, const char *task, Jsonb *preprocessing)
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

/* ---- reading the catalogue ---- */

static Oid
catalogue_owner(void)
{
	Oid			relation = get_relname_relid("models", get_namespace_oid("tensile_internal", true));
	HeapTuple	tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(relation));
	Oid			owner;

	if (!HeapTupleIsValid(tuple))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("the extension pg_tensile is not installed in this database"),
				 errhint("Run CREATE EXTENSION pg_tensile CASCADE.")));
	owner = ((Form_pg_class) GETSTRUCT(tuple))->relowner;
	tensile_watch_models(relation);
	ReleaseSysCache(tuple);
	return owner;
}

/* A column of a row; a null becomes 0. */
static Datum
spi_value(SPITupleTable *table, int row, int column, bool *isnull)
{
	bool		null;
	Datum		value = SPI_getbinval(table->vals[row], table->tupdesc, column, &null);

	if (isnull != NULL)
		*isnull = null;
	return null ? (Datum) 0 : value;
}

static ModelRole
read_role(SPITupleTable *table, int row, MemoryContext context)
{
	return (ModelRole) {
		.oid = DatumGetObjectId(spi_value(table, row, 1, NULL)),
		.name = MemoryContextStrdup(context, SPI_getvalue(table->vals[row], table->tupdesc, 2))
	};
}

/* `nulls` is as for SPI_execute_with_args. */
static uint64
spi_select(const char *query, int nargs, Oid *types, Datum *arguments, const char *nulls)
{
	if (SPI_execute_with_args(query, nargs, types, arguments, nulls, true, 0) != SPI_OK_SELECT)
		elog(ERROR, "could not read the catalogue of models");
	return SPI_processed;
}

/*
 * Fills in the model with this version, or with the deployed one (0); the
 * version is NO_MODEL or NO_VERSION if there is none.  `version_id`, unless it
 * is 0, is one of model_versions instead of a name and a number.
 */
static void
read_model(PredictModel *model, int32 version, int64 version_id)
{
	Oid			types[] = {TEXTOID, INT4OID, INT8OID};
	Datum		arguments[] = {
		CStringGetTextDatum(model->name), Int32GetDatum(version), Int64GetDatum(version_id)
	};
	Oid			id_type = INT8OID;
	SPITupleTable *table;
	Datum		id;
	bool		no_version;

	if (spi_select(version_id == 0 ? MODEL_QUERY : ID_QUERY, 3, types, arguments,
				   version == 0 ? " n " : "   ") == 0)
	{
		model->version = NO_MODEL;
		return;
	}
	table = SPI_tuptable;
	model->owner = read_role(table, 0, model->context);
	model->version = DatumGetInt64(spi_value(table, 0, 3, &no_version));
	if (no_version)
		model->version = NO_VERSION;
	else
		read_preprocessing(model, SPI_getvalue(table->vals[0], table->tupdesc, 4),
						   DatumGetJsonbP(spi_value(table, 0, 5, NULL)));
	id = spi_value(table, 0, 6, NULL);
	model->memory_budget = DatumGetInt64(spi_value(table, 0, 7, NULL));
	model->pretrained = DatumGetBool(spi_value(table, 0, 8, NULL));
	model->base = DatumGetInt64(spi_value(table, 0, 9, NULL));
	model->number = DatumGetInt32(spi_value(table, 0, 10, NULL));

	model->ngrants = (int) spi_select(GRANTS_QUERY, 1, &id_type, &id, NULL);
	model->grants = MemoryContextAlloc(model->context, sizeof(ModelRole) * Max(model->ngrants, 1));
	for (int i = 0; i < model->ngrants; i++)
		model->grants[i] = read_role(SPI_tuptable, i, model->context);
}

/*
 * Raises an error whose hint suggests a model that the current user may see.
 */
static void
unknown_model(const char *name)
{
	const char **names;

	SPI_connect();
	if (SPI_execute(NAMES_QUERY, true, 10000) != SPI_OK_SELECT)
		elog(ERROR, "could not read the names of models");
	names = palloc(sizeof(char *) * Max(SPI_processed, 1));
	for (uint64 i = 0; i < SPI_processed; i++)
		names[i] = SPI_getvalue(SPI_tuptable->vals[i], SPI_tuptable->tupdesc, 1);
	ereport(ERROR,
			(errcode(ERRCODE_UNDEFINED_OBJECT),
			 errmsg("model \"%s\" does not exist", name),
			 tensile_hint_nearest(name, names, SPI_processed,
								  "See tensile.models; register_model makes a new one.")));
}

/* Calls read_model with the rights, search_path and snapshot that it needs. */
static void
read_model_as_owner(PredictModel *model, int32 version, int64 version_id)
{
	Oid			user;
	int			security_context;
	int			nest_level = NewGUCNestLevel();

	(void) set_config_option("search_path", "pg_catalog, pg_temp", PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SAVE, true, 0, false);
	GetUserIdAndSecContext(&user, &security_context);
	SetUserIdAndSecContext(catalogue_owner(), security_context | SECURITY_LOCAL_USERID_CHANGE);
	PushActiveSnapshot(IsInParallelMode() ? GetActiveSnapshot() : GetLatestSnapshot());
	SPI_connect();
	read_model(model, version, version_id);
	SPI_finish();
	PopActiveSnapshot();
	SetUserIdAndSecContext(user, security_context);
	if (model->version == NO_MODEL && version_id == 0)
		unknown_model(model->name);
	AtEOXact_GUC(true, nest_level);
}

static PredictModel *
empty_model(const char *name, MemoryContext parent)
{
	MemoryContext context = AllocSetContextCreate(parent, "pg_tensile model", ALLOCSET_SMALL_SIZES);
	PredictModel *model = MemoryContextAllocZero(context, sizeof(PredictModel));

	model->context = context;
	model->name = MemoryContextStrdup(context, name);
	return model;
}

/* The model with that version (0: the deployed one), which it may not have. */
static PredictModel *
load_model(const char *name, int32 version, MemoryContext parent)
{
	PredictModel *model = empty_model(name, parent);

	read_model_as_owner(model, version, 0);
	predict_model_check_privilege(model);
	return model;
}

PredictModel *
predict_model_load_id(int64 version_id, MemoryContext parent)
{
	PredictModel *model = empty_model("", parent);

	read_model_as_owner(model, 0, version_id);
	if (model->version == NO_MODEL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("this version of the model does not exist any more"),
				 errhint("Use another one.")));
	return model;
}

static PredictModel *
with_version(PredictModel *model)
{
	if (model->version == NO_VERSION)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("model \"%s\" has no version to predict with", model->name),
				 errhint("Train it with train_model and wait for the job, "
						 "or choose a version with deploy_model.")));
	return model;
}

PredictModel *
predict_model_load_version(const char *name, int32 version, MemoryContext parent)
{
	PredictModel *model = load_model(name, version, parent);

	if (model->version == NO_VERSION && version != 0)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("model \"%s\" has no version %d", name, version),
				 errhint("See tensile.model_versions.")));
	return with_version(model);
}

PredictModel *
predict_model_load(const char *name, MemoryContext parent)
{
	return with_version(load_model(name, 0, parent));
}

/* ---- the cache ---- */

static PredictModel *
cached_model(const char *name)
{
	ListCell   *cell;

	foreach(cell, cached_models)
	{
		PredictModel *model = lfirst(cell);

		if (strcmp(model->name, name) == 0)
			return model;
	}
	return NULL;
}

/* A callback of the context of a call. */
static void
release_model(void *argument)
{
	PredictModel *model = argument;

	if (--model->users == 0 && model->forgotten)
		MemoryContextDelete(model->context);
}

/* Keeps a model of the cache for a call, until its context ends. */
static void
hold_model(PredictModel *model, MemoryContext call_context)
{
	MemoryContextCallback *release = MemoryContextAllocZero(call_context,
															sizeof(MemoryContextCallback));

	release->func = release_model;
	release->arg = model;
	model->users++;
	MemoryContextRegisterResetCallback(call_context, release);
}

static void
forget_models(uint64 generation)
{
	ListCell   *cell;

	if (cache_context == NULL)
		cache_context = AllocSetContextCreate(TopMemoryContext, "pg_tensile models",
											  ALLOCSET_SMALL_SIZES);
	foreach(cell, cached_models)
	{
		PredictModel *model = lfirst(cell);

		model->forgotten = true;
		if (model->users > 0)
			MemoryContextSetParent(model->context, TopMemoryContext);
	}
	MemoryContextReset(cache_context);
	cached_models = NIL;
	cached_generation = generation;
}

PredictModel *
predict_model_find(const char *name, MemoryContext call_context)
{
	uint64		generation = tensile_models_generation();
	PredictModel *model;
	MemoryContext old;

	tensile_require_version();
	if (cache_context == NULL || cached_generation != generation)
		forget_models(generation);
	model = cached_model(name);
	if (model != NULL)
	{
		predict_model_check_privilege(model);
		hold_model(model, call_context);
		return model;
	}
	model = load_model(name, 0, call_context);
	if (!IsInParallelMode())
	{
		MemoryContextSetParent(model->context, cache_context);
		old = MemoryContextSwitchTo(cache_context);
		cached_models = lappend(cached_models, model);
		MemoryContextSwitchTo(old);
		hold_model(model, call_context);
	}
	return model;
}

PredictModel *
predict_model_get(const char *name, MemoryContext call_context)
{
	return with_version(predict_model_find(name, call_context));
}

void
predict_model_check_privilege(const PredictModel *model)
{
	if (superuser() || tensile_role_owned(model->owner.oid, model->owner.name))
		return;
	for (int i = 0; i < model->ngrants; i++)
	{
		const ModelRole *grantee = &model->grants[i];

		if (!OidIsValid(grantee->oid) || tensile_role_owned(grantee->oid, grantee->name))
			return;
	}
	ereport(ERROR,
			(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			 errmsg("permission denied to predict with model \"%s\"", model->name),
			 errhint("Its owner can allow it with grant_model.")));
}
