/*
 * answers.c: answers to the rows of a batch, computed in this session if the
 * model can be, else by the predictor.
 *
 * The session has one connection for all functions that predict for the rows
 * of a statement.  It is not used while user code runs, because features are
 * packed before anything is sent, so calls cannot get into each other's way.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "predicting/answers.h"
#include "predicting/predict_client.h"
#include "predicting/predict_socket.h"
#include "predicting/session_answers.h"
#include "predicting/session_models.h"
#include "state/predictions.h"

/* The member of a request's header that asks for it; NULL: none. */
static char *
wish_member(const Wish *wish)
{
	switch (wish->kind)
	{
		case WISH_NOTHING:
			return NULL;
		case WISH_INTERVAL:
			return psprintf("\"coverage\":%.17g", wish->coverage);
		case WISH_OPTIONAL_INTERVAL:
			return psprintf("\"coverage\":%.17g,\"optional\":true", wish->coverage);
		case WISH_PROBABILITIES:
			return pstrdup("\"probabilities\":true");
	}
	pg_unreachable();
}

/* Further members of a request's header; the predictor holds what has a number. */
static char *
more_members(const Wish *wish, int64 held)
{
	char	   *member = wish_member(wish);

	if (held == 0)
		return member;
	return psprintf("\"held\":" INT64_FORMAT "%s%s", held, member ? "," : "", member ? member : "");
}

/* Replaces a connection that broke between two requests. */
static void
ask_predictor(const PredictModel *model, FeatureBatch *batch, int64 memory_budget,
			  const Wish *wish, Predictions *answers)
{
	static int64 last_held = 0;
	PredictClient *client = predict_session_client();
	int64		held = batch->row > 1 || wish->is_trial ? ++last_held : 0;
	TimestampTz deadline = predict_deadline();
	StringInfoData header;
	WireBuffer *buffers;
	int			nbuffers;
	bool		connected_now;

	initStringInfo(&header);
	nbuffers = feature_batch_frame(batch, memory_budget, more_members(wish, held), &header,
								   &buffers);
	do
	{
		connected_now = predict_client_connect(client, deadline);
		if (predict_client_exchange(client, model->version, &header, buffers, nbuffers, answers,
									deadline))
		{
			if (answers->rows != batch->row)
				elog(ERROR, "the predictor answered with %d rows instead of %d",
					 answers->rows, batch->row);
			answers->held = held;
			return;
		}
		predict_client_close(client);
	} while (!connected_now);
	predict_client_went_away(client, NULL);
}

void
predict_answers(const PredictModel *model, FeatureBatch *batch, int64 memory_budget,
				const Wish *wish, Predictions *answers)
{
	Evaluator  *evaluator = NULL;

	if (memory_budget == 0)
		evaluator = session_model(model);
	if (evaluator != NULL)
		session_answers(evaluator, model, batch, wish, answers);
	else
		ask_predictor(model, batch, memory_budget, wish, answers);
}

void
predict_count(const PredictModel *model, const FeatureBatch *batch, const Predictions *answers,
			  int first, int rows)
{
	tensile_count_predictions(model->version, rows, predict_unknown(answers, first, rows));
	if (answers->in_session)
		session_model_count(model, batch, answers, first, rows);
	else if (answers->held != 0)
		predict_client_passed(predict_session_client(), answers->held, first, rows);
}

void
predict_check_coverage(double coverage)
{
	if (!(coverage > 0 && coverage < 1))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("coverage must be between 0 and 1, not %g", coverage),
				 errhint("0.9 means that nine of ten targets lie in their intervals.")));
}
