/*
 * stored_version.h: a version of a model as the tables have it.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_STORED_VERSION_H
#define TENSILE_STORED_VERSION_H

#include "evaluator/evaluator.h"
#include "rows/model.h"

/*
 * Reads the model's version as the active snapshot shows it, in the current
 * context; 55000 if it is gone.
 */
extern void stored_version_read(const PredictModel *model, StoredVersion *stored);

#endif
