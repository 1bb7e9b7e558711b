/*
 * banker.c: which of the jobs whose memory flows may go on.
 *
 * A job's iteration is cut into groups of steps.  A group begins when its
 * memory is free and the state stays safe, as in Dijkstra's banker's
 * algorithm: there is an order in which each job can end its iteration while
 * those after it rest where they are.  So no job waits for memory that cannot
 * become free.  pg_tensile/planning/memory_flow/grants.py says more; a test
 * drives both with the same requests.
 *
 * The state can become unsafe all the same, by facts: an overhead, or a lower
 * setting.  Then nothing is safe, and one job at a time goes on, as jobs with
 * constant grants do.
 *
 * There is no call of PostgreSQL here, so that the test can load this file.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "state/banker.h"

#include <stddef.h>
#include <stdlib.h>

#define MOST_JOBS 256			/* TENSILE_MAX_JOBS */

/* Memory that a job in an iteration needs to end it, and gives back then. */
typedef struct Remainder
{
	int64_t		more_bytes;
	int64_t		given_bytes;	/* negative: it gets back what was swapped out */
} Remainder;

void
tensile_banker_prepare(TensileFlow *flow, int64_t whole_bytes)
{
	int64_t		needed = 0;

	flow->whole_bytes = whole_bytes;
	for (int i = flow->ngroups - 1; i >= 0; i--)
	{
		if (flow->most_bytes[i] > needed)
			needed = flow->most_bytes[i];
		flow->needed_bytes[i] = needed;
	}
}

/* Memory that a job keeps between two iterations. */
static int64_t
least_bytes(const TensileFlow *flow)
{
	return flow->joined ? flow->rest_bytes[flow->ngroups - 1] : flow->kept_bytes;
}

int64_t
tensile_banker_held(const TensileFlow *flow)
{
	if (flow->ngroups == 0)
		return 0;
	if (flow->running)
		return flow->whole ? flow->whole_bytes : flow->most_bytes[flow->position];
	return flow->position > 0 ? flow->rest_bytes[flow->position - 1] : least_bytes(flow);
}

bool
tensile_banker_begun(const TensileFlow *flow)
{
	return flow->running || flow->position > 0;
}

/* The most that the job takes until the end of its iteration. */
static int64_t
needed_bytes(const TensileFlow *flow)
{
	return flow->running && flow->whole ? flow->whole_bytes : flow->needed_bytes[flow->position];
}

static int64_t
kept_by_all(TensileFlow *const *jobs, int njobs)
{
	int64_t		sum = 0;

	for (int i = 0; i < njobs; i++)
		sum += least_bytes(jobs[i]);
	return sum;
}

int64_t
tensile_banker_fit_bytes(TensileFlow *const *jobs, int njobs)
{
	int64_t		kept = kept_by_all(jobs, njobs);
	int64_t		most = 0;

	for (int i = 0; i < njobs; i++)
		if (jobs[i]->joined && jobs[i]->whole_bytes - least_bytes(jobs[i]) > most)
			most = jobs[i]->whole_bytes - least_bytes(jobs[i]);
	return kept + most;
}

/*
 * Those that give memory back come first, the one that needs the fewest bytes
 * before the others; then those that only get back what a plan had swapped
 * out, the one that leaves the most last.
 */
static int
compare_remainders(const void *left, const void *right)
{
	const Remainder *a = left;
	const Remainder *b = right;
	bool		taking = a->given_bytes < 0;
	int64_t		keys[2];

	if (taking != (b->given_bytes < 0))
		return taking ? 1 : -1;
	keys[0] = taking ? -(a->more_bytes + a->given_bytes) : a->more_bytes;
	keys[1] = taking ? -(b->more_bytes + b->given_bytes) : b->more_bytes;
	return (keys[0] > keys[1]) - (keys[0] < keys[1]);
}

