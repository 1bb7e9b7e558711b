-- Evaluating a model in the caller's session

-- Path of the library with which a trainer evaluates the version as a session does; null: PyTorch has to
CREATE FUNCTION tensile_internal._evaluator(version bigint) RETURNS text
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_evaluator';

-- The input of the trainer (docs/internals.md) for a version of a model; null if it is gone. `request`: what to do.
CREATE FUNCTION tensile_internal._evaluation_spec(version bigint, memory_budget text, request jsonb) RETURNS jsonb
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    budget bigint := tensile_internal._parse_budget(memory_budget);
BEGIN
    RETURN (SELECT jsonb_build_object(
                'job', 0, 'kind', 'evaluate', 'version', v.id, 'architecture', v.architecture,
                'preprocessing', v.preprocessing,
                'weight_bytes', coalesce(v.weight_bytes, -- null while the job of the version runs
                                         (SELECT sum(octet_length(w.data)) FROM tensile_internal.model_weights w
                                          WHERE w.version = v.id)),
                'memory_budget', b.memory_budget,
                'evaluator', CASE WHEN b.memory_budget = 0 AND NOT request ? 'kind'
                                  THEN tensile_internal._evaluator(v.id) END,
                'options', '{}'::jsonb,
                'profiles', (SELECT coalesce(jsonb_object_agg(p.device, p.profile), '{}')
                             FROM tensile_internal.device_profiles p)) || request
            FROM tensile_internal.model_versions v JOIN tensile_internal.models m ON m.id = v.model_id,
                LATERAL (SELECT coalesce((request->>'memory_budget')::bigint, budget, m.memory_budget, 0)) b (memory_budget)
            WHERE v.id = _evaluation_spec.version);
END $$;

-- For csrc/training/evaluate.c, which has checked the caller's privilege on the model
CREATE FUNCTION tensile_internal._evaluate_model(caller oid, model text, query text, by text, version int,
                                                 memory_budget text, version_id bigint) RETURNS jsonb
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_internal._evaluation_spec(version_id, memory_budget, '{"function": "evaluate_model"}')
$$;

-- Metrics of an evaluation of models with that task
CREATE FUNCTION tensile_internal._metrics_of(task text) RETURNS text[]
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE $1 WHEN 'regression' THEN ARRAY['r2', 'rmse', 'mae', 'mape', 'median_absolute_error']
        ELSE ARRAY['log_loss', 'accuracy', 'balanced_accuracy', 'f1', 'precision', 'recall', 'mcc', 'brier', 'roc_auc',
                   'pr_auc'] END
$$;

CREATE FUNCTION tensile_internal._feature_importance(caller oid, model text, query text, repeats int, metric text,
                                                     seed bigint, version_id bigint) RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    metrics text[] := tensile_internal._metrics_of((SELECT v.task FROM tensile_internal.model_versions v
                                                    WHERE v.id = version_id));
    chosen text := coalesce(metric, metrics[1]);
BEGIN
    IF repeats NOT BETWEEN 1 AND 1000 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('repeats is %s, but must be between 1 and 1000', repeats),
            HINT = 'Ten are usually enough.';
    ELSIF NOT chosen = ANY (metrics) THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('the model has no metric "%s"', chosen),
            HINT = format('It has: %s.', array_to_string(metrics, ', '));
    END IF;
    RETURN tensile_internal._evaluation_spec(version_id, NULL, jsonb_build_object(
        'function', 'feature_importance', 'repeats', repeats, 'metric', chosen, 'seed', seed));
END $$;
