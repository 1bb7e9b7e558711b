------------------------------------------------------------------------------------------------------------------------
-- Tunings: functions for the controller, which advances each open tuning from time to time
------------------------------------------------------------------------------------------------------------------------

-- Trial k is chosen when trials 0 to k - 2 * parallel have ended, and knows their results and no others; it is pruned by
-- comparison with these as well. So neither depends on the order in which trials end, and there is always one to begin
-- with. All that is known about a tuning is in its rows: whatever is killed, the next turn goes on.

-- Number of the last trial whose result trial `number` knows; below 0: none
CREATE FUNCTION tensile._known_until(number int, parallel int) RETURNS int
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT $1 - 2 * $2
$$;

-- "tuning 3, trial 7" for the best trial of a tuning; null for null
CREATE FUNCTION tensile._winner_of(tuning bigint) RETURNS text
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT format('tuning %s, trial %s', t.id, t.best_trial) FROM tensile.tunings t WHERE t.id = $1
$$;

CREATE FUNCTION tensile._open_tunings() RETURNS TABLE (tuning bigint, rows_file text)
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT t.id, tensile._rows_file(t) FROM tensile.tunings t WHERE t.ended_at IS NULL ORDER BY t.id
$$;

-- Advance a tuning by what can be done now. Returns what the tuner needs to choose the next trial; null: none is to be chosen
-- now. An error ends the tuning, unless trying again may help.
CREATE FUNCTION tensile._advance_tuning(tuning bigint, cores int) RETURNS jsonb
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET extra_float_digits = 1
AS $$
DECLARE
    t tensile.tunings;
    code text;
    text_of_error text;
    text_of_hint text;
BEGIN
    -- Lock the model before the tuning and its jobs, as drop_model does.
    PERFORM FROM tensile.models m JOIN tensile.tunings o ON o.model = m.id WHERE o.id = tuning FOR NO KEY UPDATE OF m;
    SELECT * INTO t FROM tensile.tunings o WHERE o.id = tuning AND o.ended_at IS NULL FOR UPDATE;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    BEGIN
        PERFORM tensile._check_tuner(t);
        IF t.state = 'queued' THEN
            UPDATE tensile.tunings o
                SET state = 'running', started_at = clock_timestamp(),
                    threads = coalesce((t.arguments->'options'->>'threads')::int,
                                       nullif(current_setting('pg_tensile.threads')::int, 0),
                                       greatest((cores - 1) / t.parallel, 1))
                WHERE o.id = t.id RETURNING * INTO t;
        END IF;
        IF t.state = 'comparing' THEN
            PERFORM tensile._follow_comparison(t);
            RETURN NULL;
        END IF;
        PERFORM tensile._collect_trials(t);
        SELECT * INTO t FROM tensile.tunings o WHERE o.id = t.id;
        IF tensile._end_trials(t) THEN
            RETURN NULL;
        END IF;
        PERFORM tensile._begin_trials(t);
        RETURN tensile._next_suggestion(t);
    EXCEPTION WHEN OTHERS THEN
        GET STACKED DIAGNOSTICS code = RETURNED_SQLSTATE, text_of_error = MESSAGE_TEXT, text_of_hint = PG_EXCEPTION_HINT;
        IF left(code, 2) IN ('40', '53', '57') THEN
            RAISE;
        END IF;
        PERFORM tensile._end_tuning(t, 'failed', code, text_of_error, nullif(text_of_hint, ''));
    END;
    RETURN NULL;
END $$;

-- Raise an error if the tuning cannot go on.
CREATE FUNCTION tensile._check_tuner(t tensile.tunings) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF t.model IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object', MESSAGE = format('model "%s" was dropped', t.model_name),
            HINT = 'Register the model again and tune it once more.';
    ELSIF NOT EXISTS (SELECT FROM pg_roles r WHERE r.oid = t.owner AND r.rolname = t.owner_name) THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object',
            MESSAGE = format('role "%s" was dropped or renamed', t.owner_name),
            HINT = 'Another role has to tune the model.';
    ELSIF NOT tensile._may_execute(t.owner, 'tune_model') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', MESSAGE = 'permission denied for function tune_model',
            HINT = format('Grant it to the tuning''s owner: GRANT tensile_user TO %I.', t.owner_name);
    END IF;
