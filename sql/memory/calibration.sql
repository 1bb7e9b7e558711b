-- Calibration: measuring a device's operators

-- Store the result of a calibration. `known_kinds`: those of the operators that were to be measured. Those of jobs
-- count as known as well, because a kind that cannot be measured must not cause another calibration.
CREATE FUNCTION tensile_worker._calibrate_done(device text, profile jsonb, models bytea, kinds int, samples int,
                                               error float8, known_kinds text[], torch text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM tensile_internal.jobs j
                   WHERE j.id = tensile_worker._my_job() AND j.kind = 'calibrate') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('job %s is not a calibration', tensile_worker._my_job());
    END IF;
    INSERT INTO tensile_internal.device_profiles (device, profile) VALUES ($1, $2)
        ON CONFLICT ON CONSTRAINT device_profiles_pkey
        DO UPDATE SET profile = EXCLUDED.profile, measured_at = clock_timestamp();
    INSERT INTO tensile_internal.latency_models (device, models, kinds, samples, error, job, known_kinds, torch)
        VALUES ($1, $3, $4, $5, $6, tensile_worker._my_job(),
                ARRAY(SELECT unnest($7) UNION
                      SELECT tensile_internal._operator_kind(o.target, o.signature)
                      FROM tensile_internal.operators o JOIN tensile_internal.traces t ON t.job = o.job
                      WHERE t.device = $1 ORDER BY 1),
                $8)
        ON CONFLICT ON CONSTRAINT latency_models_pkey
        DO UPDATE SET models = EXCLUDED.models, kinds = EXCLUDED.kinds, samples = EXCLUDED.samples,
            error = EXCLUDED.error, job = EXCLUDED.job, known_kinds = EXCLUDED.known_kinds, torch = EXCLUDED.torch,
            calibrated_at = clock_timestamp();
    PERFORM tensile_internal._log('calibration', tensile_worker._my_job(), NULL, $1, 'finished',
                                  jsonb_build_object('kinds', $4, 'samples', $5, 'error', $6));
END $$;

-- A calibration is a job without a model and a query, and with its own kind of trainer. The options in its row
-- have the time that it may take; those of an automatic one also its device, the cause, and why it is to stop, if it
-- is. Null if there is one already.
CREATE FUNCTION tensile_internal._submit_calibration(owner name, options jsonb, automatic bool) RETURNS bigint
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile_internal.jobs (kind, model, owner, query, target, epochs, batch_size, optimizer, learning_rate,
                                       validation, seed, priority, options, settings, automatic)
        VALUES ('calibrate', '(calibration)', $1, '', '', 1, 1, '', 0, 0, 0, 0, $2, '{}', $3)
        ON CONFLICT DO NOTHING
        RETURNING id
$$;

CREATE FUNCTION tensile_internal._calibrate_device(caller oid, seconds int) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    job bigint;
BEGIN
    PERFORM tensile_internal._not_null('seconds', seconds::text), tensile_internal._check_can_start(caller);
    IF seconds NOT BETWEEN 1 AND 86400 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('seconds is out of range: %s', seconds), HINT = 'Use 1 to 86400.';
    END IF;
    job := tensile_internal._submit_calibration(pg_get_userbyid(caller), jsonb_build_object('seconds', seconds), false);
    IF job IS NULL THEN
        job := (SELECT j.id FROM tensile_internal.jobs j
                WHERE j.kind = 'calibrate' AND NOT j.automatic AND j.ended_at IS NULL);
        RAISE EXCEPTION USING ERRCODE = 'object_in_use', MESSAGE = 'the device is already being calibrated',
            DETAIL = format('Job %s is calibrating it.', job),
            HINT = 'Wait with wait_for_job until that job has ended, or stop it with cancel_job.';
    END IF;
    PERFORM tensile_internal._log_event(job, 'submitted');
    RETURN job;
END $$;

-- Times of automatic calibrations. idle_s: how long the server must have been idle; a user's next statement, and the
-- next job of a script, come sooner and find the device free. pause_s: least time after an interruption or a failure
-- until the next attempt, doubled each time. device_seconds: that of calibrate_device(). most_s: after which it is
-- stopped, whatever it has measured. most_load: share of the processors' time above which the machine is busy: a
-- calibration does not begin then, and stops if others than processes of a lowered priority, as its own are, take as
-- much.
CREATE FUNCTION tensile_internal._automatic_calibration_times(OUT idle_s float8, OUT pause_s float8,
                                                              OUT device_seconds int, OUT most_s float8,
                                                              OUT most_load float8)
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT 30, 60, 240, 480, 0.5
$$;

