------------------------------------------------------------------------------------------------------------------------
-- Public functions: models, jobs and predictions
------------------------------------------------------------------------------------------------------------------------

CREATE FUNCTION @extschema@.register_model(name text, architecture jsonb DEFAULT NULL, description text DEFAULT NULL,
                                           replace bool DEFAULT false) RETURNS bigint
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.register_model(text, jsonb, text, bool) IS
    'register a model, e.g. register_model(''late'', ''{"type": "mlp", "hidden": [128, 64]}''); return its id';
CREATE FUNCTION @extschema@.drop_model(name text) RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.drop_model(text) IS
    'drop a model with its versions, and end its job; for the model''s owner';
CREATE FUNCTION @extschema@.deploy_model(model text, version int, reason text DEFAULT NULL) RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.deploy_model(text, int, text) IS
    'set the version that predictions use from now on; older versions are possible; the reason is kept in '
    'tensile.deployments; for the model''s owner';
CREATE FUNCTION @extschema@.rollback_model(model text, reason text DEFAULT NULL) RETURNS int
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.rollback_model(text, text) IS
    'return to the version that was deployed before the present one; return its number; for the model''s owner';
CREATE FUNCTION @extschema@.grant_model(model text, grantee text, privilege text DEFAULT 'predict') RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.grant_model(text, text, text) IS
    'allow a role (or ''public'') to ''predict'' with a model or to ''train'' it; predictions reveal training '
    'data; for the model''s owner';
CREATE FUNCTION @extschema@.revoke_model(model text, grantee text, privilege text DEFAULT 'predict') RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.revoke_model(text, text, text) IS
    'revoke a privilege granted by grant_model; for the model''s owner';
CREATE FUNCTION @extschema@.set_model_owner(model text, role text) RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.set_model_owner(text, text) IS
    'give a model to another role that the caller is a member of; for the model''s owner, and superusers';

CREATE FUNCTION @extschema@.set_model_memory_budget(model text, memory_budget text) RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.set_model_memory_budget(text, text) IS
    'limit the device memory of predictions with a model, unless a call specifies its own budget; null: no '
    'limit; for the model''s owner';

CREATE FUNCTION @extschema@.drop_version(model text, version int) RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.drop_version(text, int) IS
    'drop a version of a model that is not deployed, with its weights; for the model''s owner';

CREATE FUNCTION @extschema@.set_model_retention(model text, keep_versions int) RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.set_model_retention(text, int) IS
    'set how many of a model''s newest versions are kept, besides the deployed one, when a job adds a '
    'version; null: all; for the model''s owner';

CREATE FUNCTION @extschema@.train_model(model text, query text, target text,
        epochs int DEFAULT 200, batch_size int DEFAULT NULL, optimizer text DEFAULT 'adamw',
        learning_rate float8 DEFAULT NULL, validation float8 DEFAULT 0.2, seed bigint DEFAULT 0,
        policy text DEFAULT NULL, memory_budget text DEFAULT NULL, priority int DEFAULT 0,
        options jsonb DEFAULT '{}', split_by text DEFAULT NULL, validation_query text DEFAULT NULL,
        max_time interval DEFAULT NULL) RETURNS bigint
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_train_model';
COMMENT ON FUNCTION @extschema@.train_model(text, text, text, int, int, text, float8, float8, bigint, text, text, int,
                                            jsonb, text, text, interval) IS
    'submit a job that trains a model on the rows of a query; return the number of the job, which starts at '
    'commit; for the model''s owner and roles granted ''train''; a model that does not exist is registered';
CREATE FUNCTION @extschema@.schedule_training(model text, query text, target text,
        epochs int DEFAULT 200, batch_size int DEFAULT NULL, optimizer text DEFAULT 'adamw',
        learning_rate float8 DEFAULT NULL, validation float8 DEFAULT 0.2, seed bigint DEFAULT 0,
        policy text DEFAULT NULL, memory_budget text DEFAULT NULL, priority int DEFAULT 0,
        options jsonb DEFAULT '{}', split_by text DEFAULT NULL, validation_query text DEFAULT NULL,
        max_time interval DEFAULT NULL, every interval DEFAULT NULL, rows bigint DEFAULT NULL,
        source regclass DEFAULT NULL, drift float8 DEFAULT NULL) RETURNS bigint
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_schedule_training';
COMMENT ON FUNCTION @extschema@.schedule_training(text, text, text, int, int, text, float8, float8, bigint, text, text,
                                                  int, jsonb, text, text, interval, interval, bigint, regclass,
                                                  float8) IS
    'train a model again and again, as train_model with the same arguments: "every" time, whenever the table '
    '"source" has that many new "rows", and when predicted rows have drifted from the training rows by more than '
    '"drift"; return the id of the schedule; for roles that may train the model';
