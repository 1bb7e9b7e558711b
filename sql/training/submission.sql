-- Submitting a training

-- Insert a job after the checks of the query. `settings`: those with which the query is to run;
-- `architecture`: that of a trial; null: the model's.
CREATE FUNCTION tensile_internal._submit_training(caller oid, arguments jsonb, settings jsonb, arrays text[],
                                                  architecture jsonb DEFAULT NULL, tuning bigint DEFAULT NULL)
    RETURNS bigint
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile_internal.models := tensile_internal._check_submission(caller, arguments, arrays);
    j tensile_internal.jobs := tensile_internal._job_of_arguments(arguments);
    model_id bigint := tensile_internal._store_architecture(caller, m, arrays);
    job bigint;
BEGIN
    INSERT INTO tensile_internal.jobs (model_id, model, owner, query, target, epochs, batch_size, optimizer,
                                       learning_rate, validation, seed, policy, memory_budget, priority, options,
                                       settings, split_by, validation_query, max_time, architecture, tuning)
        VALUES (model_id, m.name, pg_get_userbyid(caller), j.query, j.target, j.epochs, j.batch_size, j.optimizer,
                j.learning_rate, j.validation, j.seed, j.policy,
                tensile_internal._parse_budget(arguments->>'memory_budget'), j.priority, j.options,
                _submit_training.settings, j.split_by, j.validation_query, j.max_time,
                _submit_training.architecture, _submit_training.tuning)
        ON CONFLICT DO NOTHING
        RETURNING id INTO job;
    IF job IS NULL THEN
        PERFORM tensile_internal._no_open_job(m);
        RAISE EXCEPTION USING ERRCODE = 'object_in_use', MESSAGE = format('model "%s" is being trained', m.name),
            HINT = 'Wait until that job has ended, or stop it with cancel_job.';
    END IF;
    PERFORM tensile_internal._log_event(job, 'submitted');
    RETURN job;
END $$;

-- Settings of this session with which the query is to run
CREATE FUNCTION tensile_internal._session_settings(search_path text) RETURNS jsonb
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_build_object('search_path', $1, 'TimeZone', current_setting('TimeZone'),
                              'DateStyle', current_setting('DateStyle'),
                              'IntervalStyle', current_setting('IntervalStyle'))
$$;

-- The part of train_model after the checks of the query, which need the caller's privileges and are in
-- csrc/training/submit.c
CREATE FUNCTION tensile_internal._train_model(caller oid, arguments jsonb, search_path text, arrays text[])
    RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    job bigint := tensile_internal._submit_training(caller, arguments, tensile_internal._session_settings(search_path),
                                                    arrays);
    about text := ', ' || tensile_internal._about(tensile_internal._expected_time(caller, job));
BEGIN
    RAISE NOTICE 'job %: SELECT wait_for_job(%)', job || coalesce(about, ''), job;
    RETURN job;
END $$;

-- Seconds that the job takes once it has started, if it takes as long as the last one of the model with the same
-- queries and settings that the caller may see; null if there is none. Another number of epochs is allowed for; the
-- time between two attempts of a job that was interrupted is not known.
CREATE FUNCTION tensile_internal._expected_time(caller oid, job bigint) RETURNS float8
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT least(extract(epoch FROM f.ended_at - f.started_at)::float8
                     * CASE f.stopped WHEN 'early_stopping' THEN least(j.epochs, d.epochs) ELSE j.epochs END / d.epochs,
                 extract(epoch FROM j.max_time)::float8,
                 tensile_internal._role_limit(j.owner_id, 'pg_tensile.role_job_time'))
    FROM tensile_internal.jobs j JOIN tensile_internal.models m ON m.id = j.model_id
         JOIN tensile_internal.jobs f ON f.model_id = j.model_id AND f.kind = 'train' AND f.state = 'finished'
             AND f.attempts = 1
             AND f.query = j.query AND f.target = j.target AND f.options = j.options AND f.validation = j.validation
             AND (f.batch_size, f.validation_query, f.max_time, f.policy, f.memory_budget,
                  coalesce(f.architecture, m.architecture))
                 IS NOT DISTINCT FROM
                 (j.batch_size, j.validation_query, j.max_time, j.policy, j.memory_budget,
                  coalesce(j.architecture, m.architecture))
         CROSS JOIN LATERAL (SELECT max(e.epoch)::float8 AS epochs FROM tensile_internal.epochs e WHERE e.job = f.id) d
    WHERE j.id = $2 AND d.epochs > 0
      AND (tensile_internal._acts_for($1, f.owner_id, f.owner) OR pg_has_role($1, 'pg_read_all_stats', 'USAGE'))
    ORDER BY f.id DESC LIMIT 1
