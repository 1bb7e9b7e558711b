-- Public functions: schedules

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
