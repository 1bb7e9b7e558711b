-- Public functions: tuning

CREATE FUNCTION @extschema@.tune_model(model text, query text, target text, space jsonb DEFAULT NULL,
        trials int DEFAULT 20, max_time interval DEFAULT NULL, metric text DEFAULT NULL, parallel int DEFAULT 2,
        halving jsonb DEFAULT '{}', epochs int DEFAULT 200, batch_size int DEFAULT NULL, optimizer text DEFAULT 'adamw',
        learning_rate float8 DEFAULT NULL, validation float8 DEFAULT 0.2, seed bigint DEFAULT 0,
        policy text DEFAULT NULL, memory_budget text DEFAULT NULL, priority int DEFAULT 0,
        options jsonb DEFAULT '{}', split_by text DEFAULT NULL, validation_query text DEFAULT NULL) RETURNS bigint
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_tune_model';
COMMENT ON FUNCTION @extschema@.tune_model(text, text, text, jsonb, int, interval, text, int, jsonb, int, int, text,
                                           float8, float8, bigint, text, text, int, jsonb, text, text) IS
    'search for the hyperparameters with which train_model trains the best model, by jobs that share the device and the '
    'rows of one run of the query; deploy the best one; return the id of the tuning, which starts at commit; for roles '
    'that may train the model; a model that does not exist is registered';
CREATE FUNCTION @extschema@.cancel_tuning(tuning bigint) RETURNS bool
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.cancel_tuning(bigint) IS
    'stop a tuning and its jobs; nothing is deployed; return false if it has already ended; for the tuning''s owner and '
    'members of pg_signal_backend';
CREATE FUNCTION @extschema@.wait_for_tuning(tuning bigint, timeout interval DEFAULT NULL) RETURNS text
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward_reading';
COMMENT ON FUNCTION @extschema@.wait_for_tuning(bigint, interval) IS
    'wait until a tuning has ended, and return its state; raise its error if it failed';
