/*
 * foreign_code.h: code of other roles in a query that somebody else has
 * written.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_FOREIGN_CODE_H
#define TENSILE_FOREIGN_CODE_H

#include "nodes/parsenodes.h"

/* A function or a type; both are InvalidOid if there is nothing to refuse. */
typedef struct ForeignCode
{
	Oid			function;
	Oid			type;
} ForeignCode;

/*
 * What the query, rewritten for the current user, must not run with his
 * rights.
 */
extern ForeignCode tensile_foreign_code(Query *rewritten);

#endif