END $$;

-- Take over what the jobs of running trials have reached, prune those that are worse than others, and delete the versions
-- of all but the best.
CREATE FUNCTION tensile._collect_trials(INOUT t tensile.tunings)
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    k tensile.trials;
    best int;
    worse bigint;
BEGIN
    IF t.metric IS NULL THEN
        t.metric := (SELECT CASE WHEN bool_or(m.metric = 'rmse') THEN 'rmse' ELSE 'log_loss' END
                     FROM tensile.jobs j JOIN tensile.metrics m ON m.job = j.id AND m.split = 'validation'
                     WHERE j.tuning = t.id HAVING count(*) > 0);
    END IF;
    -- a trial without its job comes from a dump, which has no open jobs
    UPDATE tensile.trials o SET state = 'waiting', job = NULL, started_at = NULL
        WHERE o.tuning = t.id AND o.state = 'running' AND NOT EXISTS (SELECT FROM tensile.jobs j WHERE j.id = o.job);
    FOR k IN SELECT * FROM tensile.trials o WHERE o.tuning = t.id AND o.state = 'running' ORDER BY o.number LOOP
        PERFORM tensile._collect_trial(t, k);
    END LOOP;
    UPDATE tensile.tunings o SET metric = t.metric WHERE o.id = t.id AND o.metric IS DISTINCT FROM t.metric;
    PERFORM tensile._keep_rows(t);
    best := (SELECT o.number FROM tensile.trials o
             WHERE o.tuning = t.id AND o.state = 'finished' AND o.value <> 'NaN'
             ORDER BY o.value * tensile._sign(t.metric), o.number LIMIT 1);
    UPDATE tensile.tunings o SET best_trial = best WHERE o.id = t.id AND o.best_trial IS DISTINCT FROM best;
    -- Not one statement: sessions forget the models that they know whenever one deletes versions, even none.
    FOR worse IN SELECT v.id FROM tensile.trials o JOIN tensile.jobs j ON j.id = o.job
                     JOIN tensile.model_versions v ON v.job = j.id JOIN tensile.models m ON m.id = v.model
                 WHERE o.tuning = t.id AND o.number IS DISTINCT FROM best AND o.state <> 'running'
                   AND j.ended_at IS NOT NULL AND v.version IS DISTINCT FROM m.deployed_version LOOP
        DELETE FROM tensile.model_versions v WHERE v.id = worse;
    END LOOP;
END $$;

-- 1 if a lower value of the metric is better, else -1
CREATE FUNCTION tensile._sign(metric text) RETURNS int
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN $1 = ANY (tensile._losses()) THEN 1 ELSE -1 END
$$;

-- Note the rows that the trials have in common; warn if a later one has read others, because the file with them was lost.
CREATE FUNCTION tensile._keep_rows(t tensile.tunings) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    seen record;
    changed text;
BEGIN
    IF t.rows IS NULL THEN
        UPDATE tensile.tunings o SET rows = j.rows
            FROM (SELECT i.rows FROM tensile.jobs i WHERE i.tuning = t.id AND i.rows IS NOT NULL ORDER BY i.id LIMIT 1) j
            WHERE o.id = t.id;
    END IF;
    FOR seen IN SELECT k.number, j.fingerprint FROM tensile.jobs j JOIN tensile.trials k ON k.job = j.id
                WHERE j.tuning = t.id AND j.fingerprint IS NOT NULL ORDER BY k.number LOOP
        t.fingerprint := coalesce(t.fingerprint, seen.fingerprint);
        changed := format('trial %s has other rows than the trials before: they have changed, and had to be read again',
                          seen.number);
        IF seen.fingerprint <> t.fingerprint AND changed <> ALL (coalesce(t.warnings, '{}')) THEN
            t.warnings := t.warnings || changed;
        END IF;
    END LOOP;
    UPDATE tensile.tunings o SET fingerprint = t.fingerprint, warnings = t.warnings
        WHERE o.id = t.id AND (o.fingerprint, o.warnings) IS DISTINCT FROM (t.fingerprint, t.warnings);
