/*
 * rules.c: pg_tensile/rules.json for SQL, and "did you mean".
 *
 * The file says what the keys of architectures and the options of train_model may be. It is compiled in, so that it
 * needs no place in the catalogue and no upgrade; tensile._check_value and its neighbours in sql/ compare values with
 * it, as pg_tensile/rules.py does in a child.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "fmgr.h"
#include "utils/array.h"
#include "utils/builtins.h"

#include "query.h"

PG_FUNCTION_INFO_V1(tensile_rules);
PG_FUNCTION_INFO_V1(tensile_nearest);

/* ASCII only: the same bytes in every server encoding. */
static const char rules[] =
#include "../../build/rules.h"	/* made by the Makefile: the file as a string literal */
;

/* tensile._rules(): json, whose keys keep their order; bytes of json are those of its text */
Datum
tensile_rules(PG_FUNCTION_ARGS)
{
	PG_RETURN_TEXT_P(cstring_to_text_with_len(rules, sizeof(rules) - 1));
}

/* tensile._nearest(name, names): the one of them that was probably meant, or null */
Datum
tensile_nearest(PG_FUNCTION_ARGS)
{
	Datum	   *elements;
	bool	   *nulls;
	int			n;
	const char **names;
	const char *nearest;

	deconstruct_array(PG_GETARG_ARRAYTYPE_P(1), TEXTOID, -1, false, TYPALIGN_INT, &elements, &nulls, &n);
	names = palloc(n * sizeof(char *) + 1);
	for (int i = 0; i < n; i++)
		names[i] = nulls[i] ? "" : TextDatumGetCString(elements[i]);
	nearest = tensile_nearest_name(text_to_cstring(PG_GETARG_TEXT_PP(0)), names, n);
	if (nearest == NULL)
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(cstring_to_text(nearest));
}
