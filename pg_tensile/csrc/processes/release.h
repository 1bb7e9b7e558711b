/*
 * release.h: a database that pg_tensile has left for a while.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_RELEASE_H
#define TENSILE_RELEASE_H

/* Raises 55000 if this database is released. */
extern void tensile_require_unreleased(void);

#endif
