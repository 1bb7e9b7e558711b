-- Scheduled evaluations: when they are due, and their jobs

CREATE FUNCTION tensile_worker._evaluation_feed(fd int, version bigint, query text, settings jsonb) RETURNS bigint
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_evaluation_feed';

-- The part of schedule_evaluation after the checks of the query (csrc/training/evaluate.c)
CREATE FUNCTION tensile_internal._schedule_evaluation(caller oid, model text, query text, every interval, metric text,
                                                      search_path text) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    model_id bigint := (SELECT m.id FROM tensile_internal.models m WHERE m.name = model);
    metrics text[] := (SELECT tensile_internal._metrics_of(v.task) FROM tensile_internal.models m
                           JOIN tensile_internal.model_versions v ON v.model_id = m.id
                               AND v.version = m.deployed_version
                       WHERE m.name = model);
    schedule bigint;
BEGIN
    PERFORM tensile_internal._check_can_start(caller), tensile_internal._check_every(every);
    IF metrics IS NULL THEN -- C has looked with a newer snapshot
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('this transaction cannot see the version of model "%s"', model),
            HINT = 'Its snapshot is older: call the function in a new transaction.';
    ELSIF NOT metric = ANY (metrics) THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('model "%s" has no metric "%s"', model, metric),
            HINT = format('Its metrics are %s.', array_to_string(metrics, ', '));
    END IF;
    INSERT INTO tensile_internal.evaluation_schedules (model_id, owner, query, metric, every, next_run, settings)
        VALUES (model_id, pg_get_userbyid(caller), _schedule_evaluation.query, _schedule_evaluation.metric,
                _schedule_evaluation.every, clock_timestamp() + _schedule_evaluation.every,
                tensile_internal._session_settings(_schedule_evaluation.search_path))
        ON CONFLICT DO NOTHING
        RETURNING id INTO schedule;
    IF schedule IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'duplicate_object',
            MESSAGE = format('model "%s" is already evaluated by a schedule', model),
            HINT = 'Remove it with unschedule_evaluation first.';
    END IF;
    PERFORM tensile_internal._notify(-1); -- wakes the controller
    RETURN schedule;
END $$;

CREATE FUNCTION tensile_internal._unschedule_evaluation(caller oid, model text) RETURNS bool
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    s tensile_internal.evaluation_schedules;
BEGIN
    SELECT o.* INTO s FROM tensile_internal.evaluation_schedules o JOIN tensile_internal.models m ON m.id = o.model_id
        WHERE m.name = _unschedule_evaluation.model FOR UPDATE OF o;
    IF NOT FOUND THEN
        RETURN false;
    ELSIF NOT tensile_internal._acts_for(caller, s.owner_id, s.owner) THEN
        PERFORM tensile_internal._own_model(caller, model);
    END IF;
    DELETE FROM tensile_internal.evaluation_schedules o WHERE o.id = s.id;
    RETURN true;
END $$;

CREATE FUNCTION tensile_internal._evaluates(job bigint) RETURNS bool
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM tensile_internal.jobs j WHERE j.id = $1 AND j.ended_at IS NULL)
$$;

-- Schedules of which an evaluation is due and does not run already
CREATE FUNCTION tensile_internal._due_evaluations() RETURNS TABLE (schedule bigint)
    LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT s.id FROM tensile_internal.evaluation_schedules s
    WHERE s.next_run <= clock_timestamp() AND NOT tensile_internal._evaluates(s.last_job)
    ORDER BY s.next_run, s.id
$$;

-- Submit the evaluation that is due, as its owner. A refusal is kept in the schedule, and the next time is the next
-- try.
CREATE FUNCTION tensile_internal._run_evaluation(schedule bigint) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    s tensile_internal.evaluation_schedules;
    text_of_error text;
    text_of_hint text;
    code text;
    submitted bigint;
BEGIN
    SELECT * INTO s FROM tensile_internal.evaluation_schedules o WHERE o.id = schedule FOR UPDATE SKIP LOCKED;
    IF NOT FOUND OR s.next_run > clock_timestamp() OR tensile_internal._evaluates(s.last_job) THEN
        RETURN;
    END IF;
    BEGIN
        submitted := tensile_internal._submit_evaluation(s);
    EXCEPTION WHEN lock_not_available THEN
        RETURN;
    WHEN OTHERS THEN
        GET STACKED DIAGNOSTICS code = RETURNED_SQLSTATE, text_of_error = MESSAGE_TEXT,
                                text_of_hint = PG_EXCEPTION_HINT;
        IF s.error IS DISTINCT FROM text_of_error THEN
            PERFORM tensile_internal._log_job(
                format('pg_tensile: evaluation %s refused: owner="%s" sqlstate=%s reason="%s"',
                       s.id, s.owner, code, text_of_error));
        END IF;
    END;
    UPDATE tensile_internal.evaluation_schedules o
        SET last_run = clock_timestamp(), last_job = submitted, sqlstate = code, error = text_of_error,
            hint = nullif(text_of_hint, ''), next_run = tensile_internal._next_run(s.created_at, s.every)
        WHERE o.id = s.id;