$$;

-- Register a model that does not exist to the caller, store the architecture that was chosen for a model without one,
-- and tell the client of both; return the model's id. The lock keeps the model from being dropped until the caller has
-- referred to it.
CREATE FUNCTION tensile_internal._store_architecture(caller oid, m tensile_internal.models, arrays text[])
    RETURNS bigint
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    model_id bigint := m.id;
    was_open bool := true;
BEGIN
    IF model_id IS NULL AND NOT tensile_internal._may_execute(caller, 'register_model') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('permission denied to register model "%s"', m.name),
            HINT = 'A role that may call register_model can register it and grant you ''train''.';
    ELSIF model_id IS NULL THEN
        model_id := tensile_internal._insert_model(caller, m.name, m.architecture, m.architecture_reason, NULL, true);
        IF model_id IS NULL THEN
            RAISE EXCEPTION USING ERRCODE = 'object_in_use',
                MESSAGE = format('model "%s" has just been registered by another session', m.name),
                HINT = 'Call train_model again.';
        END IF;
    ELSE
        SELECT o.architecture IS NULL INTO was_open FROM tensile_internal.models o WHERE o.id = model_id FOR KEY SHARE;
        IF NOT FOUND THEN
            RAISE EXCEPTION USING ERRCODE = 'object_in_use',
                MESSAGE = format('model "%s" has just been dropped by another session', m.name),
                HINT = 'Call train_model again.';
        END IF;
        UPDATE tensile_internal.models SET architecture = m.architecture, architecture_reason = m.architecture_reason,
            updated_at = clock_timestamp() WHERE id = model_id AND architecture IS NULL AND m.architecture IS NOT NULL;
    END IF;
    IF was_open AND m.architecture IS NOT NULL THEN
        RAISE NOTICE 'model "%" is registered with the architecture %: %', m.name, m.architecture->>'type',
            m.architecture_reason;
    ELSIF was_open AND cardinality(arrays) > 0 THEN
        RAISE NOTICE 'model "%" is registered; its training chooses the architecture by the values of %', m.name,
            (SELECT string_agg(format('"%s"', a), ', ') FROM unnest(arrays) a);
    END IF;
    RETURN model_id;
END $$;

-- Undo what a training that ended before its first epoch has done to its model by being submitted: the choice of an
-- architecture and, unless something else refers to the model, its registration. A transaction that goes on may be
-- about to refer to it, so its lock counts as a reference.
CREATE FUNCTION tensile_internal._undo_submission(model bigint) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF EXISTS (SELECT FROM tensile_internal.model_versions v WHERE v.model_id = $1)
       OR EXISTS (SELECT FROM tensile_internal.jobs j WHERE j.model_id = $1
                  AND (j.ended_at IS NULL OR EXISTS (SELECT FROM tensile_internal.epochs e WHERE e.job = j.id)))
       OR EXISTS (SELECT FROM tensile_internal.tunings t WHERE t.model_id = $1 AND t.ended_at IS NULL) THEN
        RETURN;
    END IF;
    UPDATE tensile_internal.models m SET architecture = NULL, architecture_reason = NULL, updated_at = clock_timestamp()
        WHERE m.id = $1 AND m.architecture_reason IS NOT NULL;
    PERFORM FROM tensile_internal.models m WHERE m.id = $1 AND m.auto_registered AND m.memory_budget IS NULL
            AND m.keep_versions IS NULL FOR UPDATE SKIP LOCKED;
    IF FOUND AND NOT EXISTS (SELECT FROM tensile_internal.model_grants g WHERE g.model_id = $1)
       AND NOT EXISTS (SELECT FROM tensile_internal.schedules s WHERE s.model_id = $1)
       AND NOT EXISTS (SELECT FROM tensile_internal.evaluation_schedules s WHERE s.model_id = $1) THEN
        DELETE FROM tensile_internal.checkpoints c USING tensile_internal.jobs j WHERE c.job = j.id AND j.model_id = $1;
        DELETE FROM tensile_internal.traces t USING tensile_internal.jobs j WHERE t.job = j.id AND j.model_id = $1;
        DELETE FROM tensile_internal.models m WHERE m.id = $1;
    END IF;
