-- EXPLAIN for training

-- Make the same checks as train_model, and return the input of the trainer: the job's spec (docs/internals.md)
-- and what its admission depends on. The rows of the query are read as the caller.
CREATE FUNCTION tensile_internal._explain_training(caller oid, arguments jsonb, search_path text, arrays text[])
    RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET extra_float_digits = 1
AS $$
DECLARE
    format text := tensile_internal._explanation_format(arguments->'options');
    m tensile_internal.models;
    j tensile_internal.jobs;
    open_job bigint;
    role_memory bigint := tensile_internal._role_limit(caller, 'pg_tensile.role_job_memory') << 10;
    role_time bigint := tensile_internal._role_limit(caller, 'pg_tensile.role_job_time');
BEGIN
    IF jsonb_typeof(arguments->'options') = 'object' THEN
        arguments := arguments #- '{options,format}';
    END IF;
    m := tensile_internal._check_submission(caller, arguments, arrays);
    j := tensile_internal._job_of_arguments(arguments);
    open_job := (SELECT o.id FROM tensile_internal.jobs o
                 WHERE o.model_id = m.id AND o.ended_at IS NULL AND o.tuning IS NULL);
    RETURN arguments - '{query,priority,max_time}'::text[] || jsonb_build_object(
        'job', 0, 'kind', 'explain', 'attempt', 1, 'resume', NULL, 'format', format, 'architecture', m.architecture,
        'policy', j.policy, 'memory_budget', tensile_internal._parse_budget(arguments->>'memory_budget'), 'role_memory', role_memory,
        'validation_query', j.validation_query IS NOT NULL, 'max_time_s', least(extract(epoch FROM j.max_time), role_time),
        'profiles', (SELECT coalesce(jsonb_object_agg(p.device, p.profile), '{}') FROM tensile_internal.device_profiles p),
        'overheads', CASE WHEN j.options ? 'ranks' THEN '[]' ELSE tensile_internal._measured_overheads(m.id) END,
        'open_job', open_job, 'open_job_s', tensile_internal._remaining_s(open_job), 'admission', tensile_internal._admission(j.priority));
END $$;

CREATE FUNCTION tensile_internal._explanation_format(options jsonb) RETURNS text
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    format text := coalesce(options->>'format', 'text');
BEGIN
    IF format IN ('text', 'json') THEN
        RETURN format;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = format('unknown format "%s"', format),
        HINT = 'Use {"format": "text"} or {"format": "json"}.';
END $$;

-- Seconds until the job ends, at most (early stopping is not foreseen, max_time is), estimated from its last epochs,
-- or else from its current rate, or else from the latencies of its operators; null if unknown.
CREATE FUNCTION tensile_internal._remaining_s(job bigint) RETURNS float8
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN s.seconds BETWEEN 0 AND 1e12 THEN s.seconds END
    FROM tensile_internal.jobs j
         CROSS JOIN LATERAL (SELECT coalesce(j.chosen_batch_size, nullif(j.batch_size, 0))::float8 AS batch_size) b
         LEFT JOIN tensile_worker._progress() p ON p.job = j.id
             AND p.phase IN ('training', 'validating', 'refitting', 'saving')
         LEFT JOIN tensile_internal.operator_latencies l ON l.job = j.id
         CROSS JOIN LATERAL (SELECT sum(x.seconds) / count(DISTINCT x.epoch) AS seconds
                             FROM (SELECT y.epoch, y.seconds FROM tensile_internal.epochs y WHERE y.job = j.id
                                   ORDER BY y.epoch DESC, y.split LIMIT 10) x) e
         CROSS JOIN LATERAL (
             SELECT CASE WHEN p.steps > 0
                 THEN coalesce(e.seconds, p.steps * b.batch_size / nullif(p.samples_per_s, 0))
                      * greatest(p.epochs - p.epoch + 1 - p.step / p.steps::float8, 0)
                 ELSE l.total_us / 1e6 * ceil(j.rows * (1 - j.validation) / b.batch_size) * j.epochs END) r (seconds)
         CROSS JOIN LATERAL (SELECT least(r.seconds, extract(epoch FROM least(j.max_time, j.role_time))) AS seconds) s
    WHERE j.id = $1
