/*
 * library.c: the version of the loaded library, and the folder of the files
 * that come with it.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "fmgr.h"
#include "miscadmin.h"
#include "utils/builtins.h"

#include "base/library.h"

PG_FUNCTION_INFO_V1(tensile_version);

/*
 * tensile_worker._version(): the version of the loaded library, which may differ from
 * those of the extension and of the files on disk.
 */
Datum
tensile_version(PG_FUNCTION_ARGS)
{
	PG_RETURN_TEXT_P(cstring_to_text(TENSILE_VERSION));
}

char *
tensile_python_folder(void)
{
	char		share[MAXPGPATH];

	get_share_path(my_exec_path, share);
	return psprintf("%s/%s/python", share, TENSILE_EXTENSION);
}
