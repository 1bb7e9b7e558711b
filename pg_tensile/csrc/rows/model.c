/*
 * model.c: what a session knows about models that it predicts with: features,
 * labels, owner and grants.
 *
 * Models (model_read.c) are kept as long as tensile_models_view() is the same; then all
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
#include "rows/model.h"
#include "rows/model_read.h"
#include "state/extension.h"
#include "state/models_generation.h"

static MemoryContext cache_context = NULL;	/* of everything that is kept */
static List *cached_models = NIL;	/* of PredictModel */
static ModelsView cached_view;

/* Bytes of stored weights above which the evaluator does not even look at a version. */
#define MOST_EVALUATED_BYTES (64 * 1024 * 1024)

#define NAMES_QUERY "SELECT name FROM tensile_internal.models"

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

	model_read(model, version, 0);
	if (model->version == NO_MODEL)
		unknown_model(model->name);
	predict_model_check_privilege(model);
	return model;
}

PredictModel *
predict_model_load_id(int64 version_id, MemoryContext parent)
{
	PredictModel *model = empty_model("", parent);

	model_read(model, 0, version_id);
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