-- Kind of an operator: its target and the type of its first operand, as far as it has one.
-- pyworker/children/calibrate.py has the same rule.
CREATE FUNCTION tensile_internal._operator_kind(target text, signature text) RETURNS text
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT concat_ws(' ', $1, substring($2 FROM '^\[?([a-z]+[0-9]+)\['))
$$;

-- Devices to calibrate, and why: the default one and those of jobs if they have not been calibrated, and those whose
-- jobs have used another PyTorch since, or have trained models with kinds of operators that were not known. Only a
-- trainer knows which device "auto" is, so any calibration will do for it.
CREATE FUNCTION tensile_internal._uncalibrated() RETURNS TABLE (device text, cause text)
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    WITH unknown AS (
        SELECT d.device
        FROM current_setting('pg_tensile.device') s (setting)
             CROSS JOIN LATERAL (
                 SELECT CASE WHEN setting ~ ':|^auto$|^cpu$' THEN setting ELSE setting || ':0' END) d (device)
        WHERE NOT EXISTS (SELECT FROM tensile_internal.latency_models l WHERE d.device IN (l.device, 'auto')))
    SELECT u.device, 'it has not been calibrated' FROM unknown u
    UNION ALL
    SELECT p.device,
           CASE WHEN l.device IS NULL THEN 'it has not been calibrated'
                WHEN newest.torch <> l.torch
                THEN format('it was calibrated with PyTorch %s, and jobs use %s', l.torch, newest.torch)
                ELSE 'jobs have new kinds of operators: ' || new.kinds END
    FROM tensile_internal.device_profiles p
         LEFT JOIN tensile_internal.latency_models l ON l.device = p.device
         LEFT JOIN LATERAL (SELECT t.torch FROM tensile_internal.traces t
                            WHERE t.device = p.device AND t.captured_at > l.calibrated_at AND t.torch IS NOT NULL
                            ORDER BY t.captured_at DESC LIMIT 1) newest ON true
         LEFT JOIN LATERAL (SELECT string_agg(DISTINCT k.kind, ', ' ORDER BY k.kind) AS kinds
                            FROM tensile_internal.traces t
                                 JOIN tensile_internal.model_versions v ON v.job = t.job AND v.weight_bytes IS NOT NULL
                                 JOIN tensile_internal.operators o ON o.job = t.job
                                 CROSS JOIN LATERAL tensile_internal._operator_kind(o.target, o.signature) k (kind)
                            WHERE t.device = p.device AND t.captured_at > l.calibrated_at
                              AND k.kind <> ALL (l.known_kinds)) new ON true
    WHERE NOT EXISTS (SELECT FROM unknown) -- which may be the same device
      AND (l.device IS NULL OR newest.torch <> l.torch OR new.kinds IS NOT NULL)
$$;

-- Submit the calibration of a device for the controller. Earlier ones without a result have no further use.
CREATE FUNCTION tensile_internal._calibrate_automatically(device text, cause text, device_seconds int) RETURNS bigint
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    options jsonb := jsonb_build_object('seconds', device_seconds, 'device', device, 'cause', cause);
    job bigint;
BEGIN
    DELETE FROM tensile_internal.jobs j WHERE j.automatic AND j.ended_at IS NOT NULL
        AND NOT EXISTS (SELECT FROM tensile_internal.latency_models l WHERE l.job = j.id);
    job := tensile_internal._submit_calibration(current_user, options, true);
    PERFORM tensile_internal._log_event(job, 'submitted');
    RETURN job;
END $$;

-- Stop an automatic calibration. Its worker kills the trainer at once.
CREATE FUNCTION tensile_internal._stop_calibration(job bigint, reason text) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    state text;
BEGIN
    UPDATE tensile_internal.jobs j SET options = j.options || jsonb_build_object('stop', _stop_calibration.reason)
        WHERE j.id = job AND j.automatic AND j.ended_at IS NULL
          AND (NOT j.options ? 'stop' OR j.state IN ('queued', 'interrupted')) -- no worker could be started after all
        RETURNING j.state INTO state;
    IF state IN ('queued', 'interrupted') THEN
        PERFORM tensile_internal._end_job(job, 'cancelled');
    ELSIF FOUND THEN
        PERFORM tensile_internal._notify_stop(job);
    END IF;
