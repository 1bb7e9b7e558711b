------------------------------------------------------------------------------------------------------------------------
-- Models
------------------------------------------------------------------------------------------------------------------------

-- True if the caller may act for this owner; superusers may act for an owner that no longer exists as well.
CREATE FUNCTION tensile._acts_for(caller oid, owner oid, owner_name name) RETURNS bool
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(c.rolsuper OR pg_has_role(c.oid, o.oid, 'USAGE'), false)
    FROM pg_roles c LEFT JOIN pg_roles o ON o.oid = $2 AND o.rolname = $3
    WHERE c.oid = $1
$$;

-- True if the caller owns the model or holds the privilege on it.
CREATE FUNCTION tensile._granted(caller oid, model bigint, privilege text) RETURNS bool
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM tensile.models m WHERE m.id = $2 AND tensile._acts_for($1, m.owner, m.owner_name))
        OR EXISTS (SELECT FROM tensile.model_grants g
                   WHERE g.model = $2 AND g.privilege = $3
                   AND (g.grantee = 0 OR tensile._acts_for($1, g.grantee, g.grantee_name)))
$$;

-- The predictor's number of a model as its folder has it, without a version: negative, and another one for each
-- architecture that the model has had. Also called from C (model.c).
CREATE FUNCTION tensile._base_number(model bigint, architecture jsonb) RETURNS bigint
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT -(($1 << 24) | (jsonb_hash($2)::bigint & 16777215))
$$;

-- Lock and return the model's row; raise an error unless the caller may change it.
CREATE FUNCTION tensile._own_model(caller oid, name text) RETURNS tensile.models
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models;
BEGIN
    SELECT * INTO m FROM tensile.models WHERE models.name = _own_model.name FOR NO KEY UPDATE;
    PERFORM tensile._check_owner(caller, m, name);
    RETURN m;
END $$;

-- Raise an error unless there is a model and the caller may change it; `name` is what it was looked up by.
CREATE FUNCTION tensile._check_owner(caller oid, m tensile.models, name text) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF m.id IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object', MESSAGE = format('model "%s" does not exist', name),
            HINT = 'The models you may use are listed in tensile.models; register_model creates a new one.';
    ELSIF NOT tensile._acts_for(caller, m.owner, m.owner_name) THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', MESSAGE = format('must be owner of model "%s"', name),
            HINT = format('It belongs to role "%s".', m.owner_name);
    END IF;
END $$;

CREATE FUNCTION tensile._not_null(variadic arguments text[]) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    FOR i IN 1 .. array_length(arguments, 1) BY 2 LOOP
        IF arguments[i + 1] IS NULL THEN
            RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed',
                MESSAGE = format('argument "%s" must not be null', arguments[i]),
                HINT = 'Pass a value, or leave the argument out if it has a default.';
        END IF;
    END LOOP;
END $$;

CREATE FUNCTION tensile._register_model(caller oid, name text, architecture jsonb, description text, replace bool)
    RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models;
    model bigint;
BEGIN
    PERFORM tensile._not_null('name', name, 'replace', replace::text), tensile._check_model_name(name);
    IF architecture IS NOT NULL THEN -- otherwise the first train_model chooses one
        PERFORM tensile._check_architecture(architecture);
    END IF;
    PERFORM tensile._check_code(caller, architecture);

    model := tensile._insert_model(caller, name, architecture, NULL, description);
    IF model IS NOT NULL THEN
        RETURN model;
    ELSIF NOT replace THEN
        RAISE EXCEPTION USING ERRCODE = 'duplicate_object', MESSAGE = format('model "%s" already exists', name),
            HINT = 'Its owner can give it a new architecture with replace => true.';
    END IF;

    m := tensile._own_model(caller, name);
    PERFORM tensile._no_open_job(m), tensile._no_open_tuning(m);
    UPDATE tensile.models SET architecture = _register_model.architecture, architecture_reason = NULL,
        auto_registered = false, description = _register_model.description, updated_at = clock_timestamp()
        WHERE id = m.id;
    RETURN m.id;
END $$;

-- Raise an error if the architecture runs code that the caller may not run on the server.
CREATE FUNCTION tensile._check_code(caller oid, architecture jsonb) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (tensile._rules()->'architectures'->(architecture->>'type')->>'code')::bool
       AND NOT pg_has_role(caller, 'pg_execute_server_program', 'USAGE') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('permission denied for architecture type "%s"', architecture->>'type'),
            DETAIL = 'It runs code as the operating-system user of the server.',
            HINT = format('Only members of role pg_execute_server_program may register it; any role may register %s.',
                          (SELECT string_agg(to_json(a.key)::text, ', ')
                           FROM json_each(tensile._rules()->'architectures') a WHERE a.value->'code' IS NULL));
    END IF;