int64_t
tensile_banker_safe_bytes(TensileFlow *const *jobs, int njobs)
{
	Remainder	begun[MOST_JOBS];
	int			nbegun = 0;
	int64_t		held = 0;
	int64_t		given = 0;		/* by those that have ended */
	int64_t		lacking = 0;	/* beyond what is held */

	for (int i = 0; i < njobs; i++)
	{
		int64_t		bytes = tensile_banker_held(jobs[i]);

		held += bytes;
		if (!tensile_banker_begun(jobs[i]))
			continue;
		begun[nbegun].more_bytes = needed_bytes(jobs[i]) - bytes;
		begun[nbegun++].given_bytes = bytes - least_bytes(jobs[i]);
	}
	qsort(begun, nbegun, sizeof(Remainder), compare_remainders);
	for (int i = 0; i < nbegun; i++)
	{
		if (begun[i].more_bytes - given > lacking)
			lacking = begun[i].more_bytes - given;
		given += begun[i].given_bytes;
	}
	return held + lacking;
}

bool
tensile_banker_join(TensileFlow *const *jobs, int njobs, TensileFlow *job, int64_t new_budget)
{
	job->joined = true;
	if (tensile_banker_fit_bytes(jobs, njobs) <= new_budget &&
		tensile_banker_safe_bytes(jobs, njobs) <= new_budget)
		return true;
	job->joined = false;
	return false;
}

/* The others; `rest` has room for them. */
static int
others_of(TensileFlow *const *jobs, int njobs, const TensileFlow *job, TensileFlow **rest)
{
	int			nrest = 0;

	for (int i = 0; i < njobs; i++)
		if (jobs[i] != job)
			rest[nrest++] = jobs[i];
	return nrest;
}

/*
 * Is it the turn of this job to have its constant grant although it does not
 * fit?  Yes if all flows of the device wait for such grants, none of them
 * fits, as after the setting was lowered, and this one asks for the least.
 */
static bool
is_only_constant(TensileFlow *const *jobs, int njobs, const TensileFlow *job, int64_t new_budget)
{
	const TensileFlow *first = NULL;

	for (int i = 0; i < njobs; i++)
	{
		if (!jobs[i]->waiting || jobs[i]->claim != TENSILE_CLAIM_CONSTANT ||
			tensile_banker_could_go(jobs, njobs, jobs[i], new_budget))
			return false;
		if (first == NULL || jobs[i]->claim_bytes < first->claim_bytes)
			first = jobs[i];
	}
	return first == job;
}

bool
tensile_banker_may_leave(TensileFlow *const *jobs, int njobs, const TensileFlow *job,
						 int64_t new_budget)
{
	TensileFlow *rest[MOST_JOBS];
	int			nrest = others_of(jobs, njobs, job, rest);
	int64_t		remaining = new_budget - job->claim_bytes;

	/*
	 * A job that is alone with its constant grant may exceed the budget as it
	 * could before.
	 */
	if (nrest == 0 && job->joined && job->claim_bytes <= job->whole_bytes)
		return true;
	if (is_only_constant(jobs, njobs, job, new_budget))
		return true;
	return tensile_banker_fit_bytes(rest, nrest) <= remaining &&
		tensile_banker_safe_bytes(rest, nrest) <= remaining;
}

bool
tensile_banker_could_go(TensileFlow *const *jobs, int njobs, const TensileFlow *job,
						int64_t new_budget)
{
	TensileFlow *rest[MOST_JOBS];
	int			nrest = others_of(jobs, njobs, job, rest);
	int64_t		most;

	if (job->claim == TENSILE_CLAIM_CONSTANT)
		return tensile_banker_fit_bytes(rest, nrest) + job->claim_bytes <= new_budget;
	if (!job->joined)
	{
		TensileFlow joined = *job;

		joined.joined = true;
		rest[nrest] = &joined;
		return tensile_banker_fit_bytes(rest, nrest + 1) <= new_budget;
	}
	most = job->claim == TENSILE_CLAIM_WHOLE ? job->whole_bytes : needed_bytes(job);
	return kept_by_all(rest, nrest) + most <= new_budget;
}

