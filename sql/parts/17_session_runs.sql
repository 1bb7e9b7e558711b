------------------------------------------------------------------------------------------------------------------------
-- Executors in the caller's session: explaining a training, evaluating a model
------------------------------------------------------------------------------------------------------------------------

-- The supervisor, called only by public functions (csrc/processes/session_run.c), as the caller and in the caller's
-- transaction. `result` has the values of all columns of each row.
CREATE FUNCTION tensile._session_run(spec jsonb, folder text, OUT result text[], OUT sqlstate text, OUT message text,
                                     OUT hint text, OUT detail text, OUT traceback text)
    LANGUAGE plpython3u SET search_path = pg_catalog, pg_temp
AS $$
import sys
if folder not in sys.path:
    sys.path.insert(0, folder)
from pyworker.supervisors import session_run
return session_run.run(plpy, spec)
$$;
CREATE FUNCTION tensile._session_feed(fd int) RETURNS bigint
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_session_feed';
CREATE FUNCTION tensile._session_wait(fd int, timeout_ms int, writable bool) RETURNS int
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_session_wait';
CREATE FUNCTION tensile._session_check(function text) RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_session_check';

-- Make the same checks as train_model, and return the input of the executor: the job's spec (docs/internals.md)
-- and what its admission depends on. The rows of the query are read as the caller.
CREATE FUNCTION tensile._explain_training(caller oid, arguments jsonb, search_path text, arrays text[]) RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET extra_float_digits = 1
AS $$
DECLARE
    format text := tensile._explanation_format(arguments->'options');
    m tensile.models;
    j tensile.jobs;
    open_job bigint;
BEGIN
    IF jsonb_typeof(arguments->'options') = 'object' THEN
        arguments := arguments #- '{options,format}';
    END IF;
    m := tensile._check_submission(caller, arguments, arrays);
    j := tensile._job_of_arguments(arguments);
    open_job := (SELECT o.id FROM tensile.jobs o WHERE o.model = m.id AND o.ended_at IS NULL AND o.tuning IS NULL);
    RETURN arguments - '{query,priority,max_time}'::text[] || jsonb_build_object(
        'job', 0, 'kind', 'explain', 'attempt', 1, 'resume', NULL, 'format', format, 'architecture', m.architecture,
        'policy', j.policy, 'memory_budget', tensile._parse_budget(arguments->>'memory_budget'),
        'validation_query', j.validation_query IS NOT NULL, 'max_time_s', extract(epoch FROM j.max_time),
        'profiles', (SELECT coalesce(jsonb_object_agg(p.device, p.profile), '{}') FROM tensile.device_profiles p),
        'open_job', open_job, 'open_job_s', tensile._remaining_s(open_job), 'admission', tensile._admission(j.priority));
END $$;

CREATE FUNCTION tensile._explanation_format(options jsonb) RETURNS text
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
CREATE FUNCTION tensile._remaining_s(job bigint) RETURNS float8
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN s.seconds BETWEEN 0 AND 1e12 THEN s.seconds END
    FROM tensile.jobs j
         CROSS JOIN LATERAL (SELECT coalesce(j.chosen_batch_size, nullif(j.batch_size, 0))::float8 AS batch_size) b
         LEFT JOIN tensile._progress() p ON p.job = j.id AND p.phase IN ('training', 'validating', 'refitting', 'saving')
         LEFT JOIN tensile.latencies l ON l.job = j.id
         CROSS JOIN LATERAL (SELECT sum(x.seconds) / count(DISTINCT x.epoch) AS seconds
                             FROM (SELECT y.epoch, y.seconds FROM tensile.epochs y WHERE y.job = j.id
                                   ORDER BY y.epoch DESC, y.split LIMIT 10) x) e
         CROSS JOIN LATERAL (
             SELECT CASE WHEN p.steps > 0
                 THEN coalesce(e.seconds, p.steps * b.batch_size / nullif(p.samples_per_s, 0))
                      * greatest(p.epochs - p.epoch + 1 - p.step / p.steps::float8, 0)
                 ELSE l.total_us / 1e6 * ceil(j.rows * (1 - j.validation) / b.batch_size) * j.epochs END) r (seconds)
         CROSS JOIN LATERAL (SELECT least(r.seconds, extract(epoch FROM j.max_time)) AS seconds) s
    WHERE j.id = $1
$$;

