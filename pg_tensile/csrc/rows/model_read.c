/*
 * model_read.c: models as their tables have them.
 *
 * They are read without queries, because callers see only grants of their own,
 * and because planning would take most of the time of a session's first
 * prediction: the version with the active snapshot, so that a statement sees
 * one version, and the privileges with a new one, as PostgreSQL does.  In
 * parallel mode no new snapshot can be taken.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "access/xact.h"
#include "common/hashfn.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/jsonb.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "base/convert.h"
#include "rows/catalogue.h"
#include "rows/model_features.h"
#include "rows/model_read.h"

static ModelRole
read_role(const CatalogueRow *row, const char *oid, const char *name, MemoryContext context)
{
	return (ModelRole) {
		.oid = DatumGetObjectId(catalogue_value(row, oid)),
		.name = MemoryContextStrdup(context, NameStr(*DatumGetName(catalogue_value(row, name))))
	};
}

static bool
is_type(Jsonb *architecture, const char *const *types, int count)
{
	char	   *type = tensile_text_key(&architecture->root, "type");

	for (int i = 0; type != NULL && i < count; i++)
		if (strcmp(type, types[i]) == 0)
			return true;
	return false;
}

static uint64
hash_jsonb(const Jsonb *jsonb, uint64 seed)
{
	return hash_bytes_extended((const unsigned char *) jsonb, VARSIZE(jsonb), seed);
}

static void
read_version(PredictModel *model, const CatalogueRow *row)
{
	static const char *const evaluated[] = {"mlp", "tabular", "linear", "boosted", "ensemble"};
	Jsonb	   *preprocessing = DatumGetJsonbP(catalogue_value(row, "preprocessing"));
	Jsonb	   *architecture = DatumGetJsonbP(catalogue_value(row, "architecture"));
	int64		created_at = DatumGetInt64(catalogue_value(row, "created_at"));

	model->version = DatumGetInt64(catalogue_value(row, "id"));
	model->number = DatumGetInt32(catalogue_value(row, "version"));
	model_features_read(model, TextDatumGetCString(catalogue_value(row, "task")), preprocessing);
	model->evaluated = is_type(architecture, evaluated, lengthof(evaluated)) &&
		!model->features.has_vectors;
	model->weight_bytes = DatumGetInt64(catalogue_value(row, "weight_bytes"));
	model->identity = hash_jsonb(preprocessing, created_at + model->weight_bytes);
	model->identity = hash_jsonb(architecture, model->identity);
}

/* Whether it is a pretrained transformer, and its number without a version. */
static void
read_architecture(PredictModel *model, const CatalogueRow *row, const CatalogueRow *version)
{
	static const char *const pretrained[] = {"pretrained"};
	Jsonb	   *own = NULL;
	Jsonb	   *architecture;

	if (!catalogue_is_null(row, "architecture"))
		own = DatumGetJsonbP(catalogue_value(row, "architecture"));
	architecture = version ? DatumGetJsonbP(catalogue_value(version, "architecture")) : own;
	model->pretrained = architecture != NULL &&
		is_type(architecture, pretrained, lengthof(pretrained));
	/* as tensile_worker._base_number has it */
	if (own != NULL)
		model->base = -(model->id << 24 |
						(DatumGetInt32(DirectFunctionCall1(jsonb_hash, JsonbPGetDatum(own))) & 0xFFFFFF));
}

/* The version with this number that is complete; NULL: there is none. */
static CatalogueRow *
find_version(int64 model, Datum number)
{
	CatalogueKey keys[] = {
		{"model_id", F_INT8EQ, Int64GetDatum(model)}, {"version", F_INT4EQ, number}
	};
	CatalogueRow *row = catalogue_row("model_versions", "model_versions_model_id_version_key", keys,
									  lengthof(keys));

	return row != NULL && catalogue_is_null(row, "weight_bytes") ? NULL : row;
}

/*
 * Fills in the model with this version, or with the deployed one (0); the
 * version is NO_MODEL or NO_VERSION if there is none.
 */
static void
read_model(PredictModel *model, int32 number)
{
	CatalogueKey key = {"name", F_TEXTEQ, CStringGetTextDatum(model->name)};
	CatalogueRow *row = catalogue_row("models", "models_name_key", &key, 1);
	CatalogueRow *version = NULL;

	model->version = NO_MODEL;
	if (row == NULL)
		return;
	model->id = DatumGetInt64(catalogue_value(row, "id"));
	if (number != 0)
		version = find_version(model->id, Int32GetDatum(number));
	else if (!catalogue_is_null(row, "deployed_version"))
		version = find_version(model->id, catalogue_value(row, "deployed_version"));
	model->version = NO_VERSION;
	if (version != NULL)
		read_version(model, version);
	read_architecture(model, row, version);
}

/* The same for a version by its id, which may be incomplete. */
static void
read_model_of_version(PredictModel *model, int64 version_id)
{
	CatalogueKey key = {"id", F_INT8EQ, Int64GetDatum(version_id)};
	CatalogueRow *version = catalogue_row("model_versions", "model_versions_pkey", &key, 1);
	CatalogueRow *row;

	model->version = NO_MODEL;
	if (version == NULL)
		return;
	model->id = DatumGetInt64(catalogue_value(version, "model_id"));
	key.value = Int64GetDatum(model->id);
	row = catalogue_row("models", "models_pkey", &key, 1);
	if (row == NULL)
		return;
	read_version(model, version);
	read_architecture(model, row, version);
}

/* Fills in the owner and the grants. */
static void
read_access(PredictModel *model)
{
	CatalogueKey key = {"id", F_INT8EQ, Int64GetDatum(model->id)};
	CatalogueRow *row = catalogue_row("models", "models_pkey", &key, 1);
	List	   *grants;
	ListCell   *cell;

	if (row == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("model \"%s\" was dropped after this transaction's snapshot was taken",
						model->name),
				 errhint("Begin another transaction.")));
	model->owner = read_role(row, "owner_id", "owner", model->context);
	model->memory_budget = catalogue_is_null(row, "memory_budget") ? 0 :
		DatumGetInt64(catalogue_value(row, "memory_budget"));
	key.column = "model_id";
	grants = catalogue_rows("model_grants", "model_grants_pkey", &key, 1);
	model->grants = MemoryContextAlloc(model->context,
									   sizeof(ModelRole) * Max(list_length(grants), 1));
	foreach(cell, grants)
	{
		row = lfirst(cell);
		if (!catalogue_is_null(row, "grantee") &&
			strcmp(TextDatumGetCString(catalogue_value(row, "privilege")), "predict") == 0)
			model->grants[model->ngrants++] = read_role(row, "grantee", "grantee_name",
														model->context);
	}
}

void
model_read(PredictModel *model, int32 number, int64 version_id)
{
	MemoryContext scratch = AllocSetContextCreate(CurrentMemoryContext, "pg_tensile catalogue",
												  ALLOCSET_DEFAULT_SIZES);
	MemoryContext old = MemoryContextSwitchTo(scratch);

	PushActiveSnapshot(ActiveSnapshotSet() ? GetActiveSnapshot() : GetTransactionSnapshot());
	if (version_id == 0)
		read_model(model, number);
	else
		read_model_of_version(model, version_id);
	PopActiveSnapshot();
	if (model->version != NO_MODEL)
	{
		PushActiveSnapshot(IsInParallelMode() ? GetActiveSnapshot() : GetLatestSnapshot());
		read_access(model);
		PopActiveSnapshot();
	}
	MemoryContextSwitchTo(old);
	MemoryContextDelete(scratch);
}