END $$;

-- Epochs after which trials are compared
CREATE FUNCTION tensile._rungs(halving jsonb, epochs int) RETURNS int[]
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    WITH RECURSIVE rungs AS (
        SELECT ($1->>'min_epochs')::numeric AS epoch
        UNION ALL
        SELECT epoch * ($1->>'factor')::int FROM rungs WHERE epoch < $2
    )
    SELECT coalesce(array_agg(epoch::int ORDER BY epoch), '{}') FROM rungs WHERE epoch < $2
$$;

-- The best value of a metric in the epochs up to `epoch`; that of log_loss is after calibration where there is one.
CREATE FUNCTION tensile._best_until(job bigint, metric text, epoch int) RETURNS float8
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._sign($2) * min(tensile._sign($2) * coalesce(c.value, m.value))
    FROM tensile.metrics m
         LEFT JOIN tensile.metrics c ON c.job = m.job AND c.epoch = m.epoch AND c.split = m.split
                                    AND c.metric = 'calibrated_' || m.metric
    WHERE m.job = $1 AND m.split = 'validation' AND m.metric = $2 AND m.epoch <= $3 AND m.value <> 'NaN'
$$;

-- Take over what a trial's job has reached. Comparisons that it loses count before what it reached after them.
CREATE FUNCTION tensile._collect_trial(t tensile.tunings, k tensile.trials) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile.jobs;
    validation jsonb;
    rung int;
BEGIN
    SELECT * INTO j FROM tensile.jobs o WHERE o.id = k.job;
    k.epochs := (SELECT max(e.epoch) FROM tensile.epochs e WHERE e.job = j.id AND e.split = 'validation');
    FOREACH rung IN ARRAY (tensile._rungs(t.halving, (t.arguments->>'epochs')::int))[cardinality(k.rungs) + 1:] LOOP
        EXIT WHEN k.epochs IS NULL OR k.epochs < rung;
        k.rungs := k.rungs || tensile._best_until(j.id, t.metric, rung);
        IF tensile._loses(t, k) THEN
            k.state := 'pruned';
            k.value := k.rungs[cardinality(k.rungs)];
            PERFORM tensile._stop_trial(j.id, format('pruned after %s epochs', rung));
            EXIT;
        END IF;
    END LOOP;
    IF k.state = 'running' AND j.ended_at IS NOT NULL THEN
        IF j.state = 'finished' THEN
            SELECT v.version, v.metrics->'validation' INTO k.version, validation
                FROM tensile.model_versions v WHERE v.job = j.id;
            k.state := 'finished';
            k.value := coalesce(validation->>('calibrated_' || t.metric), validation->>t.metric)::float8;
            IF k.value IS NULL THEN
                RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
                    MESSAGE = format('trial %s has no metric "%s"', k.number, t.metric),
                    HINT = format('It has: %s.', (SELECT string_agg(o.key, ', ' ORDER BY o.key)
                                                  FROM jsonb_each_text(validation) o WHERE o.value IS NOT NULL));
            END IF;
        ELSE
            k.state := CASE WHEN j.sqlstate = '53200' THEN 'infeasible' ELSE j.state END;
            k.sqlstate := j.sqlstate;
            k.error := coalesce(j.error, j.reason);
        END IF;
    END IF;
    UPDATE tensile.trials o
        SET state = k.state, value = k.value, epochs = k.epochs, rungs = k.rungs, version = k.version,
            sqlstate = k.sqlstate, error = k.error, ended_at = CASE WHEN k.state <> 'running' THEN clock_timestamp() END
        WHERE o.tuning = k.tuning AND o.number = k.number
          AND (o.state, o.epochs, o.rungs) IS DISTINCT FROM (k.state, k.epochs, k.rungs);
    IF k.state <> 'running' THEN
        PERFORM tensile._notify(-1); -- wakes who waits
    END IF;
