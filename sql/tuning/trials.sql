-- Trials: beginning, comparing and ending them
--
-- Trial k is chosen when trials 0 to k - 2 * parallel have ended, and knows their results and no others; it is pruned
-- by comparison with these as well. So neither depends on the order in which trials end, and there is always one to
-- begin with.

-- Number of the last trial whose result trial `number` knows; below 0: none
CREATE FUNCTION tensile_internal._known_until(number int, parallel int) RETURNS int
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT $1 - 2 * $2
$$;

-- Take over what the jobs of running trials have reached, prune those that are worse than others, and delete the
-- versions of all but the best.
CREATE FUNCTION tensile_internal._collect_trials(INOUT t tensile_internal.tunings)
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    k tensile_internal.trials;
    best int;
    worse bigint;
BEGIN
    IF t.metric IS NULL THEN
        t.metric := (SELECT CASE WHEN bool_or(m.metric = 'rmse') THEN 'rmse' ELSE 'log_loss' END
                     FROM tensile_internal.jobs j
                          JOIN tensile_internal.metrics m ON m.job = j.id AND m.split = 'validation'
                     WHERE j.tuning = t.id HAVING count(*) > 0);
    END IF;
    -- a trial without its job comes from a dump, which has no open jobs
    UPDATE tensile_internal.trials o SET state = 'waiting', job = NULL, started_at = NULL
        WHERE o.tuning = t.id AND o.state = 'running'
            AND NOT EXISTS (SELECT FROM tensile_internal.jobs j WHERE j.id = o.job);
    FOR k IN SELECT * FROM tensile_internal.trials o
        WHERE o.tuning = t.id AND o.state = 'running' ORDER BY o.number LOOP
        PERFORM tensile_internal._collect_trial(t, k);
    END LOOP;
    UPDATE tensile_internal.tunings o SET metric = t.metric WHERE o.id = t.id AND o.metric IS DISTINCT FROM t.metric;
    PERFORM tensile_internal._keep_rows(t);
    best := (SELECT o.number FROM tensile_internal.trials o
             WHERE o.tuning = t.id AND o.state = 'finished' AND o.value <> 'NaN'
             ORDER BY o.value * tensile_internal._sign(t.metric), o.number LIMIT 1);
    UPDATE tensile_internal.tunings o SET best_trial = best WHERE o.id = t.id AND o.best_trial IS DISTINCT FROM best;
    -- Not one statement: sessions forget the models that they know whenever one deletes versions, even none.
    FOR worse IN SELECT v.id FROM tensile_internal.trials o JOIN tensile_internal.jobs j ON j.id = o.job
                     JOIN tensile_internal.model_versions v ON v.job = j.id
                          JOIN tensile_internal.models m ON m.id = v.model_id
                 WHERE o.tuning = t.id AND o.number IS DISTINCT FROM best AND o.state <> 'running'
                   AND j.ended_at IS NOT NULL AND v.version IS DISTINCT FROM m.deployed_version LOOP
        DELETE FROM tensile_internal.model_versions v WHERE v.id = worse;
    END LOOP;
END $$;

-- 1 if a lower value of the metric is better, else -1
CREATE FUNCTION tensile_internal._sign(metric text) RETURNS int
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN $1 = ANY (tensile_internal._losses()) THEN 1 ELSE -1 END
$$;

-- Note the rows that the trials have in common; warn if a later one has read others, because the file with them was
-- lost.
CREATE FUNCTION tensile_internal._keep_rows(t tensile_internal.tunings) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    seen record;
    changed text;
BEGIN
    IF t.rows IS NULL THEN
        UPDATE tensile_internal.tunings o SET rows = j.rows
            FROM (SELECT i.rows FROM tensile_internal.jobs i WHERE i.tuning = t.id AND i.rows IS NOT NULL
                  ORDER BY i.id LIMIT 1) j
            WHERE o.id = t.id;
    END IF;
    FOR seen IN SELECT k.number, j.fingerprint FROM tensile_internal.jobs j
         JOIN tensile_internal.trials k ON k.job = j.id
                WHERE j.tuning = t.id AND j.fingerprint IS NOT NULL ORDER BY k.number LOOP
        t.fingerprint := coalesce(t.fingerprint, seen.fingerprint);
        changed := format('trial %s has other rows than the trials before: they have changed, and had to be read again',
                          seen.number);
        IF seen.fingerprint <> t.fingerprint AND changed <> ALL (coalesce(t.warnings, '{}')) THEN
            t.warnings := t.warnings || changed;
        END IF;
    END LOOP;
    UPDATE tensile_internal.tunings o SET fingerprint = t.fingerprint, warnings = t.warnings
        WHERE o.id = t.id AND (o.fingerprint, o.warnings) IS DISTINCT FROM (t.fingerprint, t.warnings);
