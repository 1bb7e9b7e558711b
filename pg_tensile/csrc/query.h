/*
 * query.h: one SELECT that changes nothing, from its text to a DestReceiver.
 */
#ifndef TENSILE_QUERY_H
#define TENSILE_QUERY_H

#include "postgres.h"

#include "nodes/parsenodes.h"
#include "tcop/dest.h"

/*
 * Parses and analyses `text` as the current user and makes sure that it is one SELECT without INTO, row marks and
 * data-modifying CTEs. `what` names it in messages ("training query"). Syntax errors carry their position in `text`.
 */
extern Query *tensile_analyze_select(const char *sql, const char *what);

/* Sets transaction_read_only for the rest of the current GUC nest level (NewGUCNestLevel ... AtEOXact_GUC). */
extern void tensile_set_read_only(void);

/* Plans and runs it to the end with a fresh snapshot; `dest` gets the rows. */
extern void tensile_run_select(Query *query, const char *sql, DestReceiver *dest);

/* The name among `names` that `name` was probably meant to be; NULL when none is close. */
extern const char *tensile_nearest_name(const char *name, const char *const *names, int nnames);

/* A hint for an unknown name: 'Did you mean "x"?', or else `otherwise`. */
extern int	tensile_hint_nearest(const char *name, const char *const *names, int nnames, const char *otherwise);

#endif