END $$;

-- True if the trial, at the last comparison that it has reached, is not among the best 1 / factor of those it knows
CREATE FUNCTION tensile._loses(t tensile.tunings, k tensile.trials) RETURNS bool
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT count(o.number) + 1 >= f.factor AND count(*) FILTER (WHERE o.better) >= (count(o.number) + 1) / f.factor
    FROM (SELECT (($1).halving->>'factor')::int, cardinality(($2).rungs), tensile._sign(($1).metric)) f (factor, rung, sign)
         LEFT JOIN LATERAL (
             SELECT o.number, coalesce(f.sign * o.rungs[f.rung] < f.sign * ($2).rungs[f.rung], ($2).rungs[f.rung] IS NULL) AS better
             FROM tensile.trials o
             WHERE o.tuning = ($1).id AND o.number <= tensile._known_until(($2).number, ($1).parallel)
               AND cardinality(o.rungs) >= f.rung) o ON true
    GROUP BY f.factor
$$;

-- Stop a job of a tuning.
CREATE FUNCTION tensile._stop_trial(job bigint, reason text) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    state text;
BEGIN
    UPDATE tensile.jobs j
        SET cancel_requested = true, options = j.options || jsonb_build_object('stop', _stop_trial.reason)
        WHERE j.id = job AND j.ended_at IS NULL AND NOT j.cancel_requested
        RETURNING j.state INTO state;
    IF state IN ('queued', 'interrupted') THEN
        PERFORM tensile._end_job(job, 'cancelled');
    ELSIF FOUND THEN
        PERFORM tensile._notify_stop(job);
    END IF;
END $$;

-- If no trial is to begin any more, wait for the running ones or stop them, and end the tuning after the last one. Returns
-- true if no trial is to begin.
CREATE FUNCTION tensile._end_trials(t tensile.tunings) RETURNS bool
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    stop text := CASE WHEN t.cancel_requested THEN 'cancelled by cancel_tuning'
                      WHEN clock_timestamp() > t.started_at + t.time_limit THEN 'the time of the tuning is over' END;
    first_failure tensile.trials;
BEGIN
    IF stop IS NOT NULL THEN
        PERFORM tensile._stop_trials(t, stop);
    END IF;
    SELECT * INTO first_failure FROM tensile.trials k
        WHERE k.tuning = t.id AND k.state IN ('failed', 'infeasible') ORDER BY k.state, k.number LIMIT 1;
    IF NOT EXISTS (SELECT FROM tensile.trials k WHERE k.tuning = t.id AND k.number < 2 * t.parallel
                   AND k.state <> 'failed')
       AND (SELECT count(*) >= least(t.trials, 2 * t.parallel) FROM tensile.trials k WHERE k.tuning = t.id) THEN
        PERFORM tensile._end_tuning(t, 'failed', first_failure.sqlstate, first_failure.error,
                                    'All of the first trials have failed; tensile.trials has their jobs.');
        RETURN true;
    ELSIF EXISTS (SELECT FROM tensile.jobs j WHERE j.tuning = t.id AND j.ended_at IS NULL)
          OR EXISTS (SELECT FROM tensile.trials k WHERE k.tuning = t.id AND k.state IN ('waiting', 'running'))
          OR stop IS NULL AND (SELECT count(*) < t.trials FROM tensile.trials k WHERE k.tuning = t.id) THEN
        RETURN stop IS NOT NULL;
    ELSIF t.cancel_requested THEN
        PERFORM tensile._end_tuning(t, 'cancelled');
    ELSIF t.best_trial IS NULL THEN
        PERFORM tensile._end_tuning(
            t, 'failed', coalesce(first_failure.sqlstate, '55000'), coalesce(first_failure.error, 'no trial has finished'),
            CASE WHEN first_failure.error IS NULL THEN 'Use a longer time_limit.'
                 ELSE 'No trial has finished; tensile.trials has their errors.' END);
    ELSE
        PERFORM tensile._deploy_winner(t);
    END IF;
    RETURN true;