END $$;

-- Epochs after which trials are compared
CREATE FUNCTION tensile_internal._rungs(halving jsonb, epochs int) RETURNS int[]
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
CREATE FUNCTION tensile_internal._best_until(job bigint, metric text, epoch int) RETURNS float8
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_internal._sign($2) * min(tensile_internal._sign($2) * coalesce(c.value, m.value))
    FROM tensile_internal.metrics m
         LEFT JOIN tensile_internal.metrics c ON c.job = m.job AND c.epoch = m.epoch AND c.split = m.split
                                    AND c.metric = 'calibrated_' || m.metric
    WHERE m.job = $1 AND m.split = 'validation' AND m.metric = $2 AND m.epoch <= $3 AND m.value <> 'NaN'
$$;

-- Take over what a trial's job has reached. Comparisons that it loses count before what it reached after them.
CREATE FUNCTION tensile_internal._collect_trial(t tensile_internal.tunings, k tensile_internal.trials) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile_internal.jobs;
    validation jsonb;
    rung int;
BEGIN
    SELECT * INTO j FROM tensile_internal.jobs o WHERE o.id = k.job;
    k.epochs := (SELECT max(e.epoch) FROM tensile_internal.epochs e WHERE e.job = j.id AND e.split = 'validation');
    FOREACH rung IN ARRAY (tensile_internal._rungs(t.halving,
                                                   (t.arguments->>'epochs')::int))[cardinality(k.rungs) + 1:] LOOP
        EXIT WHEN k.epochs IS NULL OR k.epochs < rung;
        k.rungs := k.rungs || tensile_internal._best_until(j.id, t.metric, rung);
        IF tensile_internal._loses(t, k) THEN
            k.state := 'pruned';
            k.value := k.rungs[cardinality(k.rungs)];
            PERFORM tensile_internal._stop_trial(j.id, format('pruned after %s epochs', rung));
            EXIT;
        END IF;
    END LOOP;
    IF k.state = 'running' AND j.ended_at IS NOT NULL THEN
        IF j.state = 'finished' THEN
            SELECT v.version, v.metrics->'validation' INTO k.version, validation
                FROM tensile_internal.model_versions v WHERE v.job = j.id;
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
    UPDATE tensile_internal.trials o
        SET state = k.state, value = k.value, epochs = k.epochs, rungs = k.rungs, version = k.version,
            sqlstate = k.sqlstate, error = k.error, ended_at = CASE WHEN k.state <> 'running' THEN clock_timestamp() END
        WHERE o.tuning = k.tuning AND o.number = k.number
          AND (o.state, o.epochs, o.rungs) IS DISTINCT FROM (k.state, k.epochs, k.rungs);
    IF k.state <> 'running' THEN
        PERFORM tensile_internal._notify(-1); -- wakes all that wait
    END IF;
END $$;

-- True if the trial, at the last comparison that it has reached, is not among the best 1 / factor of those it knows
CREATE FUNCTION tensile_internal._loses(t tensile_internal.tunings, k tensile_internal.trials) RETURNS bool
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT count(o.number) + 1 >= f.factor AND count(*) FILTER (WHERE o.better) >= (count(o.number) + 1) / f.factor
    FROM (SELECT (($1).halving->>'factor')::int, cardinality(($2).rungs),
                 tensile_internal._sign(($1).metric)) f (factor, rung, sign)
         LEFT JOIN LATERAL (
             SELECT o.number, coalesce(f.sign * o.rungs[f.rung] < f.sign * ($2).rungs[f.rung],
                                       ($2).rungs[f.rung] IS NULL) AS better
             FROM tensile_internal.trials o
             WHERE o.tuning = ($1).id AND o.number <= tensile_internal._known_until(($2).number, ($1).parallel)
               AND cardinality(o.rungs) >= f.rung) o ON true
    GROUP BY f.factor
$$;

-- Stop a job of a tuning.
CREATE FUNCTION tensile_internal._stop_trial(job bigint, reason text) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    state text;
BEGIN
    UPDATE tensile_internal.jobs j
        SET cancel_requested = true, options = j.options || jsonb_build_object('stop', _stop_trial.reason)
        WHERE j.id = job AND j.ended_at IS NULL AND NOT j.cancel_requested
        RETURNING j.state INTO state;
    IF state IN ('queued', 'interrupted') THEN
        PERFORM tensile_internal._end_job(job, 'cancelled');
    ELSIF FOUND THEN
        PERFORM tensile_internal._notify_stop(job);
    END IF;
