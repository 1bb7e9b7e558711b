/*
 * progress.c: the progress of jobs, in their slots in shared memory.
 *
 * A worker is the only writer of its slot's progress.  Readers copy the slots
 * under their locks, and then, without locks, omit those that the current
 * user may not see.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "base/convert.h"
#include "base/library.h"
#include "state/identity.h"
#include "state/progress.h"
#include "state/shmem.h"
#include "state/slot.h"

PG_FUNCTION_INFO_V1(tensile_report);
PG_FUNCTION_INFO_V1(tensile_progress);

/*
 * Arguments of tensile_worker._report in order, and bits of TensileProgress.reported.
 */
enum
{
	REPORT_PHASE, REPORT_EPOCH, REPORT_EPOCHS, REPORT_STEP, REPORT_STEPS, REPORT_LOSS,
	REPORT_SAMPLES_PER_S, REPORT_DEVICE_BYTES, REPORT_DEVICE_PEAK_BYTES, REPORT_BYTES_SWAPPED,
	REPORT_STALL_US, REPORT_PASSIVE_SWAP_INS, REPORT_UTILISATION, REPORT_RAW_BYTES_SWAPPED,
	REPORT_TIME_LEFT_S, REPORT_LEAST_TIME_LEFT_S, REPORT_N
};
StaticAssertDecl(TENSILE_REPORTED_UTILISATION == 1 << REPORT_UTILISATION,
				 "ledger_sql.c reads this bit");

/*
 * tensile_worker._report(...): updates the progress; null leaves a number as it is.
 */
Datum
tensile_report(PG_FUNCTION_ARGS)
{
	TensileProgress now;
	text	   *phase = PG_ARGISNULL(REPORT_PHASE) ? NULL : PG_GETARG_TEXT_PP(REPORT_PHASE);

	tensile_require_process(TENSILE_WORKER);
	now = tensile_my_slot->progress;	/* nobody else writes it */
	for (int i = 0; i < REPORT_N; i++)
		if (!PG_ARGISNULL(i))
			now.reported |= 1 << i;
#define REPORT(argument, field, get) if (!PG_ARGISNULL(argument)) now.field = get(argument)
	if (phase)
		tensile_copy_text(now.phase, sizeof(now.phase), phase);
	REPORT(REPORT_EPOCH, epoch, PG_GETARG_INT32);
	REPORT(REPORT_EPOCHS, epochs, PG_GETARG_INT32);
	REPORT(REPORT_STEP, step, PG_GETARG_INT64);
	REPORT(REPORT_STEPS, steps, PG_GETARG_INT64);
	REPORT(REPORT_LOSS, loss, PG_GETARG_FLOAT8);
	REPORT(REPORT_SAMPLES_PER_S, samples_per_s, PG_GETARG_FLOAT8);
	REPORT(REPORT_DEVICE_BYTES, device_bytes, PG_GETARG_INT64);
	REPORT(REPORT_DEVICE_PEAK_BYTES, device_peak_bytes, PG_GETARG_INT64);
	REPORT(REPORT_BYTES_SWAPPED, bytes_swapped, PG_GETARG_INT64);
	REPORT(REPORT_STALL_US, stall_us, PG_GETARG_INT64);
	REPORT(REPORT_PASSIVE_SWAP_INS, passive_swap_ins, PG_GETARG_INT64);
	REPORT(REPORT_UTILISATION, utilisation, PG_GETARG_FLOAT8);
	REPORT(REPORT_RAW_BYTES_SWAPPED, raw_bytes_swapped, PG_GETARG_INT64);
	REPORT(REPORT_TIME_LEFT_S, time_left_s, PG_GETARG_FLOAT8);
	REPORT(REPORT_LEAST_TIME_LEFT_S, least_time_left_s, PG_GETARG_FLOAT8);
#undef REPORT
	/* The ledger adds these up over all jobs. */
	now.device_bytes = Max(0, Min(now.device_bytes, TENSILE_MAX_BYTES));
	now.device_peak_bytes = Max(0, Min(now.device_peak_bytes, TENSILE_MAX_BYTES));
	now.utilisation = now.utilisation >= 0 ? Min(now.utilisation, 1) : 0;	/* NaN becomes 0 */
	now.heartbeat = GetCurrentTimestamp();

	LWLockAcquire(tensile_my_slot->lock, LW_EXCLUSIVE);
	tensile_my_slot->progress = now;
	LWLockRelease(tensile_my_slot->lock);
	PG_RETURN_VOID();
}

/* Returns one row of tensile_worker._progress(), in the order of its columns. */
static void
put_progress(ReturnSetInfo *rsinfo, const TensileSlot *slot)
{
	const TensileProgress *progress = &slot->progress;
	Datum		reported[REPORT_N] = {
		CStringGetTextDatum(progress->phase),
		Int32GetDatum(progress->epoch), Int32GetDatum(progress->epochs),
		Int64GetDatum(progress->step), Int64GetDatum(progress->steps),
		Float8GetDatum(progress->loss), Float8GetDatum(progress->samples_per_s),
		Int64GetDatum(progress->device_bytes), Int64GetDatum(progress->device_peak_bytes),
		Int64GetDatum(progress->bytes_swapped), Int64GetDatum(progress->stall_us),
		Int64GetDatum(progress->passive_swap_ins), Float8GetDatum(progress->utilisation),
		Int64GetDatum(progress->raw_bytes_swapped), Float8GetDatum(progress->time_left_s),
		Float8GetDatum(progress->least_time_left_s)
	};
	Datum		values[2 + REPORT_N + 2];
	bool		nulls[2 + REPORT_N + 2] = {false};

	values[0] = Int64GetDatum(slot->job);
	values[1] = Int32GetDatum(slot->pid);
	nulls[1] = slot->pid == 0;
	for (int i = 0; i < REPORT_N; i++)
	{
		values[2 + i] = reported[i];
		nulls[2 + i] = (progress->reported & (1 << i)) == 0;
	}
	values[2 + REPORT_N] = Int64GetDatum((int64) slot->acknowledged);
	nulls[2 + REPORT_N] = slot->acknowledged == 0;
	values[3 + REPORT_N] = TimestampTzGetDatum(progress->heartbeat);
	nulls[3 + REPORT_N] = progress->heartbeat == 0;
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}

/* tensile_worker._progress(): the jobs that the current user may see */
Datum
tensile_progress(PG_FUNCTION_ARGS)
{
	TensileSlot *slots;
	int			nslots;

	tensile_require_preload();
	InitMaterializedSRF(fcinfo, 0);
	slots = tensile_copy_slots(&nslots);
	for (int i = 0; i < nslots; i++)
		if (tensile_role_visible(slots[i].role))
			put_progress((ReturnSetInfo *) fcinfo->resultinfo, &slots[i]);
	PG_RETURN_NULL();
}
