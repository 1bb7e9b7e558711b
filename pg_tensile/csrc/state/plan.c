/*
 * plan.c: the plan table.
 *
 * For each job slot the table has a header (generation, number of events),
 * event rows of fixed size, and behind these, for a plan that has them, the
 * groups of its steps (rows of the same size) and the order of the operators
 * (int32 each).
 *
 * The scheduler is the only writer.  It writes the header and the rows under
 * the slot's lock, and readers copy both under that lock, so nobody sees half
 * a plan.  A worker that finds a newer generation than its trainer has sends
 * the plan, and acknowledges it when the trainer has made an iteration under
 * it.
 *
 * A plan comes with a grant of device memory.  The grant is entered into the
 * ledger (ledger.c) at the same time, under shared->lock, or the plan is not
 * published.  A plan with groups comes without: its job asks for memory before
 * each of them (memory_flow.c).
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/builtins.h"

#include "base/compat.h"
#include "state/banker.h"
#include "state/identity.h"
#include "state/ledger.h"
#include "state/memory_flow.h"
#include "state/plan.h"
#include "state/shmem.h"
#include "state/slot.h"
#include "state/wakeup.h"

PG_FUNCTION_INFO_V1(tensile_publish_plan);
PG_FUNCTION_INFO_V1(tensile_acknowledge_plan);

#define KINDS 4				/* of events, as in plan_sql.c */
#define CODECS 4				/* pg_tensile/planning/compression/codec.py */
#define SWAP_OUT 1

/* ---- checking ---- */

/*
 * Raises an error unless rows, groups and order have whole elements and fit
 * into the table.
 */
static void
check_size(Size event_bytes, Size group_bytes, Size order_bytes)
{
	Size		limit = tensile_shared->plan_events * sizeof(TensilePlanEvent);
	Size		bytes = event_bytes + group_bytes;

	if (group_bytes % sizeof(TensilePlanGroup) != 0 ||
		group_bytes / sizeof(TensilePlanGroup) > TENSILE_MOST_GROUPS)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("groups of %zu bytes are not up to %d rows of %zu bytes",
						group_bytes, TENSILE_MOST_GROUPS, sizeof(TensilePlanGroup))));

	if (event_bytes % sizeof(TensilePlanEvent) != 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("a plan of %zu bytes is not a number of rows of %zu bytes",
						event_bytes, sizeof(TensilePlanEvent))));
	if (order_bytes % sizeof(int32) != 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("an order of %zu bytes is not a number of operators", order_bytes)));
	if (bytes > limit || order_bytes > limit - bytes)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 order_bytes == 0
				 ? errmsg("a plan of %zu events does not fit into the plan table",
						  bytes / sizeof(TensilePlanEvent))
				 : errmsg("a plan of %zu events that orders %zu operators does not fit "
						  "into the plan table",
						  bytes / sizeof(TensilePlanEvent), order_bytes / sizeof(int32)),
				 errhint("Increase pg_tensile.plan_events (now %d) and restart the server.",
						 tensile_shared->plan_events)));
}

/*
 * Raises an error unless all rows are events, and the order consists of
 * operators.
 */
static void
check_plan(const TensilePlanHeader *header, TensilePlanEvent *events)
{
	const int32 *order = tensile_plan_order(header, events);

	for (uint32 i = 0; i < header->nevents; i++)
		if (events[i].kind == 0 || events[i].kind > KINDS ||
			events[i].codec >= (events[i].kind == SWAP_OUT ? CODECS + 1 : 1) ||
			events[i].zero[0] != 0 || events[i].zero[1] != 0)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("event %u of the plan is of unknown kind", i)));
	for (uint32 i = 0; i < header->nordered; i++)
		if (order[i] < 0)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("the plan's order names operator %d", order[i])));
}

/*
 * Raises an error unless the groups have consecutive steps and sizes within
 * the plan's grant.
 */
static void
check_groups(const TensilePlanHeader *header, const TensilePlanGroup *groups)
{
	int64		next = 0;

	for (uint32 i = 0; i < header->ngroups; i++)
	{
		const TensilePlanGroup *group = &groups[i];

		if (group->first != next || group->last < group->first ||
			group->first_operator < 0 || group->last_operator < 0 ||
			group->rest_bytes < 0 || group->most_bytes < group->rest_bytes ||
			group->most_bytes > header->granted_bytes)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("group %u of the plan does not follow the one before, "
							"or has impossible sizes", i)));
		next = (int64) group->last + 1;
	}
}

/*
 * Raises an error unless the numbers of a plan make sense; comparisons with
 * NaN are false.
 */
static void
check_header(const TensilePlanHeader *header)
{
	if (header->planned_bytes < 0 || header->granted_bytes < header->planned_bytes ||
		!(header->link_share >= 0 && header->link_share <= 1))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("a plan cannot have planned_bytes " INT64_FORMAT
						", granted_bytes " INT64_FORMAT " and link_share %g",
						header->planned_bytes, header->granted_bytes, header->link_share)));
}

