/*
 * pg_tensile.c: what happens when the library is loaded.
 *
 * In the postmaster (shared_preload_libraries) it defines the settings, asks for shared memory, registers the launcher
 * and hooks into commits. Loaded later, into one session, there is no shared memory: the settings can be looked at, and
 * every function that needs the rest raises (tensile_require_preload).
 */
#include "postgres.h"

#include "fmgr.h"
#include "miscadmin.h"
#include "utils/builtins.h"

#include "guc.h"
#include "notify.h"
#include "pg_tensile.h"
#include "process.h"
#include "shmem.h"

PG_MODULE_MAGIC;

PGDLLEXPORT void _PG_init(void);

PG_FUNCTION_INFO_V1(tensile_version);

void
_PG_init(void)
{
	tensile_define_settings();
	if (!process_shared_preload_libraries_in_progress)
		return;
	tensile_install_shmem_hooks();
	tensile_install_notify_hooks();
	tensile_register_launcher();
}

/* tensile._version(): of the loaded library, which may be another one than that of the extension or the files on disk. */
Datum
tensile_version(PG_FUNCTION_ARGS)
{
	PG_RETURN_TEXT_P(cstring_to_text(TENSILE_VERSION));
}
