/*
 * normal_quantile.c: quantiles of the normal distribution (Wichura 1988,
 * algorithm AS241, with 16 digits, without what is for shares below e^-25).
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include <math.h>

#include "evaluator/normal_quantile.h"

#define TERMS 8

/* Quotients of polynomials, the highest power first: of the middle, and of the tails. */
static const double middle[2][TERMS] = {
	{2509.0809287301227, 33430.57558358813, 67265.7709270087, 45921.95393154987,
	13731.69376550946, 1971.5909503065513, 133.14166789178438, 3.3871328727963665},
	{5226.495278852854, 28729.085735721943, 39307.89580009271, 21213.794301586597,
	5394.196021424751, 687.1870074920579, 42.31333070160091, 1.0},
};
static const double tail[2][TERMS] = {
	{0.0007745450142783414, 0.022723844989269184, 0.2417807251774506, 1.2704582524523684,
	3.6478483247632045, 5.769497221460691, 4.630337846156546, 1.4234371107496835},
	{1.0507500716444169e-09, 0.0005475938084995345, 0.015198666563616457, 0.14810397642748008,
	0.6897673349851, 1.6763848301838038, 2.053191626637759, 1.0},
};

static double
quotient(const double terms[2][TERMS], double x)
{
	double		numerator = 0.0,
				denominator = 0.0;

	for (int i = 0; i < TERMS; i++)
	{
		numerator = numerator * x + terms[0][i];
		denominator = denominator * x + terms[1][i];
	}
	return numerator / denominator;
}

double
normal_quantile(double share)
{
	double		q = share - 0.5;
	double		r;
	double		x;

	if (fabs(q) <= 0.425)
		return q * quotient(middle, 0.180625 - q * q);
	r = sqrt(-log(q <= 0.0 ? share : 1.0 - share));
	x = quotient(tail, r - 1.6);
	return q < 0.0 ? -x : x;
}
