/*
 * query.h: read-only queries given as text, and suggestions for unknown names.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_QUERY_H
#define TENSILE_QUERY_H

#include "nodes/parsenodes.h"
#include "tcop/dest.h"
#include "utils/jsonb.h"

/*
 * Parses and analyses a query as the current user, and makes sure that it is
 * one SELECT without INTO, row marks and data-modifying CTEs.  `what` names it
 * in messages ("training query").  Syntax errors have a position in `sql`.
 */
extern Query *tensile_analyze_select(const char *sql, const char *what);

/*
 * The same for a query of the role `author` that the current user is to run:
 * it is analysed as the author, whose code can run then, in a
 * security-restricted operation, and rewritten as the current user.
 */
extern Query *tensile_analyze_select_of(Oid author, const char *sql, const char *what,
										Jsonb *settings);

/*
 * "(...)": the text of a query that was analysed from `sql`, without its
 * semicolon, as a part of another query.
 */
extern const char *tensile_subquery(const Query *query, const char *sql);

/* Sets transaction_read_only for the rest of the current GUC nest level. */
extern void tensile_set_read_only(void);

/*
 * Applies the search_path, TimeZone, ... with which a training query was
 * submitted ({"name": "value"}), for the rest of the current GUC nest level.
 */
extern void tensile_apply_settings(Jsonb *settings);

/* The same without search_path, in which functions could find others' objects. */
extern void tensile_apply_settings_of_values(Jsonb *settings);

/* A DestReceiver with these callbacks; `startup` may be NULL. */
extern DestReceiver tensile_dest_receiver(bool (*receive) (TupleTableSlot *, DestReceiver *),
										  void (*startup) (DestReceiver *, int, TupleDesc));

/* Plans and runs the query with a new snapshot; `dest` receives the rows. */
extern void tensile_run_select(Query *query, const char *sql, DestReceiver *dest);

/*
 * The one of the names that is most similar to `name`; NULL if none is
 * similar.
 */
extern const char *tensile_nearest_name(const char *name, const char *const *names, int nnames);

/* A hint for an unknown name: 'Did you mean "x"?', or `otherwise`. */
extern int	tensile_hint_nearest(const char *name, const char *const *names, int nnames,
								 const char *otherwise);

#endif