/*
 * Has another job waited so long, and longer than this one, that no iteration
 * begins before it goes on?  One that waits for more than these jobs could
 * give holds up nobody.
 */
static bool
is_overtaken(TensileFlow *const *jobs, int njobs, const TensileFlow *job, int64_t new_budget)
{
	for (int i = 0; i < njobs; i++)
	{
		const TensileFlow *other = jobs[i];

		if (other->waiting && other->overtaken >= TENSILE_OVERTAKEN &&
			other->overtaken > job->overtaken &&
			((other->joined && other->claim != TENSILE_CLAIM_CONSTANT) ||
			 tensile_banker_could_go(jobs, njobs, other, new_budget)))
			return true;
	}
	return false;
}

/* The bytes that the job takes beyond what it holds if it goes on. */
static int64_t
additional_bytes(const TensileFlow *job)
{
	int64_t		needed = job->claim == TENSILE_CLAIM_WHOLE ? job->whole_bytes : needed_bytes(job);

	return needed - tensile_banker_held(job);
}

/* Does a job come before another one where only one can go on? */
static bool
comes_before(const TensileFlow *job, const TensileFlow *other)
{
	bool		overtaken = job->overtaken >= TENSILE_OVERTAKEN;

	if (tensile_banker_begun(job))
		return additional_bytes(job) < additional_bytes(other);
	if (overtaken || other->overtaken >= TENSILE_OVERTAKEN)
		return job->overtaken > other->overtaken;
	return additional_bytes(job) < additional_bytes(other);
}

/*
 * Is it the turn of this job although nothing is safe?  Yes if no job runs,
 * and of those in an iteration it needs the fewest bytes.  If there are none,
 * of those that would begin one: but not while one could safely, unless it
 * has been overtaken by these for too long.
 */
static bool
is_only_way(TensileFlow *const *jobs, int njobs, const TensileFlow *job, int64_t budget,
			int64_t new_budget)
{
	const TensileFlow *first = NULL;
	bool		begun = false;
	bool		could_go = false;

	for (int i = 0; i < njobs; i++)
	{
		if (jobs[i]->running)
			return false;
		begun = begun || tensile_banker_begun(jobs[i]);
	}
	if (begun && tensile_banker_safe_bytes(jobs, njobs) <= budget)
		return false;
	for (int i = 0; i < njobs; i++)
	{
		const TensileFlow *other = jobs[i];

		if (!other->joined || !other->waiting || other->claim == TENSILE_CLAIM_CONSTANT ||
			tensile_banker_begun(other) != begun)
			continue;
		could_go = could_go || (!begun && tensile_banker_could_go(jobs, njobs, other, new_budget));
		if (first == NULL || comes_before(other, first))
			first = other;
	}
	return first == job && (!could_go || job->overtaken >= TENSILE_OVERTAKEN);
}

bool
tensile_banker_begin(TensileFlow *const *jobs, int njobs, TensileFlow *job, int64_t budget,
					 int64_t new_budget)
{
	bool		begins = !tensile_banker_begun(job);
	bool		may_go;

	if (!job->waiting)
		job->overtaken = 0;
	job->waiting = true;
	if (begins && is_overtaken(jobs, njobs, job, new_budget))
		return false;
	may_go = is_only_way(jobs, njobs, job, budget, new_budget);
	job->running = true;
	job->whole = job->claim == TENSILE_CLAIM_WHOLE;
	if (!may_go && tensile_banker_safe_bytes(jobs, njobs) > (begins ? new_budget : budget))
	{
		job->running = job->whole = false;
		return false;
	}
	job->waiting = false;
	for (int i = 0; i < njobs; i++)
		if (jobs[i]->waiting)
			jobs[i]->overtaken++;
	return true;
}

void
tensile_banker_end(TensileFlow *job)
{
	if (job->running && !job->whole)
		job->position = (job->position + 1) % job->ngroups;
	job->running = job->whole = false;
}

void
tensile_banker_rest(TensileFlow *job)
{
	job->position = 0;
	job->running = job->whole = job->waiting = false;
}
