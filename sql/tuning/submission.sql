-- Submitting, cancelling and waiting for a tuning

-- The part of tune_model after the checks of the query, which are those of train_model (csrc/training/submit.c).
-- max_time limits the tuning; a key of that name in the options limits each trial.
CREATE FUNCTION tensile_internal._tune_model(caller oid, arguments jsonb, space jsonb, trials int, max_time interval,
                                             metric text, parallel int, halving jsonb, search_path text, arrays text[])
    RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile_internal.models;
    base jsonb;
    model_id bigint;
    tuning bigint;
BEGIN
    IF jsonb_typeof(arguments->'options') = 'object' THEN
        arguments := arguments #- '{options,max_time}'
                     || jsonb_build_object('max_time', arguments->'options'->'max_time');
    END IF;
    m := tensile_internal._check_submission(caller, arguments, arrays);
    IF m.architecture->>'type' = 'ensemble' THEN -- whose network has the hyperparameters
        m := jsonb_populate_record(m, '{"architecture": {"type": "tabular"}}');
    END IF;
    base := m.architecture;
    PERFORM tensile_internal._check_tuning(trials, max_time, metric, parallel),
        tensile_internal._check_measurable(arguments);
    IF base IS NOT NULL THEN -- otherwise the first trial chooses it
        space := coalesce(space,
                          tensile_internal._default_space(base->>'type')
                              - tensile_internal._given_keys(base, arguments));
    END IF;
    IF space IS NOT NULL THEN
        PERFORM tensile_internal._check_space(space, base->>'type'), tensile_internal._check_given(space, arguments),
                tensile_internal._check_space_code(caller, base, space);
    END IF;
    halving := tensile_internal._halving(halving, (arguments->>'epochs')::int);
    model_id := tensile_internal._store_architecture(caller, m, arrays);
    INSERT INTO tensile_internal.tunings (model_id, model, owner, architecture, space, trials, max_time, metric,
                                          parallel, halving, settings, arguments)
        VALUES (model_id, m.name, pg_get_userbyid(caller), base, _tune_model.space, _tune_model.trials,
                _tune_model.max_time, _tune_model.metric, _tune_model.parallel, _tune_model.halving,
                tensile_internal._session_settings(_tune_model.search_path), _tune_model.arguments - 'model')
        RETURNING id INTO tuning;
    PERFORM tensile_internal._log_tuning(tuning, 'submitted');
    RETURN tuning;
END $$;

CREATE FUNCTION tensile_internal._check_tuning(trials int, max_time interval, metric text, parallel int) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    metrics text[] := tensile_internal._tuning_metrics();
    message text;
    hint text;
