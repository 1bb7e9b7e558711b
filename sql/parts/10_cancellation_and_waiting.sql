------------------------------------------------------------------------------------------------------------------------
-- Jobs: cancellation, priority, and waiting for the end
------------------------------------------------------------------------------------------------------------------------

-- Lock and return the job's row; raise an error unless the caller may cancel it or change its priority. The model is
-- locked first, because the end of a job may drop it.
CREATE FUNCTION tensile._own_job(caller oid, job bigint) RETURNS tensile.jobs
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile.jobs;
    own bool;
BEGIN
    PERFORM tensile._lock_model(job);
    SELECT * INTO j FROM tensile.jobs WHERE id = job FOR UPDATE;
    own := tensile._acts_for(caller, j.owner, j.owner_name);
    IF j.id IS NULL OR NOT own AND NOT pg_has_role(caller, 'pg_read_all_stats', 'USAGE')
                               AND NOT pg_has_role(caller, 'pg_signal_backend', 'USAGE') THEN
        PERFORM tensile._no_such_job(job);
    ELSIF NOT own AND (NOT pg_has_role(caller, 'pg_signal_backend', 'USAGE')
                       OR EXISTS (SELECT FROM pg_roles WHERE oid = j.owner AND rolsuper)) THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', MESSAGE = format('permission denied for job %s', job),
            HINT = 'Its owner may do that, and members of pg_signal_backend unless the owner is a superuser.';
    END IF;
    RETURN j;
END $$;

CREATE FUNCTION tensile._cancel_job(caller oid, job bigint) RETURNS bool
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile.jobs := tensile._own_job(caller, job);
BEGIN
    IF j.state IN ('queued', 'interrupted') THEN
        UPDATE tensile.jobs SET cancel_requested = true WHERE id = job;
        PERFORM tensile._end_job(job, 'cancelled');
    ELSIF j.state IN ('starting', 'running', 'waiting') THEN
        UPDATE tensile.jobs SET cancel_requested = true WHERE id = job;
        PERFORM tensile._notify_stop(job);
    ELSE
        RETURN false;
    END IF;
    RETURN true;
END $$;

CREATE FUNCTION tensile._set_job_priority(caller oid, job bigint, priority int) RETURNS bool
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile.jobs := tensile._own_job(caller, job);
BEGIN
    PERFORM tensile._not_null('priority', priority::text), tensile._check_priority(priority);
    UPDATE tensile.jobs SET priority = _set_job_priority.priority WHERE id = job AND ended_at IS NULL;
    PERFORM tensile._notify(job);
    RETURN j.ended_at IS NULL;
END $$;

CREATE FUNCTION tensile._no_such_job(job bigint) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'undefined_object',
        MESSAGE = format('job %s does not exist', coalesce(job::text, 'null')),
        HINT = 'The jobs you may see are listed in tensile.jobs.';
END $$;

-- Four significant digits
CREATE FUNCTION tensile._rounded(value float8) RETURNS text
    LANGUAGE sql IMMUTABLE STRICT SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN value = 0 OR value IN ('NaN', 'Infinity', '-Infinity') THEN value::text
                ELSE trim_scale(round(value::numeric, 3 - floor(log(abs(value)))::int))::text END
$$;

-- What can be done next with a version that a job has trained. Reads as the caller.
CREATE FUNCTION tensile._next_step(j tensile.jobs) RETURNS text
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce((
        SELECT CASE WHEN m.deployed_version = ($1).version
                    THEN format('Predict with it: SELECT t.*, %s(%L, t) FROM my_table t. For many rows, predict_rows is '
                                'faster.', CASE v.task WHEN 'regression' THEN 'predict' ELSE 'predict_class' END, m.name)
                    ELSE format('It is not deployed: SELECT deploy_model(%L, %s) makes predictions use it.', m.name,
                                v.version) END
        FROM tensile.models m JOIN tensile.model_versions v ON v.model = m.id
        WHERE m.id = ($1).model AND v.version = ($1).version), 'tensile.job_history has its other metrics.')
$$;

-- Tell what a finished job warned of and, of a training, how good the version is.
CREATE FUNCTION tensile._tell_result(j tensile.jobs) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    warning text;
    metrics text;
    validated bool;
