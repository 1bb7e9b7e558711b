/*
 * plan_sql.c: the plan table in SQL: a worker reads its job's plan, sessions all
 * plans that they may see.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/tuplestore.h"

#include "base/compat.h"
#include "processes/memory_flow_socket.h"
#include "state/identity.h"
#include "state/plan.h"
#include "state/shmem.h"
#include "state/slot.h"

PG_FUNCTION_INFO_V1(tensile_fetch_plan);
PG_FUNCTION_INFO_V1(tensile_plan);

static const char *const event_kinds[] = {NULL, "swap_out", "swap_in", "recompute", "release"};
/* as in pg_tensile/planning/compression/codec.py */
static const char *const codecs[] = {NULL, "zvc", "rle", "csr", "lz4"};

/*
 * A copy of the job's plan if it is newer than generation `after`, else NULL.
 * shared->lock is held only to find the slot.  Up to 32 MB are copied under
 * the slot's own lock, without which no other job can reserve the slot.
 */
static TensilePlanEvent *
read_plan(int64 job, uint64 after, TensilePlanHeader *header)
{
	TensilePlanEvent *events = NULL;
	TensileSlot *slot;

	LWLockAcquire(tensile_shared->lock, LW_SHARED);
	slot = tensile_slot_of_job(job);
	if (slot)
		LWLockAcquire(slot->lock, LW_SHARED);
	LWLockRelease(tensile_shared->lock);
	if (slot == NULL)
		return NULL;
	*header = slot->plan;
	if (header->generation > after)
	{
		events = palloc(tensile_plan_bytes(header) + 1);
		memcpy(events, tensile_slot_events(slot), tensile_plan_bytes(header));
	}
	LWLockRelease(slot->lock);
	return events;
}

/*
 * tensile_worker._fetch_plan(generation) -> the plan of this worker's job if it is
 * newer, or no row
 */
Datum
tensile_fetch_plan(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	TensilePlanHeader header;
	TensilePlanEvent *events;
	TensilePlanGroup *groups;
	Size		row_bytes;
	Datum		values[7];
	bool		nulls[7] = {false};

	tensile_require_process(TENSILE_WORKER);
	InitMaterializedSRF(fcinfo, 0);
	events = read_plan(tensile_my_slot->job, Max(PG_GETARG_INT64(0), 0), &header);
	if (events == NULL)
		PG_RETURN_NULL();
	values[0] = Int64GetDatum((int64) header.generation);
	row_bytes = header.nevents * sizeof(TensilePlanEvent);
	values[1] = PointerGetDatum(cstring_to_text_with_len((char *) events, row_bytes));
	values[2] = Int64GetDatum(header.planned_bytes);
	values[3] = Int64GetDatum(header.granted_bytes);
	values[4] = Float8GetDatum(header.link_share);
	values[5] = PointerGetDatum(cstring_to_text_with_len((char *) tensile_plan_order(&header, events),
														 header.nordered * sizeof(int32)));
	groups = tensile_plan_groups(&header, events);
	values[6] = PointerGetDatum(cstring_to_text_with_len((char *) groups,
														 header.ngroups * sizeof(TensilePlanGroup)));
	tensile_memory_flow_know_plan(&header, groups);	/* its trainer gets it, and may adopt it */
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	PG_RETURN_NULL();
}

/*
 * The operator at an index of the plan's order; without an order, the index.
 */
static int32
operator_at(const TensilePlanHeader *header, TensilePlanEvent *events, int32 index)
{
	if (index < 0 || (uint32) index >= header->nordered)
		return index;
	return tensile_plan_order(header, events)[index];
}

/* Returns one row of tensile_worker._plan(), in the order of its columns. */
static void
put_event(ReturnSetInfo *rsinfo, int64 job, const TensilePlanHeader *header,
		  TensilePlanEvent *events, uint32 number)
{
	const TensilePlanEvent *event = &events[number];
	Datum		values[] = {
		Int64GetDatum(job), Int64GetDatum((int64) header->generation),
		Int32GetDatum((int32) number), CStringGetTextDatum(event_kinds[event->kind]),
		Int32GetDatum(event->tensor), Int32GetDatum(event->version),
		Int32GetDatum(operator_at(header, events, event->trigger_operator)),
		Int64GetDatum((int64) event->delay_us),
		Int32GetDatum(operator_at(header, events, event->deadline_operator)),
		Int64GetDatum(event->bytes),
		event->codec ? CStringGetTextDatum(codecs[event->codec]) : (Datum) 0
	};
	bool		nulls[lengthof(values)] = {false};

	nulls[lengthof(values) - 1] = event->codec == 0;
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}

/* Returns the begin and the end of a group as two rows behind the events. */
static void
put_group(ReturnSetInfo *rsinfo, int64 job, const TensilePlanHeader *header,
		  TensilePlanEvent *events, uint32 number)
{
	const TensilePlanGroup *group = &tensile_plan_groups(header, events)[number];

	for (int end = 0; end <= 1; end++)
	{
		Datum		values[] = {
			Int64GetDatum(job), Int64GetDatum((int64) header->generation),
			Int32GetDatum((int32) (header->nevents + 2 * number + end)),
			CStringGetTextDatum(end ? "end_group" : "begin_group"), (Datum) 0, (Datum) 0,
			Int32GetDatum(group->first_operator), Int64GetDatum(0),
			Int32GetDatum(group->last_operator),
			Int64GetDatum(end ? group->rest_bytes : group->most_bytes), (Datum) 0
		};
		bool		nulls[lengthof(values)] = {[4] = true,[5] = true,[10] = true};

		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
}

/* Returns the rows of a plan. */
static void
put_plan(ReturnSetInfo *rsinfo, int64 job)
{
	TensilePlanHeader header;
	TensilePlanEvent *events = read_plan(job, 0, &header);

	if (events == NULL)
		return;
	for (uint32 i = 0; i < header.nevents; i++)
		put_event(rsinfo, job, &header, events, i);
	for (uint32 i = 0; i < header.ngroups; i++)
		put_group(rsinfo, job, &header, events, i);
	pfree(events);
}

/* tensile_worker._plan(): the plans of the jobs that the current user may see */
Datum
tensile_plan(PG_FUNCTION_ARGS)
{
	TensileSlot *slots;
	int			nslots;

	tensile_require_preload();
	InitMaterializedSRF(fcinfo, 0);
	slots = tensile_copy_slots(&nslots);
	for (int i = 0; i < nslots; i++)
		if (tensile_role_visible(slots[i].role))
			put_plan((ReturnSetInfo *) fcinfo->resultinfo, slots[i].job);
	PG_RETURN_NULL();
}
