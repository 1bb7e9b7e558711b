/*
 * library.h: names, versions and limits that the whole library shares.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_LIBRARY_H
#define TENSILE_LIBRARY_H

#define TENSILE_VERSION "0.2.0" /* as in pg_tensile.control; test_loading.py compares */
#define TENSILE_EXTENSION "pg_tensile"
#define TENSILE_LIBRARY "pg_tensile"

/* Upper limit of the memory of a device; 512 times as much fits into int64. */
#define TENSILE_MAX_BYTES (INT64CONST(1) << 50)

/* The folder of this library, and of what is installed beside it. */
extern char *tensile_library_folder(void);

/* The folder of the Python packages that come with the extension. */
extern char *tensile_python_folder(void);

#endif