BEGIN
    FOREACH warning IN ARRAY coalesce(j.warnings, '{}') LOOP
        RAISE WARNING USING MESSAGE = format('job %s: %s', j.id, warning);
    END LOOP;
    IF j.kind <> 'train' OR j.kept_epoch IS NULL THEN
        RETURN;
    END IF;
    IF j.architecture_reason IS NOT NULL THEN
        RAISE NOTICE 'model "%" has the architecture %: %', j.model_name, j.architecture->>'type',
            j.architecture_reason;
    END IF;
    validated := EXISTS (SELECT FROM tensile.epochs e
                         WHERE e.job = j.id AND e.epoch = j.kept_epoch AND e.split = 'validation');
    -- log_loss is after calibration where there is one, as of the version's predictions
    SELECT string_agg(format('%s %s', m.metric, tensile._rounded(coalesce(c.value, m.value))), ', ' ORDER BY o.place)
        INTO metrics
        FROM unnest('{accuracy,roc_auc,log_loss,rmse,mae,r2}'::text[]) WITH ORDINALITY AS o (metric, place)
             JOIN tensile.metrics m ON m.metric = o.metric AND m.job = j.id AND m.epoch = j.kept_epoch
                 AND m.split = CASE WHEN validated THEN 'validation' ELSE 'training' END
             LEFT JOIN tensile.metrics c ON c.job = m.job AND c.epoch = m.epoch AND c.split = m.split
                                        AND c.metric = 'calibrated_' || m.metric;
    RAISE NOTICE USING
        MESSAGE = format('version %s of model "%s": %s on the %s rows', j.version, j.model_name, metrics,
                         CASE WHEN validated THEN 'validation' ELSE 'training' END),
        DETAIL = format('Its weights are those after epoch %s of %s; training ended because %s.', j.kept_epoch,
                        (SELECT max(e.epoch) FROM tensile.epochs e WHERE e.job = j.id),
                        CASE j.stopped WHEN 'early_stopping' THEN 'nothing improved any more (early_stopping)'
                                       WHEN 'max_time' THEN 'the time was up (max_time)'
                                       ELSE 'that was the last one (epochs)' END),
        HINT = tensile._next_step(j);
END $$;

-- The job's final state, or null if it has not ended; raises the job's error if it failed. Reads as the caller.
CREATE FUNCTION tensile._job_result(job bigint, deadline timestamptz) RETURNS text
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET row_security = on
AS $$
DECLARE
    j tensile.jobs;
BEGIN
    SELECT * INTO j FROM tensile.jobs WHERE id = job;
    IF NOT FOUND THEN
        PERFORM tensile._no_such_job(job);
    ELSIF j.state = 'failed' THEN
        PERFORM tensile._raise(j.sqlstate, j.error, j.hint, j.detail);
    ELSIF j.state IN ('finished', 'cancelled') THEN
        IF j.state = 'finished' THEN
            PERFORM tensile._tell_result(j);
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
CREATE FUNCTION tensile._wait_round(deadline timestamptz) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._wait_for_change(CASE WHEN $1 IS NULL THEN 1000
        ELSE least(1000, greatest(1, 1 + 1000 * extract(epoch FROM $1 - clock_timestamp())))::int END)
$$;

-- Raise an error if this transaction sees only what was there when it began.
CREATE FUNCTION tensile._check_sees_changes(function text, hint text) RETURNS void
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

-- Not SECURITY DEFINER: it reads as the caller.
CREATE FUNCTION tensile._wait_for_job(caller oid, job bigint, timeout interval) RETURNS text
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    deadline timestamptz := clock_timestamp() + timeout;
    result text;
BEGIN
    IF tensile._submitted_here(job) THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('job %s was submitted by this transaction and cannot start before it commits', job),
            HINT = 'Commit first, then wait.';
    END IF;
    PERFORM tensile._check_sees_changes(
        'wait_for_job', 'CALL wait_for_job_procedure(...) outside a transaction block, or use READ COMMITTED.');
    LOOP
        result := tensile._job_result(job, deadline);
        EXIT WHEN result IS NOT NULL;
        PERFORM tensile._wait_round(deadline);
    END LOOP;
    RETURN result;
END $$;
CREATE FUNCTION @extschema@.wait_for_job(job bigint, timeout interval DEFAULT NULL) RETURNS text
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward_reading';
COMMENT ON FUNCTION @extschema@.wait_for_job(bigint, interval) IS
    'wait until a job has ended, and return its state; raise the job''s error if it failed';

-- A procedure with SET cannot commit, so every name is qualified instead.
CREATE PROCEDURE tensile._wait_for_job_procedure(caller oid, job bigint, timeout interval, INOUT state text)
    LANGUAGE plpgsql
AS $$
DECLARE
    deadline timestamptz := pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) timeout;
BEGIN
    state := NULL;
    COMMIT;
    LOOP
        state := tensile._job_result(job, deadline);
        EXIT WHEN state IS NOT NULL;
        COMMIT;
        PERFORM tensile._wait_round(deadline);
        COMMIT;
    END LOOP;
END $$;
CREATE PROCEDURE @extschema@.wait_for_job_procedure(job bigint, timeout interval DEFAULT NULL,
                                                    INOUT state text DEFAULT NULL)
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward_reading';
COMMENT ON PROCEDURE @extschema@.wait_for_job_procedure(bigint, interval, text) IS
    'wait like wait_for_job, but commit while waiting, so that no snapshot is held';
