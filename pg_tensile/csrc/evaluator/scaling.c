/*
 * scaling.c: maps of numbers.
 *
 * Compiled without contractions of a product and a sum, which numpy does not
 * make (Makefile).
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include <math.h>

#include "evaluator/processor.h"
#include "evaluator/scaling.h"

#define LIMIT 1e6
#define SMOOTH_LIMIT 3.0
#define HUGE_STD 1e300
#define SEARCHES 8

#define KERNEL(name) baseline_##name
#include "evaluator/scaling_kernels.h"
#undef KERNEL

#ifdef TENSILE_VECTORS
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define KERNEL(name) avx2_##name
#include "evaluator/scaling_kernels.h"
#undef KERNEL
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512vl,avx2,fma")
#define KERNEL(name) avx512_##name
#include "evaluator/scaling_kernels.h"
#undef KERNEL
#pragma GCC pop_options
#endif

const ScalingKernels *
scaling_kernels(void)
{
#ifdef TENSILE_VECTORS
	switch (processor_vectors())
	{
		case VECTORS_AVX512:
			return &avx512_scaling_kernels;
		case VECTORS_AVX2:
			return &avx2_scaling_kernels;
		case VECTORS_BASELINE:
			break;
	}
#endif
	return &baseline_scaling_kernels;
}

/* An infinite scale maps all numbers to 0; a quarter keeps differences of huge ones finite. */
void
scaling_set(Scaling *self, double mean, double std)
{
	self->fill = mean;
	self->unit = std < HUGE_STD || std == 0 ? 1.0 : 0.25;
	self->center = std == 0 ? 0.0 : mean * self->unit;
	self->scale = std == 0 ? INFINITY : std * self->unit;
}