END $$;

-- Submit waiting trials while fewer than `parallel` jobs are open. The first one reads the rows, the others follow.
CREATE FUNCTION tensile_internal._begin_trials(t tensile_internal.tunings) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    k tensile_internal.trials;
    open int := (SELECT count(*) FROM tensile_internal.jobs j WHERE j.tuning = t.id AND j.ended_at IS NULL);
BEGIN
    FOR k IN SELECT * FROM tensile_internal.trials o
        WHERE o.tuning = t.id AND o.state = 'waiting' ORDER BY o.number LOOP
        EXIT WHEN open >= t.parallel OR open > 0 AND t.rows IS NULL;
        IF tensile_internal._begin_trial(t, k) THEN
            open := open + 1;
        END IF;
    END LOOP;
END $$;

-- Submit a trial's job, as train_model would for the tuning's owner; false if its values exclude each other.
CREATE FUNCTION tensile_internal._begin_trial(t tensile_internal.tunings, k tensile_internal.trials) RETURNS bool
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    architecture jsonb := tensile_internal._trial_architecture(t.architecture, k.params);
    arguments jsonb := tensile_internal._trial_arguments(t.arguments, k.params);
    options jsonb := (arguments->'options') - 'gate' || jsonb_build_object('deploy', 'never', 'threads', t.threads);
    submitted bigint;
    text_of_error text;
BEGIN
    BEGIN
        IF architecture IS NOT NULL THEN
            PERFORM tensile_internal._check_architecture(architecture);
        END IF;
        submitted := tensile_internal._submit_training(
            t.owner_id, arguments || jsonb_build_object('model', t.model, 'options', options), t.settings, NULL,
            architecture, t.id);
    EXCEPTION WHEN invalid_parameter_value THEN
        GET STACKED DIAGNOSTICS text_of_error = MESSAGE_TEXT;
        UPDATE tensile_internal.trials o SET state = 'infeasible', sqlstate = '22023', error = text_of_error,
            ended_at = clock_timestamp() WHERE o.tuning = k.tuning AND o.number = k.number;
        RETURN false;
    END;
    UPDATE tensile_internal.trials o SET state = 'running', job = submitted, started_at = clock_timestamp()
        WHERE o.tuning = k.tuning AND o.number = k.number;
    PERFORM tensile_internal._notify(submitted);
    RETURN true;
END $$;

-- What the tuner needs to choose the next trial: {"tuning", "number", "seed", "trials", "maximize", "domains", "known":
-- [{"params", "state", "value", "least_bytes"}]}, the trials before by number. The results of those that the trial does
-- not know are left out. Null: it is too early, or the last one was chosen.
CREATE FUNCTION tensile_internal._next_suggestion(t tensile_internal.tunings) RETURNS jsonb
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    chosen int := (SELECT count(*) FROM tensile_internal.trials k WHERE k.tuning = t.id);
    known int := tensile_internal._known_until(chosen, t.parallel);
BEGIN
    IF chosen >= t.trials OR tensile_internal._is_open(t)
       OR EXISTS (SELECT FROM tensile_internal.trials k WHERE k.tuning = t.id AND k.number <= known
                                     AND k.state IN ('waiting', 'running')) THEN
        RETURN NULL;
    END IF;
    RETURN jsonb_build_object(
        'tuning', t.id, 'number', chosen, 'seed', t.arguments->'seed', 'trials', t.trials,
        'maximize', tensile_internal._sign(t.metric) < 0, 'domains', tensile_internal._space_domains(t.space, t.architecture->>'type'),
        'architecture', t.architecture->>'type',
        'known', (SELECT coalesce(jsonb_agg(jsonb_build_object('params', k.params) || CASE WHEN k.number <= known THEN
                             jsonb_build_object('state', k.state, 'value', nullif(k.value, 'NaN'),
                                                'least_bytes', k.least_bytes)
                             ELSE '{"state": "running"}' END ORDER BY k.number), '[]')
                  FROM tensile_internal.trials k WHERE k.tuning = t.id));
END $$;

-- Add the trial that the tuner has chosen; nothing if the tuning has ended, or has this trial already.
CREATE FUNCTION tensile_internal._add_trial(tuning bigint, number int, params jsonb) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile_internal.trials (tuning, number, params)
        SELECT t.id, $2, $3 FROM tensile_internal.tunings t
        WHERE t.id = $1 AND t.ended_at IS NULL
            AND $2 = (SELECT count(*) FROM tensile_internal.trials k WHERE k.tuning = t.id)
        ON CONFLICT DO NOTHING;
    SELECT tensile_internal._notify(-1); -- the controller's next turn submits it
$$;
