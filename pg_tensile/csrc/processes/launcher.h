/*
 * launcher.h: the process that keeps the controller and the scheduler running.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_LAUNCHER_H
#define TENSILE_LAUNCHER_H

/* Has the postmaster start the launcher; while the library is preloaded. */
extern void tensile_register_launcher(void);

#endif