END $$;

CREATE FUNCTION tensile._check_model_name(name text) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- Bytes that ISO 8859 and Unicode have for control characters are letters in these encodings.
    IF length(name) NOT BETWEEN 1 AND 200
       OR name ~ (CASE WHEN getdatabaseencoding() ~ '^(WIN|KOI8|SQL_ASCII)' THEN '[\x01-\x1F\x7F]' ELSE '[[:cntrl:]]' END) THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'invalid model name',
            HINT = 'A name has 1 to 200 characters and no control characters.';
    ELSIF getdatabaseencoding() = 'SQL_ASCII' THEN
        PERFORM convert_from(convert_to(name, 'SQL_ASCII'), 'UTF8'); -- raises an error for what is not in UTF-8
    END IF;
END $$;

-- Id of the new model; null if there is one of that name
CREATE FUNCTION tensile._insert_model(caller oid, name text, architecture jsonb, reason text, description text,
                                      auto_registered bool DEFAULT false)
    RETURNS bigint
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile.models (name, owner_name, architecture, architecture_reason, description, auto_registered)
        SELECT $2, r.rolname, $3, $4, $5, $6 FROM pg_roles r WHERE r.oid = $1
        ON CONFLICT DO NOTHING
        RETURNING id
$$;

-- Number of a model's next version; the model's row must be locked.
CREATE FUNCTION tensile._next_version(model bigint) RETURNS int
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT 1 + greatest((SELECT max(o.version) FROM tensile.model_versions o WHERE o.model = $1),
                        (SELECT max(o.version) FROM tensile.jobs o WHERE o.model = $1), 0)
$$;

-- Delete old versions beyond the model's retention, but not the deployed one or that which rollback_model returns to, nor
-- those of trials while their tuning goes on.
CREATE FUNCTION tensile._drop_old_versions(m tensile.models) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    DELETE FROM tensile.model_versions v
        WHERE v.model = m.id AND v.version IS DISTINCT FROM m.deployed_version
          AND v.version IS DISTINCT FROM CASE WHEN m.keep_versions > 1
                                              THEN (tensile._earlier_deployment(m.id)).version END
          AND NOT EXISTS (SELECT FROM tensile.trials k JOIN tensile.tunings t ON t.id = k.tuning
                          WHERE k.job = v.job AND t.ended_at IS NULL) -- may be the best trial's
          AND v.version <= (SELECT o.version FROM tensile.model_versions o WHERE o.model = m.id
                            ORDER BY o.version DESC OFFSET m.keep_versions LIMIT 1)
          AND m.keep_versions IS NOT NULL;
END $$;

CREATE FUNCTION tensile._no_open_job(model tensile.models) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    job bigint := (SELECT j.id FROM tensile.jobs j WHERE j.model = (_no_open_job.model).id AND j.ended_at IS NULL
                                                   AND j.tuning IS NULL);
BEGIN
    IF job IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'object_in_use',
            MESSAGE = format('model "%s" is being trained by job %s', (model).name, job),
            HINT = format('Wait with wait_for_job(%s) or stop it with cancel_job(%1$s).', job);
    END IF;
END $$;

CREATE FUNCTION tensile._drop_model(caller oid, name text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models := tensile._own_model(caller, name);
    job record;
BEGIN
    PERFORM FROM tensile.models o WHERE o.id = m.id FOR UPDATE; -- before the jobs, one of which may be being submitted
    FOR job IN SELECT j.id, j.state FROM tensile.jobs j WHERE j.model = m.id FOR UPDATE LOOP
        IF job.state IN ('queued', 'interrupted') THEN
            PERFORM tensile._end_job(job.id, 'failed', '42704', format('model "%s" was dropped', name),
                                     'Register the model again and submit a new job.');
        END IF;
        DELETE FROM tensile.checkpoints c WHERE c.job = job.id;
        -- A worker that has not noticed yet continues to write; the end of its job deletes the trace.
        DELETE FROM tensile.traces t WHERE t.job = job.id AND job.state NOT IN ('starting', 'running', 'waiting');
        PERFORM tensile._notify_stop(job.id);
    END LOOP;
    DELETE FROM tensile.models WHERE id = m.id;
END $$;

-- Raise an error unless the model has this version and the version is complete.
CREATE FUNCTION tensile._check_version(m tensile.models, version int) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM tensile.model_versions v WHERE v.model = m.id AND v.version = _check_version.version
                   AND v.weight_bytes IS NOT NULL) THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object',
            MESSAGE = format('model "%s" has no version %s', m.name, coalesce(version::text, 'null')),
            HINT = coalesce((SELECT 'It has: ' || string_agg(v.version::text, ', ' ORDER BY v.version) || '.'
                             FROM tensile.model_versions v WHERE v.model = m.id AND v.weight_bytes IS NOT NULL),
                            'Train the model first with train_model.');
    END IF;