END $$;

-- An evaluation is a job without a model, which neither trains one nor keeps others from training it. Of the ended ones
-- of a schedule, the last one is kept.
CREATE FUNCTION tensile_internal._submit_evaluation(s tensile_internal.evaluation_schedules) RETURNS bigint
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    job bigint;
BEGIN
    PERFORM tensile_internal._check_schedule_owner(s.owner_id, s.owner, 'schedule_evaluation');
    DELETE FROM tensile_internal.jobs j WHERE j.kind = 'evaluate' AND j.ended_at IS NOT NULL
        AND j.options->'schedule' = to_jsonb(s.id);
    INSERT INTO tensile_internal.jobs (kind, model, owner, query, target, epochs, batch_size, optimizer, learning_rate,
                                       validation, seed, priority, options, settings)
        SELECT 'evaluate', m.name, s.owner, s.query, '', 1, 1, '', 0, 0, 0, 0,
               jsonb_build_object('schedule', s.id, 'model', m.id), s.settings
        FROM tensile_internal.models m WHERE m.id = s.model_id
        RETURNING id INTO job;
    PERFORM tensile_internal._log_event(job, 'submitted'), tensile_internal._notify(job);
    RETURN job;
END $$;

-- What the job evaluates, as the JOB frame of an evaluation; null: the model or its schedule was dropped
CREATE FUNCTION tensile_worker._job_evaluation() RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile_internal.jobs;
    m tensile_internal.models;
BEGIN
    SELECT * INTO j FROM tensile_internal.jobs o WHERE o.id = tensile_worker._my_job();
    SELECT o.* INTO m FROM tensile_internal.models o JOIN tensile_internal.evaluation_schedules s ON s.model_id = o.id
        WHERE s.id = (j.options->>'schedule')::bigint AND o.id = (j.options->>'model')::bigint AND j.kind = 'evaluate';
    IF NOT FOUND THEN
        RETURN NULL;
    ELSIF NOT tensile_internal._granted(j.owner_id, m.id, 'predict') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('permission denied for model "%s"', m.name),
            HINT = format('Its owner can allow it: SELECT grant_model(%L, %L).', m.name, j.owner);
    ELSIF m.deployed_version IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('model "%s" has no version that is deployed', m.name),
            HINT = 'Train it with train_model, or choose a version with deploy_model.';
    END IF;
    RETURN (SELECT tensile_internal._evaluation_spec(v.id, NULL, '{"function": "evaluate_model", "memory_budget": 0}')
            FROM tensile_internal.model_versions v WHERE v.model_id = m.id AND v.version = m.deployed_version);
END $$;

-- A chunk of the weights of that version; null past the end
CREATE FUNCTION tensile_worker._job_evaluation_weights(version bigint, seq int) RETURNS bytea
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_worker._my_job(); -- the next statement does not call it without a row
    SELECT w.data
    FROM tensile_internal.model_weights w JOIN tensile_internal.model_versions v ON v.id = w.version
        JOIN tensile_internal.jobs j ON (j.options->>'model')::bigint = v.model_id
    WHERE j.id = tensile_worker._my_job() AND j.kind = 'evaluate'
        AND tensile_internal._granted(j.owner_id, v.model_id, 'predict')
      AND w.version = $1 AND w.seq = $2
$$;

-- Store the values {metric: value} of that version and of its baseline, as far as the schedule asks for them.
CREATE FUNCTION tensile_worker._job_evaluated(version bigint, rows bigint, metrics jsonb, baselines jsonb) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_worker._my_job(); -- the next statements do not call it without a row
    UPDATE tensile_internal.jobs SET rows = $2 WHERE id = tensile_worker._my_job();
    INSERT INTO tensile_internal.evaluations (model_id, version, at, rows, metric, value, baseline)
        SELECT s.model_id, v.version, clock_timestamp(), $2, e.key, e.value::float8, ($4->>e.key)::float8
        FROM tensile_internal.jobs j
             JOIN tensile_internal.evaluation_schedules s ON s.id = (j.options->>'schedule')::bigint
             JOIN tensile_internal.model_versions v ON v.id = $1 AND v.model_id = s.model_id
             CROSS JOIN LATERAL jsonb_each_text($3) e
        WHERE j.id = tensile_worker._my_job() AND j.kind = 'evaluate' AND e.key = coalesce(s.metric, e.key);
$$;
