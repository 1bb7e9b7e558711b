/*
 * pg_tensile.c: what happens when the library is loaded.
 *
 * In the postmaster (shared_preload_libraries) it defines the settings,
 * requests shared memory, registers the launcher and installs hooks.  Loaded
 * later, into one session, it only defines settings, and functions that need
 * shared memory raise an error (tensile_require_preload).
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "fmgr.h"
#include "miscadmin.h"

#include "base/compat.h"
#include "base/guc.h"
#include "base/library.h"
#include "base/reports.h"
#include "batching/planner.h"
#include "processes/inference.h"
#include "processes/launcher.h"
#include "processes/notify.h"
#include "state/images.h"
#include "state/models_generation.h"
#include "state/shmem.h"

TENSILE_MODULE_MAGIC(TENSILE_EXTENSION, TENSILE_VERSION);

PGDLLEXPORT void _PG_init(void);

void
_PG_init(void)
{
	tensile_define_settings();
	if (!process_shared_preload_libraries_in_progress)
		return;
	tensile_request_shmem();
	tensile_install_inference_hook();
	tensile_install_images_hook();
	tensile_install_notify_hooks();
	tensile_install_report_hook();
	tensile_install_batching();
	tensile_watch_invalidations();
	tensile_register_launcher();
}
