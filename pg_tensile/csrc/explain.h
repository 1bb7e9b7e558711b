/*
 * explain.h: what a session may do while explain_training runs in it.
 */
#ifndef TENSILE_EXPLAIN_H
#define TENSILE_EXPLAIN_H

#include "postgres.h"

/* This session runs the supervisor's part of explain_training, and no code of the user. */
extern bool tensile_explaining(void);

/* The same, or its training query runs. */
extern bool tensile_explanation_runs(void);

/* feed.c: runs the query with this search_path, read only, as the current user, and sends its rows to `fd`; how many. */
extern int64 tensile_feed_session(int fd, const char *query, const char *target, const char *search_path);

#endif
