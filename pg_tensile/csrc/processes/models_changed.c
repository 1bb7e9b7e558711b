/*
 * models_changed.c: triggers of the tables of models.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "commands/trigger.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"

#include "processes/notify.h"

PG_FUNCTION_INFO_V1(tensile_models_changed);
PG_FUNCTION_INFO_V1(tensile_version_deleted);

static TriggerData *
trigger_data(FunctionCallInfo fcinfo, const char *name)
{
	if (!CALLED_AS_TRIGGER(fcinfo))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("function \"%s\" was not called by trigger manager", name)));
	return (TriggerData *) fcinfo->context;
}

/* tensile_internal._models_changed(): for statements that change models */
Datum
tensile_models_changed(PG_FUNCTION_ARGS)
{
	Relation	relation = trigger_data(fcinfo, "_models_changed")->tg_relation;
	Oid			models;

	tensile_models_changed_at_commit();
	/* This reaches standbys with the commit record. */
	models = get_relname_relid("models", RelationGetNamespace(relation));
	if (OidIsValid(models))
		CacheInvalidateRelcacheByRelid(models);
	return PointerGetDatum(NULL);
}

/* tensile_internal._version_deleted(): for each version that is deleted, whose id comes first */
Datum
tensile_version_deleted(PG_FUNCTION_ARGS)
{
	TriggerData *trigger = trigger_data(fcinfo, "_version_deleted");
	bool		isnull;
	Datum		version = heap_getattr(trigger->tg_trigtuple, 1, RelationGetDescr(trigger->tg_relation),
									   &isnull);

	tensile_version_deleted_at_commit(DatumGetInt64(version));
	return PointerGetDatum(NULL);
}
