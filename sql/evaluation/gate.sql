-- The gate: a new version is compared with the deployed one

CREATE FUNCTION tensile_worker._gate_feed(fd int, previous_fd int, version bigint, previous bigint, query text,
                                          settings jsonb) RETURNS bigint
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_gate_feed';

-- Raise an error unless the rows and the metric by which versions are compared are known, and can be.
CREATE FUNCTION tensile_internal._check_gate(m tensile_internal.models, j tensile_internal.jobs) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    metric text := j.options->'gate'->>'metric';
    metrics text[] := (SELECT tensile_internal._metrics_of(v.task) FROM tensile_internal.model_versions v
                       WHERE v.model_id = m.id AND v.version = m.deployed_version);
BEGIN
    IF tensile_internal._deploys(j.options) <> 'if_better' THEN
        IF j.options ? 'gate' THEN
            RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
                MESSAGE = 'option "gate" requires the option "deploy" to be "if_better"',
                HINT = 'Add "deploy": "if_better", or leave "gate" out.';
        END IF;
    ELSIF j.options->'gate'->>'query' IS NULL AND j.validation_query IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'there are no rows on which the versions could be compared',
            HINT = 'Add a query of them to the options, such as "gate": {"query": "SELECT * FROM test_rows"}, or '
                   'use validation_query.';
    ELSIF metric <> ALL (metrics) THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('the deployed version of model "%s" has no metric "%s"', m.name, metric),
            HINT = format('It has: %s.', array_to_string(metrics, ', '));
    END IF;
END $$;

-- Id in model_versions of the version that the job has trained, or that it compares
CREATE FUNCTION tensile_internal._version_of(j tensile_internal.jobs) RETURNS bigint
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE ($1).kind WHEN 'compare' THEN ($1).start_version
                ELSE (SELECT v.id FROM tensile_internal.model_versions v WHERE v.job = ($1).id
                      ORDER BY v.weight_bytes IS NULL DESC LIMIT 1) END -- rather than a first version
$$;

-- Id in model_versions of the version that the job's is compared with: the deployed one, unless that is a first version of
-- the job, which is deployed only where there is no other
CREATE FUNCTION tensile_internal._compared_with(j tensile_internal.jobs, m tensile_internal.models) RETURNS bigint
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT v.id FROM tensile_internal.model_versions v
    WHERE v.model_id = ($2).id AND v.version = ($2).deployed_version AND v.job IS DISTINCT FROM ($1).id
$$;

-- What the job's version is to be compared with; null unless it is deployed if it is better. "previous" is null while
-- no version is deployed, otherwise the versions are as in JOB frames of evaluations.
CREATE FUNCTION tensile_worker._job_gate() RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM tensile_worker._my_job(); -- the next statement does not call it without a row
    RETURN (SELECT jsonb_build_object(
            'query', coalesce(j.options->'gate'->>'query', j.validation_query),
            'metric', coalesce(j.options->'gate'->>'metric', CASE v.task WHEN 'regression' THEN 'rmse' ELSE 'log_loss' END),
            'version', tensile_internal._evaluation_spec(v.id, NULL, '{"function": "evaluate_model"}'),
            'previous', tensile_internal._evaluation_spec(p.id, NULL, '{"function": "evaluate_model"}'))
        FROM tensile_internal.jobs j JOIN tensile_internal.model_versions v ON v.id = tensile_internal._version_of(j)
             JOIN tensile_internal.models m ON m.id = j.model_id
            LEFT JOIN tensile_internal.model_versions p ON p.id = tensile_internal._compared_with(j, m)
        WHERE j.id = tensile_worker._my_job() AND tensile_internal._deploys(j.options) = 'if_better');
END $$;

-- A chunk of the weights of one of these versions; null past the end
CREATE FUNCTION tensile_worker._job_gate_weights(version bigint, seq int) RETURNS bytea
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_worker._my_job(); -- the next statement does not call it without a row
    SELECT w.data
    FROM tensile_internal.model_weights w JOIN tensile_internal.model_versions v ON v.id = w.version
        JOIN tensile_internal.jobs j ON j.model_id = v.model_id
    WHERE j.id = tensile_worker._my_job() AND tensile_internal._deploys(j.options) = 'if_better' AND w.version = $1
        AND w.seq = $2
$$;

-- Decide whether the job's version is deployed, in the transaction that finishes the job. `previous` is the id of the
-- version that it was compared with: false if another one is deployed by now, with which it has to be compared.
-- `warning` is for the job if its version is not deployed; `error` is what the comparison has failed with.
CREATE FUNCTION tensile_worker._job_decide(previous bigint, metric text, value float8, previous_value float8,
                                           sqlstate text, error text, OUT decided bool, OUT warning text)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile_internal.jobs;
    m tensile_internal.models;
    version int;
    margin float8;
    gain float8 := CASE WHEN metric = ANY (tensile_internal._losses()) THEN previous_value - value
        ELSE value - previous_value END;
    better bool;
    reason text := 'no version was deployed';
BEGIN
    SELECT * INTO j FROM tensile_internal.jobs o WHERE o.id = tensile_worker._my_job();
    m := tensile_internal._trained_model(j);
    decided := previous IS NOT DISTINCT FROM tensile_internal._compared_with(j, m);
    version := (SELECT min(v.version) FROM tensile_internal.model_versions v -- a first version's, which it takes over
                WHERE v.job = j.id OR v.id = tensile_internal._version_of(j));
    margin := coalesce((j.options->'gate'->>'margin')::float8, 0);
    better := coalesce(gain > margin AND gain <= 'Infinity', false); -- NaN is greater than all numbers
    IF NOT decided THEN
        RETURN;
    ELSIF error IS NOT NULL THEN
        reason := format('the comparison with version %s failed with SQLSTATE %s', m.deployed_version, sqlstate);
    ELSIF previous IS NOT NULL THEN
        reason := format('%s is %s, of version %s it is %s', metric, coalesce(value::text, 'not defined'),
                         m.deployed_version, coalesce(previous_value::text, 'not defined'))
            || CASE WHEN margin > 0 THEN format('; the margin is %s', margin) ELSE '' END;
    END IF;
    reason := concat_ws(': ', tensile_internal._winner_of(j.tuning), reason);
    PERFORM tensile_internal._deploy(
        m, version, j.owner, reason, CASE WHEN better OR previous IS NULL THEN 'deployed' ELSE 'kept' END, j.id,
        comparison => jsonb_strip_nulls(jsonb_build_object(
            'metric', metric, 'value', nullif(value, 'NaN'), 'previous_value', nullif(previous_value, 'NaN'))));
    IF NOT better AND previous IS NOT NULL THEN
        warning := format('version %s was not deployed: %s', version, reason || coalesce(': ' || error, ''));
    END IF;
END $$;

-- Metrics of which a lower value is better (LOSSES in pg_tensile/execution/data/scores.py)
CREATE FUNCTION tensile_internal._losses() RETURNS text[]
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT ARRAY['log_loss', 'brier', 'rmse', 'mae', 'mape', 'median_absolute_error']
$$;
