-- Public functions: training

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

CREATE FUNCTION @extschema@.explain_training(model text, query text, target text,
        epochs int DEFAULT 200, batch_size int DEFAULT NULL, optimizer text DEFAULT 'adamw',
        learning_rate float8 DEFAULT NULL, validation float8 DEFAULT 0.2, seed bigint DEFAULT 0,
        policy text DEFAULT NULL, memory_budget text DEFAULT NULL, priority int DEFAULT 0,
        options jsonb DEFAULT '{}', split_by text DEFAULT NULL, validation_query text DEFAULT NULL,
        max_time interval DEFAULT NULL) RETURNS SETOF text
    LANGUAGE C COST 1000 AS 'MODULE_PATHNAME', 'tensile_explain_training';
COMMENT ON FUNCTION @extschema@.explain_training(text, text, text, int, int, text, float8, float8, bigint, text, text,
                                                 int, jsonb, text, text, interval) IS
    'show what train_model with the same arguments would require, its memory plan, and whether it would '
    'start; train nothing; for roles that may train the model';
