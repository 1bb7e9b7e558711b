-- Waiting for jobs

CREATE FUNCTION tensile_worker._submitted_here(job bigint) RETURNS bool
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_submitted_here';

CREATE FUNCTION tensile_worker._no_such_job(job bigint) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'undefined_object',
        MESSAGE = format('job %s does not exist', coalesce(job::text, 'null')),
        HINT = 'The jobs you may see are listed in tensile.jobs.';
END $$;

-- Four significant digits
CREATE FUNCTION tensile_worker._rounded(value float8) RETURNS text
    LANGUAGE sql IMMUTABLE STRICT SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN value = 0 OR value IN ('NaN', 'Infinity', '-Infinity') THEN value::text
                ELSE trim_scale(round(value::numeric, 3 - floor(log(abs(value)))::int))::text END
$$;

-- What a metric in that message is to be compared with, from jobs.baseline; null: nothing that tells more than 0 or 0.5
CREATE FUNCTION tensile_worker._beside(baseline jsonb, metric text) RETURNS text
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT format(' (%s: %s)', b.name, tensile_worker._rounded((baseline->>metric)::float8))
    FROM (VALUES ('mean', 'rmse', 'the mean of the training rows'), ('mean', 'mae', 'their median'),
                 ('last', 'rmse', 'the last value before'), ('last', 'mae', 'the last value before'),
                 ('frequencies', 'accuracy', 'the most frequent class'),
                 ('frequencies', 'log_loss', 'the frequencies of the classes')) b (kind, metric, name)
    WHERE b.kind = baseline->>'kind' AND b.metric = $2 AND baseline ? $2
$$;

-- What can be done next with a version that a job has trained. Reads as the caller.
CREATE FUNCTION tensile_worker._next_step(job bigint) RETURNS text
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce((
        SELECT CASE WHEN m.deployed_version = v.version
                    THEN format('Predict with it: SELECT t.*, %s(%L, t) FROM my_table t.',
                                CASE v.task WHEN 'regression' THEN 'predict' ELSE 'predict_class' END, m.model)
                    ELSE format('It is not deployed: SELECT deploy_model(%L, %s) makes predictions use it.', m.model,
                                v.version) END
        FROM tensile.jobs j JOIN tensile.models m ON m.model_id = j.model_id
             JOIN tensile.model_versions v ON v.model_id = m.model_id AND v.version = j.version
        WHERE j.job = $1), 'tensile.job_history has its other metrics.')
$$;

CREATE FUNCTION tensile_worker._has_metrics(job bigint, epoch int, split text) RETURNS bool
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM tensile.epoch_metrics e WHERE e.job = $1 AND e.epoch = $2 AND e.split = $3)
$$;

-- What the version of an ensemble's job consists of; null: it is no ensemble. Reads as the caller.
CREATE FUNCTION tensile_worker._members(job bigint) RETURNS text
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE count(*) WHEN 1 THEN format('It is %s alone.', min(m->>'type'))
                ELSE format('It is the average of %s.', string_agg(format('%s %s', m->>'weight', m->>'type'), ' + '
                                                                ORDER BY (m->>'weight')::float8 DESC)) END
    FROM tensile.jobs j JOIN tensile.model_versions v ON v.model_id = j.model_id AND v.version = j.version,
         jsonb_array_elements(v.training->'members') m
    WHERE j.job = $1 AND (m->>'weight')::float8 > 0 AND jsonb_array_length(v.training->'members') > 1
    HAVING count(*) > 0
$$;

