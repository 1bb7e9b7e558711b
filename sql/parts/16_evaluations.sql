------------------------------------------------------------------------------------------------------------------------
-- Scheduled evaluations: how good the deployed version is on rows whose truth is known by now
------------------------------------------------------------------------------------------------------------------------

-- The part of schedule_evaluation after the checks of the query (csrc/training/evaluate.c)
CREATE FUNCTION tensile._schedule_evaluation(caller oid, model text, query text, every interval, metric text,
                                             search_path text) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    model_id bigint := (SELECT m.id FROM tensile.models m WHERE m.name = model);
    metrics text[] := (SELECT tensile._metrics_of(v.task) FROM tensile.models m
                           JOIN tensile.model_versions v ON v.model = m.id AND v.version = m.deployed_version
                       WHERE m.id = model_id);
    schedule bigint;
BEGIN
    PERFORM tensile._check_can_start(caller), tensile._check_every(every);
    IF metrics IS NULL THEN -- C has looked with a newer snapshot
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('this transaction cannot see the version of model "%s"', model),
            HINT = 'Its snapshot is older: call the function in a new transaction.';
    ELSIF NOT metric = ANY (metrics) THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('model "%s" has no metric "%s"', model, metric),
            HINT = format('Its metrics are %s.', array_to_string(metrics, ', '));
    END IF;
    INSERT INTO tensile.evaluation_schedules (model, owner_name, query, metric, every, next_run, settings)
        VALUES (model_id, pg_get_userbyid(caller), _schedule_evaluation.query, _schedule_evaluation.metric,
                _schedule_evaluation.every, clock_timestamp() + _schedule_evaluation.every,
                tensile._session_settings(_schedule_evaluation.search_path))
        ON CONFLICT DO NOTHING
        RETURNING id INTO schedule;
    IF schedule IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'duplicate_object',
            MESSAGE = format('model "%s" is already evaluated by a schedule', model),
            HINT = 'Remove it with unschedule_evaluation first.';
    END IF;
    PERFORM tensile._notify(-1); -- wakes the controller
    RETURN schedule;
END $$;

CREATE FUNCTION tensile._unschedule_evaluation(caller oid, model text) RETURNS bool
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    s tensile.evaluation_schedules;
BEGIN
    SELECT o.* INTO s FROM tensile.evaluation_schedules o JOIN tensile.models m ON m.id = o.model
        WHERE m.name = _unschedule_evaluation.model FOR UPDATE OF o;
    IF NOT FOUND THEN
        RETURN false;
    ELSIF NOT tensile._acts_for(caller, s.owner, s.owner_name) THEN
        PERFORM tensile._own_model(caller, model);
    END IF;
    DELETE FROM tensile.evaluation_schedules o WHERE o.id = s.id;
    RETURN true;
END $$;

CREATE FUNCTION tensile._evaluates(job bigint) RETURNS bool
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM tensile.jobs j WHERE j.id = $1 AND j.ended_at IS NULL)
$$;

-- Schedules of which an evaluation is due and does not run already
CREATE FUNCTION tensile._due_evaluations() RETURNS TABLE (schedule bigint)
    LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT s.id FROM tensile.evaluation_schedules s
    WHERE s.next_run <= clock_timestamp() AND NOT tensile._evaluates(s.last_job)
    ORDER BY s.next_run, s.id
$$;

-- Submit the evaluation that is due, as its owner. A refusal is kept in the schedule, and the next time is the next try.
CREATE FUNCTION tensile._run_evaluation(schedule bigint) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    s tensile.evaluation_schedules;
    text_of_error text;
    text_of_hint text;
    code text;
    submitted bigint;
BEGIN
    SELECT * INTO s FROM tensile.evaluation_schedules o WHERE o.id = schedule FOR UPDATE SKIP LOCKED;
    IF NOT FOUND OR s.next_run > clock_timestamp() OR tensile._evaluates(s.last_job) THEN
        RETURN;
    END IF;
    BEGIN
        submitted := tensile._submit_evaluation(s);
    EXCEPTION WHEN lock_not_available THEN
        RETURN;
    WHEN OTHERS THEN
        GET STACKED DIAGNOSTICS code = RETURNED_SQLSTATE, text_of_error = MESSAGE_TEXT,
                                text_of_hint = PG_EXCEPTION_HINT;
        IF s.error IS DISTINCT FROM text_of_error THEN
            PERFORM tensile._log_job(format('pg_tensile: evaluation %s refused: owner="%s" sqlstate=%s reason="%s"',
                                            s.id, s.owner_name, code, text_of_error));
        END IF;
    END;
    UPDATE tensile.evaluation_schedules o
        SET last_run = clock_timestamp(), last_job = submitted, sqlstate = code, error = text_of_error,
            hint = nullif(text_of_hint, ''), next_run = tensile._next_run(s.created_at, s.every)
        WHERE o.id = s.id;
