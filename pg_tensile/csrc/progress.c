/*
 * progress.c: live numbers in shared memory: the jobs' progress, prediction counters, the predictor's models.
 *
 * A worker is the only writer of its slot's progress; readers copy slots under their locks and then, without locks,
 * leave out what the current user may not see. Prediction counters are atomic; a lock is taken exclusively only when a
 * version is counted for the first time, and takes the place of the one not used for longest when all are taken.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "funcapi.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "pg_tensile.h"

PG_FUNCTION_INFO_V1(tensile_report);
PG_FUNCTION_INFO_V1(tensile_progress);
PG_FUNCTION_INFO_V1(tensile_predictions);
PG_FUNCTION_INFO_V1(tensile_report_loaded);
PG_FUNCTION_INFO_V1(tensile_loaded_models);

void
tensile_copy_text(char *target, Size size, const text *source)
{
	int			length = pg_mbcliplen(VARDATA_ANY(source), VARSIZE_ANY_EXHDR(source), size - 1);

	memcpy(target, VARDATA_ANY(source), length);
	target[length] = '\0';
}

/* ---- progress ---- */

/* Arguments of tensile._report, in order; bits of TensileProgress.reported. */
enum
{
	REPORT_PHASE, REPORT_EPOCH, REPORT_EPOCHS, REPORT_STEP, REPORT_STEPS, REPORT_LOSS, REPORT_SAMPLES_PER_S,
	REPORT_DEVICE_BYTES, REPORT_DEVICE_PEAK_BYTES, REPORT_BYTES_SWAPPED, REPORT_STALL_US, REPORT_PASSIVE_SWAP_INS,
	REPORT_UTILISATION, REPORT_RAW_BYTES_SWAPPED, REPORT_N
};
StaticAssertDecl(TENSILE_REPORTED_UTILISATION == 1 << REPORT_UTILISATION, "ledger.c looks at this bit");

/* tensile._report(...): null leaves a number as it is. */
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
#undef REPORT
	/* Sums over all jobs are made of these (ledger.c). */
	now.device_bytes = Max(0, Min(now.device_bytes, TENSILE_MAX_BYTES));
	now.device_peak_bytes = Max(0, Min(now.device_peak_bytes, TENSILE_MAX_BYTES));
	now.utilisation = now.utilisation >= 0 ? Min(now.utilisation, 1) : 0;	/* a NaN is 0, too */
	now.heartbeat = GetCurrentTimestamp();

	LWLockAcquire(tensile_my_slot->lock, LW_EXCLUSIVE);
	tensile_my_slot->progress = now;
	LWLockRelease(tensile_my_slot->lock);
	PG_RETURN_VOID();
}

/* One row of tensile._progress(), in the order of its columns. */
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
		Int64GetDatum(progress->raw_bytes_swapped)
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

/* tensile._progress() */
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

/* ---- prediction counters ---- */

/* The version's counters, or NULL. Caller holds predictions_lock. */
static TensilePredictions *
find_counters(int64 version)
{
	for (int i = 0; i < TENSILE_MAX_PREDICTIONS; i++)
	{
		TensilePredictions *counters = &tensile_shared->predictions[i];

		if (counters->version == version && counters->database == MyDatabaseId)
			return counters;
	}
	return NULL;
}

/* Gives the version the counters not used for longest. Caller holds predictions_lock exclusively. */
static TensilePredictions *
take_counters(int64 version)
{
	TensilePredictions *oldest = &tensile_shared->predictions[0];

	for (int i = 1; i < TENSILE_MAX_PREDICTIONS; i++)
	{
		TensilePredictions *counters = &tensile_shared->predictions[i];

		if (pg_atomic_read_u64(&counters->last_used) < pg_atomic_read_u64(&oldest->last_used))
			oldest = counters;
	}
	oldest->version = version;
	oldest->database = MyDatabaseId;
	pg_atomic_write_u64(&oldest->rows, 0);
	pg_atomic_write_u64(&oldest->requests, 0);
	pg_atomic_write_u64(&oldest->unknown_categories, 0);
	return oldest;
}

static void
add_to_counters(TensilePredictions *counters, int64 rows, int64 unknown_categories)
{
	pg_atomic_fetch_add_u64(&counters->rows, rows);
	pg_atomic_fetch_add_u64(&counters->requests, 1);
	pg_atomic_fetch_add_u64(&counters->unknown_categories, unknown_categories);
	pg_atomic_write_u64(&counters->last_used, (uint64) GetCurrentTimestamp());
}

void
tensile_count_predictions(int64 version, int64 rows, int64 unknown_categories)
{
	TensilePredictions *counters;

	LWLockAcquire(tensile_shared->predictions_lock, LW_SHARED);
	counters = find_counters(version);
	if (counters)
		add_to_counters(counters, rows, unknown_categories);
	LWLockRelease(tensile_shared->predictions_lock);
	if (counters)
		return;

	LWLockAcquire(tensile_shared->predictions_lock, LW_EXCLUSIVE);
	counters = find_counters(version);	/* somebody else may have been faster */
	if (counters == NULL)
		counters = take_counters(version);
	add_to_counters(counters, rows, unknown_categories);
	LWLockRelease(tensile_shared->predictions_lock);
}

/* A copy of this database's counters as an array of rows; the plain values of atomics. */
typedef struct PredictionRow
{
	int64		version;
	int64		rows;
	int64		requests;
	int64		unknown_categories;
} PredictionRow;

