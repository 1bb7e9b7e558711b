-- Changes of a job's state

CREATE FUNCTION tensile_internal._log_job(line text) RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_log_job';

-- Lock and return the model that the job trains.
CREATE FUNCTION tensile_internal._trained_model(j tensile_internal.jobs) RETURNS tensile_internal.models
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile_internal.models;
BEGIN
    SELECT * INTO m FROM tensile_internal.models WHERE id = j.model_id FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object', MESSAGE = format('model "%s" was dropped', j.model),
            HINT = 'Register the model again and submit a new job.';
    END IF;
    RETURN m;
END $$;

-- Lock the model of a job. Whoever changes the job's state does that before, as drop_model does. Transactions that have
-- only referred to the model, such as one that has submitted a job, hold nobody up.
CREATE FUNCTION tensile_internal._lock_model(job bigint) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT FROM tensile_internal.models m JOIN tensile_internal.jobs j ON j.model_id = m.id
        WHERE j.id = $1 FOR NO KEY UPDATE OF m
$$;

-- Lock a model unless another transaction holds it; true if it is locked, or does not exist. For the controller, with
-- which all jobs would wait: a transaction that has called cancel_job or drop_model may stay open for hours.
CREATE FUNCTION tensile_internal._try_lock_model(model bigint) RETURNS bool
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM FROM tensile_internal.models m WHERE m.id = model FOR NO KEY UPDATE SKIP LOCKED;
    RETURN FOUND OR NOT EXISTS (SELECT FROM tensile_internal.models m WHERE m.id = model);
END $$;

-- The same for a job, after its model; false as well if it does not exist
CREATE FUNCTION tensile_internal._try_lock_job(job bigint) RETURNS bool
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT tensile_internal._try_lock_model((SELECT j.model_id FROM tensile_internal.jobs j WHERE j.id = job)) THEN
        RETURN false;
    END IF;
    PERFORM FROM tensile_internal.jobs j WHERE j.id = job FOR UPDATE SKIP LOCKED;
    RETURN FOUND;
END $$;

-- Write a line about the job to the server's log: "submitted", "started", "interrupted" or its final state. The failure
-- of an automatic calibration, which is tried again, is logged by the controller, once.
CREATE FUNCTION tensile_internal._log_event(job bigint, event text) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_internal._log_job(format('pg_tensile: job %s %s: model="%s" owner="%s"', j.id, $2, j.model, j.owner)
        || CASE WHEN $2 IN ('started', 'interrupted') THEN format(' attempt=%s', j.attempts) ELSE '' END
        || coalesce(' seconds=' || round(extract(epoch FROM j.ended_at - j.started_at), 3), '')
        || coalesce(' sqlstate=' || j.sqlstate, '')
        || coalesce(' reason="' || coalesce(j.error, j.reason) || '"', ''))
    FROM tensile_internal.jobs j WHERE j.id = $1 AND NOT (j.automatic AND $2 = 'failed')
$$;

-- Notify sessions that LISTEN to pg_tensile of the end of a job or a tuning. Any role may listen, so the payload has
-- only its number and state. A full queue would abort the transaction that ends it.
CREATE FUNCTION tensile_internal._announce(what text, number bigint, state text) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT pg_notify('pg_tensile', json_build_object($1, $2, 'state', $3)::text)
    WHERE pg_notification_queue_usage() < 0.95
$$;
CREATE FUNCTION tensile_internal._announce_end(job bigint, state text) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_internal._announce('job', $1, $2)
$$;

-- End a job as finished, failed or cancelled. A failed job keeps its last complete checkpoint until a later job of
-- the model finishes. `reason`: the cause of a cancellation other than cancel_job.
CREATE FUNCTION tensile_internal._end_job(job bigint, state text, sqlstate text DEFAULT NULL, error text DEFAULT NULL,
                                          hint text DEFAULT NULL, detail text DEFAULT NULL, traceback text DEFAULT NULL,
                                          warnings text[] DEFAULT NULL, reason text DEFAULT NULL) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile_internal.jobs;
BEGIN
    PERFORM tensile_internal._lock_model(job);
    UPDATE tensile_internal.jobs o SET state = _end_job.state, ended_at = clock_timestamp(), not_before = NULL,
            reason = CASE WHEN _end_job.state <> 'cancelled' THEN NULL
                          WHEN o.cancel_requested THEN coalesce(o.options->>'stop', 'cancelled by cancel_job')
                          ELSE coalesce(o.options->>'stop', _end_job.reason) END,
            sqlstate = _end_job.sqlstate, error = _end_job.error, hint = _end_job.hint, detail = _end_job.detail,
            traceback = _end_job.traceback, warnings = _end_job.warnings
        WHERE id = job AND ended_at IS NULL
        RETURNING * INTO j;
    IF NOT FOUND THEN
        RETURN;
    ELSIF state = 'finished' THEN
        IF j.kind = 'train' THEN
            PERFORM tensile_internal._complete_version(j);
        END IF;
    ELSE
        DELETE FROM tensile_internal.model_versions v WHERE v.job = j.id AND v.weight_bytes IS NULL;
        DELETE FROM tensile_internal.checkpoints c
            WHERE c.job = j.id AND (j.state = 'cancelled' OR c.meta IS NULL);
    END IF;
    DELETE FROM tensile_internal.rank_reports r WHERE r.job = j.id;
    -- The trace of the model's last job stays for inspection, with all rows that refer to it.
    DELETE FROM tensile_internal.traces t USING tensile_internal.jobs o
        WHERE t.job = o.id AND CASE WHEN j.model_id IS NULL THEN o.id = j.id
                                    ELSE o.model_id = j.model_id AND o.id <> j.id AND o.ended_at IS NOT NULL END;
    IF state <> 'finished' AND j.kind = 'train' THEN
        PERFORM tensile_internal._undo_submission(j.model_id);
    END IF;
    PERFORM tensile_internal._notify(job), tensile_internal._log_event(job, state),
        tensile_internal._announce_end(job, state);
