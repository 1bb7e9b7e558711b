/*
 * gate.h: the query of the option "gate".
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_GATE_H
#define TENSILE_GATE_H

#include "utils/jsonb.h"

#include "rows/training_query.h"

/*
 * Checks the query of the option "gate", if there is one, beside the analysed
 * training query.
 */
extern void tensile_check_gate(const TrainingQuery *training, const Query *query, Jsonb *options);

#endif