CREATE FUNCTION @extschema@.unschedule_training(model text) RETURNS bool
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.unschedule_training(text) IS
    'remove a model''s schedule; return false if it has none; jobs continue; for the owner of the schedule, and of the '
    'model';
CREATE FUNCTION @extschema@.cancel_job(job bigint) RETURNS bool
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.cancel_job(bigint) IS
    'stop a job; return false if it has already ended; for the job''s owner and members of pg_signal_backend';
CREATE FUNCTION @extschema@.set_job_priority(job bigint, priority int) RETURNS bool
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.set_job_priority(bigint, int) IS
    'set a job''s priority: a higher one starts earlier and loses less time to other jobs'' memory; return '
    'false if the job has already ended; for roles that may cancel it';

CREATE FUNCTION @extschema@.release_database() RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_release_database';
COMMENT ON FUNCTION @extschema@.release_database() IS
    'end all background processes of pg_tensile in this database, so that it can be renamed, copied or dropped, until '
    'resume_database() or the next start of the server; return when they have ended; jobs continue afterwards; for the '
    'owner of the database, and superusers';
CREATE FUNCTION @extschema@.resume_database() RETURNS bool
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_resume_database';
COMMENT ON FUNCTION @extschema@.resume_database() IS
    'end what release_database() has begun; return false if the database was not released; for the owner of the '
    'database, and superusers';

CREATE FUNCTION @extschema@.predict(model text, features record, memory_budget text DEFAULT NULL) RETURNS float8
    LANGUAGE C STABLE PARALLEL RESTRICTED COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_record';
CREATE FUNCTION @extschema@.predict(model text, features float8[], memory_budget text DEFAULT NULL) RETURNS float8
    LANGUAGE C STABLE PARALLEL RESTRICTED COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_array';
CREATE FUNCTION @extschema@.predict(model text, features jsonb, memory_budget text DEFAULT NULL) RETURNS float8
    LANGUAGE C STABLE PARALLEL RESTRICTED COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_jsonb';
CREATE FUNCTION @extschema@.predict_class(model text, features record, memory_budget text DEFAULT NULL) RETURNS text
    LANGUAGE C STABLE PARALLEL RESTRICTED COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_class_record';
CREATE FUNCTION @extschema@.predict_class(model text, features float8[], memory_budget text DEFAULT NULL) RETURNS text
    LANGUAGE C STABLE PARALLEL RESTRICTED COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_class_array';
CREATE FUNCTION @extschema@.predict_class(model text, features jsonb, memory_budget text DEFAULT NULL) RETURNS text
    LANGUAGE C STABLE PARALLEL RESTRICTED COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_class_jsonb';
CREATE FUNCTION @extschema@.predict_rows(model text, query text, memory_budget text DEFAULT NULL)
    RETURNS TABLE (row_number bigint, prediction float8, label text, probability float8)
    LANGUAGE C COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_rows';
CREATE FUNCTION @extschema@.predict_rows(model text, source regclass DEFAULT NULL, memory_budget text DEFAULT NULL)
    RETURNS TABLE (row_number bigint, prediction float8, label text, probability float8)
    LANGUAGE C COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_rows_of_source';
CREATE FUNCTION @extschema@.embed(model text, content text) RETURNS real[]
    LANGUAGE C STABLE STRICT PARALLEL RESTRICTED COST 10000 AS 'MODULE_PATHNAME', 'tensile_embed';
CREATE FUNCTION @extschema@.embed_rows(model text, query text)
    RETURNS TABLE (row_number bigint, embedding real[])
    LANGUAGE C COST 10000 AS 'MODULE_PATHNAME', 'tensile_embed_rows';
