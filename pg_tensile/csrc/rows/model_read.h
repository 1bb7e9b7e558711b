/*
 * model_read.h: models as their tables have them.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_MODEL_READ_H
#define TENSILE_MODEL_READ_H

#include "rows/model.h"

#define NO_MODEL 0				/* a version */

/*
 * Fills in the model with its name and this version, or the deployed one (0);
 * or, unless it is 0, the model of a version by its id.  The version is NO_MODEL
 * or NO_VERSION if there is none.
 */
extern void model_read(PredictModel *model, int32 number, int64 version_id);

#endif