-- For each device, the least memory of the jobs of all roles. `ahead`: the jobs that a job of the given priority
-- would wait for, in the order in which they may begin
CREATE FUNCTION tensile._admission(priority int) RETURNS jsonb
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (SELECT coalesce(jsonb_object_agg(d.name, jsonb_build_object(
                'budget_bytes', d.budget_bytes, 'inference_bytes', coalesce(d.inference_bytes, 0),
                'running', r.running, 'waiting', r.waiting, 'least_bytes', r.least_bytes, 'ahead', r.ahead)), '{}')
            FROM tensile._devices() d CROSS JOIN LATERAL (
                SELECT count(*) FILTER (WHERE j.state = 'running') AS running,
                       count(*) FILTER (WHERE j.state = 'waiting') AS waiting,
                       coalesce(sum(t.least_bytes + t.overhead_bytes) FILTER (WHERE j.state = 'running'), 0)
                           AS least_bytes,
                       coalesce(jsonb_agg(jsonb_build_object('job', j.id, 'running', j.state = 'running',
                                    'least_bytes', t.least_bytes + t.overhead_bytes,
                                    'remaining_s', tensile._remaining_s(j.id))
                                    ORDER BY j.aged_priority DESC, j.submitted_at, j.id)
                                FILTER (WHERE j.state = 'running'
                                        OR j.state = 'waiting' AND j.aged_priority >= _admission.priority), '[]')
                           AS ahead
                FROM tensile.traces t JOIN tensile._open_jobs j ON j.id = t.job
                WHERE t.device = d.name AND NOT j.automatic) r
            WHERE NOT tensile._on_cluster(d.name));
END $$;

-- For the supervisor, which reads as the caller, whose row_security may be off
CREATE FUNCTION tensile._explain_latency_models() RETURNS TABLE (device text, models bytea)
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT m.device, m.models FROM tensile.latency_models m
$$;

-- Likewise: how the executor reaches the Ray cluster; JSON null for options without ranks
CREATE FUNCTION tensile._explain_ray(options jsonb) RETURNS jsonb
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM tensile._session_check('tensile._explain_ray');
    RETURN CASE WHEN options ? 'ranks' THEN tensile._ray_access() ELSE 'null' END;
END $$;

-- Likewise: the running jobs of all roles, for which the executor makes the scheduler's decision. `description`: fields
-- of JobState, with device, granted_bytes and traced; the trace is null for a job that is executed eagerly
CREATE FUNCTION tensile._explain_running() RETURNS TABLE (description jsonb, trace bytea, average real[])
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM tensile._session_check('tensile._explain_running');
    RETURN QUERY
        SELECT jsonb_build_object(
                   'job', j.id, 'device', t.device, 'traced', cardinality(t.traces) > 0, 'least_bytes', t.least_bytes,
                   'granted_bytes', coalesce(f.granted_bytes, t.least_bytes), 'operator', coalesce(t.largest_operator, ''),
                   'policy', t.policy, 'priority', j.priority::float8, 'overhead_bytes', t.overhead_bytes,
                   'most_bytes', j.memory_budget, 'max_slowdown', (j.options->>'max_slowdown')::float8,
                   'swap_share', coalesce((j.options->>'swap_share')::float8, 1)),
               t.traces[1], l.average
        FROM tensile.jobs j JOIN tensile.traces t ON t.job = j.id
             LEFT JOIN tensile.footprints f ON f.job = j.id LEFT JOIN tensile.latencies l ON l.job = j.id
        WHERE j.state = 'running' AND NOT j.automatic AND t.refusal IS NULL AND NOT tensile._on_cluster(t.device)
        ORDER BY j.id;
END $$;

CREATE FUNCTION @extschema@.explain_training(model text, query text, target text,
        epochs int DEFAULT 200, batch_size int DEFAULT NULL, optimizer text DEFAULT 'adamw',
        learning_rate float8 DEFAULT NULL, validation float8 DEFAULT 0.2, seed bigint DEFAULT 0,
        policy text DEFAULT NULL, memory_budget text DEFAULT NULL, priority int DEFAULT 0,
        options jsonb DEFAULT '{}', split_by text DEFAULT NULL, validation_query text DEFAULT NULL,
        max_time interval DEFAULT NULL) RETURNS SETOF text
    LANGUAGE C COST 1000 AS 'MODULE_PATHNAME', 'tensile_explain_training';
COMMENT ON FUNCTION @extschema@.explain_training(text, text, text, int, int, text, float8, float8, bigint, text, text,
                                                 int, jsonb, text, text, interval) IS
    'show what train_model with the same arguments would require, its memory plan, and whether it would '
    'start; train nothing; for roles that may train the model';