/* ---- writing ---- */

/*
 * Writes the plan with its grant and wakes the job's worker.  Sets the
 * header's generation, to 0 if there is no room for the grant.  False if the
 * job has no slot with a device.
 *
 * Grant and header are entered under shared->lock, so that grants are entered
 * one after the other.  The rows are copied under the slot's own lock, for
 * which readers and the next job of the slot have to wait.
 */
static bool
write_plan(int64 job, TensilePlanHeader *header, const TensilePlanEvent *events)
{
	TensileSlot *slot;
	bool		exists;

	header->generation = 0;
	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	slot = tensile_slot_of_job(job);
	exists = slot && slot->device >= 0;
	if (exists && (header->ngroups > 0 || tensile_ledger_enter(slot, header->granted_bytes)))
	{
		LWLockAcquire(slot->lock, LW_EXCLUSIVE);
		header->generation = slot->plan.generation + 1;
		slot->plan = *header;
		tensile_wake(&slot->wakeup);
	}
	LWLockRelease(tensile_shared->lock);
	if (header->generation > 0)
	{
		memcpy(tensile_slot_events(slot), events, tensile_plan_bytes(header));
		LWLockRelease(slot->lock);
	}
	return exists;
}

/*
 * tensile_internal._publish_plan(job, events, planned_bytes, granted_bytes, link_share,
 * plan_order, groups) -> generation; null if there is no room
 */
Datum
tensile_publish_plan(PG_FUNCTION_ARGS)
{
	int64		job = PG_GETARG_INT64(0);
	bytea	   *plan = PG_GETARG_BYTEA_PP(1);
	bytea	   *order = PG_GETARG_BYTEA_PP(5);
	bytea	   *groups = PG_GETARG_BYTEA_PP(6);
	TensilePlanEvent *events;	/* a copy, because rows must be aligned */
	TensilePlanHeader header;

	tensile_require_process(TENSILE_SCHEDULER);
	check_size(VARSIZE_ANY_EXHDR(plan), VARSIZE_ANY_EXHDR(groups), VARSIZE_ANY_EXHDR(order));
	memset(&header, 0, sizeof(header));
	header.planned_bytes = PG_GETARG_INT64(2);
	header.granted_bytes = PG_GETARG_INT64(3);
	header.link_share = PG_GETARG_FLOAT8(4);
	header.nevents = VARSIZE_ANY_EXHDR(plan) / sizeof(TensilePlanEvent);
	header.ngroups = VARSIZE_ANY_EXHDR(groups) / sizeof(TensilePlanGroup);
	header.nordered = VARSIZE_ANY_EXHDR(order) / sizeof(int32);
	check_header(&header);
	events = palloc(tensile_plan_bytes(&header) + 1);
	memcpy(events, VARDATA_ANY(plan), VARSIZE_ANY_EXHDR(plan));
	memcpy(tensile_plan_groups(&header, events), VARDATA_ANY(groups), VARSIZE_ANY_EXHDR(groups));
	memcpy(tensile_plan_order(&header, events), VARDATA_ANY(order), VARSIZE_ANY_EXHDR(order));
	check_plan(&header, events);
	check_groups(&header, tensile_plan_groups(&header, events));
	if (!write_plan(job, &header, events))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("job " INT64_FORMAT " has no worker with a device to plan for", job)));
	if (header.generation == 0)
		PG_RETURN_NULL();
	PG_RETURN_INT64((int64) header.generation);
}

/*
 * tensile_worker._acknowledge_plan(generation): the trainer has made an iteration
 * under that plan.  If it is still the newest, the job's grant becomes that of
 * the plan, and there may be room for others.
 */
Datum
tensile_acknowledge_plan(PG_FUNCTION_ARGS)
{
	uint64		generation = (uint64) PG_GETARG_INT64(0);
	uint64		newest;

	tensile_require_process(TENSILE_WORKER);
	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	newest = tensile_my_slot->plan.generation;	/* written under shared->lock only */
	if (generation > 0 && generation <= newest)
	{
		tensile_my_slot->acknowledged = Max(tensile_my_slot->acknowledged, generation);
		if (generation == newest && tensile_my_slot->plan.ngroups == 0 &&
			tensile_my_slot->flow.ngroups == 0)
		{
			tensile_my_slot->granted_bytes = tensile_my_slot->plan.granted_bytes;
			tensile_memory_flow_wake(tensile_my_slot->device);
		}
		tensile_wake(&tensile_shared->singletons[TENSILE_SCHEDULER].wakeup);
	}
	LWLockRelease(tensile_shared->lock);
	if (generation == 0 || generation > newest)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("job " INT64_FORMAT " has no plan of generation " INT64_FORMAT,
						tensile_my_slot->job, (int64) generation)));
	tensile_announce_job_change();
	PG_RETURN_VOID();
}
