/*
 * session_models.c: versions that this session evaluates itself.
 *
 * Small models need no process beside the session's (evaluator.h).  The first
 * session that predicts with a version makes its image from the tables and
 * stores it in a file; this and all others map the file.  An image that was
 * removed meanwhile (images.c) is mapped, or made, again.
 *
 * What this session has of versions is in a context of its own each, with the
 * evaluator and its workspace.  The mapping itself is not memory of a context.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "access/xlog.h"
#include "catalog/pg_type.h"
#include "common/file_perm.h"
#include "common/file_utils.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "nodes/pg_list.h"
#include "storage/fd.h"
#include "utils/array.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "base/compat.h"
#include "base/guc.h"
#include "predicting/drift_counts.h"
#include "predicting/session_models.h"
#include "rows/catalogue.h"
#include "rows/stored_version.h"
#include "state/images.h"

#define MOST_MODELS 64			/* that a session keeps mapped */
#define MOST_ATTEMPTS 10		/* to map an image, which others may remove meanwhile */

#define IMAGES_QUERY \
	"SELECT u.id FROM unnest($1) u (id) " \
	"WHERE NOT EXISTS (SELECT FROM tensile_internal.model_versions v WHERE v.id = u.id)"

typedef struct SessionModel
{
	int64		version;
	uint64		identity;
	Evaluator  *evaluator;		/* NULL: the predictor has to answer */
	void	   *address;		/* of the image */
	Size		bytes;
	DriftCounts counts;
	TensileImage *image;
	uint64		serial;
	MemoryContext context;		/* of everything in here */
} SessionModel;

static List *session_models = NIL;	/* the one used last comes first */

static void
forget_model(SessionModel *model)
{
	session_models = list_delete_ptr(session_models, model);
	drift_counts_unmap(&model->counts);
	if (model->address != NULL)
		munmap(model->address, model->bytes);
	MemoryContextDelete(model->context);
}

/* ---- files ---- */

static void
write_image(const char *path, const char *image, Size bytes)
{
	char	   *temporary = psprintf("%s.%d", path, MyProcPid);
	int			fd;
	Size		written = 0;

	if (MakePGDirectory("base/" PG_TEMP_FILES_DIR) < 0 && errno != EEXIST)
		ereport(ERROR,
				(errcode_for_file_access(),
				 errmsg("could not create directory \"%s\": %m", "base/" PG_TEMP_FILES_DIR)));
	unlink(temporary);
	fd = OpenTransientFile(temporary, O_RDWR | O_CREAT | O_EXCL | PG_BINARY);
	while (fd >= 0 && written < bytes)
	{
		ssize_t		size = write(fd, image + written, bytes - written);

		if (size < 0 && errno == EINTR)
			continue;
		if (size <= 0)
		{
			if (size == 0)
				errno = ENOSPC;
			break;
		}
		written += size;
	}
	if (fd < 0 || written < bytes || CloseTransientFile(fd) != 0 || rename(temporary, path) != 0)
	{
		int			saved = errno;

		unlink(temporary);
		errno = saved;
		ereport(ERROR,
				(errcode_for_file_access(),
				 errmsg("could not write file \"%s\": %m", path),
				 errdetail("It holds a model for predictions, " UINT64_FORMAT " bytes.",
						   (uint64) bytes),
				 errhint("With pg_tensile.predict_in_session = off, the predictor answers, "
						 "which needs no file.")));
	}
}

/* Maps a file, whole; NULL: there is none. */
static void *
map_image(const char *path, Size *bytes)
{
	int			fd = OpenTransientFile(path, O_RDONLY | PG_BINARY);
	struct stat status;
	void	   *address;

	if (fd < 0 && errno == ENOENT)
		return NULL;
	if (fd < 0 || fstat(fd, &status) < 0)
		ereport(ERROR, (errcode_for_file_access(), errmsg("could not open file \"%s\": %m", path)));
	*bytes = status.st_size;
	if (*bytes == 0)
		address = NULL;
	else
		address = mmap(NULL, *bytes, PROT_READ, MAP_SHARED, fd, 0);
	CloseTransientFile(fd);
	if (address == MAP_FAILED)
		ereport(ERROR,
				(errcode(ERRCODE_OUT_OF_MEMORY), errmsg("could not map file \"%s\": %m", path)));
	return address;
}

/* ---- images ---- */

/*
 * On a standby: removes the images of versions that do not exist any more.
 * Elsewhere the transaction that deletes a version does so.
 */
static void
remove_old_images(void)
{
	int64		versions[TENSILE_MAX_IMAGES];
	int			count = tensile_image_versions(versions);
	Datum	   *items = palloc(sizeof(Datum) * Max(count, 1));
	Oid			type = INT8ARRAYOID;
	Datum		argument;
	CatalogueAccess access;

	if (count == 0 || !RecoveryInProgress() || IsInParallelMode())
		return;
	for (int i = 0; i < count; i++)
		items[i] = Int64GetDatum(versions[i]);
	argument = PointerGetDatum(construct_array(items, count, INT8OID, sizeof(int64),
											   FLOAT8PASSBYVAL, TYPALIGN_DOUBLE));
	access = catalogue_open();
	PushActiveSnapshot(GetLatestSnapshot());
	catalogue_select(IMAGES_QUERY, 1, &type, &argument, NULL);
	for (uint64 i = 0; i < SPI_processed; i++)
	{
		bool		isnull;

		tensile_images_remove(DatumGetInt64(SPI_getbinval(SPI_tuptable->vals[i],
														 SPI_tuptable->tupdesc, 1, &isnull)));
	}
	PopActiveSnapshot();
	catalogue_close(&access);
}