END $$;

-- Stop the trials that wait or run.
CREATE FUNCTION tensile._stop_trials(t tensile.tunings, reason text) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile.trials k SET state = 'cancelled', error = $2, ended_at = clock_timestamp()
        WHERE k.tuning = ($1).id AND k.state IN ('waiting', 'running');
    SELECT tensile._stop_trial(j.id, $2) FROM tensile.jobs j WHERE j.tuning = ($1).id AND j.ended_at IS NULL;
$$;

-- Submit waiting trials while fewer than `parallel` jobs are open. The first one reads the rows, the others follow.
CREATE FUNCTION tensile._begin_trials(t tensile.tunings) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    k tensile.trials;
    open int := (SELECT count(*) FROM tensile.jobs j WHERE j.tuning = t.id AND j.ended_at IS NULL);
BEGIN
    FOR k IN SELECT * FROM tensile.trials o WHERE o.tuning = t.id AND o.state = 'waiting' ORDER BY o.number LOOP
        EXIT WHEN open >= t.parallel OR open > 0 AND t.rows IS NULL;
        IF tensile._begin_trial(t, k) THEN
            open := open + 1;
        END IF;
    END LOOP;
END $$;

-- Submit a trial's job, as train_model would for the tuning's owner; false if its values exclude each other.
CREATE FUNCTION tensile._begin_trial(t tensile.tunings, k tensile.trials) RETURNS bool
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    architecture jsonb := tensile._trial_architecture(t.architecture, k.params);
    a record;
    submitted bigint;
    text_of_error text;
BEGIN
    SELECT * INTO a FROM jsonb_to_record(tensile._trial_arguments(t.arguments, k.params)) AS r (
        query text, target text, epochs int, batch_size int, optimizer text, learning_rate float8, validation float8,
        seed bigint, policy text, memory_budget text, priority int, options jsonb, split_by text,
        validation_query text, max_time interval);
    BEGIN
        PERFORM tensile._check_architecture(architecture);
        submitted := tensile._submit_training(
            t.owner, t.model_name, a.query, a.target, a.epochs, a.batch_size, a.optimizer, a.learning_rate, a.validation,
            a.seed, a.policy, a.memory_budget, a.priority,
            a.options - 'gate' || jsonb_build_object('deploy', 'never', 'threads', t.threads), a.split_by,
            a.validation_query, a.max_time, t.settings->>'search_path', '{}', architecture, t.id);
    EXCEPTION WHEN invalid_parameter_value THEN
        GET STACKED DIAGNOSTICS text_of_error = MESSAGE_TEXT;
        UPDATE tensile.trials o SET state = 'infeasible', sqlstate = '22023', error = text_of_error,
            ended_at = clock_timestamp() WHERE o.tuning = k.tuning AND o.number = k.number;
        RETURN false;
    END;
    UPDATE tensile.jobs j SET settings = t.settings WHERE j.id = submitted;
    UPDATE tensile.trials o SET state = 'running', job = submitted, started_at = clock_timestamp()
        WHERE o.tuning = k.tuning AND o.number = k.number;
    PERFORM tensile._notify(submitted);
    RETURN true;
END $$;

-- What the tuner needs to choose the next trial: {"tuning", "number", "seed", "trials", "maximize", "domains", "known":
-- [{"params", "state", "value", "least_bytes"}]}, the trials before by number. The results of those that the trial does
-- not know are left out. Null: it is too early, or the last one was chosen.
CREATE FUNCTION tensile._next_suggestion(t tensile.tunings) RETURNS jsonb
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    chosen int := (SELECT count(*) FROM tensile.trials k WHERE k.tuning = t.id);
    known int := tensile._known_until(chosen, t.parallel);
