-- Numbers and retention of versions

-- The predictor's number of a model as its folder has it, without a version: negative, and another one for each
-- architecture that the model has had. Also called from C (model.c).
CREATE FUNCTION tensile_worker._base_number(model bigint, architecture jsonb) RETURNS bigint
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT -(($1 << 24) | (jsonb_hash($2)::bigint & 16777215))
$$;

-- Number of a model's next version; the model's row must be locked.
CREATE FUNCTION tensile_internal._next_version(model bigint) RETURNS int
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT 1 + greatest((SELECT max(o.version) FROM tensile_internal.model_versions o WHERE o.model_id = $1),
                        (SELECT max(o.version) FROM tensile_internal.jobs o WHERE o.model_id = $1), 0)
$$;

-- Delete old versions beyond the model's retention, but not the deployed one or that which rollback_model returns to,
-- nor those of open jobs, or with whose weights they have begun, or of trials while their tuning goes on.
CREATE FUNCTION tensile_internal._drop_old_versions(m tensile_internal.models) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- 0: all
    kept int := nullif(coalesce(m.keep_versions, current_setting('pg_tensile.version_retention')::int), 0);
BEGIN
    DELETE FROM tensile_internal.model_versions v
        WHERE v.model_id = m.id AND v.version IS DISTINCT FROM m.deployed_version
          AND v.version IS DISTINCT FROM CASE WHEN kept > 1
                                              THEN (tensile_internal._earlier_deployment(m.id)).version END
          AND NOT EXISTS (SELECT FROM tensile_internal.jobs j
                          WHERE j.ended_at IS NULL AND (j.id = v.job OR j.start_version = v.id))
          AND NOT EXISTS (SELECT FROM tensile_internal.trials k JOIN tensile_internal.tunings t ON t.id = k.tuning
                          WHERE k.job = v.job AND t.ended_at IS NULL) -- may be the best trial's
          AND v.version <= (SELECT o.version FROM tensile_internal.model_versions o WHERE o.model_id = m.id
                            ORDER BY o.version DESC OFFSET kept LIMIT 1)
          AND kept IS NOT NULL;
END $$;

-- Raise an error unless the model has this version and the version is complete.
CREATE FUNCTION tensile_internal._check_version(m tensile_internal.models, version int) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM tensile_internal.model_versions v
                   WHERE v.model_id = m.id AND v.version = _check_version.version
                   AND v.weight_bytes IS NOT NULL) THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object',
            MESSAGE = format('model "%s" has no version %s', m.name, coalesce(version::text, 'null')),
            HINT = coalesce((SELECT 'It has: ' || string_agg(v.version::text, ', ' ORDER BY v.version) || '.'
                             FROM tensile_internal.model_versions v
                                 WHERE v.model_id = m.id AND v.weight_bytes IS NOT NULL),
                            'Train the model first with train_model.');
    END IF;
END $$;

CREATE FUNCTION tensile_internal._drop_model_version(caller oid, model text, version int) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile_internal.models := tensile_internal._own_model(caller, model);
BEGIN
    PERFORM tensile_internal._check_version(m, version);
    IF version = m.deployed_version THEN
        RAISE EXCEPTION USING ERRCODE = 'object_in_use',
            MESSAGE = format('cannot drop version %s of model "%s" because it is deployed', version, model),
            HINT = 'Deploy another version with deploy_model first, or drop the model with drop_model.';
    END IF;
    DELETE FROM tensile_internal.model_versions v WHERE v.model_id = m.id AND v.version = _drop_model_version.version;
END $$;

CREATE FUNCTION tensile_internal._set_model_retention(caller oid, model text, keep_versions int) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile_internal.models := tensile_internal._own_model(caller, model);
BEGIN
    IF keep_versions < 0 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('keep_versions is out of range: %s', keep_versions),
            HINT = 'Use 1 or more, 0 to keep all versions, or null for the setting pg_tensile.version_retention.';
    END IF;
    UPDATE tensile_internal.models SET keep_versions = _set_model_retention.keep_versions,
        updated_at = clock_timestamp()
        WHERE id = m.id;
END $$;