-- After which epoch or round the version of a finished job was made, and why its training ended. Reads as the caller.
CREATE FUNCTION tensile_worker._course(job bigint) RETURNS text
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN kinds @> '{boosted}' AND kinds <@ '{boosted,linear}'
                THEN format('Its trees are those after round %s of %s; ', j.kept_epoch, e.latest)
                WHEN kinds <@ '{linear}' THEN 'Its coefficients are those with the best of several penalties; '
                ELSE format('%s after epoch %s of %s; ', CASE WHEN tensile_worker._members(j.job) IS NULL
                                                              THEN 'Its weights are those'
                                                              ELSE 'The network is that' END, j.kept_epoch, e.latest) END
        || format('training ended because %s.',
                  CASE WHEN j.stopped = 'max_time' AND j.role_time < coalesce(j.max_time, '1000 years')
                            THEN 'the time was up (pg_tensile.role_job_time)'
                       WHEN j.stopped = 'early_stopping' THEN 'nothing improved any more (early_stopping)'
                       WHEN j.stopped = 'max_time' THEN 'the time was up (max_time)'
                       WHEN kinds <@ '{linear}' THEN 'all were tried'
                       ELSE 'that was the last one (epochs)' END)
    FROM tensile.jobs j LEFT JOIN tensile.model_versions v ON v.model_id = j.model_id AND v.version = j.version,
         LATERAL (SELECT coalesce((SELECT array_agg(m->>'type') FROM jsonb_array_elements(v.training->'members') m),
                                  ARRAY[j.architecture->>'type'])) AS k (kinds),
         LATERAL (SELECT max(e.epoch) FROM tensile.epoch_metrics e WHERE e.job = j.job) AS e (latest)
    WHERE j.job = $1
$$;

-- Tell what a finished job warned of and, of a training, how good the version is.
CREATE FUNCTION tensile_worker._tell_result(job bigint) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile.jobs;
    warning text;
    metrics text;
    validated bool;
    crossed jsonb; -- folds, repeats, and the spread of each metric
BEGIN
    SELECT * INTO j FROM tensile.jobs o WHERE o.job = _tell_result.job;
    FOREACH warning IN ARRAY coalesce(j.warnings, '{}') LOOP
        RAISE WARNING USING MESSAGE = format('job %s: %s', j.job, warning);
    END LOOP;
    IF j.kind <> 'train' OR j.kept_epoch IS NULL THEN
        RETURN;
    END IF;
    IF j.architecture_reason IS NOT NULL THEN
        RAISE NOTICE 'model "%" has the architecture %: %', j.model, j.architecture->>'type',
            j.architecture_reason;
    END IF;
    validated := tensile_worker._has_metrics(j.job, j.kept_epoch, 'validation');
    crossed := (SELECT v.metrics->'cross_validation' FROM tensile.model_versions v
                WHERE v.model_id = j.model_id AND v.version = j.version);
    -- log_loss is after calibration where there is one, as of the version's predictions
    SELECT string_agg(concat(m.metric, ' ', tensile_worker._rounded(coalesce(c.value, m.value)),
                             ' +- ' || tensile_worker._rounded((crossed->'spread'->>m.metric)::float8),
                             tensile_worker._beside(j.baseline, m.metric)), ', ' ORDER BY o.place)
        INTO metrics
        FROM unnest('{accuracy,roc_auc,log_loss,rmse,mae,r2}'::text[]) WITH ORDINALITY AS o (metric, place)
             JOIN tensile.metrics m ON m.metric = o.metric AND m.job = j.job AND m.epoch = j.kept_epoch
                 AND m.split = CASE WHEN tensile_worker._has_metrics(j.job, j.kept_epoch, 'version') THEN 'version'
                                    WHEN validated THEN 'validation' ELSE 'training' END
             LEFT JOIN tensile.metrics c ON c.job = m.job AND c.epoch = m.epoch AND c.split = m.split
                                        AND c.metric = 'calibrated_' || m.metric;
    RAISE NOTICE USING
        MESSAGE = format('version %s of model "%s": %s %s', j.version, j.model, metrics,
                         CASE WHEN crossed IS NOT NULL THEN format('in a cross-validation (%s folds, %s times)',
                                                                   crossed->>'folds', crossed->>'repeats')
                              WHEN validated THEN 'on the validation rows' ELSE 'on the training rows' END),
        DETAIL = concat_ws(' ', tensile_worker._members(j.job), tensile_worker._course(j.job)),
        HINT = tensile_worker._next_step(j.job);
END $$;

-- The job's final state, or null if it has not ended; raises the job's error if it failed. Reads as the caller.
CREATE FUNCTION tensile_worker._job_result(job bigint, deadline timestamptz) RETURNS text
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET row_security = on
AS $$
DECLARE
    j tensile.jobs;
