------------------------------------------------------------------------------------------------------------------------
-- Tunings: submission, cancellation, waiting
------------------------------------------------------------------------------------------------------------------------

-- The part of tune_model after the checks of the query, which are those of train_model (csrc/training/submit.c)
CREATE FUNCTION tensile._tune_model(caller oid, arguments jsonb, space jsonb, trials int, time_limit interval,
                                    metric text, parallel int, halving jsonb, search_path text, arrays text[])
    RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models := tensile._check_submission(caller, arguments, arrays);
    base jsonb := m.architecture;
    model_id bigint;
    tuning bigint;
BEGIN
    PERFORM tensile._check_tuning(trials, time_limit, metric, parallel), tensile._check_measurable(arguments);
    IF base IS NOT NULL THEN -- otherwise the first trial chooses it
        space := coalesce(space, tensile._default_space(base->>'type') - tensile._given_keys(base, arguments));
    END IF;
    IF space IS NOT NULL THEN
        PERFORM tensile._check_space(space, base->>'type'), tensile._check_given(space, arguments),
                tensile._check_space_code(caller, base, space);
    END IF;
    halving := tensile._halving(halving, (arguments->>'epochs')::int);
    model_id := tensile._store_architecture(caller, m, arrays);
    INSERT INTO tensile.tunings (model, model_name, owner_name, architecture, space, trials, time_limit, metric,
                                 parallel, halving, settings, arguments)
        VALUES (model_id, m.name, pg_get_userbyid(caller), base, _tune_model.space, _tune_model.trials,
                _tune_model.time_limit, _tune_model.metric, _tune_model.parallel, _tune_model.halving,
                tensile._session_settings(_tune_model.search_path), _tune_model.arguments - 'model')
        RETURNING id INTO tuning;
    PERFORM tensile._log_tuning(tuning, 'submitted');
    RETURN tuning;
END $$;

CREATE FUNCTION tensile._check_tuning(trials int, time_limit interval, metric text, parallel int) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    metrics text[] := tensile._tuning_metrics();
    message text;
    hint text;
BEGIN
    PERFORM tensile._not_null('trials', trials::text, 'parallel', parallel::text),
            tensile._check_time('time_limit', time_limit, '1 microsecond',
                'Use a time up to 100 years, such as ''1 hour'', or leave it out for no limit.');
    IF trials NOT BETWEEN 1 AND 10000 THEN
        message := format('trials is out of range: %s', trials);
        hint := 'Use 1 to 10000; 20 to 50 are usual.';
    ELSIF parallel NOT BETWEEN 1 AND 64 THEN
        message := format('parallel is out of range: %s', parallel);
        hint := 'Use 1 to 64 trials at once; as many as there are cores, at most, are useful.';
    ELSIF metric <> ALL (metrics) THEN
        message := format('trials have no metric "%s"', metric);
        hint := format('They are measured after each epoch by: %s.', array_to_string(metrics, ', '));
    END IF;
    IF message IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = message, HINT = hint;
    END IF;
END $$;

-- Metrics of the option "gate" that each epoch has
CREATE FUNCTION tensile._tuning_metrics() RETURNS text[]
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT array_agg(e.value) FROM json_array_elements_text(
        tensile._rules()->'options'->'properties'->'gate'->'properties'->'metric'->'enum') e
    WHERE e.value NOT IN ('mape', 'median_absolute_error')
$$;

-- Trials are compared by their validation rows.
CREATE FUNCTION tensile._check_measurable(arguments jsonb) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (arguments->>'validation')::float8 = 0 AND arguments->>'validation_query' IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'there are no rows for validation, by which trials are compared',
            HINT = 'Leave validation out for a share of 0.2, or use validation_query.';
    END IF;
END $$;

-- Keys of a space that have a value already
CREATE FUNCTION tensile._given_keys(architecture jsonb, arguments jsonb) RETURNS text[]
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT ARRAY(SELECT jsonb_object_keys($1) UNION SELECT jsonb_object_keys($2->'options')
                 UNION SELECT a FROM unnest('{batch_size,learning_rate}'::text[]) a WHERE $2->>a IS NOT NULL)
$$;

-- True while the first trial has yet to choose the architecture by the values of arrays.
CREATE FUNCTION tensile._is_open(t tensile.tunings) RETURNS bool
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT ($1).architecture IS NULL AND NOT coalesce(($1).space ? 'architecture', false)
$$;

