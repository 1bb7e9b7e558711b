/*
 * owner.h: ownership by OID and name, and calls with the rights of the extension's owner.
 */
#ifndef TENSILE_OWNER_H
#define TENSILE_OWNER_H

#include "postgres.h"

#include "fmgr.h"

/* Is the current user the role with this OID and name, or has it the privileges of that role? */
extern bool tensile_role_owned(Oid owner, const char *name);

/* Does the current user own the model, or hold 'predict' or 'train' on it? Needs an active snapshot. */
extern bool tensile_model_granted(int64 model, const char *privilege);

/* Bytes of a size such as '100MB', checked and refused (22023) as memory_budget is everywhere. */
extern int64 tensile_parse_budget(text *budget);

/* From a public function f(args): tensile._f(caller's OID, args, extra). */
extern Datum tensile_forward_with(FunctionCallInfo fcinfo, int nextra, const Oid *extra_types, const NullableDatum *extra);

/*
 * Raises an error whose SQLSTATE is data: a job's, or one that a child has sent. One that cannot be raised becomes XX000;
 * what is NULL is left out.
 */
extern void tensile_raise_error(const char *sqlstate, const char *message, const char *hint, const char *detail);

#endif
