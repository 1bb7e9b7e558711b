/*
 * models_generation.c: a number that changes whenever models may have changed.
 *
 * Sessions keep what they have read about models (model.c) as long as the
 * generation is the same.  It is the sum of a counter in shared memory, which
 * rises when a change is committed (notify.c), and one of this session, which
 * rises for changes that other sessions do not see: its own before the commit
 * or when they are rolled back, and invalidations of tensile_internal.models.  Those
 * are the only news on a standby, where no commit callback runs, and after
 * its promotion.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "utils/inval.h"

#include "state/models_generation.h"
#include "state/shmem.h"

static uint64 own_generation = 0;
static Oid	models_relation = InvalidOid;

uint64
tensile_models_generation(void)
{
	tensile_require_preload();
	return pg_atomic_read_u64(&tensile_shared->models_generation) + own_generation;
}

void
tensile_models_changed_here(void)
{
	own_generation++;
}

/*
 * A callback of the relation cache; the OID is invalid when any relation may
 * have changed.
 */
static void
relation_changed(Datum arg, Oid relation)
{
	if (relation == models_relation || !OidIsValid(relation))
		own_generation++;
}

void
tensile_watch_models(Oid relation)
{
	models_relation = relation;
}

void
tensile_watch_invalidations(void)
{
	CacheRegisterRelcacheCallback(relation_changed, (Datum) 0);
}
