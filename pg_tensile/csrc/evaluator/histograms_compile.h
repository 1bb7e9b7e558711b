/*
 * histograms_compile.h: the statistics of a version's training rows.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_HISTOGRAMS_COMPILE_H
#define TENSILE_HISTOGRAMS_COMPILE_H

#include "evaluator/histograms.h"
#include "evaluator/json.h"

/*
 * Adds the histograms of a reference, none if it is NULL or not one that a
 * version with this preprocessing may have: it predicts all the same.
 */
extern void histograms_compile(ImageWriter *writer, const JsonNode *reference,
							   const JsonNode *preprocessing);

#endif
