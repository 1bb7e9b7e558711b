/*
 * processor.c: which vector instructions this processor has.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include "evaluator/processor.h"

ProcessorVectors
processor_vectors(void)
{
	ProcessorVectors most = VECTORS_AVX512;

#ifdef FRONTEND
	/* Tests compare what the variants compute. */
	if (getenv("EVALUATOR_VECTORS") != NULL)
		most = (ProcessorVectors) atoi(getenv("EVALUATOR_VECTORS"));
#endif
#ifdef TENSILE_VECTORS
	if (most >= VECTORS_AVX512 && __builtin_cpu_supports("avx512f") &&
		__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
			__builtin_cpu_supports("fma"))
		return VECTORS_AVX512;
	if (most >= VECTORS_AVX2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
		return VECTORS_AVX2;
#endif
	return Min(most, VECTORS_BASELINE);
}