BEGIN
    SELECT * INTO j FROM tensile.jobs o WHERE o.job = _job_result.job;
    IF NOT FOUND THEN
        PERFORM tensile_worker._no_such_job(job);
    ELSIF j.state = 'failed' THEN
        PERFORM tensile_worker._raise(j.sqlstate, j.error, j.hint, j.detail);
    ELSIF j.state IN ('finished', 'cancelled') THEN
        IF j.state = 'finished' THEN
            PERFORM tensile_worker._tell_result(job);
        END IF;
        RETURN j.state;
    ELSIF clock_timestamp() >= deadline THEN
        RAISE EXCEPTION USING ERRCODE = 'query_canceled',
            MESSAGE = format('job %s has not ended in time: it is %s', job, j.state),
            DETAIL = coalesce(j.reason, 'The job continues.'),
            HINT = format('Wait longer, see its progress in tensile.progress, or stop it with cancel_job(%s).', job);
    END IF;
    RETURN NULL;
END $$;

-- Wait until a job changes, one second at most.
CREATE FUNCTION tensile_worker._wait_round(deadline timestamptz) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_worker._wait_for_change(CASE WHEN $1 IS NULL THEN 1000
        ELSE least(1000, greatest(1, 1 + 1000 * extract(epoch FROM $1 - clock_timestamp())))::int END)
$$;

-- Raise an error if this transaction sees only what was there when it began.
CREATE FUNCTION tensile_worker._check_sees_changes(function text, hint text) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('%s cannot see changes in a transaction with isolation level %s', function,
                             current_setting('transaction_isolation')),
            HINT = hint;
    END IF;
END $$;

-- Raise an error if this transaction cannot wait for the job.
CREATE FUNCTION tensile_worker._check_waiting(job bigint, function text) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF tensile_worker._submitted_here(job) THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('job %s was submitted by this transaction and cannot start before it commits', job),
            HINT = 'Commit first, then wait.';
    END IF;
    PERFORM tensile_worker._check_sees_changes(
        function, 'CALL await_job(...) outside a transaction block, or use READ COMMITTED.');
END $$;

-- Not SECURITY DEFINER: it reads as the caller.
CREATE FUNCTION tensile_internal._wait_for_job(caller oid, job bigint, timeout interval) RETURNS text
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    deadline timestamptz := clock_timestamp() + timeout;
    result text;
BEGIN
    PERFORM tensile_worker._check_waiting(job, 'wait_for_job');
    LOOP
        result := tensile_worker._job_result(job, deadline);
        EXIT WHEN result IS NOT NULL;
        PERFORM tensile_worker._wait_round(deadline);
    END LOOP;
    RETURN result;
END $$;

-- Not SECURITY DEFINER: it reads as the caller.
CREATE FUNCTION tensile_internal._wait_for_first_version(caller oid, job bigint, timeout interval) RETURNS int
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    deadline timestamptz := clock_timestamp() + timeout;
    version int;
BEGIN
    PERFORM tensile_worker._check_waiting(job, 'wait_for_first_version');
    LOOP
        SELECT j.version INTO version FROM tensile.jobs j WHERE j.job = _wait_for_first_version.job;
        EXIT WHEN version IS NOT NULL OR tensile_worker._job_result(job, deadline) IS NOT NULL;
        PERFORM tensile_worker._wait_round(deadline);
    END LOOP;
    RETURN version;
END $$;

-- A procedure with SET cannot commit, so every name is qualified instead.
CREATE PROCEDURE tensile_internal._await_job(caller oid, job bigint, timeout interval, INOUT state text)
    LANGUAGE plpgsql
AS $$
DECLARE
    deadline timestamptz := pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) timeout;
BEGIN
    state := NULL;
    COMMIT;
    LOOP
        state := tensile_worker._job_result(job, deadline);
        EXIT WHEN state IS NOT NULL;
        COMMIT;
        PERFORM tensile_worker._wait_round(deadline);
        COMMIT;
    END LOOP;
END $$;