END $$;

-- Return the model to train; raise the errors that train_model and explain_training have in common. A model that does
-- not exist has no id; one without an architecture gets one if the query has no array. Neither is stored. Which
-- architecture takes an array depends on its values, so the job chooses it. `arrays`: names of the features that are
-- arrays; null: not known
CREATE FUNCTION tensile_internal._check_submission(caller oid, arguments jsonb, arrays text[])
    RETURNS tensile_internal.models
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile_internal.jobs := tensile_internal._job_of_arguments(arguments);
    m tensile_internal.models;
BEGIN
    SELECT * INTO m FROM tensile_internal.models WHERE name = j.model;
    IF NOT FOUND THEN
        PERFORM tensile_internal._check_model_name(j.model);
        m := jsonb_populate_record(m, jsonb_build_object('name', j.model));
    ELSIF NOT tensile_internal._granted(caller, m.id, 'train') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('permission denied for model "%s"', m.name),
            HINT = format('Its owner can allow it: SELECT grant_model(%L, %L, ''train'').', m.name,
                          pg_get_userbyid(caller));
    END IF;
    PERFORM tensile_internal._check_training(j), tensile_internal._check_split(j),
        tensile_internal._check_max_time(j.max_time), tensile_internal._check_options(j.options),
        tensile_internal._check_choice(j), tensile_internal._check_compression(j),
        tensile_internal._check_swap_share(j), tensile_internal._check_ranks(j), tensile_internal._check_gate(m, j),
        tensile_internal._check_can_start(caller), tensile_internal._parse_budget(arguments->>'memory_budget');
    IF m.architecture IS NULL AND cardinality(arrays) = 0 THEN
        m := jsonb_populate_record(m, '{"architecture": {"type": "ensemble"}, '
                                       '"architecture_reason": "no column is an array"}');
    END IF;
    RETURN m;
END $$;

-- Raise an error if no worker could start for this role in this database.
CREATE FUNCTION tensile_internal._check_can_start(caller oid) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    home text := current_setting('pg_tensile.database');
BEGIN
    IF home <> current_database() THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('jobs do not run in database "%s"', current_database()),
            HINT = format('pg_tensile.database is "%s": connect there, or change the setting and reload.', home);
    ELSIF tensile_internal._is_released() THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('pg_tensile has released database "%s"', home),
            HINT = 'Its owner or a superuser can call resume_database().';
    ELSIF NOT (SELECT rolcanlogin FROM pg_roles WHERE oid = caller) THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('role "%s" is not permitted to log in', pg_get_userbyid(caller)),
            HINT = 'The job''s worker connects as the role that submits it: submit as a role with LOGIN.';
    ELSIF NOT has_schema_privilege(caller, 'tensile', 'USAGE') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('role "%s" has no USAGE privilege for schema "tensile"', pg_get_userbyid(caller)),
            HINT = format('The job''s worker runs as the role that submits it: GRANT tensile_user TO %I.',
                          pg_get_userbyid(caller));
    ELSIF NOT has_database_privilege(caller, current_database(), 'CONNECT') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('role "%s" has no CONNECT privilege for database "%s"',
                             pg_get_userbyid(caller), current_database()),
            HINT = 'The job''s worker connects as the role that submits it: grant it CONNECT.';
    END IF;
END $$;
