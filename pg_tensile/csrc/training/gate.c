/*
 * gate.c: the rows on which a job's version and the deployed one are compared,
 * with the option "deploy" = "if_better".
 *
 * train_model checks the query of the option "gate" like the training query.
 * The worker runs it once, as the role that has submitted the job, with that
 * role's settings, and sends each row to two trainers, one for each version:
 * both are evaluated on the same rows.  A scheduled evaluation has one trainer.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "fmgr.h"
#include "nodes/parsenodes.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"

#include "base/convert.h"
#include "base/query.h"
#include "rows/evaluation_rows.h"
#include "rows/feed.h"
#include "rows/model.h"
#include "rows/training_query.h"
#include "state/identity.h"
#include "training/gate.h"

#define QUERY_NAME "gate query"

PG_FUNCTION_INFO_V1(tensile_gate_feed);
PG_FUNCTION_INFO_V1(tensile_evaluation_feed);

/* ---- at submission ---- */

/* The query of the option, or NULL. */
static const char *
gate_query(Jsonb *options)
{
	JsonbValue *gate = NULL;

	if (JB_ROOT_IS_OBJECT(options))
		gate = getKeyJsonValueFromContainer(&options->root, "gate", strlen("gate"), NULL);
	return gate != NULL && gate->type == jbvBinary ? tensile_text_key(gate->val.binary.data, "query") : NULL;
}

static bool
returns(const Query *query, const char *name)
{
	ListCell   *cell;

	foreach(cell, query->targetList)
	{
		const TargetEntry *entry = lfirst_node(TargetEntry, cell);

		if (!entry->resjunk && strcmp(entry->resname, name) == 0)
			return true;
	}
	return false;
}

/*
 * Is the column one that predictions need, or the target?  Groups, weights and
 * the flag of validation rows are not features.
 */
static bool
is_needed(const char *name, const TrainingQuery *training, const char *weight)
{
	if (training->split_by != NULL && strcmp(name, training->split_by) == 0)
		return false;
	if (weight != NULL && strcmp(name, weight) == 0)
		return false;
	return training->validation_query == NULL || strcmp(name, TENSILE_VALIDATION_COLUMN) != 0;
}

void
tensile_check_gate(const TrainingQuery *training, const Query *query, Jsonb *options)
{
	const char *sql = gate_query(options);
	const char *weight = tensile_text_key(&options->root, "weight");
	Query	   *gate;
	ListCell   *cell;

	if (sql == NULL)
		return;
	gate = tensile_analyze_select(sql, QUERY_NAME);
	foreach(cell, query->targetList)
	{
		const TargetEntry *entry = lfirst_node(TargetEntry, cell);

		if (!entry->resjunk && is_needed(entry->resname, training, weight) &&
			!returns(gate, entry->resname))
			ereport(ERROR,
					(errcode(ERRCODE_UNDEFINED_COLUMN),
					 errmsg("column \"%s\" is missing in the gate query", entry->resname),
					 errhint("It must return the target and the features of the training query.")));
	}
	tensile_check_privileges(sql, QUERY_NAME);
}

/* ---- in the worker ---- */

typedef struct GateFeed
{
	const char *query;
	const char *name;			/* of the query, in messages */
	int			nreaders;
	EvaluationReader readers[2];
} GateFeed;

static int64
feed_gate(void *argument)
{
	const GateFeed *feed = argument;

	tensile_interrupt_if_woken();
	return evaluation_feed(feed->query, feed->name, NULL, feed->readers, feed->nreaders);
}

/*
 * tensile_worker._gate_feed(fd, previous_fd, version, previous, query, settings) ->
 * number of rows
 */
Datum
tensile_gate_feed(PG_FUNCTION_ARGS)
{
	GateFeed	feed;

	tensile_require_process(TENSILE_WORKER);
	feed.query = text_to_cstring(PG_GETARG_TEXT_PP(4));
	feed.name = QUERY_NAME;
	feed.nreaders = lengthof(feed.readers);
	for (int i = 0; i < feed.nreaders; i++)
		feed.readers[i] = (EvaluationReader) {
			.fd = PG_GETARG_INT32(i),
			.model = predict_model_load_id(PG_GETARG_INT64(2 + i), CurrentMemoryContext)
		};
	PG_RETURN_INT64(tensile_feed_in_worker(PG_GETARG_JSONB_P(5), feed_gate, &feed));
}

/* tensile_worker._evaluation_feed(fd, version, query, settings) -> number of rows */
Datum
tensile_evaluation_feed(PG_FUNCTION_ARGS)
{
	GateFeed	feed = {.name = EVALUATION_QUERY_NAME,.nreaders = 1};

	tensile_require_process(TENSILE_WORKER);
	feed.query = text_to_cstring(PG_GETARG_TEXT_PP(2));
	feed.readers[0] = (EvaluationReader) {
		.fd = PG_GETARG_INT32(0),
		.model = predict_model_load_id(PG_GETARG_INT64(1), CurrentMemoryContext)
	};
	PG_RETURN_INT64(tensile_feed_in_worker(PG_GETARG_JSONB_P(3), feed_gate, &feed));
}
