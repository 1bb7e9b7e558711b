/*
 * models_generation.c: whether what a session has read about models is what
 * the present statement sees.
 *
 * Models are read with the active snapshot, so that a statement sees one
 * version of each, whatever is committed meanwhile.  What has been read is
 * valid for other snapshots as well, unless models have changed in between.
 *
 * The generation of models is the sum of a counter in shared memory, which
 * rises when a change has been committed (notify.c), and one of this session,
 * which rises for changes that other sessions do not see: its own before the
 * commit or when they are rolled back, and invalidations of
 * tensile_internal.models.  Those are the only news on a standby, where no
 * commit callback runs, and after its promotion.
 *
 * A snapshot is as new as the generation if it was taken after the last
 * change, which PostgreSQL's count of completed transactions tells.  Others
 * get a number, so that what was read with one of them is used with it only.
 * That includes all snapshots while a change is being committed, which is
 * visible some time before the generation rises.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "access/transam.h"
#include "access/xact.h"
#include "storage/lwlock.h"
#include "storage/proc.h"
#include "utils/inval.h"
#include "utils/snapmgr.h"

#include "base/compat.h"
#include "state/models_generation.h"
#include "state/shmem.h"

/* What tells snapshots of this session apart. */
typedef struct SnapshotKey
{
	LocalTransactionId transaction;
	TransactionId xmin;
	TransactionId xmax;
	uint32		running;
	int32		subtransactions;
	CommandId	command;
	uint64		completed;
} SnapshotKey;

static uint64 own_generation = 0;
static uint64 own_change = 0;	/* completed transactions at the last invalidation */
static bool changed_here = false;	/* this transaction has changed models */
static CommandId changed_by;	/* the last command that did */
static bool committing = false; /* counted in models_committing */
static Oid	models_relation = InvalidOid;

static uint64
completed_transactions(void)
{
	return tensile_transaction_state->xactCompletionCount;
}

/* The number of a snapshot that is older than the generation. */
static uint64
snapshot_number(Snapshot snapshot)
{
	static SnapshotKey last;
	static uint64 number = 0;
	SnapshotKey key;

	memset(&key, 0, sizeof(key));
	key.transaction = tensile_local_transaction;
	key.xmin = snapshot->xmin;
	key.xmax = snapshot->xmax;
	key.running = snapshot->xcnt;
	key.subtransactions = snapshot->subxcnt;
	key.command = snapshot->curcid;
	key.completed = snapshot->snapXactCompletionCount;
	if (number == 0 || memcmp(&key, &last, sizeof(key)) != 0)
	{
		last = key;
		number++;
	}
	return number;
}

/* Was the snapshot taken after models changed last, here or elsewhere? */
static bool
is_new(Snapshot snapshot, uint64 last_change)
{
	/* 0: one that another process has taken */
	if (snapshot->snapXactCompletionCount == 0 ||
		snapshot->snapXactCompletionCount < Max(last_change, own_change))
		return false;
	return !changed_here || snapshot->curcid > changed_by;
}

ModelsView
tensile_models_view(void)
{
	Snapshot	snapshot = ActiveSnapshotSet() ? GetActiveSnapshot() : GetTransactionSnapshot();
	uint64		generation;
	uint64		last_change;
	bool		changing;

	tensile_require_preload();

	/*
	 * Until the generation has stayed the same: a change that is visible to
	 * the snapshot was then either counted before, or is being committed.
	 */
	do
	{
		generation = pg_atomic_read_u64(&tensile_shared->models_generation);
		pg_read_barrier();
		changing = pg_atomic_read_u32(&tensile_shared->models_committing) > 0;
		last_change = pg_atomic_read_u64(&tensile_shared->models_changed);
		pg_read_barrier();
	} while (generation != pg_atomic_read_u64(&tensile_shared->models_generation));

	return (ModelsView) {
		.generation = generation + own_generation,
		.snapshot = !changing && is_new(snapshot, last_change) ? 0 : snapshot_number(snapshot)
	};
}

/* ---- changes ---- */

void
tensile_models_changed_here(void)
{
	own_generation++;
	changed_here = true;
	changed_by = GetCurrentCommandId(false);
}

void
tensile_models_committing(void)
{
	if (committing)
		return;
	committing = true;
	pg_atomic_fetch_add_u32(&tensile_shared->models_committing, 1);
}

void
tensile_models_transaction_ended(bool changed)
{
	uint64		completed = completed_transactions();
	uint64		last;

	if (changed)
	{
		last = pg_atomic_read_u64(&tensile_shared->models_changed);
		while (last < completed &&
			   !pg_atomic_compare_exchange_u64(&tensile_shared->models_changed, &last, completed))
			;
		pg_atomic_fetch_add_u64(&tensile_shared->models_generation, 1);
	}
	else if (changed_here)
		own_generation++;
	changed_here = false;
	if (committing)
		pg_atomic_fetch_sub_u32(&tensile_shared->models_committing, 1);
	committing = false;
}

/*
 * A callback of the relation cache; the OID is invalid when any relation may
 * have changed.
 */
static void
relation_changed(Datum arg, Oid relation)
{
	if (relation != models_relation && OidIsValid(relation))
		return;
	own_generation++;
	own_change = completed_transactions();
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