-- The input of the executor (docs/internals.md) for a version of a model; null if it is gone. `request`: what to do.
CREATE FUNCTION tensile._evaluation_spec(version bigint, memory_budget text, request jsonb) RETURNS jsonb
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    budget bigint := tensile._parse_budget(memory_budget);
BEGIN
    RETURN (SELECT jsonb_build_object(
                'job', 0, 'kind', 'evaluate', 'version', v.id, 'architecture', v.architecture,
                'preprocessing', v.preprocessing,
                'weight_bytes', coalesce(v.weight_bytes, -- null while the job of the version runs
                                         (SELECT sum(octet_length(w.data)) FROM tensile.model_weights w
                                          WHERE w.version = v.id)),
                'memory_budget', coalesce(budget, m.memory_budget, 0), 'options', '{}'::jsonb,
                'profiles', (SELECT coalesce(jsonb_object_agg(p.device, p.profile), '{}')
                             FROM tensile.device_profiles p)) || request
            FROM tensile.model_versions v JOIN tensile.models m ON m.id = v.model
            WHERE v.id = _evaluation_spec.version);
END $$;

-- For csrc/training/evaluate.c, which has checked the caller's privilege on the model
CREATE FUNCTION tensile._evaluate_model(caller oid, model text, query text, by text, version int, memory_budget text,
                                        version_id bigint) RETURNS jsonb
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._evaluation_spec(version_id, memory_budget, '{"function": "evaluate_model"}')
$$;

-- Metrics of an evaluation of models with that task
CREATE FUNCTION tensile._metrics_of(task text) RETURNS text[]
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE $1 WHEN 'regression' THEN ARRAY['r2', 'rmse', 'mae', 'mape', 'median_absolute_error']
        ELSE ARRAY['log_loss', 'accuracy', 'balanced_accuracy', 'f1', 'precision', 'recall', 'mcc', 'brier', 'roc_auc',
                   'pr_auc'] END
$$;

CREATE FUNCTION tensile._feature_importance(caller oid, model text, query text, repeats int, metric text, seed bigint,
                                            version_id bigint) RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    metrics text[] := tensile._metrics_of((SELECT v.task FROM tensile.model_versions v WHERE v.id = version_id));
    chosen text := coalesce(metric, metrics[1]);
BEGIN
    IF repeats NOT BETWEEN 1 AND 1000 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('repeats is %s, but must be between 1 and 1000', repeats), HINT = 'Ten are usually enough.';
    ELSIF NOT chosen = ANY (metrics) THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('the model has no metric "%s"', chosen),
            HINT = format('It has: %s.', array_to_string(metrics, ', '));
    END IF;
    RETURN tensile._evaluation_spec(version_id, NULL, jsonb_build_object(
        'function', 'feature_importance', 'repeats', repeats, 'metric', chosen, 'seed', seed));
END $$;

-- For the supervisor, which reads as the caller; null past the end
CREATE FUNCTION tensile._session_weights(version bigint, seq int) RETURNS bytea
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM tensile._session_check('tensile._session_weights');
    RETURN (SELECT w.data FROM tensile.model_weights w
            WHERE w.version = _session_weights.version AND w.seq = _session_weights.seq);
END $$;

CREATE FUNCTION @extschema@.evaluate_model(model text, query text, by text DEFAULT NULL, version int DEFAULT NULL,
                                           memory_budget text DEFAULT NULL)
    RETURNS TABLE (group_value text, metric text, label text, predicted text, quantile float8, value float8)
    LANGUAGE C COST 1000 AS 'MODULE_PATHNAME', 'tensile_evaluate_model';
COMMENT ON FUNCTION @extschema@.evaluate_model(text, text, text, int, text) IS
    'compare a model''s predictions with the target for every row of a query, or for each value of the column "by"; '
    'for roles that may predict with the model';

CREATE FUNCTION @extschema@.feature_importance(model text, query text, repeats int DEFAULT 5, metric text DEFAULT NULL,
                                               seed bigint DEFAULT 0)
    RETURNS TABLE (feature text, importance float8, deviation float8, metric_used text)
    LANGUAGE C COST 1000 AS 'MODULE_PATHNAME', 'tensile_feature_importance';
COMMENT ON FUNCTION @extschema@.feature_importance(text, text, int, text, bigint) IS
    'measure how much worse a model''s metric becomes on the rows of a query when a feature''s values are shuffled; '
    'for roles that may predict with the model';