-- Complete a tuning whose first trial has chosen the architecture. The space is the default one, or the keys of the given
-- one that the architecture has.
CREATE FUNCTION tensile._settle_space(tuning bigint, architecture jsonb) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile.tunings t
        SET architecture = $2,
            space = CASE WHEN t.space IS NULL
                THEN tensile._default_space($2->>'type')
                     - tensile._given_keys($2, t.arguments)
                ELSE (SELECT coalesce(jsonb_object_agg(e.key, e.value), '{}') FROM jsonb_each(t.space) e
                      WHERE e.key IN (SELECT r.key FROM tensile._space_rules(ARRAY[$2->>'type']) r)) END
        WHERE t.id = $1 AND tensile._is_open(t);
    SELECT tensile._notify(-1) WHERE $1 IS NOT NULL; -- the controller's next turn chooses other trials
$$;

-- Raise an error if an argument or an option is given, and is to be chosen as well.
CREATE FUNCTION tensile._check_given(space jsonb, arguments jsonb) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    given text := (SELECT k FROM unnest(tensile._given_keys('{}', arguments)) k
                   WHERE space ? k ORDER BY k LIMIT 1);
BEGIN
    IF given IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('"%s" has a value, and is in the space', given), HINT = 'Leave one of them out.';
    ELSIF space = '{}' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'there is nothing to choose from',
            HINT = 'Give a space.';
    END IF;
END $$;

-- Raise an error if trials would run code that the caller may not run on the server.
CREATE FUNCTION tensile._check_space_code(caller oid, architecture jsonb, space jsonb) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    types text[] := tensile._space_types(space, architecture->>'type');
BEGIN
    IF EXISTS (SELECT FROM tensile._space_rules(types) r WHERE space ? r.key AND r.kind NOT IN ('argument', 'option'))
       OR space ? 'architecture' THEN
        PERFORM tensile._check_code(caller, jsonb_build_object('type', t)) FROM unnest(types) t;
    END IF;
END $$;

-- {"min_epochs", "factor"} with defaults; null: no trial is pruned
CREATE FUNCTION tensile._halving(halving jsonb, epochs int) RETURNS jsonb
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    rules json := '{"properties": {"min_epochs": {"type": "integer", "minimum": 1, "maximum": 1000000},
                                   "factor": {"type": "integer", "minimum": 2, "maximum": 100}}}';
BEGIN
    IF halving IS NULL THEN
        RETURN NULL;
    ELSIF jsonb_typeof(halving) <> 'object' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'halving must be a JSON object or null',
            HINT = 'For example ''{"min_epochs": 5, "factor": 3}''; null: no trial is pruned.';
    END IF;
    PERFORM tensile._check_object(halving, rules, 'halving', '');
    RETURN jsonb_build_object('min_epochs', ceil(epochs / 27.0)::int, 'factor', 3) || halving;
END $$;

CREATE FUNCTION tensile._no_open_tuning(model tensile.models) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    tuning bigint := (SELECT min(t.id) FROM tensile.tunings t
                      WHERE t.model = (_no_open_tuning.model).id AND t.ended_at IS NULL);
BEGIN
    IF tuning IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'object_in_use',
            MESSAGE = format('model "%s" is being tuned by tuning %s', (model).name, tuning),
            HINT = format('Wait with wait_for_tuning(%s) or stop it with cancel_tuning(%1$s).', tuning);
    END IF;
END $$;

-- Write a line about the tuning to the server's log.
CREATE FUNCTION tensile._log_tuning(tuning bigint, event text) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._log_job(format('pg_tensile: tuning %s %s: model="%s" owner="%s" trials=%s', t.id, $2, t.model_name,
                                   t.owner_name, (SELECT count(*) FROM tensile.trials k WHERE k.tuning = t.id))
        || coalesce(' seconds=' || round(extract(epoch FROM t.ended_at - t.started_at), 3), '')
        || coalesce(' sqlstate=' || t.sqlstate, '') || coalesce(' reason="' || t.error || '"', ''))
    FROM tensile.tunings t WHERE t.id = $1
$$;

CREATE FUNCTION tensile._no_such_tuning(tuning bigint) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'undefined_object',
        MESSAGE = format('tuning %s does not exist', coalesce(tuning::text, 'null')),
        HINT = 'The tunings you may see are listed in tensile.tunings.';
END $$;

