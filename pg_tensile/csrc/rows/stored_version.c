/*
 * stored_version.c: a version of a model as the tables have it.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "mb/pg_wchar.h"
#include "utils/memutils.h"

#include "base/compat.h"
#include "rows/catalogue.h"
#include "rows/stored_version.h"

#define VERSION_QUERY \
	"SELECT architecture::text, preprocessing::text, reference::text " \
	"FROM tensile_internal.model_versions WHERE id = $1"
#define WEIGHTS_QUERY \
	"SELECT data FROM tensile_internal.model_weights WHERE version = $1 ORDER BY seq"

/* A column of the only row in UTF-8, in `context`; NULL: it is null. */
static const char *
json_column(int column, MemoryContext context, Size *length)
{
	char	   *json = SPI_getvalue(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, column);
	char	   *utf8;

	if (json == NULL)
		return NULL;
	utf8 = pg_server_to_any(json, strlen(json), PG_UTF8);
	*length = strlen(utf8);
	return MemoryContextStrdup(context, utf8);
}

/* The chunks of the weights one after the other, as many as there should be. */
static char *
join_weights(const PredictModel *model, MemoryContext context)
{
	char	   *weights = MemoryContextAllocHuge(context, Max(model->weight_bytes, 1));
	Size		used = 0;

	for (uint64 i = 0; i < SPI_processed; i++)
	{
		bool		isnull;
		bytea	   *chunk = DatumGetByteaPP(SPI_getbinval(SPI_tuptable->vals[i],
														  SPI_tuptable->tupdesc, 1, &isnull));
		Size		length = VARSIZE_ANY_EXHDR(chunk);

		if (length > model->weight_bytes - used)
			break;
		memcpy(weights + used, VARDATA_ANY(chunk), length);
		used += length;
	}
	if (used != model->weight_bytes)
		ereport(ERROR,
				(errcode(ERRCODE_DATA_CORRUPTED),
				 errmsg("the weights of model \"%s\" are not complete", model->name),
				 errhint("Deploy another version, or train the model again.")));
	return weights;
}

void
stored_version_read(const PredictModel *model, StoredVersion *stored)
{
	MemoryContext context = CurrentMemoryContext;
	Oid			type = INT8OID;
	Datum		id = Int64GetDatum(model->version);
	CatalogueAccess access = catalogue_open();

	memset(stored, 0, sizeof(*stored));
	if (catalogue_select(VERSION_QUERY, 1, &type, &id, NULL) == 0)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("the version that this transaction sees does not exist any more"),
				 errhint("Begin another transaction, which sees the deployed one.")));
	stored->architecture = json_column(1, context, &stored->architecture_length);
	stored->preprocessing = json_column(2, context, &stored->preprocessing_length);
	stored->reference = json_column(3, context, &stored->reference_length);
	(void) catalogue_select(WEIGHTS_QUERY, 1, &type, &id, NULL);
	stored->weights = join_weights(model, context);
	stored->weight_bytes = model->weight_bytes;
	catalogue_close(&access);
}