$$;

-- For each device, the least memory of the jobs of all roles. `ahead`: the jobs that a job of the given priority
-- would wait for, in the order in which they may begin
CREATE FUNCTION tensile_internal._admission(priority int) RETURNS jsonb
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (SELECT coalesce(jsonb_object_agg(d.name, jsonb_build_object(
                'budget_bytes', d.budget_bytes, 'inference_bytes', coalesce(d.inference_bytes, 0),
                'running', r.running, 'waiting', r.waiting, 'least_bytes', r.least_bytes, 'ahead', r.ahead)), '{}')
            FROM tensile_worker._devices() d CROSS JOIN LATERAL (
                SELECT count(*) FILTER (WHERE j.state = 'running') AS running,
                       count(*) FILTER (WHERE j.state = 'waiting') AS waiting,
                       coalesce(sum(t.least_bytes + t.overhead_bytes) FILTER (WHERE j.state = 'running'), 0)
                           AS least_bytes,
                       coalesce(jsonb_agg(jsonb_build_object('job', j.id, 'running', j.state = 'running',
                                    'least_bytes', t.least_bytes + t.overhead_bytes,
                                    'remaining_s', tensile_internal._remaining_s(j.id))
                                    ORDER BY j.aged_priority DESC, j.submitted_at, j.id)
                                FILTER (WHERE j.state = 'running'
                                        OR j.state = 'waiting' AND j.aged_priority >= _admission.priority), '[]')
                           AS ahead
                FROM tensile_internal.traces t JOIN tensile_internal._open_jobs j ON j.id = t.job
                WHERE t.device = d.name AND NOT j.automatic) r
            WHERE NOT tensile_internal._on_cluster(d.name));
END $$;

-- For the supervisor, which reads as the caller, whose row_security may be off
CREATE FUNCTION tensile_worker._explain_latency_models() RETURNS TABLE (device text, models bytea)
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT m.device, m.models FROM tensile_internal.latency_models m
$$;

-- Likewise: how the trainer reaches the Ray cluster; JSON null for options without ranks
CREATE FUNCTION tensile_worker._explain_ray(options jsonb) RETURNS jsonb
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM tensile_internal._session_check('tensile_worker._explain_ray');
    RETURN CASE WHEN options ? 'ranks' THEN tensile_internal._ray_access() ELSE 'null' END;
END $$;

-- Likewise: the running jobs of all roles, for which the trainer makes the scheduler's decision. `description`: fields
-- of JobState, with device, granted_bytes and traced; the trace is null for a job that is executed eagerly
CREATE FUNCTION tensile_worker._explain_running() RETURNS TABLE (description jsonb, trace bytea, average real[])
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM tensile_internal._session_check('tensile_worker._explain_running');
    RETURN QUERY
        SELECT jsonb_build_object(
                   'job', j.id, 'device', t.device, 'traced', cardinality(t.traces) > 0, 'least_bytes', t.least_bytes,
                   'granted_bytes', coalesce(f.granted_bytes, t.least_bytes), 'operator', coalesce(t.largest_operator, ''),
                   'policy', t.policy, 'priority', j.priority::float8, 'overhead_bytes', t.overhead_bytes,
                   'most_bytes', least(j.memory_budget, j.role_memory), 'max_slowdown', (j.options->>'max_slowdown')::float8,
                   'swap_share', coalesce((j.options->>'swap_share')::float8, 1)),
               t.traces[1], l.average
        FROM tensile_internal.jobs j JOIN tensile_internal.traces t ON t.job = j.id
             LEFT JOIN tensile_internal.plans f ON f.job = j.id
                  LEFT JOIN tensile_internal.operator_latencies l ON l.job = j.id
        WHERE j.state = 'running' AND NOT j.automatic AND t.refusal IS NULL
            AND NOT tensile_internal._on_cluster(t.device)
        ORDER BY j.id;
END $$;
