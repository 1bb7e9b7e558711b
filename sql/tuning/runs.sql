-- The course of a tuning
--
-- All that is known about a tuning is in its rows: whatever is killed, the next turn continues.

-- "tuning 3, trial 7" for the best trial of a tuning; null for null
CREATE FUNCTION tensile_internal._winner_of(tuning bigint) RETURNS text
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT format('tuning %s, trial %s', t.id, t.best_trial) FROM tensile_internal.tunings t WHERE t.id = $1
$$;

CREATE FUNCTION tensile_internal._open_tunings() RETURNS TABLE (tuning bigint, rows_file text)
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT t.id, tensile_internal._rows_file(t) FROM tensile_internal.tunings t WHERE t.ended_at IS NULL ORDER BY t.id
$$;

-- Advance a tuning by what can be done now. Returns what the tuner needs to choose the next trial; null: none is to be
-- chosen now, or another transaction holds the tuning. An error ends the tuning, unless trying again may help.
CREATE FUNCTION tensile_internal._advance_tuning(tuning bigint, cores int) RETURNS jsonb
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET extra_float_digits = 1
AS $$
DECLARE
    t tensile_internal.tunings;
    code text;
    text_of_error text;
    text_of_hint text;
BEGIN
    -- Lock the model before the tuning and its jobs, as drop_model does.
    IF NOT tensile_internal._try_lock_model((SELECT o.model_id FROM tensile_internal.tunings o
                                             WHERE o.id = tuning)) THEN
        RETURN NULL;
    END IF;
    SELECT * INTO t FROM tensile_internal.tunings o WHERE o.id = tuning AND o.ended_at IS NULL FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    BEGIN
        PERFORM tensile_internal._check_tuner(t);
        IF t.state = 'queued' THEN
            UPDATE tensile_internal.tunings o
                SET state = 'running', started_at = clock_timestamp(),
                    threads = coalesce((t.arguments->'options'->>'threads')::int,
                                       nullif(current_setting('pg_tensile.threads')::int, 0),
                                       greatest((cores - 1) / t.parallel, 1))
                WHERE o.id = t.id RETURNING * INTO t;
        END IF;
        IF t.state = 'comparing' THEN
            PERFORM tensile_internal._follow_comparison(t);
            RETURN NULL;
        END IF;
        PERFORM tensile_internal._collect_trials(t);
        SELECT * INTO t FROM tensile_internal.tunings o WHERE o.id = t.id;
        IF tensile_internal._end_trials(t) THEN
            RETURN NULL;
        END IF;
        IF tensile_internal._is_open(t) THEN -- the first trial is the job that train_model would submit
            PERFORM tensile_internal._add_trial(t.id, 0, '{}');
        END IF;
        PERFORM tensile_internal._begin_trials(t);
        RETURN tensile_internal._next_suggestion(t);
    EXCEPTION WHEN lock_not_available THEN
        RETURN NULL;
    WHEN OTHERS THEN
        GET STACKED DIAGNOSTICS code = RETURNED_SQLSTATE, text_of_error = MESSAGE_TEXT,
                                text_of_hint = PG_EXCEPTION_HINT;
        IF left(code, 2) IN ('40', '53', '57') THEN
            RAISE;
        END IF;
        PERFORM tensile_internal._end_tuning(t, 'failed', code, text_of_error, nullif(text_of_hint, ''));
    END;
    RETURN NULL;
END $$;

-- Raise an error if the tuning cannot go on.
CREATE FUNCTION tensile_internal._check_tuner(t tensile_internal.tunings) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF t.model_id IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object', MESSAGE = format('model "%s" was dropped', t.model),
            HINT = 'Register the model again and tune it once more.';
    ELSIF NOT EXISTS (SELECT FROM pg_roles r WHERE r.oid = t.owner_id AND r.rolname = t.owner) THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object',
            MESSAGE = format('role "%s" was dropped or renamed', t.owner),
            HINT = 'Another role has to tune the model.';
    ELSIF NOT tensile_internal._may_execute(t.owner_id, 'tune_model') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', MESSAGE = 'permission denied for function tune_model',
            HINT = format('Grant it to the tuning''s owner: GRANT tensile_user TO %I.', t.owner);
    ELSIF t.space = '{}' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('the space has no key of the architecture "%s"', t.architecture->>'type'),
            HINT = 'The first trial has chosen it: register the model with another one, or leave the space out.';
    END IF;
END $$;

-- If no trial is to begin any more, wait for the running ones or stop them, and end the tuning after the last one.
-- Returns true if no trial is to begin.
CREATE FUNCTION tensile_internal._end_trials(t tensile_internal.tunings) RETURNS bool
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    stop text := CASE WHEN t.cancel_requested THEN 'cancelled by cancel_tuning'
                      WHEN clock_timestamp() > t.started_at + t.max_time THEN 'the time of the tuning is over' END;
    first_failure tensile_internal.trials;
