/*
 * owner.h: ownership by OID and name, and calls with the rights of the
 * extension's owner.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_OWNER_H
#define TENSILE_OWNER_H

#include "fmgr.h"

/*
 * Is the current user the role with this OID and name, or does it have its
 * privileges?
 */
extern bool tensile_role_owned(Oid owner, const char *name);

/*
 * Calls tensile.<name>(arguments).  The result may be null, as that of a
 * query whose snapshot does not show the rows: callers look before they read.
 */
extern NullableDatum tensile_call(const char *name, int nargs, const Oid *types,
								  const NullableDatum *arguments);

/* The bytes of a memory_budget such as '100MB'; 22023 if it is not valid. */
extern int64 tensile_parse_budget(text *budget);

/*
 * In a public function f(args): calls tensile_internal._f(caller's OID, args, extra).
 */
extern Datum tensile_forward_with(FunctionCallInfo fcinfo, int nextra, const Oid *extra_types,
								  const NullableDatum *extra);

/*
 * Raises 25006 in a read-only transaction; for public functions that change
 * tables.
 */
extern void tensile_require_writable(FunctionCallInfo fcinfo);

/*
 * Raises an error whose SQLSTATE comes from a table or a child.  A SQLSTATE
 * that cannot be raised becomes XX000; fields that are NULL are omitted.
 */
extern void tensile_raise_error(const char *sqlstate, const char *message, const char *hint,
								const char *detail);

#endif