BEGIN
    IF chosen >= t.trials OR EXISTS (SELECT FROM tensile.trials k WHERE k.tuning = t.id AND k.number <= known
                                     AND k.state IN ('waiting', 'running')) THEN
        RETURN NULL;
    END IF;
    RETURN jsonb_build_object(
        'tuning', t.id, 'number', chosen, 'seed', t.arguments->'seed', 'trials', t.trials,
        'maximize', tensile._sign(t.metric) < 0, 'domains', tensile._space_domains(t.space, t.architecture->>'type'),
        'architecture', t.architecture->>'type',
        'known', (SELECT coalesce(jsonb_agg(jsonb_build_object('params', k.params) || CASE WHEN k.number <= known THEN
                             jsonb_build_object('state', k.state, 'value', nullif(k.value, 'NaN'),
                                                'least_bytes', k.least_bytes)
                             ELSE '{"state": "running"}' END ORDER BY k.number), '[]')
                  FROM tensile.trials k WHERE k.tuning = t.id));
END $$;

-- Add the trial that the tuner has chosen; nothing if the tuning has ended, or has this trial already.
CREATE FUNCTION tensile._add_trial(tuning bigint, number int, params jsonb) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile.trials (tuning, number, params)
        SELECT t.id, $2, $3 FROM tensile.tunings t
        WHERE t.id = $1 AND t.ended_at IS NULL AND $2 = (SELECT count(*) FROM tensile.trials k WHERE k.tuning = t.id)
        ON CONFLICT DO NOTHING;
    SELECT tensile._notify(-1); -- the controller's next turn submits it
$$;

-- End a tuning whose trials cannot be chosen.
CREATE FUNCTION tensile._fail_tuning(tuning bigint, sqlstate text, error text, hint text) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._end_tuning(t, 'failed', $2, $3, $4) FROM tensile.tunings t WHERE t.id = $1 AND t.ended_at IS NULL
$$;

-- Deploy the version of the best trial, or have a job compare it with the deployed one, as the option deploy says.
CREATE FUNCTION tensile._deploy_winner(t tensile.tunings) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    options jsonb := t.arguments->'options';
    m tensile.models;
    v tensile.model_versions;
    best float8;
BEGIN
    SELECT * INTO m FROM tensile.models o WHERE o.id = t.model;
    SELECT o.* INTO v FROM tensile.model_versions o JOIN tensile.trials k ON k.job = o.job
        WHERE k.tuning = t.id AND k.number = t.best_trial AND o.weight_bytes IS NOT NULL;
    IF v.id IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object',
            MESSAGE = format('the version of the best trial, %s, was dropped', t.best_trial),
            HINT = 'tensile.trials has its values, with which train_model trains it again.';
    ELSIF tensile._deploys(options) = 'if_better' THEN
        UPDATE tensile.tunings o SET state = 'comparing', comparison = tensile._submit_comparison(t, v)
            WHERE o.id = t.id;
        RETURN;
    ELSIF tensile._deploys(options) = 'always' THEN
        best := (SELECT k.value FROM tensile.trials k WHERE k.tuning = t.id AND k.number = t.best_trial);
        PERFORM tensile._deploy(m, v.version, t.owner_name,
                                format('%s: %s is %s', tensile._winner_of(t.id), t.metric, best), job => v.job),
                tensile._adopt_architecture(t, v.architecture);
    END IF;
    PERFORM tensile._end_tuning(t, 'finished');
END $$;

-- Have the model the architecture of its best trial, if the tuning's owner may change it.
CREATE FUNCTION tensile._adopt_architecture(t tensile.tunings, architecture jsonb) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile.models m SET architecture = $2, architecture_reason = tensile._winner_of(($1).id),
            updated_at = clock_timestamp()
        WHERE m.id = ($1).model AND m.architecture <> $2 AND m.architecture = ($1).architecture
          AND tensile._acts_for(($1).owner, m.owner, m.owner_name)
$$;

