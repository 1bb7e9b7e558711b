-- The version that predictions use: deploying, and rolling back

-- When a job's version is deployed: always, if_better or never; true and false were the values of 0.1.0.
CREATE FUNCTION tensile_internal._deploys(options jsonb) RETURNS text
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE coalesce($1->>'deploy', 'true') WHEN 'true' THEN 'always' WHEN 'false' THEN 'never'
                ELSE $1->>'deploy' END
$$;

-- Record a decision about a version of the locked model `m`, and unless it is "kept", have predictions use the version.
-- `restored`: the deployment that a rollback returns to. `comparison`: {"metric", "value", "previous_value"}.
CREATE FUNCTION tensile_internal._deploy(m tensile_internal.models, version int, decided_by name, reason text,
                                         decision text DEFAULT 'deployed', job bigint DEFAULT NULL,
                                         restored tensile_internal.deployments DEFAULT NULL,
                                         comparison jsonb DEFAULT '{}') RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    moment timestamptz := clock_timestamp();
    current bigint;
BEGIN
    IF decision <> 'kept' THEN
        UPDATE tensile_internal.deployments d SET ended_at = moment WHERE d.model_id = m.id AND d.ended_at IS NULL
            RETURNING d.id INTO current;
        UPDATE tensile_internal.models o SET deployed_version = _deploy.version, updated_at = moment WHERE o.id = m.id;
        DELETE FROM tensile_internal.drift_alarms a USING tensile_internal.model_versions v
            WHERE v.id = a.version AND v.model_id = m.id AND v.version <> _deploy.version;
    END IF;
    INSERT INTO tensile_internal.deployments (model_id, version, decision, reason, job, decided_by, decided_at,
                                              ended_at, metric, value, previous_version, previous_value, follows)
        VALUES (m.id, _deploy.version, _deploy.decision, _deploy.reason, _deploy.job, _deploy.decided_by, moment,
                CASE WHEN _deploy.decision = 'kept' THEN moment END, comparison->>'metric',
                (comparison->>'value')::float8, m.deployed_version, (comparison->>'previous_value')::float8,
                CASE _deploy.decision WHEN 'deployed' THEN current WHEN 'rolled back' THEN restored.follows END);
END $$;

-- The deployment that rollback_model returns to: the nearest one before the present one whose version still exists
CREATE FUNCTION tensile_internal._earlier_deployment(model bigint) RETURNS tensile_internal.deployments
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    WITH RECURSIVE earlier AS (
        SELECT d.follows AS id, d.version FROM tensile_internal.deployments d
            WHERE d.model_id = $1 AND d.ended_at IS NULL
        UNION ALL
        SELECT d.follows, e.version FROM earlier e JOIN tensile_internal.deployments d ON d.id = e.id
    )
    SELECT d.* FROM earlier e JOIN tensile_internal.deployments d ON d.id = e.id
        JOIN tensile_internal.model_versions v ON v.model_id = d.model_id AND v.version = d.version
            AND v.weight_bytes IS NOT NULL
    WHERE d.version <> e.version
    ORDER BY d.id DESC LIMIT 1
$$;

CREATE FUNCTION tensile_internal._deploy_model(caller oid, model text, version int, reason text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile_internal.models := tensile_internal._own_model(caller, model);
BEGIN
    PERFORM tensile_internal._check_version(m, version);
    IF m.deployed_version IS DISTINCT FROM version THEN
        PERFORM tensile_internal._deploy(m, version, pg_get_userbyid(caller), reason);
    END IF;
END $$;

CREATE FUNCTION tensile_internal._rollback_model(caller oid, model text, reason text) RETURNS int
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile_internal.models := tensile_internal._own_model(caller, model);
    earlier tensile_internal.deployments := tensile_internal._earlier_deployment(m.id);
BEGIN
    IF earlier.id IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('model "%s" has no earlier deployment to return to', model),
            HINT = 'Choose a version with deploy_model; tensile.deployments lists the earlier ones, whose versions '
                   'may have been dropped.';
    END IF;
    PERFORM tensile_internal._deploy(m, earlier.version, pg_get_userbyid(caller), reason, 'rolled back',
                                     restored => earlier);
    RETURN earlier.version;
END $$;
