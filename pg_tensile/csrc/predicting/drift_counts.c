/*
 * drift_counts.c: counts of rows that sessions have predicted, in the bins of
 * their versions' histograms.
 *
 * A random share of the rows counts, pg_tensile.drift_sample_rate, as in the
 * predictor (pyworker/children/drift_counts.py).  The counts of a version are
 * in a file beside its image, which all sessions map and add to.  The
 * controller takes them from there a while after the first one, and stores
 * them in the tables, which sessions may not write.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include <fcntl.h>
#include <math.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "access/xlog.h"
#include "catalog/pg_type.h"
#include "common/pg_prng.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "storage/fd.h"
#include "utils/array.h"
#include "utils/tuplestore.h"

#include "base/guc.h"
#include "predicting/drift_counts.h"
#include "state/identity.h"
#include "state/shmem.h"
#include "state/wakeup.h"

PG_FUNCTION_INFO_V1(tensile_counts_pending);
PG_FUNCTION_INFO_V1(tensile_take_counts);

static Size
file_size(int bins)
{
	return sizeof(pg_atomic_uint64) * ((Size) bins + 1);
}

/* ---- files ---- */

/*
 * The file has its storage from the start, and never gets smaller: a session
 * that counts in it, perhaps while another one makes it too, would end by
 * SIGBUS otherwise.
 */
void
drift_counts_create(const char *path, int bins)
{
	int			fd = OpenTransientFile(path, O_RDWR | O_CREAT | PG_BINARY);
	int			error = 0;

	if (fd >= 0)
		do
			error = posix_fallocate(fd, 0, file_size(bins));
		while (error == EINTR);
	if (error != 0)
		errno = error;
	if (fd < 0 || error != 0 || CloseTransientFile(fd) != 0)
		ereport(ERROR,
				(errcode_for_file_access(), errmsg("could not create file \"%s\": %m", path)));
}