END $$;

-- Make the version of the job that is not visible yet visible, and return its number: that of the job's first version, if
-- it has one, which this one replaces.
CREATE FUNCTION tensile_internal._make_visible(j tensile_internal.jobs) RETURNS int
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    latest bigint := (SELECT v.id FROM tensile_internal.model_versions v WHERE v.job = j.id AND v.weight_bytes IS NULL);
    number int;
BEGIN
    IF latest IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('job %s cannot finish without a version of its model', j.id);
    END IF;
    DELETE FROM tensile_internal.model_versions v WHERE v.job = j.id AND v.id <> latest RETURNING v.version INTO number;
    DELETE FROM tensile_internal.evaluations e WHERE e.model_id = j.model_id AND e.version = number;
    UPDATE tensile_internal.model_versions v
        SET weight_bytes = (SELECT coalesce(sum(octet_length(w.data)), 0)
                            FROM tensile_internal.model_weights w WHERE w.version = v.id),
            created_at = clock_timestamp(), version = coalesce(number, v.version)
        WHERE v.id = latest
        RETURNING v.version INTO number;
    UPDATE tensile_internal.jobs SET version = number WHERE id = j.id;
    RETURN number;
END $$;

-- Make the job's version visible, and delete old versions beyond the model's retention.
CREATE FUNCTION tensile_internal._complete_version(j tensile_internal.jobs) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile_internal.models := tensile_internal._trained_model(j);
    number int := tensile_internal._make_visible(j);
BEGIN
    IF tensile_internal._deploys(j.options) = 'always' THEN
        PERFORM tensile_internal._deploy(m, number, j.owner, format('trained by job %s', j.id), job => j.id);
    END IF; -- with if_better, _job_decide has decided in this transaction
    IF j.tuning IS NULL THEN -- otherwise when the tuning ends
        SELECT * INTO m FROM tensile_internal.models o WHERE o.id = m.id;
        PERFORM tensile_internal._drop_old_versions(m);
    END IF;
    DELETE FROM tensile_internal.checkpoints c USING tensile_internal.jobs o
        WHERE c.job = o.id AND o.model_id = j.model_id AND o.ended_at IS NOT NULL;
END $$;

-- Interrupt a job, which will continue from its last checkpoint. With `retry` the interruption counts towards
-- pg_tensile.max_retries, and the next attempt is delayed by 1, 2, 4 ... s, at most an hour. An automatic calibration
-- ends: the controller begins another one when the server is idle.
CREATE FUNCTION tensile_internal._interrupt_job(job bigint, reason text, retry bool, traceback text DEFAULT NULL)
    RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile_internal.jobs;
    failures int;
BEGIN
    PERFORM tensile_internal._lock_model(job);
    SELECT * INTO j FROM tensile_internal.jobs
        WHERE id = job AND state IN ('starting', 'running', 'waiting') FOR UPDATE;
    failures := j.retries + retry::int;
    IF NOT FOUND THEN
        RETURN;
    ELSIF j.cancel_requested THEN
        PERFORM tensile_internal._end_job(job, 'cancelled');
        RETURN;
    ELSIF j.automatic THEN
        IF retry AND NOT j.options ? 'stop' THEN
            PERFORM tensile_internal._end_job(job, 'failed', '58000', reason, NULL, NULL, traceback);
        ELSE
            PERFORM tensile_internal._end_job(job, 'cancelled', reason => reason);
        END IF;
        RETURN;
    ELSIF retry AND failures > current_setting('pg_tensile.max_retries')::int THEN
        PERFORM tensile_internal._end_job(job, 'failed', '58000', reason,
            format('The job failed %s times in a row; a higher pg_tensile.max_retries allows more attempts. '
                   'The server''s log may have details.', failures), NULL, traceback);
        RETURN;
    END IF;
    DELETE FROM tensile_internal.model_versions v WHERE v.job = j.id AND v.weight_bytes IS NULL;
    DELETE FROM tensile_internal.checkpoints c WHERE c.job = j.id AND c.meta IS NULL;
    DELETE FROM tensile_internal.rank_reports r WHERE r.job = j.id;
    UPDATE tensile_internal.jobs SET state = 'interrupted', reason = _interrupt_job.reason,
            traceback = _interrupt_job.traceback, retries = failures,
            not_before = CASE WHEN retry THEN clock_timestamp() + least(2.0 ^ (failures - 1), 3600) * interval '1 s' END
        WHERE id = job;
    PERFORM tensile_internal._notify(job), tensile_internal._log_event(job, 'interrupted');
END $$;
