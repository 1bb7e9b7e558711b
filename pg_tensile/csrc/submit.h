/*
 * submit.h: what is checked of a training query when it is submitted, and again when it runs.
 */
#ifndef TENSILE_SUBMIT_H
#define TENSILE_SUBMIT_H

#include "postgres.h"

#include "nodes/parsenodes.h"

/* Raises for names that appear twice, types that can't travel, a missing or unusable target, no features. */
extern void tensile_check_columns(Query *query, const char *target);

#endif