void
drift_counts_map(DriftCounts *self, const char *path, int bins)
{
	int			fd = OpenTransientFile(path, O_RDWR | PG_BINARY);
	struct stat status;
	void	   *address;

	self->numbers = NULL;
	self->bins = bins;
	if (fd < 0)
		return;
	if (fstat(fd, &status) == 0 && status.st_size == file_size(bins))
	{
		address = mmap(NULL, file_size(bins), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		self->numbers = address == MAP_FAILED ? NULL : address;
	}
	CloseTransientFile(fd);
}

void
drift_counts_unmap(DriftCounts *self)
{
	if (self->numbers != NULL)
		munmap(self->numbers, file_size(self->bins));
	self->numbers = NULL;
}

/* ---- counting ---- */

/* The number of rows in front of the next one that counts. */
static double
random_gap(double rate)
{
	if (!(rate > 0 && rate < 1))
		return rate > 0 ? 0 : INFINITY;
	return floor(log(1.0 - pg_prng_double(&pg_global_prng_state)) / log1p(-rate));
}

int
drift_next(int rows)
{
	static double rate = -1;
	static double gap;
	double		place;

	if (rate != tensile_drift_sample_rate)
	{
		rate = tensile_drift_sample_rate;
		gap = random_gap(rate);
	}
	if (gap >= rows)
	{
		gap -= rows;
		return 0;
	}
	place = gap;
	gap = random_gap(rate);
	return (int) place + 1;
}

/* The row's features as the evaluator takes them; arrays are not counted. */
static EvaluatorRows
single_row(const Evaluator *evaluator, const FeatureBatch *batch, int row)
{
	const FeatureSet *set = batch->set;
	int32	   *codes = palloc(sizeof(int32) * Max((Size) set->ncategories * batch->capacity, 1));

	for (int i = 0; i < set->ncategories; i++)
	{
		int32		place = batch->codes[(Size) i * batch->capacity + row];
		const char *string;
		int			length;
		bool		unknown;

		codes[(Size) i * batch->capacity] = -1;
		if (place < 0)
			continue;
		string = dictionary_string(&batch->dictionaries[i], place, &length);
		codes[(Size) i * batch->capacity] = evaluator_code(evaluator, i, string, length, &unknown);
	}
	return (EvaluatorRows) {
		.rows = 1,.capacity = batch->capacity,.scalars = batch->scalars + row,.codes = codes
	};
}

static void
wake_controller(void)
{
	LWLockAcquire(tensile_shared->lock, LW_SHARED);
	tensile_wake(&tensile_shared->singletons[TENSILE_CONTROLLER].wakeup);
	LWLockRelease(tensile_shared->lock);
}

void
drift_count(DriftCounts *self, TensileImage *image, const Evaluator *evaluator,
			const FeatureBatch *batch, int row, double prediction, int32 label)
{
	int		   *bins;
	int			count = evaluator_histograms(evaluator);
	EvaluatorRows features;

	if (self->numbers == NULL || RecoveryInProgress())
		return;
	bins = palloc(sizeof(int) * Max(count, 1));
	features = single_row(evaluator, batch, row);
	evaluator_row_bins(evaluator, &features, 0, prediction, label, bins);
	pg_atomic_fetch_add_u64(&self->numbers[0], 1);
	for (int i = 0; i < count; i++)
		pg_atomic_fetch_add_u64(&self->numbers[1 + bins[i]], 1);
	if (pg_atomic_exchange_u32(&image->counted, 1) == 0)
		wake_controller();
	pfree(bins);
	pfree((void *) features.codes);
}

/* ---- the controller ---- */

/* Do versions of this database have counts that have not been taken? */
static bool
is_counted(TensileImage *image)
{
	return pg_atomic_read_u64(&image->serial) != 0 && image->database == MyDatabaseId &&
		pg_atomic_read_u32(&image->counted) != 0;
}

/* tensile_internal._counts_pending() */
Datum
tensile_counts_pending(PG_FUNCTION_ARGS)
{
	tensile_require_process(TENSILE_CONTROLLER);
	for (int i = 0; i < TENSILE_MAX_IMAGES; i++)
		if (is_counted(&tensile_shared->images[i]))
			PG_RETURN_BOOL(true);
	PG_RETURN_BOOL(false);
}

/* The number of bins that a file of counts has; 0: it is gone. */
static int
bins_of_file(const char *path)
{
	struct stat status;

	if (stat(path, &status) != 0 || status.st_size < file_size(0))
		return 0;
	return Min(status.st_size / sizeof(pg_atomic_uint64), INT_MAX) - 1;
}

static void
take_counts(ReturnSetInfo *result, int64 version, const char *path)
{
	int			bins = bins_of_file(path);
	Datum	   *items = palloc(sizeof(Datum) * Max(bins, 1));
	DriftCounts counts;
	Datum		values[3];
	bool		nulls[3] = {false};

	drift_counts_map(&counts, path, bins);
	if (counts.numbers == NULL)
		return;
	values[0] = Int64GetDatum(version);
	values[1] = Int64GetDatum((int64) pg_atomic_exchange_u64(&counts.numbers[0], 0));
	for (int i = 0; i < bins; i++)
		items[i] = Int64GetDatum((int64) pg_atomic_exchange_u64(&counts.numbers[1 + i], 0));
	drift_counts_unmap(&counts);
	values[2] = PointerGetDatum(construct_array(items, bins, INT8OID, sizeof(int64),
												FLOAT8PASSBYVAL, TYPALIGN_DOUBLE));
	tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
}

/*
 * tensile_internal._take_counts() -> (version, rows, counts): what sessions have
 * counted since the last call
 */
Datum
tensile_take_counts(PG_FUNCTION_ARGS)
{
	tensile_require_process(TENSILE_CONTROLLER);
	InitMaterializedSRF(fcinfo, 0);
	for (int i = 0; i < TENSILE_MAX_IMAGES; i++)
	{
		TensileImage *image = &tensile_shared->images[i];
		TensileImagePath path;
		int64		version;

		LWLockAcquire(tensile_shared->lock, LW_SHARED);
		version = is_counted(image) ? image->version : 0;
		if (version != 0)
		{
			tensile_counts_path(path, version, image->identity);
			pg_atomic_write_u32(&image->counted, 0);
		}
		LWLockRelease(tensile_shared->lock);
		if (version != 0)
			take_counts((ReturnSetInfo *) fcinfo->resultinfo, version, path);
	}
	PG_RETURN_NULL();
}
