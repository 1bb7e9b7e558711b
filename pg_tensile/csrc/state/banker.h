/*
 * banker.h: which of the jobs whose memory flows may go on.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_BANKER_H
#define TENSILE_BANKER_H

#include <stdbool.h>
#include <stdint.h>

#define TENSILE_MOST_GROUPS 64	/* of a job; groups.py */
#define TENSILE_OVERTAKEN 64	/* groups of others that may begin while a job waits,
								 * before it is its turn; grants.py */

typedef enum TensileClaimKind
{
	TENSILE_CLAIM_GROUP,		/* the group at the flow's position */
	TENSILE_CLAIM_WHOLE,		/* a whole iteration, or other work */
	TENSILE_CLAIM_CONSTANT		/* a constant grant instead of groups */
} TensileClaimKind;

/*
 * The groups of a job, and where it is.  A job has joined the others from the
 * first time that its groups fit beside theirs; until then it only keeps what
 * it has.
 */
typedef struct TensileFlow
{
	int32_t		ngroups;		/* 0: the job's memory does not flow */
	int32_t		position;		/* of the running or the next group */
	bool		joined;
	bool		running;		/* the group at `position`, or a whole iteration */
	bool		whole;			/* a whole iteration runs, not a group */
	bool		waiting;		/* for what it claims */
	int32_t		overtaken;		/* groups of others that began while it waits */
	TensileClaimKind claim;
	int64_t		claim_bytes;	/* of a constant grant that it claims */
	int64_t		kept_bytes;		/* by a job that has not joined */
	int64_t		whole_bytes;	/* the most that it takes at any time */
	int64_t		most_bytes[TENSILE_MOST_GROUPS];	/* taken during a group */
	int64_t		rest_bytes[TENSILE_MOST_GROUPS];	/* kept after it */
	int64_t		needed_bytes[TENSILE_MOST_GROUPS];	/* the most from a group on */
} TensileFlow;

/*
 * `jobs` are all flows of a device, in any order, the job in question among
 * them.  `budget` is the memory for them together.  What begins an iteration
 * has to be safe within `new_budget`, which is smaller while others wait for
 * memory that does not flow.
 */

/* Sets whole_bytes and needed_bytes of a flow with groups. */
extern void tensile_banker_prepare(TensileFlow *flow, int64_t whole_bytes);

/* Memory that the job holds now. */
extern int64_t tensile_banker_held(const TensileFlow *flow);

/* Is the job in an iteration? */
extern bool tensile_banker_begun(const TensileFlow *flow);

/*
 * The least budget within which the jobs fit: each may take its most while the
 * others rest between two iterations.
 */
extern int64_t tensile_banker_fit_bytes(TensileFlow *const *jobs, int njobs);

/*
 * The least budget within which the state is safe: what the jobs hold fits,
 * and there is an order in which each can end its iteration.
 */
extern int64_t tensile_banker_safe_bytes(TensileFlow *const *jobs, int njobs);

/* Adds a job between two iterations; false, and no change, if it has to wait. */
extern bool tensile_banker_join(TensileFlow *const *jobs, int njobs, TensileFlow *job,
								int64_t new_budget);

/*
 * Begins what the job claims, a group or a whole iteration; false if it has to
 * wait, which is counted.
 */
extern bool tensile_banker_begin(TensileFlow *const *jobs, int njobs, TensileFlow *job,
								 int64_t budget, int64_t new_budget);

/* May the job have the constant grant that it claims, and leave the others? */
extern bool tensile_banker_may_leave(TensileFlow *const *jobs, int njobs, const TensileFlow *job,
									 int64_t new_budget);

/* Could the job have what it claims if all others were between two iterations? */
extern bool tensile_banker_could_go(TensileFlow *const *jobs, int njobs, const TensileFlow *job,
									int64_t new_budget);

/* Ends the running group or whole iteration. */
extern void tensile_banker_end(TensileFlow *job);

/* Ends the iteration wherever it is, and withdraws what the job waits for. */
extern void tensile_banker_rest(TensileFlow *job);

#endif
