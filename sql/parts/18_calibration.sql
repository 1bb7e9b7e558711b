------------------------------------------------------------------------------------------------------------------------
-- Calibrating a device
------------------------------------------------------------------------------------------------------------------------

-- A calibration is a job without a model and a query, and with its own kind of executor. The options in its row
-- have the time that it may take.
CREATE FUNCTION tensile._calibrate(caller oid, device_seconds int) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    job bigint;
BEGIN
    PERFORM tensile._not_null('device_seconds', device_seconds::text), tensile._check_can_start(caller);
    IF device_seconds NOT BETWEEN 1 AND 86400 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('device_seconds is out of range: %s', device_seconds), HINT = 'Use 1 to 86400.';
    END IF;
    INSERT INTO tensile.jobs (kind, model_name, owner_name, query, target, epochs, batch_size, optimizer,
                              learning_rate, validation, seed, priority, options, settings)
        VALUES ('calibrate', '(calibration)', pg_get_userbyid(caller), '', '', 1, 1, '', 0, 0, 0, 0,
                jsonb_build_object('seconds', device_seconds), '{}')
        ON CONFLICT DO NOTHING
        RETURNING id INTO job;
    IF job IS NULL THEN
        job := (SELECT j.id FROM tensile.jobs j WHERE j.kind = 'calibrate' AND j.ended_at IS NULL);
        RAISE EXCEPTION USING ERRCODE = 'object_in_use', MESSAGE = 'the device is already being calibrated',
            DETAIL = format('Job %s is calibrating it.', job),
            HINT = 'Wait with wait_for_job until that job has ended, or stop it with cancel_job.';
    END IF;
    PERFORM tensile._log_event(job, 'submitted');
    RETURN job;
END $$;
CREATE FUNCTION tensile.calibrate(device_seconds int DEFAULT 240) RETURNS bigint
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_calibrate';
COMMENT ON FUNCTION tensile.calibrate(int) IS
    'submit a job that measures operators on the device, so that latencies are predicted well before anything '
    'has run';

-- Training steps to measure, for the job's worker: those of the models trained last, with the settings of their
-- training
CREATE FUNCTION tensile._calibration_workloads() RETURNS jsonb
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM tensile._my_job();
    RETURN (SELECT coalesce(jsonb_agg(jsonb_build_object(
                'architecture', v.architecture, 'inputs', tensile._model_inputs(v.preprocessing), 'task', v.task,
                'outputs', CASE v.task WHEN 'multiclass' THEN jsonb_array_length(v.preprocessing->'labels') ELSE 1 END,
                'batch_size', v.batch_size, 'optimizer', v.optimizer, 'options', v.options)
                ORDER BY v.created_at DESC), '[]')
            FROM (SELECT o.*, coalesce(j.chosen_batch_size, j.batch_size) AS batch_size, j.optimizer, j.options,
                         row_number() OVER (PARTITION BY o.model ORDER BY o.version DESC) AS age
                  FROM tensile.model_versions o JOIN tensile.jobs j ON j.id = o.job
                  WHERE o.weight_bytes IS NOT NULL
                  ORDER BY age, o.created_at DESC LIMIT 20) v
            WHERE v.age = 1);
END $$;

-- Sizes of a model's features, derived from the fitted preprocessing as in
-- pg_tensile/execution/data/preprocessing.py: number of numeric columns, number of codes of each category (0
-- included), [length, tokens or 0] of each array, those of text features last
CREATE FUNCTION tensile._model_inputs(preprocessing jsonb) RETURNS jsonb
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_build_object(
        'numeric', coalesce(sum(CASE f->>'kind' WHEN 'numeric' THEN 1 WHEN 'array' THEN 0
                                    WHEN 'timestamp' THEN CASE WHEN (f->>'hour')::bool THEN 7 ELSE 5 END ELSE 0 END
                                + CASE WHEN (f->>'kind' <> 'category' OR f ? 'vocabulary') AND (f->>'nulls')::bigint > 0
                                       THEN 1 ELSE 0 END + (f ? 'ranks')::int), 0),
        'cardinalities', coalesce(jsonb_agg(1 + jsonb_array_length(f->'categories') + coalesce((f->>'buckets')::int, 0)
                                            ORDER BY position)
                                  FILTER (WHERE f->>'kind' = 'category' AND NOT f ? 'vocabulary'), '[]'),
        'arrays', coalesce(jsonb_agg(jsonb_build_array((f->>'length')::int,
                                                       coalesce((f->>'vocabulary')::int,
                                                                2 + jsonb_array_length(f->'tokens'), 0))
                                     ORDER BY f ? 'vocabulary', position)
                           FILTER (WHERE f->>'kind' = 'array' OR f ? 'vocabulary'), '[]'),
        'edges', coalesce(jsonb_agg(least(jsonb_array_length(f->'ranks'->'values'), 33) ORDER BY position)
                          FILTER (WHERE f ? 'ranks'), '[]'))
    FROM jsonb_array_elements($1->'features') WITH ORDINALITY AS e (f, position)
$$;