BEGIN
    IF stop IS NOT NULL THEN
        PERFORM tensile_internal._stop_trials(t, stop);
    END IF;
    SELECT * INTO first_failure FROM tensile_internal.trials k
        WHERE k.tuning = t.id AND k.state IN ('failed', 'infeasible') ORDER BY k.state, k.number LIMIT 1;
    IF stop IS NULL AND tensile_internal._is_open(t)
       AND EXISTS (SELECT FROM tensile_internal.trials k
                   WHERE k.tuning = t.id AND k.state NOT IN ('waiting', 'running')) THEN
        PERFORM tensile_internal._end_tuning(t, 'failed', coalesce(first_failure.sqlstate, '55000'),
                                             coalesce(first_failure.error, 'the first trial was stopped'),
                                             'The first trial chooses the architecture; tensile.trials has its job.');
        RETURN true;
    ELSIF NOT EXISTS (SELECT FROM tensile_internal.trials k WHERE k.tuning = t.id AND k.number < 2 * t.parallel
                   AND k.state <> 'failed')
       AND (SELECT count(*) >= least(t.trials, 2 * t.parallel) FROM tensile_internal.trials k
            WHERE k.tuning = t.id) THEN
        PERFORM tensile_internal._end_tuning(t, 'failed', first_failure.sqlstate, first_failure.error,
                                             'All of the first trials have failed; tensile.trials has their jobs.');
        RETURN true;
    ELSIF EXISTS (SELECT FROM tensile_internal.jobs j WHERE j.tuning = t.id AND j.ended_at IS NULL)
          OR EXISTS (SELECT FROM tensile_internal.trials k WHERE k.tuning = t.id AND k.state IN ('waiting', 'running'))
          OR stop IS NULL AND (SELECT count(*) < t.trials FROM tensile_internal.trials k WHERE k.tuning = t.id) THEN
        RETURN stop IS NOT NULL;
    ELSIF t.cancel_requested THEN
        PERFORM tensile_internal._end_tuning(t, 'cancelled');
    ELSIF t.best_trial IS NULL THEN
        PERFORM tensile_internal._end_tuning(
            t, 'failed', coalesce(first_failure.sqlstate, '55000'),
            coalesce(first_failure.error, 'no trial has finished'),
            CASE WHEN first_failure.error IS NULL THEN 'Use a longer max_time.'
                 ELSE 'No trial has finished; tensile.trials has their errors.' END);
    ELSE
        PERFORM tensile_internal._deploy_winner(t);
    END IF;
    RETURN true;
END $$;

-- Stop the trials that wait or run.
CREATE FUNCTION tensile_internal._stop_trials(t tensile_internal.tunings, reason text) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile_internal.trials k SET state = 'cancelled', error = $2, ended_at = clock_timestamp()
        WHERE k.tuning = ($1).id AND k.state IN ('waiting', 'running');
    SELECT tensile_internal._stop_trial(j.id, $2) FROM tensile_internal.jobs j
        WHERE j.tuning = ($1).id AND j.ended_at IS NULL;
$$;

-- End a tuning whose trials cannot be chosen.
CREATE FUNCTION tensile_internal._fail_tuning(tuning bigint, sqlstate text, error text, hint text) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_internal._end_tuning(t, 'failed', $2, $3, $4) FROM tensile_internal.tunings t
        WHERE t.id = $1 AND t.ended_at IS NULL
$$;

-- Deploy the version of the best trial, or have a job compare it with the deployed one, as the option deploy says.
CREATE FUNCTION tensile_internal._deploy_winner(t tensile_internal.tunings) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    options jsonb := t.arguments->'options';
    m tensile_internal.models;
    v tensile_internal.model_versions;
    best float8;
    reason text;
BEGIN
    SELECT * INTO m FROM tensile_internal.models o WHERE o.id = t.model_id;
    SELECT o.* INTO v FROM tensile_internal.model_versions o JOIN tensile_internal.trials k ON k.job = o.job
        WHERE k.tuning = t.id AND k.number = t.best_trial AND o.weight_bytes IS NOT NULL;
    IF v.id IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object',
            MESSAGE = format('the version of the best trial, %s, was dropped', t.best_trial),
            HINT = 'tensile.trials has its values, with which train_model trains it again.';
    ELSIF tensile_internal._deploys(options) = 'if_better' THEN
        UPDATE tensile_internal.tunings o SET state = 'comparing',
            comparison = tensile_internal._submit_comparison(t, v)
            WHERE o.id = t.id;
        RETURN;
    ELSIF tensile_internal._deploys(options) = 'always' THEN
        best := (SELECT k.value FROM tensile_internal.trials k WHERE k.tuning = t.id AND k.number = t.best_trial);
        reason := format('%s: %s is %s', tensile_internal._winner_of(t.id), t.metric, best);
        PERFORM tensile_internal._deploy(m, v.version, t.owner, reason, job => v.job),
            tensile_internal._adopt_architecture(t, v.architecture);
    END IF;
    PERFORM tensile_internal._end_tuning(t, 'finished');
END $$;