pg_noreturn static void
damaged(const PredictModel *model, const char *problem)
{
	ereport(ERROR,
			(errcode(ERRCODE_DATA_CORRUPTED),
			 errmsg("the version of model \"%s\" that predicts is damaged", model->name),
			 errdetail_internal("%s", problem),
			 errhint("Deploy another version, or train the model again.")));
}

/* Has the evaluator the features and labels of the model? */
static bool
has_features(const Evaluator *evaluator, const PredictModel *model)
{
	const FeatureSet *set = &model->features;
	int			scalars;
	int			categories;
	int			arrays;

	evaluator_features(evaluator, &scalars, &categories, &arrays);
	return scalars == set->nscalars && categories == set->ncategories &&
		arrays == set->narrays && evaluator_labels(evaluator) == model->nlabels;
}

/* Makes the image of the version; false: it is not one for a session. */
static bool
make_image(const PredictModel *model, const char *path)
{
	StoredVersion stored;
	char	   *image;
	Size		bytes;
	const char *problem;

	stored_version_read(model, &stored);
	switch (evaluator_compile(&stored, model->identity, &image, &bytes, &problem))
	{
		case EVALUATOR_READY:
			break;
		case EVALUATOR_UNSUITABLE:
			return false;
		case EVALUATOR_DAMAGED:
			damaged(model, problem);
	}
	remove_old_images();
	write_image(path, image, bytes);
	return true;
}

/* Maps the counts of the version's rows, which may have to be made. */
static void
open_counts(SessionModel *self)
{
	int			bins = evaluator_bins(self->evaluator);
	TensileImagePath path;

	if (bins == 0)
		return;
	tensile_counts_path(path, self->version, self->identity);
	drift_counts_map(&self->counts, path, bins);
	if (self->counts.numbers != NULL)
		return;
	drift_counts_create(path, bins);
	drift_counts_map(&self->counts, path, bins);
}

/* Maps the image of the version, which may have to be made. */
static void
open_model(SessionModel *self, const PredictModel *model)
{
	TensileImagePath path;
	const char *problem = "Its image cannot be kept.";
	MemoryContext old;

	tensile_image_path(path, model->version, model->identity);
	for (int attempt = 0; self->evaluator == NULL; attempt++)
	{
		if (attempt == MOST_ATTEMPTS)
			damaged(model, problem);
		CHECK_FOR_INTERRUPTS();
		self->address = map_image(path, &self->bytes);
		if (self->address == NULL)
		{
			if (!make_image(model, path))
				return;
			continue;
		}
		old = MemoryContextSwitchTo(self->context);
		self->evaluator = evaluator_open(self->address, self->bytes, model->identity, &problem);
		MemoryContextSwitchTo(old);
		if (self->evaluator != NULL)
		{
			if (!has_features(self->evaluator, model))
				damaged(model, "Its image has other features or labels.");
			break;
		}
		munmap(self->address, self->bytes);
		self->address = NULL;
		unlink(path);			/* the file is damaged: make another one */
	}
	open_counts(self);
	self->image = tensile_image_enter(model->version, model->identity, self->bytes,
									  (int64) tensile_model_cache * 1024 * 1024, &self->serial);
}

static SessionModel *
new_model(const PredictModel *model)
{
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext, "pg_tensile evaluator",
												  ALLOCSET_SMALL_SIZES);
	MemoryContext scratch = AllocSetContextCreate(CurrentMemoryContext, "pg_tensile image",
												  ALLOCSET_DEFAULT_SIZES);
	SessionModel *self = MemoryContextAllocZero(context, sizeof(SessionModel));
	MemoryContext old;

	self->context = context;
	self->version = model->version;
	self->identity = model->identity;
	old = MemoryContextSwitchTo(scratch);
	PG_TRY();
	{
		open_model(self, model);
	}
	PG_CATCH();
	{
		drift_counts_unmap(&self->counts);
		if (self->address != NULL)
			munmap(self->address, self->bytes);
		PG_RE_THROW();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(TopMemoryContext);
	session_models = lcons(self, session_models);
	MemoryContextSetParent(context, TopMemoryContext);
	MemoryContextSwitchTo(old);
	MemoryContextDelete(scratch);
	if (list_length(session_models) > MOST_MODELS)
		forget_model(llast(session_models));
	return self;
}

/* What the session has of the version; NULL: nothing, or an image that was removed. */
static SessionModel *
known_model(const PredictModel *model)
{
	ListCell   *cell;

	foreach(cell, session_models)
	{
		SessionModel *self = lfirst(cell);

		if (self->version != model->version || self->identity != model->identity)
			continue;
		if (self->evaluator != NULL && !tensile_image_use(self->image, self->serial))
		{
			forget_model(self);
			return NULL;
		}
		if (foreach_current_index(cell) > 0)
		{
			session_models = list_delete_cell(session_models, cell);
			session_models = lcons(self, session_models);
		}
		return self;
	}
	return NULL;
}

static SessionModel *
find_model(const PredictModel *model)
{
	SessionModel *self = known_model(model);

	return self != NULL ? self : new_model(model);
}

Evaluator *
session_model(const PredictModel *model)
{
	if (!predict_model_is_evaluated(model))
		return NULL;
	return find_model(model)->evaluator;
}

void
session_model_count(const PredictModel *model, const FeatureBatch *batch,
					const Predictions *answers, int first, int rows)
{
	int			end = first + rows;
	SessionModel *self;

	while ((rows = drift_next(end - first)) > 0)
	{
		first += rows;
		self = find_model(model);
		if (self->evaluator != NULL)
			drift_count(&self->counts, self->image, self->evaluator, batch, first - 1,
						answers->prediction[first - 1], answers->label[first - 1]);
	}
}
