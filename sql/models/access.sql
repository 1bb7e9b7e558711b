-- Owners of models and grants: granting, revoking and checking

-- True if the caller owns the model or holds the privilege on it.
CREATE FUNCTION tensile_internal._granted(caller oid, model bigint, privilege text) RETURNS bool
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM tensile_internal.models m
                   WHERE m.id = $2 AND tensile_internal._acts_for($1, m.owner_id, m.owner))
        OR EXISTS (SELECT FROM tensile_internal.model_grants g
                   WHERE g.model_id = $2 AND g.privilege = $3
                   AND (g.grantee = 0 OR tensile_internal._acts_for($1, g.grantee, g.grantee_name)))
$$;

-- Lock and return the model's row; raise an error unless the caller may change it.
CREATE FUNCTION tensile_internal._own_model(caller oid, name text) RETURNS tensile_internal.models
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile_internal.models;
BEGIN
    SELECT * INTO m FROM tensile_internal.models WHERE models.name = _own_model.name FOR NO KEY UPDATE;
    PERFORM tensile_internal._check_owner(caller, m, name);
    RETURN m;
END $$;

-- Raise an error unless there is a model and the caller may change it; `name` is what it was looked up by.
CREATE FUNCTION tensile_internal._check_owner(caller oid, m tensile_internal.models, name text) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF m.id IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object', MESSAGE = format('model "%s" does not exist', name),
            HINT = 'The models you may use are listed in tensile.models; register_model creates a new one.';
    ELSIF NOT tensile_internal._acts_for(caller, m.owner_id, m.owner) THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', MESSAGE = format('must be owner of model "%s"', name),
            HINT = format('It belongs to role "%s".', m.owner);
    END IF;
END $$;

CREATE FUNCTION tensile_internal._check_privilege(privilege text) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF privilege IN ('predict', 'train') THEN
        RETURN;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
        MESSAGE = format('unknown privilege "%s" on a model', privilege), HINT = 'Use ''predict'' or ''train''.';
END $$;

CREATE FUNCTION tensile_internal._grant_model(caller oid, model text, grantee text, privilege text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile_internal.models := tensile_internal._own_model(caller, model);
BEGIN
    PERFORM tensile_internal._not_null('grantee', grantee), tensile_internal._check_privilege(privilege);
    INSERT INTO tensile_internal.model_grants (model_id, grantee_name, privilege, grantor_name)
        VALUES (m.id, tensile_internal._role_name(grantee), _grant_model.privilege, m.owner)
        ON CONFLICT ON CONSTRAINT model_grants_pkey DO UPDATE SET grantee = EXCLUDED.grantee;
END $$;

CREATE FUNCTION tensile_internal._revoke_model(caller oid, model text, grantee text, privilege text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile_internal.models := tensile_internal._own_model(caller, model);
BEGIN
    PERFORM tensile_internal._not_null('grantee', grantee), tensile_internal._check_privilege(privilege);
    DELETE FROM tensile_internal.model_grants g
        WHERE g.model_id = m.id AND g.grantee_name = _revoke_model.grantee AND g.privilege = _revoke_model.privilege;
END $$;

CREATE FUNCTION tensile_internal._set_model_owner(caller oid, model text, role text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile_internal.models := tensile_internal._own_model(caller, model);
    new_owner oid;
BEGIN
    PERFORM tensile_internal._not_null('role', role);
    new_owner := (SELECT oid FROM pg_roles WHERE rolname = tensile_internal._role_name(role));
    IF new_owner IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'public cannot own a model',
            HINT = 'Name a role; use grant_model to let all roles use a model.';
    ELSIF NOT pg_has_role(caller, new_owner, 'MEMBER') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', MESSAGE = format('must be member of role "%s"', role),
            HINT = 'A superuser can give a model to any role.';
    END IF;
    UPDATE tensile_internal.models SET owner_id = new_owner, owner = role, auto_registered = false,
        updated_at = clock_timestamp() WHERE id = m.id;
    UPDATE tensile_internal.model_grants g SET grantor = new_owner, grantor_name = role WHERE g.model_id = m.id;
END $$;

-- The version (null: the deployed one) of a model, for its owner. Nothing is locked, so that a standby can export.
CREATE FUNCTION tensile_internal._owned_version(caller oid, model text, version int)
    RETURNS tensile_internal.model_versions
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile_internal.models;
    v tensile_internal.model_versions;
BEGIN
    PERFORM tensile_internal._not_null('model', model);
    SELECT * INTO m FROM tensile_internal.models WHERE name = model;
    PERFORM tensile_internal._check_owner(caller, m, model);
    IF version IS NULL AND m.deployed_version IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('model "%s" has no version that is deployed', model),
            HINT = 'Train it with train_model, choose a version with deploy_model, or pass a version.';
    END IF;
    PERFORM tensile_internal._check_version(m, coalesce(version, m.deployed_version));
    SELECT * INTO v FROM tensile_internal.model_versions o
        WHERE o.model_id = m.id AND o.version = coalesce(_owned_version.version, m.deployed_version);
    RETURN v;
END $$;
