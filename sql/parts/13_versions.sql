------------------------------------------------------------------------------------------------------------------------
-- Functions for the job's worker: the version that training begins with, and the one that the job's is compared with
------------------------------------------------------------------------------------------------------------------------

-- The version whose weights training begins with (option start = deployed), as in the JOB frame; null: none. All attempts
-- begin with the same one, as long as it exists.
CREATE FUNCTION tensile._start_of(j tensile.jobs) RETURNS jsonb
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v tensile.model_versions;
BEGIN
    IF coalesce(j.options->>'start', 'scratch') <> 'deployed' THEN
        RETURN NULL;
    END IF;
    SELECT * INTO v FROM tensile.model_versions o WHERE o.id = j.start_version;
    IF NOT FOUND THEN
        SELECT o.* INTO v FROM tensile.model_versions o JOIN tensile.models m ON m.id = o.model
            WHERE m.id = j.model AND o.version = m.deployed_version;
        UPDATE tensile.jobs o SET start_version = v.id WHERE o.id = j.id;
    END IF;
    RETURN CASE WHEN v.id IS NOT NULL THEN
        jsonb_build_object('id', v.id, 'version', v.version, 'architecture', v.architecture,
                           'preprocessing', v.preprocessing, 'weight_bytes', v.weight_bytes) END;
END $$;

-- A chunk of the weights of that version; null past the end
CREATE FUNCTION tensile._job_start_weights(seq int) RETURNS bytea
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._my_job(); -- the next statement does not call it without a row
    SELECT w.data FROM tensile.model_weights w JOIN tensile.jobs j ON j.start_version = w.version
    WHERE j.id = tensile._my_job() AND w.seq = $1
$$;

-- Id in model_versions of the version that the job has trained, or that it compares
CREATE FUNCTION tensile._version_of(j tensile.jobs) RETURNS bigint
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE ($1).kind WHEN 'compare' THEN ($1).start_version
                ELSE (SELECT v.id FROM tensile.model_versions v WHERE v.job = ($1).id) END
$$;

-- What the job's version is to be compared with; null unless it is deployed if it is better. "previous" is null while no
-- version is deployed, otherwise the versions are as in JOB frames of evaluations.
CREATE FUNCTION tensile._job_gate() RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM tensile._my_job(); -- the next statement does not call it without a row
    RETURN (SELECT jsonb_build_object(
            'query', coalesce(j.options->'gate'->>'query', j.validation_query),
            'metric', coalesce(j.options->'gate'->>'metric', CASE v.task WHEN 'regression' THEN 'rmse' ELSE 'log_loss' END),
            'version', tensile._evaluation_spec(v.id, NULL, '{"function": "evaluate_model"}'),
            'previous', tensile._evaluation_spec(p.id, NULL, '{"function": "evaluate_model"}'))
        FROM tensile.jobs j JOIN tensile.model_versions v ON v.id = tensile._version_of(j) JOIN tensile.models m ON m.id = j.model
            LEFT JOIN tensile.model_versions p ON p.model = m.id AND p.version = m.deployed_version
        WHERE j.id = tensile._my_job() AND tensile._deploys(j.options) = 'if_better');
END $$;

-- A chunk of the weights of one of these versions; null past the end
CREATE FUNCTION tensile._job_gate_weights(version bigint, seq int) RETURNS bytea
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._my_job(); -- the next statement does not call it without a row
    SELECT w.data
    FROM tensile.model_weights w JOIN tensile.model_versions v ON v.id = w.version
        JOIN tensile.jobs j ON j.model = v.model
    WHERE j.id = tensile._my_job() AND tensile._deploys(j.options) = 'if_better' AND w.version = $1 AND w.seq = $2
$$;

-- Decide whether the job's version is deployed, in the transaction that finishes the job. `previous` is the id of the
-- version that it was compared with: false if another one is deployed by now, with which it has to be compared.
-- `warning` is for the job if its version is not deployed; `error` is what the comparison has failed with.
CREATE FUNCTION tensile._job_decide(previous bigint, metric text, value float8, previous_value float8, sqlstate text,
                                    error text, OUT decided bool, OUT warning text)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile.jobs;
    m tensile.models;
    version int;
    margin float8;
    gain float8 := CASE WHEN metric = ANY (tensile._losses()) THEN previous_value - value ELSE value - previous_value END;
    better bool;
    reason text := 'no version was deployed';
BEGIN
    SELECT * INTO j FROM tensile.jobs o WHERE o.id = tensile._my_job();
    m := tensile._trained_model(j);
    decided := previous IS NOT DISTINCT FROM (SELECT v.id FROM tensile.model_versions v
                                              WHERE v.model = m.id AND v.version = m.deployed_version);
    version := (SELECT v.version FROM tensile.model_versions v WHERE v.id = tensile._version_of(j));
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
    reason := concat_ws(': ', tensile._winner_of(j.tuning), reason);
    PERFORM tensile._deploy(
        m, version, j.owner_name, reason, CASE WHEN better OR previous IS NULL THEN 'deployed' ELSE 'kept' END, j.id,
        comparison => jsonb_strip_nulls(jsonb_build_object(
            'metric', metric, 'value', nullif(value, 'NaN'), 'previous_value', nullif(previous_value, 'NaN'))));
    IF NOT better AND previous IS NOT NULL THEN
        warning := format('version %s was not deployed: %s', version, reason || coalesce(': ' || error, ''));
    END IF;
END $$;

-- Metrics of which a lower value is better (LOSSES in pg_tensile/execution/data/scores.py)
CREATE FUNCTION tensile._losses() RETURNS text[]
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT ARRAY['log_loss', 'brier', 'rmse', 'mae', 'mape', 'median_absolute_error']
$$;
