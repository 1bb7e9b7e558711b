/*
 * explain.c: explain_training, the EXPLAIN of a training job, which runs in
 * the caller's session and transaction (session_run.c).
 *
 * The checks are those of train_model (submit.c, as the caller; then
 * tensile_internal._explain_training, SECURITY DEFINER, which returns the spec).  The
 * trainer makes a dry run on the rows of the query, and its result is lines
 * of text.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "fmgr.h"
#include "utils/builtins.h"

#include "base/error_context.h"
#include "processes/session_run.h"
#include "rows/feed.h"
#include "rows/training_query.h"
#include "training/submit.h"

typedef struct Explanation
{
	SessionRun	run;
	TrainingQuery training;
} Explanation;

static int64
feed_training_query(SessionRun *run, int fd)
{
	Explanation *explanation = (Explanation *) run;

	return tensile_feed_session(fd, &explanation->training);
}

/*
 * explain_training(model, query, target, ...), with the arguments of
 * train_model
 */
TENSILE_PUBLIC_FUNCTION(tensile_explain_training)
{
	Explanation explanation = {.run = {.function = "explain_training",.feed = feed_training_query}};
	Datum		spec;

	tensile_require_no_session_run(explanation.run.function);
	spec = tensile_submit(fcinfo, 0, 0);
	explanation.training = tensile_training_query(fcinfo);
	tensile_session_run(fcinfo, &explanation.run, spec);
	return (Datum) 0;
}
