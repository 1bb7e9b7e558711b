/*
 * answers_compile.h: what answers need of a version's preprocessing.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_ANSWERS_COMPILE_H
#define TENSILE_ANSWERS_COMPILE_H

#include "evaluator/answers.h"
#include "evaluator/json.h"

extern void answers_compile(ImageWriter *writer, const JsonNode *preprocessing);

#endif
