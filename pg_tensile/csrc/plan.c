/*
 * plan.c: the plan table: for each job slot a header (generation, number of events, checksum) and fixed-size event rows.
 *
 * The scheduler is the only writer. It writes rows and header under the slot's lock, readers copy both under the same
 * lock, so nobody sees half a plan; the checksum is for what locks don't prevent (a stray write into shared memory), and
 * a plan that fails it is never handed out. The worker that finds a newer generation than its executor has sends it on.
 */
#include "postgres.h"

#include "funcapi.h"
#include "miscadmin.h"
#include "port/pg_crc32c.h"
#include "utils/builtins.h"

#include "pg_tensile.h"

PG_FUNCTION_INFO_V1(tensile_publish_plan);
PG_FUNCTION_INFO_V1(tensile_fetch_plan);
PG_FUNCTION_INFO_V1(tensile_plan);

static const char *const event_kinds[] = {NULL, "swap_out", "swap_in", "recompute", "release"};

/* The event rows of a slot. */
static TensilePlanEvent *
slot_events(const TensileSlot *slot)
{
	return tensile_shared->events + (slot - tensile_shared->slots) * (Size) tensile_shared->plan_events;
}

static uint32
checksum_events(const TensilePlanEvent *events, uint32 nevents)
{
	pg_crc32c	checksum;

	INIT_CRC32C(checksum);
	COMP_CRC32C(checksum, events, nevents * sizeof(TensilePlanEvent));
	FIN_CRC32C(checksum);
	return checksum;
}

/* ---- writing ---- */

/* Raises unless `events` is a plan that fits into the table. */
static void
check_events(const TensilePlanEvent *events, Size bytes)
{
	if (bytes % sizeof(TensilePlanEvent) != 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("a plan of %zu bytes is not a number of rows of %zu bytes", bytes, sizeof(TensilePlanEvent))));
	if (bytes / sizeof(TensilePlanEvent) > tensile_shared->plan_events)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("a plan of %zu events does not fit into the plan table", bytes / sizeof(TensilePlanEvent)),
				 errhint("Increase pg_tensile.plan_events (now %d) and restart the server.", tensile_shared->plan_events)));
	for (Size i = 0; i < bytes / sizeof(TensilePlanEvent); i++)
		if (events[i].kind == 0 || events[i].kind >= lengthof(event_kinds) ||
			events[i].zero[0] != 0 || events[i].zero[1] != 0 || events[i].zero[2] != 0)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("event %zu of the plan is of unknown kind", i)));
}

/* The new generation, or 0 if the job has no slot. */
static uint64
write_plan(int64 job, const TensilePlanEvent *events, uint32 nevents)
{
	uint32		checksum = checksum_events(events, nevents);
	uint64		generation = 0;
	TensileSlot *slot;

	LWLockAcquire(tensile_shared->lock, LW_SHARED);
	slot = tensile_slot_of_job(job);
	if (slot)
	{
		LWLockAcquire(slot->lock, LW_EXCLUSIVE);
		memcpy(slot_events(slot), events, nevents * sizeof(TensilePlanEvent));
		slot->plan.nevents = nevents;
		slot->plan.checksum = checksum;
		generation = ++slot->plan.generation;
		LWLockRelease(slot->lock);
		tensile_wake(&slot->wakeup);
	}
	LWLockRelease(tensile_shared->lock);
	return generation;
}

/* tensile._publish_plan(job, events) → generation */
Datum
tensile_publish_plan(PG_FUNCTION_ARGS)
{
	int64		job = PG_GETARG_INT64(0);
	bytea	   *plan = PG_GETARG_BYTEA_PP(1);
	TensilePlanEvent *events = palloc(VARSIZE_ANY_EXHDR(plan) + 1); /* a copy: the rows must be aligned */
	uint64		generation;

	tensile_require_process(TENSILE_SCHEDULER);
	memcpy(events, VARDATA_ANY(plan), VARSIZE_ANY_EXHDR(plan));
	check_events(events, VARSIZE_ANY_EXHDR(plan));
	generation = write_plan(job, events, VARSIZE_ANY_EXHDR(plan) / sizeof(TensilePlanEvent));
	if (generation == 0)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT), errmsg("job " INT64_FORMAT " has no worker to plan for", job)));
	PG_RETURN_INT64((int64) generation);
}

/* ---- reading ---- */

/*
 * A copy of the job's plan if it is newer than generation `after`; NULL if not, or if the job has no slot. Raises when
 * its checksum is wrong.
 */
static TensilePlanEvent *
read_plan(int64 job, uint64 after, TensilePlanHeader *header)
{
	TensilePlanEvent *events = NULL;
	TensileSlot *slot;

	LWLockAcquire(tensile_shared->lock, LW_SHARED);
	slot = tensile_slot_of_job(job);
	if (slot)
	{
		LWLockAcquire(slot->lock, LW_SHARED);
		*header = slot->plan;
		if (header->generation > after)
		{
			events = palloc(header->nevents * sizeof(TensilePlanEvent) + 1);
			memcpy(events, slot_events(slot), header->nevents * sizeof(TensilePlanEvent));
		}
		LWLockRelease(slot->lock);
	}
	LWLockRelease(tensile_shared->lock);
	if (events && checksum_events(events, header->nevents) != header->checksum)
		ereport(ERROR,
				(errcode(ERRCODE_DATA_CORRUPTED),
				 errmsg("the plan of job " INT64_FORMAT " in shared memory has a wrong checksum", job),
				 errhint("Restart the server, and check its memory.")));
	return events;
}

/* tensile._fetch_plan(generation) → the newer plan of this worker's job, or no row */
Datum
tensile_fetch_plan(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	TensilePlanHeader header;
	TensilePlanEvent *events;
	Datum		values[2];
	bool		nulls[2] = {false};

	tensile_require_process(TENSILE_WORKER);
	InitMaterializedSRF(fcinfo, 0);
	events = read_plan(tensile_my_slot->job, Max(PG_GETARG_INT64(0), 0), &header);
	if (events == NULL)
		PG_RETURN_NULL();
	values[0] = Int64GetDatum((int64) header.generation);
	values[1] = PointerGetDatum(cstring_to_text_with_len((char *) events, header.nevents * sizeof(TensilePlanEvent)));
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	PG_RETURN_NULL();
}

/* One row of tensile._plan(), in the order of its columns. */
static void
put_event(ReturnSetInfo *rsinfo, int64 job, uint64 generation, int number, const TensilePlanEvent *event)
{
	Datum		values[] = {
		Int64GetDatum(job), Int64GetDatum((int64) generation), Int32GetDatum(number),
		CStringGetTextDatum(event_kinds[event->kind]), Int32GetDatum(event->tensor), Int32GetDatum(event->version),
		Int32GetDatum(event->trigger_operator), Int64GetDatum((int64) event->delay_us),
		Int32GetDatum(event->deadline_operator), Int64GetDatum(event->bytes)
	};
	bool		nulls[lengthof(values)] = {false};

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
			put_event((ReturnSetInfo *) fcinfo->resultinfo, slots[i].job, header.generation, j, &events[j]);
		if (events)
			pfree(events);
	}
	PG_RETURN_NULL();
}