static PredictionRow *
copy_counters(int *count)
{
	PredictionRow *rows = palloc(TENSILE_MAX_PREDICTIONS * sizeof(PredictionRow));

	*count = 0;
	LWLockAcquire(tensile_shared->predictions_lock, LW_SHARED);
	for (int i = 0; i < TENSILE_MAX_PREDICTIONS; i++)
	{
		TensilePredictions *counters = &tensile_shared->predictions[i];

		if (counters->version == 0 || counters->database != MyDatabaseId)
			continue;
		rows[(*count)++] = (PredictionRow) {
			counters->version,
			pg_atomic_read_u64(&counters->rows),
			pg_atomic_read_u64(&counters->requests),
			pg_atomic_read_u64(&counters->unknown_categories)
		};
	}
	LWLockRelease(tensile_shared->predictions_lock);
	return rows;
}

/* ---- rows that belong to a version ---- */

/* Selects those of the versions that the current user sees in tensile.model_versions. Within SPI. */
static void
select_visible(Datum *versions, int count)
{
	Oid			type = INT8ARRAYOID;
	Datum		argument;

	argument = PointerGetDatum(construct_array(versions, count, INT8OID, sizeof(int64), FLOAT8PASSBYVAL, TYPALIGN_DOUBLE));
	if (SPI_execute_with_args("SELECT v.id FROM tensile.model_versions v WHERE v.id OPERATOR(pg_catalog.=) ANY ($1)",
							  1, &type, &argument, NULL, true, 0) != SPI_OK_SELECT)
		elog(ERROR, "could not read tensile.model_versions");
}

static bool
is_selected(int64 version)
{
	bool		isnull;

	for (uint64 i = 0; i < SPI_processed; i++)
		if (DatumGetInt64(SPI_getbinval(SPI_tuptable->vals[i], SPI_tuptable->tupdesc, 1, &isnull)) == version)
			return true;
	return false;
}

/* Puts the rows, of as many int64 as the result has columns, the version first, into the result; `null_zeros`: bits of the
 * columns whose 0 is null. */
static void
put_visible(ReturnSetInfo *rsinfo, const int64 *rows, int count, uint32 null_zeros)
{
	int			width = rsinfo->setDesc->natts;
	Datum	   *values = palloc(width * sizeof(Datum));
	bool	   *nulls = palloc(width * sizeof(bool));
	Datum	   *versions = palloc(count * sizeof(Datum));

	for (int i = 0; i < count; i++)
		versions[i] = Int64GetDatum(rows[i * width]);
	SPI_connect();
	select_visible(versions, count);
	for (int i = 0; i < count; i++)
	{
		const int64 *row = &rows[i * width];

		for (int column = 0; column < width; column++)
		{
			values[column] = Int64GetDatum(row[column]);
			nulls[column] = row[column] == 0 && (null_zeros & (1 << column)) != 0;
		}
		if (is_selected(row[0]))
			tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
	SPI_finish();
}

/* tensile._predictions(): of the versions that row-level security shows to the current user */
Datum
tensile_predictions(PG_FUNCTION_ARGS)
{
	PredictionRow *rows;
	int			count;

	tensile_require_preload();
	InitMaterializedSRF(fcinfo, 0);
	rows = copy_counters(&count);
	put_visible((ReturnSetInfo *) fcinfo->resultinfo, (const int64 *) rows, count, 0);
	PG_RETURN_NULL();
}

/* ---- the predictor's models ---- */

/* tensile._report_loaded(models): all that there are now, TensileLoaded after TensileLoaded; the last ones, if too many */
Datum
tensile_report_loaded(PG_FUNCTION_ARGS)
{
	ArrayType  *array = PG_GETARG_ARRAYTYPE_P(0);
	int			width = sizeof(TensileLoaded) / sizeof(int64);
	int			length = ArrayGetNItems(ARR_NDIM(array), ARR_DIMS(array));
	int			count = Min(length / width, TENSILE_MAX_LOADED);

	tensile_require_process(TENSILE_INFERENCE);
	if (length % width != 0 || ARR_HASNULL(array))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("loaded models are described by %d numbers each", width)));
	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	memcpy(tensile_shared->loaded, (int64 *) ARR_DATA_PTR(array) + length - count * width, count * sizeof(TensileLoaded));
	tensile_shared->nloaded = count;
	LWLockRelease(tensile_shared->lock);
	PG_RETURN_VOID();
}

/* tensile._loaded_models(): of the versions that row-level security shows to the current user */
Datum
tensile_loaded_models(PG_FUNCTION_ARGS)
{
	TensileLoaded *models = palloc(sizeof(tensile_shared->loaded));
	int			count = 0;

	tensile_require_preload();
	InitMaterializedSRF(fcinfo, 0);
	LWLockAcquire(tensile_shared->lock, LW_SHARED);
	if (tensile_shared->singletons[TENSILE_INFERENCE].database == MyDatabaseId)
		count = tensile_shared->nloaded;
	memcpy(models, tensile_shared->loaded, count * sizeof(TensileLoaded));
	LWLockRelease(tensile_shared->lock);
	put_visible((ReturnSetInfo *) fcinfo->resultinfo, (const int64 *) models, count, 1 << 1 | 1 << 3);
	PG_RETURN_NULL();
}
