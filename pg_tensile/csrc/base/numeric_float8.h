/*
 * numeric_float8.h: numeric values as float64.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_NUMERIC_FLOAT8_H
#define TENSILE_NUMERIC_FLOAT8_H

/*
 * Converts numeric to float64, correctly rounded.  The value may have a short
 * header, but must not be toasted.
 */
extern double tensile_numeric_float8(const struct varlena *packed);

#endif