-- Submit a job that does what a job with deploy = if_better does after its training.
CREATE FUNCTION tensile._submit_comparison(t tensile.tunings, v tensile.model_versions) RETURNS bigint
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    job bigint;
BEGIN
    INSERT INTO tensile.jobs (kind, model, model_name, owner_name, query, target, epochs, optimizer, validation, seed, policy,
                              priority, options, settings, validation_query, start_version, architecture, tuning)
        SELECT 'compare', j.model, j.model_name, t.owner_name, j.query, j.target, j.epochs, j.optimizer, j.validation, j.seed,
               j.policy, j.priority, (t.arguments->'options') || jsonb_build_object('threads', t.threads), t.settings,
               j.validation_query, v.id, v.architecture, t.id
        FROM tensile.jobs j WHERE j.id = v.job
        RETURNING id INTO job;
    PERFORM tensile._log_event(job, 'submitted'), tensile._notify(job);
    RETURN job;
END $$;

-- End the tuning when the comparison has ended. Whatever goes wrong with it keeps the deployed version.
CREATE FUNCTION tensile._follow_comparison(t tensile.tunings) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile.jobs;
BEGIN
    SELECT * INTO j FROM tensile.jobs o WHERE o.id = t.comparison;
    IF NOT FOUND THEN -- from a dump, which has no open jobs
        UPDATE tensile.tunings o SET state = 'running', comparison = NULL WHERE o.id = t.id;
    ELSIF j.ended_at IS NULL AND t.cancel_requested THEN
        PERFORM tensile._stop_trial(j.id, 'cancelled by cancel_tuning');
    ELSIF j.ended_at IS NOT NULL THEN
        IF EXISTS (SELECT FROM tensile.deployments d WHERE d.job = j.id AND d.decision = 'deployed') THEN
            PERFORM tensile._adopt_architecture(t, j.architecture);
        END IF;
        IF j.state <> 'finished' THEN
            j.warnings := j.warnings || format('the best version was not compared with the deployed one: %s',
                                               coalesce(j.error, j.reason));
        END IF;
        UPDATE tensile.tunings o SET warnings = o.warnings || j.warnings WHERE o.id = t.id;
        PERFORM tensile._end_tuning(t, CASE WHEN j.state = 'cancelled' THEN 'cancelled' ELSE 'finished' END);
    END IF;
END $$;

-- End a tuning: stop what is left of its jobs, and delete old versions beyond the model's retention.
CREATE FUNCTION tensile._end_tuning(t tensile.tunings, state text, sqlstate text DEFAULT NULL, error text DEFAULT NULL,
                                    hint text DEFAULT NULL) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models;
BEGIN
    PERFORM tensile._stop_trials(t, format('the tuning has %s', CASE state WHEN 'failed' THEN 'failed' ELSE 'ended' END));
    UPDATE tensile.tunings o SET state = _end_tuning.state, ended_at = clock_timestamp(),
            started_at = coalesce(o.started_at, clock_timestamp()), sqlstate = _end_tuning.sqlstate,
            error = _end_tuning.error, hint = _end_tuning.hint
        WHERE o.id = t.id;
    SELECT * INTO m FROM tensile.models o WHERE o.id = t.model;
    IF FOUND THEN
        PERFORM tensile._drop_old_versions(m);
    END IF;
    PERFORM tensile._log_tuning(t.id, state), tensile._notify(-1), tensile._announce('tuning', t.id, state);
END $$;

-- Delete tunings that ended more than pg_tensile.job_retention ago.
CREATE FUNCTION tensile._forget_tunings() RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    DELETE FROM tensile.tunings t
    WHERE current_setting('pg_tensile.job_retention')::interval > '0'
      AND t.ended_at < clock_timestamp() - current_setting('pg_tensile.job_retention')::interval
$$;

-- Milliseconds until the time of a tuning is over; null if none has a limit
CREATE FUNCTION tensile._tuning_delay_ms() RETURNS int
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT (1000 * min(least(greatest(extract(epoch FROM t.started_at + t.time_limit - clock_timestamp()), 0), 3600)))::int
    FROM tensile.tunings t WHERE t.ended_at IS NULL AND t.time_limit IS NOT NULL AND t.started_at IS NOT NULL
$$;