END $$;

CREATE FUNCTION tensile._set_model_memory_budget(caller oid, model text, memory_budget text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models := tensile._own_model(caller, model);
BEGIN
    UPDATE tensile.models SET memory_budget = tensile._parse_budget(_set_model_memory_budget.memory_budget),
        updated_at = clock_timestamp() WHERE id = m.id;
END $$;

CREATE FUNCTION tensile._drop_version(caller oid, model text, version int) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models := tensile._own_model(caller, model);
BEGIN
    PERFORM tensile._check_version(m, version);
    IF version = m.deployed_version THEN
        RAISE EXCEPTION USING ERRCODE = 'object_in_use',
            MESSAGE = format('cannot drop version %s of model "%s" because it is deployed', version, model),
            HINT = 'Deploy another version with deploy_model first, or drop the model with drop_model.';
    END IF;
    DELETE FROM tensile.model_versions v WHERE v.model = m.id AND v.version = _drop_version.version;
END $$;

CREATE FUNCTION tensile._set_model_retention(caller oid, model text, keep_versions int) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models := tensile._own_model(caller, model);
BEGIN
    IF keep_versions < 1 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('keep_versions is out of range: %s', keep_versions),
            HINT = 'Use 1 or more, or null to keep all versions.';
    END IF;
    UPDATE tensile.models SET keep_versions = _set_model_retention.keep_versions, updated_at = clock_timestamp()
        WHERE id = m.id;
END $$;

-- The role's name as stored in model_grants; raises an error if the role does not exist.
CREATE FUNCTION tensile._role_name(role text) RETURNS name
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF role = 'public' OR EXISTS (SELECT FROM pg_roles WHERE rolname = role) THEN
        RETURN role;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'undefined_object', MESSAGE = format('role "%s" does not exist', role),
        HINT = 'Role names are case-sensitive here; see pg_roles.';
END $$;

CREATE FUNCTION tensile._check_privilege(privilege text) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF privilege IN ('predict', 'train') THEN
        RETURN;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
        MESSAGE = format('unknown privilege "%s" on a model', privilege), HINT = 'Use ''predict'' or ''train''.';
END $$;

CREATE FUNCTION tensile._grant_model(caller oid, model text, grantee text, privilege text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models := tensile._own_model(caller, model);
BEGIN
    PERFORM tensile._not_null('grantee', grantee), tensile._check_privilege(privilege);
    INSERT INTO tensile.model_grants (model, grantee_name, privilege, grantor_name)
        VALUES (m.id, tensile._role_name(grantee), _grant_model.privilege, m.owner_name)
        ON CONFLICT ON CONSTRAINT model_grants_pkey DO UPDATE SET grantee = EXCLUDED.grantee;
END $$;

CREATE FUNCTION tensile._revoke_model(caller oid, model text, grantee text, privilege text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models := tensile._own_model(caller, model);
BEGIN
    PERFORM tensile._not_null('grantee', grantee), tensile._check_privilege(privilege);
    DELETE FROM tensile.model_grants g
        WHERE g.model = m.id AND g.grantee_name = _revoke_model.grantee AND g.privilege = _revoke_model.privilege;
END $$;

CREATE FUNCTION tensile._set_model_owner(caller oid, model text, role text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models := tensile._own_model(caller, model);
    new_owner oid;
BEGIN
    PERFORM tensile._not_null('role', role);
    new_owner := (SELECT oid FROM pg_roles WHERE rolname = tensile._role_name(role));
    IF new_owner IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'public cannot own a model',
            HINT = 'Name a role; use grant_model to let all roles use a model.';
    ELSIF NOT pg_has_role(caller, new_owner, 'MEMBER') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', MESSAGE = format('must be member of role "%s"', role),
            HINT = 'A superuser can give a model to any role.';
    END IF;
    UPDATE tensile.models SET owner = new_owner, owner_name = role, auto_registered = false,
        updated_at = clock_timestamp() WHERE id = m.id;
    UPDATE tensile.model_grants g SET grantor = new_owner, grantor_name = role WHERE g.model = m.id;
END $$;
