/*
 * extension.h: the extension that a process serves, and its version.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_EXTENSION_H
#define TENSILE_EXTENSION_H

/*
 * Looks for the extension in this database.  From then on this process serves
 * that one only.  False if there is none.
 */
extern bool tensile_find_extension(void);

/* Raises 55000 if the extension that this process serves was dropped. */
extern void tensile_require_extension(void);

/* Does the same if this transaction has written something; at commit. */
extern void tensile_check_commit(void);

/* Do the extension and the role that this process was started for exist? */
extern bool tensile_still_there(void);

/* Has the extension (if there is one) the version of the library? */
extern bool tensile_version_matches(void);
extern const char *tensile_extension_version(void);
extern void tensile_report_version(int elevel); /* that they differ */

/* Raises 55000 unless the extension has the version of the library. */
extern void tensile_require_version(void);

/* Raises 55000 unless this database is pg_tensile.database, and not released. */
extern void tensile_require_database(void);

/*
 * An extension has been created, and its script not yet run.  Raises a NOTICE
 * if it is pg_tensile and this database is not pg_tensile.database.
 */
extern void tensile_extension_created(Oid oid);

#endif