BEGIN
    PERFORM tensile_internal._not_null('trials', trials::text, 'parallel', parallel::text),
        tensile_internal._check_time('max_time', max_time, '1 microsecond',
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
CREATE FUNCTION tensile_internal._tuning_metrics() RETURNS text[]
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT array_agg(e.value) FROM json_array_elements_text(
        tensile_internal._rules()->'options'->'properties'->'gate'->'properties'->'metric'->'enum') e
    WHERE e.value NOT IN ('mape', 'median_absolute_error')
$$;

-- Trials are compared by their validation rows.
CREATE FUNCTION tensile_internal._check_measurable(arguments jsonb) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (arguments->>'validation')::float8 = 0 AND arguments->>'validation_query' IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'there are no rows for validation, by which trials are compared',
            HINT = 'Leave validation out for a share of 0.2, or use validation_query.';
    END IF;
END $$;

-- {"min_epochs", "factor"} with defaults; null: no trial is pruned
CREATE FUNCTION tensile_internal._halving(halving jsonb, epochs int) RETURNS jsonb
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
    PERFORM tensile_internal._check_object(halving, rules, 'halving', '');
    RETURN jsonb_build_object('min_epochs', ceil(epochs / 27.0)::int, 'factor', 3) || halving;
END $$;

CREATE FUNCTION tensile_internal._no_open_tuning(model tensile_internal.models) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    tuning bigint := (SELECT min(t.id) FROM tensile_internal.tunings t
                      WHERE t.model_id = (_no_open_tuning.model).id AND t.ended_at IS NULL);
BEGIN
    IF tuning IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'object_in_use',
            MESSAGE = format('model "%s" is being tuned by tuning %s', (model).name, tuning),
            HINT = format('Wait with wait_for_tuning(%s) or stop it with cancel_tuning(%1$s).', tuning);
    END IF;
END $$;

-- Write a line about the tuning to the server's log.
CREATE FUNCTION tensile_internal._log_tuning(tuning bigint, event text) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_internal._log_job(
        format('pg_tensile: tuning %s %s: model="%s" owner="%s" trials=%s', t.id, $2, t.model, t.owner,
               (SELECT count(*) FROM tensile_internal.trials k WHERE k.tuning = t.id))
        || coalesce(' seconds=' || round(extract(epoch FROM t.ended_at - t.started_at), 3), '')
        || coalesce(' sqlstate=' || t.sqlstate, '') || coalesce(' reason="' || t.error || '"', ''))
    FROM tensile_internal.tunings t WHERE t.id = $1
$$;

CREATE FUNCTION tensile_worker._no_such_tuning(tuning bigint) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'undefined_object',
        MESSAGE = format('tuning %s does not exist', coalesce(tuning::text, 'null')),
        HINT = 'The tunings you may see are listed in tensile.tunings.';
END $$;

-- The rules are those of cancel_job.
CREATE FUNCTION tensile_internal._cancel_tuning(caller oid, tuning bigint) RETURNS bool
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    t tensile_internal.tunings;
    own bool;
BEGIN
    SELECT * INTO t FROM tensile_internal.tunings o WHERE o.id = tuning FOR UPDATE;
    own := tensile_internal._acts_for(caller, t.owner_id, t.owner);
    IF t.id IS NULL OR NOT own AND NOT pg_has_role(caller, 'pg_read_all_stats', 'USAGE')
                               AND NOT pg_has_role(caller, 'pg_signal_backend', 'USAGE') THEN
        PERFORM tensile_worker._no_such_tuning(tuning);
    ELSIF NOT own AND (NOT pg_has_role(caller, 'pg_signal_backend', 'USAGE')
                       OR EXISTS (SELECT FROM pg_roles WHERE oid = t.owner_id AND rolsuper)) THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('permission denied for tuning %s', tuning),
            HINT = 'Its owner may do that, and members of pg_signal_backend unless the owner is a superuser.';
    END IF;
    UPDATE tensile_internal.tunings o SET cancel_requested = true WHERE o.id = tuning AND o.ended_at IS NULL;
    PERFORM tensile_internal._notify(-1); -- wakes the controller
    RETURN t.ended_at IS NULL;
END $$;

-- The tuning's final state, or null if it has not ended; raises its error if it failed. Reads as the caller.
CREATE FUNCTION tensile_worker._tuning_result(tuning bigint, deadline timestamptz) RETURNS text
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET row_security = on
AS $$
DECLARE
    t tensile.tunings;
BEGIN
    SELECT * INTO t FROM tensile.tunings o WHERE o.tuning = _tuning_result.tuning;
    IF NOT FOUND THEN
        PERFORM tensile_worker._no_such_tuning(tuning);
    ELSIF t.state = 'failed' THEN
        PERFORM tensile_worker._raise(t.sqlstate, t.error, t.hint, NULL);
    ELSIF t.ended_at IS NOT NULL THEN
        RETURN t.state;
    ELSIF clock_timestamp() >= deadline THEN
        RAISE EXCEPTION USING ERRCODE = 'query_canceled',
            MESSAGE = format('tuning %s has not ended in time: it is %s', tuning, t.state),
            DETAIL = 'The tuning continues.',
            HINT = format('Wait longer, see its progress in tensile.tunings, or stop it with cancel_tuning(%s).',
                          tuning);
    END IF;
    RETURN NULL;
END $$;

-- Not SECURITY DEFINER: it reads as the caller. A submitted tuning is noted under its negative number
-- (csrc/training/submit.c).
CREATE FUNCTION tensile_internal._wait_for_tuning(caller oid, tuning bigint, timeout interval) RETURNS text
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    deadline timestamptz := clock_timestamp() + timeout;
    result text;
BEGIN
    IF tensile_worker._submitted_here(-tuning) THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('tuning %s was submitted by this transaction and cannot start before it commits', tuning),
            HINT = 'Commit first, then wait.';
    END IF;
    PERFORM tensile_worker._check_sees_changes('wait_for_tuning', 'Use READ COMMITTED.');
    LOOP
        result := tensile_worker._tuning_result(tuning, deadline);
        EXIT WHEN result IS NOT NULL;
        PERFORM tensile_worker._wait_round(deadline);
    END LOOP;
    RETURN result;
END $$;
