/*
 * explain.h: the rows of the query of explain_training.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_EXPLAIN_H
#define TENSILE_EXPLAIN_H

/*
 * Runs the query, read only, as the current user.  Sends its rows to the
 * socket and returns their number (feed.c).
 */
extern int64 tensile_feed_session(int fd, const char *query, const char *target);

#endif
