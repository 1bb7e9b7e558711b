/*
 * blake2b.h: the hash of strings (pg_tensile/execution/data/hashing.py).
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_BLAKE2B_H
#define TENSILE_BLAKE2B_H

#include "evaluator/platform.h"

/* The BLAKE2b digest of 8 bytes, as a number whose first byte is the lowest. */
extern uint64 blake2b_hash(const char *bytes, Size length);

#endif
