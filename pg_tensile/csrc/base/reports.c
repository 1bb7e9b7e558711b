/*
 * reports.c: what this library changes in messages of the server, when they are
 * written to its log and sent to the client.
 *
 * - Some errors that PostgreSQL raises before it calls us get a hint: a
 *	 privilege that is missing for a function or a schema of pg_tensile, and a
 *	 database that cannot be renamed, copied or dropped while we are connected.
 * - Messages of supervisors, and warnings of public functions, have no context,
 *	 which would be lines about our own functions.  Those of the user's code and
 *	 internal errors keep theirs.
 *
 * PostgreSQL checks privileges itself and calls no hook where one is missing, so
 * the only place for the hint is where the error is reported: what it says is not
 * changed, and an error that is caught does not have the hint.  A transaction
 * that has failed can look up nothing, so functions are recognised by name.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "base/error_context.h"
#include "base/guc.h"
#include "base/reports.h"

static emit_log_hook_type previous_emit_log = NULL;

/* Names of the public functions and procedures; a test compares them. */
static const char *const public_functions[] = {
	"await_job", "cancel_job", "cancel_tuning", "deploy_model", "drop_model",
	"drop_model_version", "embed", "embed_rows", "evaluate_model", "explain_prediction",
	"explain_training", "export_model", "feature_importance", "grant_model", "import_model",
	"materialize_predictions", "models_of_table", "predict", "predict_all", "predict_class",
	"predict_interval", "predict_probabilities", "predict_rows", "predict_table",
	"register_model", "revoke_model", "rollback_model", "schedule_evaluation",
	"schedule_training", "set_job_priority", "set_model_memory_budget", "set_model_owner",
	"set_model_retention", "train_model", "tune_model", "unschedule_evaluation",
	"unschedule_training", "wait_for_first_version", "wait_for_job",
	"wait_for_job_procedure", "wait_for_tuning"
};

static const char *const owner_functions[] = {"release_database", "resume_database"};
static const char superuser_function[] = "calibrate_device";

/* The schemas that members of tensile_user may use, and that of the tables, which they may not. */
static const char *const schemas[] = {"tensile", "tensile_worker"};
static const char tables_schema[] = "tensile_internal";

/*
 * Does the message, in whatever language, have this word?  The name of an
 * object is one, with quotes or without.
 */
static bool
has_word(const char *message, const char *word)
{
	static const char part[] = "abcdefghijklmnopqrstuvwxyz0123456789_$";
	int			length = strlen(word);

	for (const char *found = strstr(message, word); found; found = strstr(found + 1, word))
		if ((found == message || strchr(part, found[-1]) == NULL) &&
			(found[length] == '\0' || strchr(part, found[length]) == NULL))
			return true;
	return false;
}

static bool
has_any_word(const char *message, const char *const *words, int nwords)
{
	for (int i = 0; i < nwords; i++)
		if (has_word(message, words[i]))
			return true;
	return false;
}

static bool
is_message(const ErrorData *error, const char *message)
{
	return error->message_id != NULL && strcmp(error->message_id, message) == 0;
}

/* The hint for a privilege that is missing; NULL if it is not one of pg_tensile. */
static const char *
hint_of_privilege(const ErrorData *error)
{
	bool		routine = is_message(error, "permission denied for function %s") ||
		is_message(error, "permission denied for procedure %s");
	bool		schema = is_message(error, "permission denied for schema %s");

	if (routine && has_any_word(error->message, owner_functions, lengthof(owner_functions)))
		return "It is for the owner of the database, and superusers.";
	if (routine && has_word(error->message, superuser_function))
		return "It is for superusers: GRANT EXECUTE ON FUNCTION lets another role call it.";
	if ((routine && has_any_word(error->message, public_functions, lengthof(public_functions))) ||
		(schema && has_any_word(error->message, schemas, lengthof(schemas))))
		return "pg_tensile is for members of the role tensile_user: GRANT tensile_user TO the role, "
			"or tensile_predictor, which may predict and evaluate only. "
			"With a model of another role, it predicts after grant_model by the model's owner.";
	if (schema && has_word(error->message, tables_schema))
		return "The views of schema tensile show what you may see.";
	return NULL;
}

/* The hint for the database in which pg_tensile works; NULL if it is another. */
static const char *
hint_of_database(const ErrorData *error)
{
	if ((is_message(error, "database \"%s\" is being accessed by other users") ||
		 is_message(error, "source database \"%s\" is being accessed by other users")) &&
		*tensile_database != '\0' && has_word(error->message, tensile_database))
		return "pg_tensile works in it: SELECT release_database() there, disconnect, and try again.";
	return NULL;
}

static void
add_hint(ErrorData *error)
{
	const char *hint = NULL;

	if (error->hint != NULL || error->message == NULL)
		return;
	if (error->sqlerrcode == ERRCODE_INSUFFICIENT_PRIVILEGE)
		hint = hint_of_privilege(error);
	else if (error->sqlerrcode == ERRCODE_OBJECT_IN_USE)
		hint = hint_of_database(error);
	if (hint != NULL)
		error->hint = pstrdup(hint);
}

/* Called in the memory context of the error. */
static void
report(ErrorData *error)
{
	if (error->elevel == ERROR)
		add_hint(error);
	if (tensile_in_own_code() && !tensile_is_unexpected(error->sqlerrcode))
		error->hide_ctx = true;
	if (previous_emit_log)
		previous_emit_log(error);
}

void
tensile_install_report_hook(void)
{
	previous_emit_log = emit_log_hook;
	emit_log_hook = report;
}
