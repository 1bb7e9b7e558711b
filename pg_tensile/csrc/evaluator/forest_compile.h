/*
 * forest_compile.h: trees of a stored version as the nodes of a forest.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_FOREST_COMPILE_H
#define TENSILE_FOREST_COMPILE_H

#include "evaluator/forest.h"

extern void forest_compile(ImageWriter *writer, const ModelSource *source);

#endif
