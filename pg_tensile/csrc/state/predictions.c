/*
 * predictions.c: counters of predictions for each model version, and the
 * models that the predictor has loaded.
 *
 * Counters are atomic, and normally counted under a shared lock.  It is taken
 * exclusively only to count a version for the first time, which replaces the
 * version not used for the longest time when all entries are in use.
 *
 * Both are visible for the versions that row-level security shows to the
 * current user in tensile_internal.model_versions.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "base/convert.h"
#include "state/device.h"
#include "state/identity.h"
#include "state/images.h"
#include "state/predictions.h"
#include "state/shmem.h"

PG_FUNCTION_INFO_V1(tensile_predictions);
PG_FUNCTION_INFO_V1(tensile_report_loaded);
PG_FUNCTION_INFO_V1(tensile_loaded_models);

/* Plain values of a version's counters, in the order of the SQL columns. */
typedef struct PredictionRow
{
	int64		version;
	int64		rows;
	int64		requests;
	int64		unknown_categories;
} PredictionRow;

/* ---- counters ---- */

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

/*
 * Gives the version the counters that were not used for the longest time.
 * Caller holds predictions_lock exclusively.
 */
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
	counters = find_counters(version);	/* another session may have been faster */
	if (counters == NULL)
		counters = take_counters(version);
	add_to_counters(counters, rows, unknown_categories);
	LWLockRelease(tensile_shared->predictions_lock);
}

/* Copies the counters of this database. */
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

/*
 * Selects those of the versions that the current user sees, and of the numbers
 * of models without a version.  Caller is connected to SPI.
 */
static void
select_visible(Datum *versions, int count)
{
	Oid			type = INT8ARRAYOID;
	Datum		argument;

	argument = PointerGetDatum(construct_array(versions, count, INT8OID, sizeof(int64),
											   FLOAT8PASSBYVAL, TYPALIGN_DOUBLE));
	if (SPI_execute_with_args("SELECT v.version_id FROM tensile.model_versions v "
							  "WHERE v.version_id OPERATOR(pg_catalog.=) ANY ($1) "
							  "UNION ALL "
							  "SELECT tensile_worker._base_number(m.model_id, m.architecture) "
							  "FROM tensile.models m "
							  "WHERE tensile_worker._base_number(m.model_id, m.architecture) "
							  "OPERATOR(pg_catalog.=) ANY ($1)",
							  1, &type, &argument, NULL, true, 0) != SPI_OK_SELECT)
		elog(ERROR, "could not read the catalogue of models");
}

static bool
is_selected(int64 version)
{
	for (uint64 i = 0; i < SPI_processed; i++)
	{
		bool		isnull;
		Datum		id = SPI_getbinval(SPI_tuptable->vals[i], SPI_tuptable->tupdesc, 1, &isnull);

		if (DatumGetInt64(id) == version)
			return true;
	}
	return false;
}

/*
 * Returns the visible ones of the rows.  The result has a column for each
 * int64 of a row, the first of which is the version, and one for the row's
 * device unless `devices` is NULL.  `null_zeros`: bits of the columns in which
 * 0 becomes null.
 */
static void
put_visible(ReturnSetInfo *rsinfo, const int64 *rows, const TensileDeviceName *devices, int count,
			uint32 null_zeros)
{
	int			natts = rsinfo->setDesc->natts;
	int			width = devices ? natts - 1 : natts;
	Datum	   *values = palloc(natts * sizeof(Datum));
	bool	   *nulls = palloc0(natts * sizeof(bool));
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
		if (devices)
			values[width] = CStringGetTextDatum(devices[i]);
		if (is_selected(row[0]))
			tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
	SPI_finish();
}

/* tensile_worker._predictions(): counters of the visible versions */
Datum
tensile_predictions(PG_FUNCTION_ARGS)
{
	PredictionRow *rows;
	int			count;

	tensile_require_preload();
	InitMaterializedSRF(fcinfo, 0);
	rows = copy_counters(&count);
	put_visible((ReturnSetInfo *) fcinfo->resultinfo, (const int64 *) rows, NULL, count, 0);
	PG_RETURN_NULL();
}

/* ---- the predictor's models ---- */

/*
 * tensile_internal._report_loaded(models, devices): all models that are loaded now, one
 * TensileLoaded after the other, and the device of each; the last ones if there
 * are too many
 */
Datum
tensile_report_loaded(PG_FUNCTION_ARGS)
{
	ArrayType  *array = PG_GETARG_ARRAYTYPE_P(0);
	int			width = sizeof(TensileLoaded) / sizeof(int64);
	int			length = ArrayGetNItems(ARR_NDIM(array), ARR_DIMS(array));
	int			count = Min(length / width, TENSILE_MAX_LOADED);
	TensileDeviceName *names = palloc0(count * sizeof(TensileDeviceName));
	Datum	   *devices;
	int			ndevices;

	tensile_require_process(TENSILE_INFERENCE);
	deconstruct_array(PG_GETARG_ARRAYTYPE_P(1), TEXTOID, -1, false, TYPALIGN_INT, &devices, NULL,
					  &ndevices);
	if (length != ndevices * width || ARR_HASNULL(array))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("loaded models must be described by %d numbers and a device each", width)));
	for (int i = 0; i < count; i++)
		tensile_copy_text(names[i], NAMEDATALEN, DatumGetTextPP(devices[ndevices - count + i]));
	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	memcpy(tensile_shared->loaded, (int64 *) ARR_DATA_PTR(array) + length - count * width,
		   count * sizeof(TensileLoaded));
	memcpy(tensile_shared->loaded_on, names, count * sizeof(TensileDeviceName));
	tensile_shared->nloaded = count;
	LWLockRelease(tensile_shared->lock);
	PG_RETURN_VOID();
}

/*
 * tensile_worker._loaded_models(): those of the visible versions, of the
 * predictor and as images
 */
Datum
tensile_loaded_models(PG_FUNCTION_ARGS)
{
	int			most = TENSILE_MAX_LOADED + TENSILE_MAX_IMAGES;
	TensileLoaded *models = palloc(most * sizeof(TensileLoaded));
	TensileDeviceName *devices = palloc(most * sizeof(TensileDeviceName));
	int			count = 0;

	tensile_require_preload();
	InitMaterializedSRF(fcinfo, 0);
	LWLockAcquire(tensile_shared->lock, LW_SHARED);
	if (tensile_shared->singletons[TENSILE_INFERENCE].database == MyDatabaseId)
		count = tensile_shared->nloaded;
	memcpy(models, tensile_shared->loaded, count * sizeof(TensileLoaded));
	memcpy(devices, tensile_shared->loaded_on, count * sizeof(TensileDeviceName));
	for (int i = 0; i < TENSILE_MAX_IMAGES; i++)
	{
		TensileImage *image = &tensile_shared->images[i];

		if (pg_atomic_read_u64(&image->serial) == 0 || image->database != MyDatabaseId)
			continue;
		models[count] = (TensileLoaded) {.version = image->version,.device_bytes = image->bytes};
		strlcpy(devices[count++], TENSILE_HOST_DEVICE, NAMEDATALEN);
	}
	LWLockRelease(tensile_shared->lock);
	put_visible((ReturnSetInfo *) fcinfo->resultinfo, (const int64 *) models, devices, count,
				1 << 1 | 1 << 3);
	PG_RETURN_NULL();
}
