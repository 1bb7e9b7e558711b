/*
 * processor.h: which vector instructions this processor has.
 *
 * A kernel is compiled for each of them: its source (dense_kernels.h) is
 * included once for each, below a pragma.  GCC takes vectors apart before it
 * inlines functions, so that only whole functions can be compiled for several
 * processors.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_PROCESSOR_H
#define TENSILE_PROCESSOR_H

#include "evaluator/platform.h"

typedef enum ProcessorVectors
{
	VECTORS_BASELINE,			/* what the compiler may use anywhere */
	VECTORS_AVX2,				/* and FMA */
	VECTORS_AVX512
} ProcessorVectors;

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TENSILE_VECTORS
#endif

/* A loop with a constant number of turns, without the loop. */
#ifdef __clang__
#define UNROLLED(loop) _Pragma("unroll") loop
#else
#define UNROLLED(loop) _Pragma("GCC unroll 16") loop
#endif

extern ProcessorVectors processor_vectors(void);

#endif
