/*
 * model.c: what a session knows about models that it predicts with: features,
 * labels, owner and grants.
 *
 * Models are read by SPI as the owner of tensile_internal.models, because callers see
 * only grants of their own: the version with the active snapshot, so that a
 * statement sees one version, and the privileges with a new one, as PostgreSQL
 * does.  Models are kept as long as tensile_models_view() is the same; then all
 * of them are forgotten.  Privileges are checked in every call, by what is kept.
 *
 * In parallel mode no new snapshot can be taken.  A model that is read then
 * belongs to the calling query and is not kept.
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
#include "catalog/pg_type.h"
#include "common/hashfn.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "nodes/pg_list.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "base/guc.h"
#include "base/owner.h"
#include "base/query.h"
#include "rows/catalogue.h"
#include "rows/model.h"
#include "rows/model_features.h"
#include "state/extension.h"
#include "state/models_generation.h"

static MemoryContext cache_context = NULL;	/* of everything that is kept */
static List *cached_models = NIL;	/* of PredictModel */
static ModelsView cached_view;

#define NO_MODEL 0

/* Bytes of stored weights above which the evaluator does not even look at a version. */
#define MOST_EVALUATED_BYTES (64 * 1024 * 1024)

#define MODEL_COLUMNS \
	"SELECT m.id, v.id, v.task, v.preprocessing, " \
	"coalesce(v.architecture, m.architecture)->>'type' = 'pretrained', " \
	"tensile_worker._base_number(m.id, m.architecture), v.weight_bytes, v.architecture, v.created_at, v.version, " \
	"v.architecture->>'type' IN ('mlp', 'tabular', 'linear', 'boosted', 'ensemble') " \

#define MODEL_QUERY \
	MODEL_COLUMNS \
	"FROM tensile_internal.models m LEFT JOIN tensile_internal.model_versions v " \
	"ON v.model_id = m.id AND v.version = coalesce($2, m.deployed_version) " \
	"AND v.weight_bytes IS NOT NULL " \
	"WHERE m.name = $1"
#define ID_QUERY \
	MODEL_COLUMNS \
	"FROM tensile_internal.models m JOIN tensile_internal.model_versions v ON v.model_id = m.id WHERE v.id = $3"
/* The owner, and then the roles that may predict besides. */
#define ACCESS_QUERY \
	"SELECT owner_id, owner::text, memory_budget, 0 FROM tensile_internal.models WHERE id = $1 " \
	"UNION ALL SELECT grantee, grantee_name::text, NULL, 1 FROM tensile_internal.model_grants " \
	"WHERE model_id = $1 AND privilege = 'predict' AND grantee IS NOT NULL ORDER BY 4"
#define NAMES_QUERY "SELECT name FROM tensile_internal.models"

/* ---- reading the catalogue ---- */

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

static void
read_version(PredictModel *model, SPITupleTable *table)
{
	Jsonb	   *preprocessing = DatumGetJsonbP(spi_value(table, 0, 4, NULL));
	Jsonb	   *architecture = DatumGetJsonbP(spi_value(table, 0, 8, NULL));
	int64		created_at = DatumGetInt64(spi_value(table, 0, 9, NULL));

	model_features_read(model, SPI_getvalue(table->vals[0], table->tupdesc, 3), preprocessing);
	model->evaluated = DatumGetBool(spi_value(table, 0, 11, NULL)) && !model->features.has_vectors;
	model->weight_bytes = DatumGetInt64(spi_value(table, 0, 7, NULL));
	model->identity = hash_bytes_extended((unsigned char *) preprocessing, VARSIZE(preprocessing),
										  created_at + model->weight_bytes);
	model->identity = hash_bytes_extended((unsigned char *) architecture, VARSIZE(architecture),
										  model->identity);
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
	SPITupleTable *table;
	bool		no_version;

	if (catalogue_select(version_id == 0 ? MODEL_QUERY : ID_QUERY, 3, types, arguments,
				   version == 0 ? " n " : "   ") == 0)
	{
		model->version = NO_MODEL;
		return;
	}
	table = SPI_tuptable;
	model->id = DatumGetInt64(spi_value(table, 0, 1, NULL));
	model->version = DatumGetInt64(spi_value(table, 0, 2, &no_version));
	if (no_version)
		model->version = NO_VERSION;
	else
		read_version(model, table);
	model->pretrained = DatumGetBool(spi_value(table, 0, 5, NULL));
	model->base = DatumGetInt64(spi_value(table, 0, 6, NULL));
	model->number = DatumGetInt32(spi_value(table, 0, 10, NULL));
}

/* Fills in the owner and the grants. */
static void
read_access(PredictModel *model)
{
	Oid			type = INT8OID;
	Datum		id = Int64GetDatum(model->id);
	uint64		count = catalogue_select(ACCESS_QUERY, 1, &type, &id, NULL);

	if (count == 0)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("model \"%s\" was dropped after this transaction's snapshot was taken",
						model->name),
				 errhint("Begin another transaction.")));
	model->owner = read_role(SPI_tuptable, 0, model->context);
	model->memory_budget = DatumGetInt64(spi_value(SPI_tuptable, 0, 3, NULL));
	model->ngrants = (int) count - 1;
	model->grants = MemoryContextAlloc(model->context, sizeof(ModelRole) * count);
	for (int i = 0; i < model->ngrants; i++)
		model->grants[i] = read_role(SPI_tuptable, i + 1, model->context);
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

/*
 * Reads the model: its version with the active snapshot, and the privileges
 * with the newest one.
 */
static void
read_model_as_owner(PredictModel *model, int32 version, int64 version_id)
{
	CatalogueAccess access = catalogue_open();

	read_model(model, version, version_id);
	if (model->version != NO_MODEL)
	{
		if (!IsInParallelMode())
			PushActiveSnapshot(GetLatestSnapshot());
		read_access(model);
		if (!IsInParallelMode())
			PopActiveSnapshot();
	}
	catalogue_close(&access);
	if (model->version == NO_MODEL && version_id == 0)
		unknown_model(model->name);
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
forget_models(ModelsView view)
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
	cached_view = view;
}

PredictModel *
predict_model_find(const char *name, MemoryContext call_context)
{
	ModelsView	view = tensile_models_view();
	PredictModel *model;
	MemoryContext old;

	tensile_require_version();
	if (cache_context == NULL || !tensile_same_view(cached_view, view))
		forget_models(view);
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

bool
predict_model_is_evaluated(const PredictModel *model)
{
	return tensile_predict_in_session && model->evaluated &&
		model->weight_bytes <= MOST_EVALUATED_BYTES;
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
