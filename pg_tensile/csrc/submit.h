/*
 * submit.h: what is checked of a training query when it is submitted, and again when it runs.
 */
#ifndef TENSILE_SUBMIT_H
#define TENSILE_SUBMIT_H

#include "postgres.h"

#include "fmgr.h"
#include "nodes/parsenodes.h"

/* Arguments of train_model and explain_training by position. */
#define TENSILE_ARG_QUERY 1
#define TENSILE_ARG_TARGET 2

/* Everything about these arguments that is checked as the caller; raises what train_model raises. */
extern void tensile_check_submission(FunctionCallInfo fcinfo);

/* tensile._<name>(caller, the arguments, search_path): the private function behind the public one. */
extern Datum tensile_forward_submission(FunctionCallInfo fcinfo);

/* Raises for names that appear twice, types that can't travel, a missing or unusable target, no features. */
extern void tensile_check_columns(Query *query, const char *target);

#endif