END $$;

-- An evaluation is a job without a model, which neither trains one nor keeps others from training it. Of the ended ones of
-- a schedule, the last one is kept.
CREATE FUNCTION tensile._submit_evaluation(s tensile.evaluation_schedules) RETURNS bigint
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    job bigint;
BEGIN
    PERFORM tensile._check_schedule_owner(s.owner, s.owner_name, 'evaluate_model');
    DELETE FROM tensile.jobs j WHERE j.kind = 'evaluate' AND j.ended_at IS NOT NULL
        AND j.options->'schedule' = to_jsonb(s.id);
    INSERT INTO tensile.jobs (kind, model_name, owner_name, query, target, epochs, batch_size, optimizer,
                              learning_rate, validation, seed, priority, options, settings)
        SELECT 'evaluate', m.name, s.owner_name, s.query, '', 1, 1, '', 0, 0, 0, 0,
               jsonb_build_object('schedule', s.id, 'model', m.id), s.settings
        FROM tensile.models m WHERE m.id = s.model
        RETURNING id INTO job;
    PERFORM tensile._log_event(job, 'submitted'), tensile._notify(job);
    RETURN job;
END $$;

-- What the job evaluates, as the JOB frame of an evaluation; null: the model or its schedule was dropped
CREATE FUNCTION tensile._job_evaluation() RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile.jobs;
    m tensile.models;
BEGIN
    SELECT * INTO j FROM tensile.jobs o WHERE o.id = tensile._my_job();
    SELECT o.* INTO m FROM tensile.models o JOIN tensile.evaluation_schedules s ON s.model = o.id
        WHERE s.id = (j.options->>'schedule')::bigint AND o.id = (j.options->>'model')::bigint AND j.kind = 'evaluate';
    IF NOT FOUND THEN
        RETURN NULL;
    ELSIF NOT tensile._granted(j.owner, m.id, 'predict') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('permission denied for model "%s"', m.name),
            HINT = format('Its owner can allow it: SELECT grant_model(%L, %L).', m.name, j.owner_name);
    ELSIF m.deployed_version IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('model "%s" has no version that is deployed', m.name),
            HINT = 'Train it with train_model, or choose a version with deploy_model.';
    END IF;
    RETURN (SELECT tensile._evaluation_spec(v.id, NULL, '{"function": "evaluate_model", "memory_budget": 0}')
            FROM tensile.model_versions v WHERE v.model = m.id AND v.version = m.deployed_version);
END $$;

-- A chunk of the weights of that version; null past the end
CREATE FUNCTION tensile._job_evaluation_weights(version bigint, seq int) RETURNS bytea
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._my_job(); -- the next statement does not call it without a row
    SELECT w.data
    FROM tensile.model_weights w JOIN tensile.model_versions v ON v.id = w.version
        JOIN tensile.jobs j ON (j.options->>'model')::bigint = v.model
    WHERE j.id = tensile._my_job() AND j.kind = 'evaluate' AND tensile._granted(j.owner, v.model, 'predict')
      AND w.version = $1 AND w.seq = $2
$$;

-- Store the values {metric: value} of that version, as far as the schedule asks for them.
CREATE FUNCTION tensile._job_evaluated(version bigint, rows bigint, metrics jsonb) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._my_job(); -- the next statements do not call it without a row
    UPDATE tensile.jobs SET rows = $2 WHERE id = tensile._my_job();
    INSERT INTO tensile.evaluations (model, version, at, rows, metric, value)
        SELECT s.model, v.version, clock_timestamp(), $2, e.key, e.value::float8
        FROM tensile.jobs j JOIN tensile.evaluation_schedules s ON s.id = (j.options->>'schedule')::bigint
             JOIN tensile.model_versions v ON v.id = $1 AND v.model = s.model
             CROSS JOIN LATERAL jsonb_each_text($3) e
        WHERE j.id = tensile._my_job() AND j.kind = 'evaluate' AND e.key = coalesce(s.metric, e.key);
$$;

CREATE FUNCTION @extschema@.schedule_evaluation(model text, query text, every interval, metric text DEFAULT NULL)
    RETURNS bigint
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_schedule_evaluation';
COMMENT ON FUNCTION @extschema@.schedule_evaluation(text, text, interval, text) IS
    'evaluate the deployed version of a model again and again on the rows of a query, as evaluate_model does, and keep '
    'the values in tensile.evaluations; return the id of the schedule; for roles that may predict with the model';
CREATE FUNCTION @extschema@.unschedule_evaluation(model text) RETURNS bool
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.unschedule_evaluation(text) IS
    'remove a model''s schedule of evaluations; return false if it has none; the values stay; for the owner of the '
    'schedule, and of the model';
