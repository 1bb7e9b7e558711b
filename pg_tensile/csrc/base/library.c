/*
 * library.c: the version of the loaded library, and the folder of the files
 * that come with it.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include <dlfcn.h>

#include "fmgr.h"
#include "port.h"
#include "utils/builtins.h"

#include "base/guc.h"
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

/* The folder that the library was loaded from: PostgreSQL loads libraries by absolute paths. */
char *
tensile_library_folder(void)
{
	Dl_info		library;
	char	   *path;

	if (dladdr((const void *) tensile_library_folder, &library) == 0)
		ereport(ERROR,
				(errcode(ERRCODE_SYSTEM_ERROR),
				 errmsg("could not find out where the library of pg_tensile lies")));
	path = pstrdup(library.dli_fname);
	get_parent_directory(path);
	return path;
}

char *
tensile_python_folder(void)
{
	if (tensile_python_path && *tensile_python_path != '\0')
		return pstrdup(tensile_python_path);
	return psprintf("%s/%s/python", tensile_library_folder(), TENSILE_LIBRARY);
}