-- Have the model the architecture of its best trial, if the tuning's owner may change it.
CREATE FUNCTION tensile_internal._adopt_architecture(t tensile_internal.tunings, architecture jsonb) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile_internal.models m SET architecture = $2, architecture_reason = tensile_internal._winner_of(($1).id),
            updated_at = clock_timestamp()
        WHERE m.id = ($1).model_id AND m.architecture IS DISTINCT FROM $2
          AND (m.architecture IS NOT DISTINCT FROM ($1).architecture OR m.architecture->>'type' = 'ensemble')
          AND tensile_internal._acts_for(($1).owner_id, m.owner_id, m.owner)
$$;

-- Submit a job that does what a job with deploy = if_better does after its training.
CREATE FUNCTION tensile_internal._submit_comparison(t tensile_internal.tunings, v tensile_internal.model_versions)
    RETURNS bigint
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    job bigint;
BEGIN
    INSERT INTO tensile_internal.jobs (kind, model_id, model, owner, query, target, epochs, optimizer, validation, seed,
                                       policy, priority, options, settings, validation_query, start_version,
                                       architecture, tuning)
        SELECT 'compare', j.model_id, j.model, t.owner, j.query, j.target, j.epochs, j.optimizer, j.validation,
               j.seed, j.policy, j.priority, (t.arguments->'options') || jsonb_build_object('threads', t.threads),
               t.settings, j.validation_query, v.id, v.architecture, t.id
        FROM tensile_internal.jobs j WHERE j.id = v.job
        RETURNING id INTO job;
    PERFORM tensile_internal._log_event(job, 'submitted'), tensile_internal._notify(job);
    RETURN job;
END $$;

-- End the tuning when the comparison has ended. Whatever goes wrong with it keeps the deployed version.
CREATE FUNCTION tensile_internal._follow_comparison(t tensile_internal.tunings) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile_internal.jobs;
    notes text[];
BEGIN
    SELECT * INTO j FROM tensile_internal.jobs o WHERE o.id = t.comparison;
    IF NOT FOUND THEN -- from a dump, which has no open jobs
        UPDATE tensile_internal.tunings o SET state = 'running', comparison = NULL WHERE o.id = t.id;
    ELSIF j.ended_at IS NULL AND t.cancel_requested THEN
        PERFORM tensile_internal._stop_trial(j.id, 'cancelled by cancel_tuning');
    ELSIF j.ended_at IS NOT NULL THEN
        IF EXISTS (SELECT FROM tensile_internal.deployments d WHERE d.job = j.id AND d.decision = 'deployed') THEN
            PERFORM tensile_internal._adopt_architecture(t, j.architecture);
        END IF;
        notes := j.warnings;
        IF j.state <> 'finished' THEN
            notes := notes || format('the best version was not compared with the deployed one: %s',
                                     coalesce(j.error, j.reason));
        END IF;
        UPDATE tensile_internal.tunings o SET warnings = o.warnings || notes WHERE o.id = t.id;
        PERFORM tensile_internal._end_tuning(t, CASE WHEN j.state = 'cancelled' THEN 'cancelled' ELSE 'finished' END);
    END IF;
END $$;

-- End a tuning: stop what is left of its jobs, and delete old versions beyond the model's retention.
CREATE FUNCTION tensile_internal._end_tuning(t tensile_internal.tunings, state text, sqlstate text DEFAULT NULL,
                                             error text DEFAULT NULL, hint text DEFAULT NULL) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile_internal.models;
BEGIN
    PERFORM tensile_internal._stop_trials(t, CASE state WHEN 'failed' THEN 'the tuning has failed'
                                          ELSE 'the tuning has ended' END);
    UPDATE tensile_internal.tunings o SET state = _end_tuning.state, ended_at = clock_timestamp(),
            started_at = coalesce(o.started_at, clock_timestamp()), sqlstate = _end_tuning.sqlstate,
            error = _end_tuning.error, hint = _end_tuning.hint
        WHERE o.id = t.id;
    SELECT * INTO m FROM tensile_internal.models o WHERE o.id = t.model_id;
    IF FOUND THEN
        PERFORM tensile_internal._drop_old_versions(m);
    END IF;
    IF state <> 'finished' THEN
        PERFORM tensile_internal._undo_submission(t.model_id);
    END IF;
    PERFORM tensile_internal._log_tuning(t.id, state), tensile_internal._notify(-1),
        tensile_internal._announce('tuning', t.id, state);
END $$;

-- Delete tunings that ended more than pg_tensile.job_retention ago.
CREATE FUNCTION tensile_internal._forget_tunings() RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    DELETE FROM tensile_internal.tunings WHERE id IN (
        SELECT t.id FROM tensile_internal.tunings t
        WHERE current_setting('pg_tensile.job_retention')::interval > '0'
          AND t.ended_at < clock_timestamp() - current_setting('pg_tensile.job_retention')::interval
        FOR UPDATE SKIP LOCKED)
$$;

-- Milliseconds until the time of a tuning is over; null if none has a limit
CREATE FUNCTION tensile_internal._tuning_delay_ms() RETURNS int
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT (1000 * min(least(greatest(extract(epoch FROM t.started_at + t.max_time - clock_timestamp()), 0),
                             3600)))::int
    FROM tensile_internal.tunings t WHERE t.ended_at IS NULL AND t.max_time IS NOT NULL AND t.started_at IS NOT NULL
$$;
