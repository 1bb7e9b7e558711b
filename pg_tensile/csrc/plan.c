/*
 * plan.c: the plan table.
 *
 * For each job slot the table has a header (generation, number of events),
 * event rows of fixed size, and behind these, for a plan that has one, the
 * order of the operators (int32 each).
 *
 * The scheduler is the only writer.  It writes the header and the rows under
 * the slot's lock, and readers copy both under that lock, so nobody sees half
 * a plan.  A worker that finds a newer generation than its executor has sends
 * the plan, and acknowledges it when the executor has made an iteration under
 * it.
 *
 * A plan comes with a grant of device memory.  The grant is entered into the
 * ledger (ledger.c) at the same time, under shared->lock, or the plan is not
 * published.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/tuplestore.h"

#include "compat.h"
#include "job_change.h"
#include "ledger.h"
#include "plan.h"
#include "process.h"
#include "shmem.h"
#include "slot.h"

PG_FUNCTION_INFO_V1(tensile_publish_plan);
PG_FUNCTION_INFO_V1(tensile_fetch_plan);
PG_FUNCTION_INFO_V1(tensile_acknowledge_plan);
PG_FUNCTION_INFO_V1(tensile_plan);

static const char *const event_kinds[] = {NULL, "swap_out", "swap_in", "recompute", "release"};
/* as in pg_tensile/planning/compression/codec.py */
static const char *const codecs[] = {NULL, "zvc", "rle", "csr", "lz4"};

#define SWAP_OUT 1

/* The event rows of a slot. */
static TensilePlanEvent *
slot_events(const TensileSlot *slot)
{
	Size		index = slot - tensile_shared->slots;

	return tensile_shared->events + index * tensile_shared->plan_events;
}

/* The order of the operators. */
static int32 *
order_of(const TensilePlanHeader *header, TensilePlanEvent *events)
{
	return (int32 *) (events + header->nevents);
}

/* Bytes of the rows and the order. */
static Size
plan_bytes(const TensilePlanHeader *header)
{
	return header->nevents * sizeof(TensilePlanEvent) + header->nordered * sizeof(int32);
}

/* ---- writing ---- */

/*
 * Raises an error unless rows and order have whole elements and fit into the
 * table.
 */
static void
check_size(Size bytes, Size order_bytes)
{
	Size		limit = tensile_shared->plan_events * sizeof(TensilePlanEvent);

	if (bytes % sizeof(TensilePlanEvent) != 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("a plan of %zu bytes is not a number of rows of %zu bytes",
						bytes, sizeof(TensilePlanEvent))));
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
	const int32 *order = order_of(header, events);

	for (uint32 i = 0; i < header->nevents; i++)
		if (events[i].kind == 0 || events[i].kind >= lengthof(event_kinds) ||
			events[i].codec >= (events[i].kind == SWAP_OUT ? lengthof(codecs) : 1) ||
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
	if (exists && tensile_ledger_enter(slot, header->granted_bytes))
	{
		LWLockAcquire(slot->lock, LW_EXCLUSIVE);
		header->generation = slot->plan.generation + 1;
		slot->plan = *header;
		tensile_wake(&slot->wakeup);
	}
	LWLockRelease(tensile_shared->lock);
	if (header->generation > 0)
	{
		memcpy(slot_events(slot), events, plan_bytes(header));
		LWLockRelease(slot->lock);
	}
	return exists;
}

/*
 * tensile._publish_plan(job, events, planned_bytes, granted_bytes, link_share,
 * plan_order) -> generation; null if there is no room
 */
Datum
tensile_publish_plan(PG_FUNCTION_ARGS)
{
	int64		job = PG_GETARG_INT64(0);
	bytea	   *plan = PG_GETARG_BYTEA_PP(1);
	bytea	   *order = PG_GETARG_BYTEA_PP(5);
	TensilePlanEvent *events;	/* a copy, because rows must be aligned */
	TensilePlanHeader header;

	tensile_require_process(TENSILE_SCHEDULER);
	check_size(VARSIZE_ANY_EXHDR(plan), VARSIZE_ANY_EXHDR(order));
	memset(&header, 0, sizeof(header));
	header.planned_bytes = PG_GETARG_INT64(2);
	header.granted_bytes = PG_GETARG_INT64(3);
	header.link_share = PG_GETARG_FLOAT8(4);
	header.nevents = VARSIZE_ANY_EXHDR(plan) / sizeof(TensilePlanEvent);
	header.nordered = VARSIZE_ANY_EXHDR(order) / sizeof(int32);
	check_header(&header);
	events = palloc(plan_bytes(&header) + 1);
	memcpy(events, VARDATA_ANY(plan), VARSIZE_ANY_EXHDR(plan));
	memcpy(order_of(&header, events), VARDATA_ANY(order), VARSIZE_ANY_EXHDR(order));
	check_plan(&header, events);
	if (!write_plan(job, &header, events))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("job " INT64_FORMAT " has no worker with a device to plan for", job)));
	if (header.generation == 0)
		PG_RETURN_NULL();
	PG_RETURN_INT64((int64) header.generation);
}

/*
 * tensile._acknowledge_plan(generation): the executor has made an iteration
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
		if (generation == newest)
			tensile_my_slot->granted_bytes = tensile_my_slot->plan.granted_bytes;
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

/* ---- reading ---- */

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
		events = palloc(plan_bytes(header) + 1);
		memcpy(events, slot_events(slot), plan_bytes(header));
	}
	LWLockRelease(slot->lock);
	return events;
}

/*
 * tensile._fetch_plan(generation) -> the plan of this worker's job if it is
 * newer, or no row
 */
Datum
tensile_fetch_plan(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	TensilePlanHeader header;
	TensilePlanEvent *events;
	Size		row_bytes;
	Datum		values[6];
	bool		nulls[6] = {false};

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
	values[5] = PointerGetDatum(cstring_to_text_with_len((char *) order_of(&header, events),
														 header.nordered * sizeof(int32)));
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
	return order_of(header, events)[index];
}

/* Returns one row of tensile._plan(), in the order of its columns. */
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

/* tensile._plan(): the plans of the jobs that the current user may see */
Datum
tensile_plan(PG_FUNCTION_ARGS)
{
	TensileSlot *slots;
	int			nslots;

	tensile_require_preload();
	InitMaterializedSRF(fcinfo, 0);
	slots = tensile_copy_slots(&nslots);
	for (int i = 0; i < nslots; i++)
	{
		TensilePlanHeader header;
		TensilePlanEvent *events;

		if (!tensile_role_visible(slots[i].role))
			continue;
		events = read_plan(slots[i].job, 0, &header);
		for (uint32 j = 0; events && j < header.nevents; j++)
			put_event((ReturnSetInfo *) fcinfo->resultinfo, slots[i].job, &header, events, j);
		if (events)
			pfree(events);
	}
	PG_RETURN_NULL();
}
