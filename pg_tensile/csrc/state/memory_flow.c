/*
 * memory_flow.c: which job may take the memory of a device that flows.
 *
 * A job whose plan has groups has no constant grant.  It asks before each
 * group (memory_flow_socket.c), and banker.c decides, about the state of all
 * flowing jobs of the device in shared memory.  They have the memory together
 * that constant grants, overheads and the predictor leave.
 *
 * Each worker looks after its own job.  One whose job has to wait looks again
 * whenever a latch is set because memory has become free, which does not count
 * as a wake-up (wait.c): nothing but its socket is to be looked after.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "storage/latch.h"
#include "utils/timestamp.h"

#include "base/guc.h"
#include "base/process_kind.h"
#include "state/banker.h"
#include "state/device.h"
#include "state/memory_flow.h"
#include "state/shmem.h"
#include "state/slot.h"
#include "state/wakeup.h"

/* Collects the flows of a device; `flows` has room for all jobs. */
static int
flows_on(int device, TensileFlow **flows)
{
	int			nflows = 0;

	for (int i = 0; i < tensile_shared->max_jobs; i++)
	{
		TensileSlot *slot = &tensile_shared->slots[i];

		if (slot->state != SLOT_FREE && slot->device == device && slot->flow.ngroups > 0)
			flows[nflows++] = &slot->flow;
	}
	return nflows;
}

void
tensile_memory_flow_needs(int device, int64 *fit_bytes, int64 *safe_bytes)
{
	TensileFlow *flows[TENSILE_MAX_JOBS];
	int			nflows = flows_on(device, flows);

	*fit_bytes = tensile_banker_fit_bytes(flows, nflows);
	*safe_bytes = tensile_banker_safe_bytes(flows, nflows);
}

void
tensile_memory_flow_wake(int device)
{
	for (int i = 0; i < tensile_shared->max_jobs; i++)
	{
		TensileSlot *slot = &tensile_shared->slots[i];

		if (slot->device == device && slot->flow.waiting && slot->wakeup.latch)
			SetLatch(slot->wakeup.latch);
	}
}

void
tensile_memory_flow_clear(TensileSlot *slot)
{
	if (slot->flow.ngroups == 0)
		return;
	memset(&slot->flow, 0, sizeof(slot->flow));
	slot->flow_generation = 0;
	slot->late_for_job = 0;
	tensile_memory_flow_wake(slot->device);
	/* Plans that had to wait may fit now. */
	tensile_wake(&tensile_shared->singletons[TENSILE_SCHEDULER].wakeup);
}

/* Does the job take no more memory with the new groups than it may already? */
static bool
shrinks(const TensileFlow *old, const TensileFlow *new)
{
	return old->joined && new->whole_bytes <= old->whole_bytes &&
		new->needed_bytes[0] <= old->needed_bytes[0] &&
		new->rest_bytes[new->ngroups - 1] <= old->rest_bytes[old->ngroups - 1];
}

void
tensile_memory_flow_adopt(uint64 generation, const TensileFlow *groups)
{
	TensileSlot *slot = tensile_my_slot;
	int64		least_bytes = groups->rest_bytes[groups->ngroups - 1];
	bool		joined = shrinks(&slot->flow, groups);
	int64		kept_bytes;

	/* Until it joins, a job that had memory keeps what it needs to rest. */
	if (slot->flow.ngroups > 0)
		kept_bytes = slot->flow.joined ? least_bytes : Min(least_bytes, slot->flow.kept_bytes);
	else
		kept_bytes = Min(least_bytes, slot->granted_bytes);
	if (slot->granted_bytes > 0)
		tensile_wake(&tensile_shared->singletons[TENSILE_SCHEDULER].wakeup);
	slot->granted_bytes = 0;
	slot->flow = *groups;
	slot->flow.joined = joined;
	slot->flow.kept_bytes = kept_bytes;
	slot->flow_generation = generation;
	tensile_memory_flow_wake(slot->device);
}

void
tensile_memory_flow_claim(TensileClaimKind kind, int64 constant_bytes)
{
	TensileFlow *flow = &tensile_my_slot->flow;

	flow->claim = kind;
	flow->claim_bytes = constant_bytes;
	flow->waiting = true;
	flow->overtaken = 0;
	tensile_my_slot->flow_waits_since = tensile_my_slot->flow_heard;
}

/* Caller holds shared->lock exclusively. */
static bool
grant_claim(TensileSlot *slot)
{
	TensileFlow *flows[TENSILE_MAX_JOBS];
	int			nflows = flows_on(slot->device, flows);
	TensileFlow *flow = &slot->flow;
	int64		budget = tensile_device_flow_budget(slot->device, false);
	int64		new_budget = tensile_device_flow_budget(slot->device, true);

	if (!flow->waiting)
		return false;
	if (flow->claim == TENSILE_CLAIM_CONSTANT)
	{
		if (!tensile_banker_may_leave(flows, nflows, flow, new_budget))
			return false;
		slot->granted_bytes = flow->claim_bytes;
		tensile_memory_flow_clear(slot);
		return true;
	}
	if (!flow->joined && !tensile_banker_join(flows, nflows, flow, new_budget))
		return false;
	return tensile_banker_begin(flows, nflows, flow, budget, new_budget);
}

bool
tensile_memory_flow_grant(void)
{
	bool		granted;

	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	granted = grant_claim(tensile_my_slot);
	if (granted)
		tensile_my_slot->flow_heard = GetCurrentTimestamp();
	LWLockRelease(tensile_shared->lock);
	return granted;
}

/* ---- jobs that hold up others ---- */

/* Has `slot` held memory that this worker's job waits for for too long? */
static void
mark_if_late(TensileSlot *slot, TimestampTz now)
{
	TimestampTz since = Max(slot->flow_heard, tensile_my_slot->flow_waits_since);

	if (slot == tensile_my_slot || slot->device != tensile_my_slot->device ||
		slot->flow.ngroups == 0 || !slot->flow.running || slot->late_for_job != 0 ||
		!TimestampDifferenceExceeds(since, now, tensile_flow_timeout * 1000))
		return;
	slot->late_for_job = tensile_my_slot->job;
	slot->late_s = (now - since) / USECS_PER_SEC;
	if (slot->wakeup.latch)
		SetLatch(slot->wakeup.latch);
}

void
tensile_memory_flow_mark_late(void)
{
	TensileFlow *flows[TENSILE_MAX_JOBS];
	TensileSlot *slot = tensile_my_slot;
	int			nflows;

	if (tensile_flow_timeout == 0)
		return;
	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	nflows = flows_on(slot->device, flows);
	/* A job is late only if the memory that it holds would suffice. */
	if (slot->flow.waiting &&
		tensile_banker_could_go(flows, nflows, &slot->flow,
								tensile_device_flow_budget(slot->device, true)))
		for (int i = 0; i < tensile_shared->max_jobs; i++)
			mark_if_late(&tensile_shared->slots[i], GetCurrentTimestamp());
	LWLockRelease(tensile_shared->lock);
}
