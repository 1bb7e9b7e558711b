-- Registering and dropping models

CREATE FUNCTION tensile_internal._not_null(variadic arguments text[]) RETURNS void
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

CREATE FUNCTION tensile_internal._register_model(caller oid, name text, architecture jsonb, description text,
                                                 replace bool) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile_internal.models;
    model bigint;
BEGIN
    PERFORM tensile_internal._not_null('name', name, 'replace', replace::text),
        tensile_internal._check_model_name(name);
    IF architecture IS NOT NULL THEN -- otherwise the first train_model chooses one
        PERFORM tensile_internal._check_architecture(architecture);
    END IF;
    PERFORM tensile_internal._check_code(caller, architecture);

    model := tensile_internal._insert_model(caller, name, architecture, NULL, description);
    IF model IS NOT NULL THEN
        RETURN model;
    ELSIF NOT replace THEN
        RAISE EXCEPTION USING ERRCODE = 'duplicate_object', MESSAGE = format('model "%s" already exists', name),
            HINT = 'Its owner can give it a new architecture with replace => true.';
    END IF;

    m := tensile_internal._own_model(caller, name);
    PERFORM tensile_internal._no_open_job(m), tensile_internal._no_open_tuning(m);
    UPDATE tensile_internal.models SET architecture = _register_model.architecture, architecture_reason = NULL,
        auto_registered = false, description = _register_model.description, updated_at = clock_timestamp()
        WHERE id = m.id;
    RETURN m.id;
END $$;

-- Raise an error if the architecture runs code that the caller may not run on the server.
CREATE FUNCTION tensile_internal._check_code(caller oid, architecture jsonb) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (tensile_internal._rules()->'architectures'->(architecture->>'type')->>'code')::bool
       AND NOT pg_has_role(caller, 'pg_execute_server_program', 'USAGE') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('permission denied for architecture type "%s"', architecture->>'type'),
            DETAIL = 'It runs code as the operating-system user of the server.',
            HINT = format('Only members of role pg_execute_server_program may register it; any role may register %s.',
                          (SELECT string_agg(to_json(a.key)::text, ', ')
                           FROM json_each(tensile_internal._rules()->'architectures') a WHERE a.value->'code' IS NULL));
    END IF;
END $$;

CREATE FUNCTION tensile_internal._check_model_name(name text) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- Bytes that ISO 8859 and Unicode have for control characters are letters in these encodings.
    IF length(name) NOT BETWEEN 1 AND 200
       OR name ~ (CASE WHEN getdatabaseencoding() ~ '^(WIN|KOI8|SQL_ASCII)' THEN '[\x01-\x1F\x7F]'
                  ELSE '[[:cntrl:]]' END) THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'invalid model name',
            HINT = 'A name has 1 to 200 characters and no control characters.';
    ELSIF getdatabaseencoding() = 'SQL_ASCII' THEN
        PERFORM convert_from(convert_to(name, 'SQL_ASCII'), 'UTF8'); -- raises an error for what is not in UTF-8
    END IF;
END $$;

-- Id of the new model; null if there is one of that name
CREATE FUNCTION tensile_internal._insert_model(caller oid, name text, architecture jsonb, reason text, description text,
                                               auto_registered bool DEFAULT false) RETURNS bigint
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile_internal.models (name, owner, architecture, architecture_reason, description, auto_registered)
        SELECT $2, r.rolname, $3, $4, $5, $6 FROM pg_roles r WHERE r.oid = $1
        ON CONFLICT DO NOTHING
        RETURNING id
$$;

CREATE FUNCTION tensile_internal._no_open_job(model tensile_internal.models) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    job bigint := (SELECT j.id FROM tensile_internal.jobs j
                   WHERE j.model_id = (_no_open_job.model).id AND j.ended_at IS NULL
                                                   AND j.tuning IS NULL);
BEGIN
    IF job IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'object_in_use',
            MESSAGE = format('model "%s" is being trained by job %s', (model).name, job),
            HINT = format('Wait with wait_for_job(%s) or stop it with cancel_job(%1$s).', job);
    END IF;
END $$;

CREATE FUNCTION tensile_internal._drop_model(caller oid, name text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile_internal.models := tensile_internal._own_model(caller, name);
    job record;
BEGIN
    PERFORM FROM tensile_internal.models o WHERE o.id = m.id FOR UPDATE; -- before the jobs, one of which may be being submitted
    FOR job IN SELECT j.id, j.state FROM tensile_internal.jobs j WHERE j.model_id = m.id FOR UPDATE LOOP
        IF job.state IN ('queued', 'interrupted') THEN
            PERFORM tensile_internal._end_job(job.id, 'failed', '42704', format('model "%s" was dropped', name),
                                              'Register the model again and submit a new job.');
        END IF;
        DELETE FROM tensile_internal.checkpoints c WHERE c.job = job.id;
        -- A worker that has not noticed yet continues to write; the end of its job deletes the trace.
        DELETE FROM tensile_internal.traces t
            WHERE t.job = job.id AND job.state NOT IN ('starting', 'running', 'waiting');
        PERFORM tensile_internal._notify_stop(job.id);
    END LOOP;
    DELETE FROM tensile_internal.models WHERE id = m.id;
END $$;

CREATE FUNCTION tensile_internal._set_model_memory_budget(caller oid, model text, memory_budget text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile_internal.models := tensile_internal._own_model(caller, model);
BEGIN
    UPDATE tensile_internal.models SET memory_budget =
        tensile_internal._parse_budget(_set_model_memory_budget.memory_budget),
        updated_at = clock_timestamp() WHERE id = m.id;
END $$;
