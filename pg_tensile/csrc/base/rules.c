/*
 * rules.c: pg_tensile/rules.json and suggestions for unknown names, for SQL.
 *
 * The file defines the keys of architectures and the options of train_model.
 * It is compiled in, so that it needs neither a table nor an upgrade.  The
 * functions in sql/ (tensile_internal._check_value, ...) check values by it, as
 * pg_tensile/rules.py does in a child.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "fmgr.h"
#include "utils/array.h"
#include "utils/builtins.h"

#include "base/query.h"

PG_FUNCTION_INFO_V1(tensile_rules);
PG_FUNCTION_INFO_V1(tensile_nearest);

/* ASCII only: the same bytes in every server encoding. */
static const char rules[] =
#include "../../../build/rules.h"	/* the file as a string literal, made by the Makefile */
;

/* tensile_internal._rules(): the file as json, which has the same bytes as text */
Datum
tensile_rules(PG_FUNCTION_ARGS)
{
	PG_RETURN_TEXT_P(cstring_to_text_with_len(rules, sizeof(rules) - 1));
}

/* tensile_internal._nearest(name, names): the most similar one of the names, or null */
Datum
tensile_nearest(PG_FUNCTION_ARGS)
{
	Datum	   *elements;
	bool	   *nulls;
	int			nnames;
	const char **names;
	const char *nearest;

	deconstruct_array(PG_GETARG_ARRAYTYPE_P(1), TEXTOID, -1, false, TYPALIGN_INT, &elements,
					  &nulls, &nnames);
	names = palloc(nnames * sizeof(char *) + 1);
	for (int i = 0; i < nnames; i++)
		names[i] = nulls[i] ? "" : TextDatumGetCString(elements[i]);
	nearest = tensile_nearest_name(text_to_cstring(PG_GETARG_TEXT_PP(0)), names, nnames);
	if (nearest == NULL)
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(cstring_to_text(nearest));
}
