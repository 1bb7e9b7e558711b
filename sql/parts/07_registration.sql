------------------------------------------------------------------------------------------------------------------------
-- Models
------------------------------------------------------------------------------------------------------------------------

-- May the caller act for this owner? Superusers may act for an owner who is gone, too.
CREATE FUNCTION tensile._acts_for(caller oid, owner oid, owner_name name) RETURNS bool
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(c.rolsuper OR pg_has_role(c.oid, o.oid, 'USAGE'), false)
    FROM pg_roles c LEFT JOIN pg_roles o ON o.oid = $2 AND o.rolname = $3
    WHERE c.oid = $1
$$;

-- Does the caller own the model or hold the privilege on it? Called from C, too (tensile_model_granted).
CREATE FUNCTION tensile._granted(caller oid, model bigint, privilege text) RETURNS bool
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM tensile.models m WHERE m.id = $2 AND tensile._acts_for($1, m.owner, m.owner_name))
        OR EXISTS (SELECT FROM tensile.model_grants g
                   WHERE g.model = $2 AND g.privilege = $3
                   AND (g.grantee = 0 OR tensile._acts_for($1, g.grantee, g.grantee_name)))
$$;

-- The model's row, locked, after making sure that the caller may change it
CREATE FUNCTION tensile._own_model(caller oid, name text) RETURNS tensile.models
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models;
BEGIN
    SELECT * INTO m FROM tensile.models WHERE models.name = _own_model.name FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object', MESSAGE = format('model "%s" does not exist', name),
            HINT = 'The models you may use are listed in tensile.models; register_model makes a new one.';
    ELSIF NOT tensile._acts_for(caller, m.owner, m.owner_name) THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', MESSAGE = format('must be owner of model "%s"', name),
            HINT = format('It belongs to role "%s".', m.owner_name);
    END IF;
    RETURN m;
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
    PERFORM tensile._not_null('name', name, 'architecture', architecture::text, 'replace', replace::text);
    IF length(name) NOT BETWEEN 1 AND 200 OR name ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'invalid name of a model',
            HINT = 'A name has 1 to 200 characters and no control characters.';
    END IF;
    PERFORM tensile._check_architecture(architecture);
    IF (tensile._rules()->'architectures'->(architecture->>'type')->>'code')::bool
       AND NOT pg_has_role(caller, 'pg_execute_server_program', 'USAGE') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('permission denied for architecture type "%s"', architecture->>'type'),
            DETAIL = 'It runs code as the operating-system user of the server.',
            HINT = format('Only members of role pg_execute_server_program may register it; for everybody are %s.',
                          (SELECT string_agg(to_json(a.key)::text, ', ')
                           FROM json_each(tensile._rules()->'architectures') a WHERE a.value->'code' IS NULL));
    END IF;

    INSERT INTO tensile.models (name, owner_name, architecture, description)
        SELECT _register_model.name, r.rolname, _register_model.architecture, _register_model.description
        FROM pg_roles r WHERE r.oid = caller
        ON CONFLICT DO NOTHING
        RETURNING id INTO model;
    IF model IS NOT NULL THEN
        RETURN model;
    ELSIF NOT replace THEN
        RAISE EXCEPTION USING ERRCODE = 'duplicate_object', MESSAGE = format('model "%s" already exists', name),
            HINT = 'Its owner can give it a new architecture with replace => true.';
    END IF;

    m := tensile._own_model(caller, name);
    PERFORM tensile._no_open_job(m);
    UPDATE tensile.models SET architecture = _register_model.architecture, description = _register_model.description,
        updated_at = clock_timestamp() WHERE id = m.id;
    RETURN m.id;
END $$;