END $$;

-- Training steps to measure, for the job's worker: those of the models trained last, with the settings of their
-- training, then the architectures of models that were never trained. Batches of several ranks are not for one machine.
CREATE FUNCTION tensile_worker._calibration_workloads() RETURNS jsonb
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM tensile_worker._my_job();
    RETURN (SELECT coalesce(jsonb_agg(jsonb_build_object(
                'architecture', v.architecture, 'inputs', tensile_internal._model_inputs(v.preprocessing), 'task', v.task,
                'outputs', CASE v.task WHEN 'multiclass' THEN jsonb_array_length(v.preprocessing->'labels') ELSE 1 END,
                'batch_size', v.batch_size, 'optimizer', v.optimizer, 'options', v.options)
                ORDER BY v.created_at DESC), '[]')
            || (SELECT coalesce(jsonb_agg(jsonb_build_object('architecture', m.architecture) ORDER BY m.id DESC), '[]')
                FROM (SELECT n.id, n.architecture FROM tensile_internal.models n
                      WHERE n.architecture IS NOT NULL
                        AND NOT EXISTS (SELECT FROM tensile_internal.model_versions v
                                        WHERE v.model_id = n.id AND v.weight_bytes IS NOT NULL)
                      ORDER BY n.id DESC LIMIT 20) m)
            FROM (SELECT o.*, coalesce(j.chosen_batch_size, j.batch_size) AS batch_size, j.optimizer, j.options,
                         row_number() OVER (PARTITION BY o.model_id ORDER BY o.version DESC) AS age
                  FROM tensile_internal.model_versions o JOIN tensile_internal.jobs j ON j.id = o.job
                  WHERE o.weight_bytes IS NOT NULL AND NOT j.options ? 'ranks'
                  ORDER BY age, o.created_at DESC LIMIT 20) v
            WHERE v.age = 1);
END $$;

-- Sizes of a model's features, derived from the fitted preprocessing as in
-- pg_tensile/execution/data/preprocessing.py: number of numeric columns, number of codes of each category (0
-- included), [length, tokens or 0] of each array, those of text features last, and how many of these are vectors
CREATE FUNCTION tensile_internal._model_inputs(preprocessing jsonb) RETURNS jsonb
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_build_object(
        'numeric', coalesce(sum(CASE f->>'kind' WHEN 'numeric' THEN 1 WHEN 'array' THEN 0
                                    WHEN 'timestamp' THEN CASE WHEN (f->>'hour')::bool THEN 7 ELSE 5 END ELSE 0 END
                                + CASE WHEN (f->>'kind' <> 'category' OR f ?| '{vocabulary,vectors}') AND (f->>'nulls')::bigint > 0
                                       THEN 1 ELSE 0 END + (f ? 'ranks')::int), 0),
        'cardinalities', coalesce(jsonb_agg(1 + jsonb_array_length(f->'categories') + coalesce((f->>'buckets')::int, 0)
                                            ORDER BY position)
                                  FILTER (WHERE f->>'kind' = 'category' AND NOT f ?| '{vocabulary,vectors}'), '[]'),
        'arrays', coalesce(jsonb_agg(jsonb_build_array((f->>'length')::int,
                                                       coalesce((f->>'vocabulary')::int,
                                                                2 + jsonb_array_length(f->'tokens'), 0))
                                     ORDER BY f ?| '{vocabulary,vectors}', position)
                           FILTER (WHERE f->>'kind' = 'array' OR f ?| '{vocabulary,vectors}'), '[]'),
        'vectors', count(*) FILTER (WHERE f ? 'vectors'),
        'edges', coalesce(jsonb_agg(least(jsonb_array_length(f->'ranks'->'values'), 33) ORDER BY position)
                          FILTER (WHERE f ? 'ranks'), '[]'))
    FROM jsonb_array_elements($1->'features') WITH ORDINALITY AS e (f, position)
$$;
