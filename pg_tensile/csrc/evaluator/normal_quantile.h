/*
 * normal_quantile.h: quantiles of the normal distribution.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_NORMAL_QUANTILE_H
#define TENSILE_NORMAL_QUANTILE_H

#include "evaluator/platform.h"

/*
 * The quantile of a share, at least 1e-10 and at most 1 minus that, as
 * Python's NormalDist().inv_cdf() has it.
 */
extern double normal_quantile(double share);

#endif
