/*
 * explain.h: explain_training, and what a session may do while it runs.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_EXPLAIN_H
#define TENSILE_EXPLAIN_H

#include "submit.h"

/*
 * Does this session run the supervisor of explain_training, and no user code?
 */
extern bool tensile_explaining(void);

/*
 * Runs the query with this search_path, read only, as the current user.  Sends
 * its rows to the socket and returns their number (feed.c).
 */
extern int64 tensile_feed_session(int fd, const TrainingQuery *training, const char *search_path);

#endif