-- The rules are those of cancel_job.
CREATE FUNCTION tensile._cancel_tuning(caller oid, tuning bigint) RETURNS bool
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    t tensile.tunings;
    own bool;
BEGIN
    SELECT * INTO t FROM tensile.tunings o WHERE o.id = tuning FOR UPDATE;
    own := tensile._acts_for(caller, t.owner, t.owner_name);
    IF t.id IS NULL OR NOT own AND NOT pg_has_role(caller, 'pg_read_all_stats', 'USAGE')
                               AND NOT pg_has_role(caller, 'pg_signal_backend', 'USAGE') THEN
        PERFORM tensile._no_such_tuning(tuning);
    ELSIF NOT own AND (NOT pg_has_role(caller, 'pg_signal_backend', 'USAGE')
                       OR EXISTS (SELECT FROM pg_roles WHERE oid = t.owner AND rolsuper)) THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('permission denied for tuning %s', tuning),
            HINT = 'Its owner may do that, and members of pg_signal_backend unless the owner is a superuser.';
    END IF;
    UPDATE tensile.tunings o SET cancel_requested = true WHERE o.id = tuning AND o.ended_at IS NULL;
    PERFORM tensile._notify(-1); -- wakes the controller
    RETURN t.ended_at IS NULL;
END $$;

-- The tuning's final state, or null if it has not ended; raises its error if it failed. Reads as the caller.
CREATE FUNCTION tensile._tuning_result(tuning bigint, deadline timestamptz) RETURNS text
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET row_security = on
AS $$
DECLARE
    t tensile.tunings;
BEGIN
    SELECT * INTO t FROM tensile.tunings o WHERE o.id = tuning;
    IF NOT FOUND THEN
        PERFORM tensile._no_such_tuning(tuning);
    ELSIF t.state = 'failed' THEN
        PERFORM tensile._raise(t.sqlstate, t.error, t.hint, NULL);
    ELSIF t.ended_at IS NOT NULL THEN
        RETURN t.state;
    ELSIF clock_timestamp() >= deadline THEN
        RAISE EXCEPTION USING ERRCODE = 'query_canceled',
            MESSAGE = format('tuning %s has not ended in time: it is %s', tuning, t.state),
            DETAIL = 'The tuning continues.',
            HINT = format('Wait longer, see its progress in tensile.tuning_status, or stop it with cancel_tuning(%s).',
                          tuning);
    END IF;
    RETURN NULL;
END $$;

-- Not SECURITY DEFINER: it reads as the caller. A submitted tuning is noted under its negative number
-- (csrc/training/submit.c).
CREATE FUNCTION tensile._wait_for_tuning(caller oid, tuning bigint, timeout interval) RETURNS text
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    deadline timestamptz := clock_timestamp() + timeout;
    result text;
BEGIN
    IF tensile._submitted_here(-tuning) THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('tuning %s was submitted by this transaction and cannot start before it commits', tuning),
            HINT = 'Commit first, then wait.';
    END IF;
    PERFORM tensile._check_sees_changes('wait_for_tuning', 'Use READ COMMITTED.');
    LOOP
        result := tensile._tuning_result(tuning, deadline);
        EXIT WHEN result IS NOT NULL;
        PERFORM tensile._wait_round(deadline);
    END LOOP;
    RETURN result;
END $$;

CREATE FUNCTION @extschema@.tune_model(model text, query text, target text, space jsonb DEFAULT NULL,
        trials int DEFAULT 20, time_limit interval DEFAULT NULL, metric text DEFAULT NULL, parallel int DEFAULT 2,
        halving jsonb DEFAULT '{}', epochs int DEFAULT 200, batch_size int DEFAULT NULL, optimizer text DEFAULT 'adamw',
        learning_rate float8 DEFAULT NULL, validation float8 DEFAULT 0.2, seed bigint DEFAULT 0,
        policy text DEFAULT NULL, memory_budget text DEFAULT NULL, priority int DEFAULT 0,
        options jsonb DEFAULT '{}', split_by text DEFAULT NULL, validation_query text DEFAULT NULL,
        max_time interval DEFAULT NULL) RETURNS bigint
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_tune_model';
COMMENT ON FUNCTION @extschema@.tune_model(text, text, text, jsonb, int, interval, text, int, jsonb, int, int, text,
                                           float8, float8, bigint, text, text, int, jsonb, text, text, interval) IS
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