COMMENT ON FUNCTION @extschema@.embed(text, text) IS
    'vector of a text by a pretrained transformer: that of the deployed version, or of the folder if the model has '
    'no version';
COMMENT ON FUNCTION @extschema@.embed_rows(text, text) IS
    'vectors of the texts that a query of one column returns, in batches; null for null';
COMMENT ON FUNCTION @extschema@.predict(text, record, text) IS
    'predict for a row, with columns matched by name: a number, or the probability of the second of two classes';
COMMENT ON FUNCTION @extschema@.predict(text, float8[], text) IS
    'predict for features in the order of the training query';
COMMENT ON FUNCTION @extschema@.predict(text, jsonb, text) IS 'predict for an object {"feature": value, ...}';
COMMENT ON FUNCTION @extschema@.predict_class(text, record, text) IS
    'predict the most probable class for a row, with columns matched by name';
COMMENT ON FUNCTION @extschema@.predict_class(text, float8[], text) IS
    'predict the most probable class for features in the order of the training query';
COMMENT ON FUNCTION @extschema@.predict_class(text, jsonb, text) IS
    'predict the most probable class for an object {"feature": value, ...}';
COMMENT ON FUNCTION @extschema@.predict_rows(text, text, text) IS
    'predict for every row of a query, in batches';
COMMENT ON FUNCTION @extschema@.predict_rows(text, regclass, text) IS
    'predict for every row of the query that is derived from the training query, which reads "source" in place of its '
    'own table; with the caller''s privileges';
CREATE FUNCTION @extschema@.predict_interval(model text, features record, coverage float8 DEFAULT 0.9,
                                             memory_budget text DEFAULT NULL,
                                             OUT lower float8, OUT prediction float8, OUT upper float8)
    LANGUAGE C STABLE PARALLEL RESTRICTED COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_interval_record';
CREATE FUNCTION @extschema@.predict_interval(model text, features float8[], coverage float8 DEFAULT 0.9,
                                             memory_budget text DEFAULT NULL,
                                             OUT lower float8, OUT prediction float8, OUT upper float8)
    LANGUAGE C STABLE PARALLEL RESTRICTED COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_interval_array';
CREATE FUNCTION @extschema@.predict_interval(model text, features jsonb, coverage float8 DEFAULT 0.9,
                                             memory_budget text DEFAULT NULL,
                                             OUT lower float8, OUT prediction float8, OUT upper float8)
    LANGUAGE C STABLE PARALLEL RESTRICTED COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_interval_jsonb';
COMMENT ON FUNCTION @extschema@.predict_interval(text, record, float8, text) IS
    'predict for a row, with columns matched by name, with an interval in which the target lies with the '
    'probability `coverage`; for regressions';
COMMENT ON FUNCTION @extschema@.predict_interval(text, float8[], float8, text) IS
    'predict for features in the order of the training query, with an interval in which the target lies with the '
    'probability `coverage`; for regressions';
COMMENT ON FUNCTION @extschema@.predict_interval(text, jsonb, float8, text) IS
    'predict for an object {"feature": value, ...}, with an interval in which the target lies with the '
    'probability `coverage`; for regressions';
CREATE FUNCTION @extschema@.explain_prediction(model text, features record, memory_budget text DEFAULT NULL)
    RETURNS TABLE (feature text, value text, attribution float8)
    LANGUAGE C STABLE PARALLEL RESTRICTED COST 100000 ROWS 20 AS 'MODULE_PATHNAME', 'tensile_explain_prediction_record';
CREATE FUNCTION @extschema@.explain_prediction(model text, features jsonb, memory_budget text DEFAULT NULL)
    RETURNS TABLE (feature text, value text, attribution float8)
    LANGUAGE C STABLE PARALLEL RESTRICTED COST 100000 ROWS 20 AS 'MODULE_PATHNAME', 'tensile_explain_prediction_jsonb';
COMMENT ON FUNCTION @extschema@.explain_prediction(text, record, text) IS
    'attribute the prediction for a row, with columns matched by name, to the features; the attribution without a feature '
    'is the prediction for average features, and all together are the prediction';
COMMENT ON FUNCTION @extschema@.explain_prediction(text, jsonb, text) IS
    'attribute the prediction for an object {"feature": value, ...}, to the features; the attribution without a feature '
    'is the prediction for average features, and all together are the prediction';
