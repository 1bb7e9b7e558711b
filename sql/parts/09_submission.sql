------------------------------------------------------------------------------------------------------------------------
-- Jobs: submission
------------------------------------------------------------------------------------------------------------------------

-- The arguments of a training are one jsonb, {name: value} as train_model declares them. csrc/submit.c makes it; schedules
-- and tunings store it without the model's name.

-- The columns of a job that these arguments determine, as they are before the checks. Not the memory budget:
-- _parse_budget has a check of its own. Options that are JSON null are refused later.
CREATE FUNCTION tensile._job_of_arguments(arguments jsonb, OUT j tensile.jobs)
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    j := jsonb_populate_record(j, arguments - '{model,memory_budget}'::text[]);
    j.model_name := arguments->>'model';
    j.policy := coalesce(j.policy, current_setting('pg_tensile.policy'));
    j.options := arguments->'options';
END $$;

-- Insert a job after the checks of the query. `settings`: those with which the query is to run;
-- `architecture`: that of a trial; null: the model's.
CREATE FUNCTION tensile._submit_training(caller oid, arguments jsonb, settings jsonb, arrays text[],
                                         architecture jsonb DEFAULT NULL, tuning bigint DEFAULT NULL) RETURNS bigint
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models := tensile._check_submission(caller, arguments, arrays);
    j tensile.jobs := tensile._job_of_arguments(arguments);
    model_id bigint := tensile._store_architecture(caller, m, arrays);
    job bigint;
BEGIN
    INSERT INTO tensile.jobs (model, model_name, owner_name, query, target, epochs, batch_size, optimizer,
                              learning_rate, validation, seed, policy, memory_budget, priority, options, settings,
                              split_by, validation_query, max_time, architecture, tuning)
        VALUES (model_id, m.name, pg_get_userbyid(caller), j.query, j.target, j.epochs, j.batch_size, j.optimizer,
                j.learning_rate, j.validation, j.seed, j.policy, tensile._parse_budget(arguments->>'memory_budget'),
                j.priority, j.options, _submit_training.settings, j.split_by, j.validation_query, j.max_time,
                _submit_training.architecture, _submit_training.tuning)
        ON CONFLICT DO NOTHING
        RETURNING id INTO job;
    IF job IS NULL THEN
        PERFORM tensile._no_open_job(m);
        RAISE EXCEPTION USING ERRCODE = 'object_in_use', MESSAGE = format('model "%s" is being trained', m.name),
            HINT = 'Wait until that job has ended, or stop it with cancel_job.';
    END IF;
    PERFORM tensile._log_event(job, 'submitted');
    RETURN job;
END $$;

-- Settings of this session with which the query is to run
CREATE FUNCTION tensile._session_settings(search_path text) RETURNS jsonb
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_build_object('search_path', $1, 'TimeZone', current_setting('TimeZone'),
                              'DateStyle', current_setting('DateStyle'),
                              'IntervalStyle', current_setting('IntervalStyle'))
$$;

-- The part of train_model after the checks of the query, which need the caller's privileges and are in
-- csrc/training/submit.c
CREATE FUNCTION tensile._train_model(caller oid, arguments jsonb, search_path text, arrays text[]) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    job bigint := tensile._submit_training(caller, arguments, tensile._session_settings(search_path), arrays);
    about text := ', ' || tensile._about(tensile._expected_time(caller, job));
BEGIN
    RAISE NOTICE 'job %: SELECT wait_for_job(%)', job || coalesce(about, ''), job;
    RETURN job;
END $$;

-- Seconds that the job takes once it has started, if it takes as long as the last one of the model with the same queries
-- and settings that the caller may see; null if there is none. Another number of epochs is allowed for; the time between
-- two attempts of a job that was interrupted is not known.
CREATE FUNCTION tensile._expected_time(caller oid, job bigint) RETURNS float8
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT least(extract(epoch FROM f.ended_at - f.started_at)::float8
                     * CASE f.stopped WHEN 'early_stopping' THEN least(j.epochs, d.epochs) ELSE j.epochs END / d.epochs,
                 extract(epoch FROM j.max_time)::float8)
    FROM tensile.jobs j JOIN tensile.models m ON m.id = j.model
         JOIN tensile.jobs f ON f.model = j.model AND f.kind = 'train' AND f.state = 'finished' AND f.attempts = 1
             AND f.query = j.query AND f.target = j.target AND f.options = j.options AND f.validation = j.validation
             AND (f.batch_size, f.validation_query, f.max_time, f.policy, f.memory_budget,
                  coalesce(f.architecture, m.architecture))
                 IS NOT DISTINCT FROM
                 (j.batch_size, j.validation_query, j.max_time, j.policy, j.memory_budget,
                  coalesce(j.architecture, m.architecture))
         CROSS JOIN LATERAL (SELECT max(e.epoch)::float8 AS epochs FROM tensile.epochs e WHERE e.job = f.id) d
    WHERE j.id = $2 AND d.epochs > 0
      AND (tensile._acts_for($1, f.owner, f.owner_name) OR pg_has_role($1, 'pg_read_all_stats', 'USAGE'))
    ORDER BY f.id DESC LIMIT 1
$$;

-- A duration in words: about 4 minutes
CREATE FUNCTION tensile._about(seconds float8) RETURNS text
    LANGUAGE sql IMMUTABLE STRICT SET search_path = pg_catalog, pg_temp
AS $$
    SELECT format('about %s %s%s', n.number, u.name, CASE WHEN n.number > 1 THEN 's' END)
    FROM (VALUES (1, 90, 'second'), (60, 5400, 'minute'), (3600, 129600, 'hour'), (86400, 'Infinity'::float8, 'day'))
             u (length, until, name)
         CROSS JOIN LATERAL (SELECT greatest(round($1 / u.length), 1) AS number) n
    WHERE $1 < u.until
    ORDER BY u.length LIMIT 1
$$;

-- True if the role may execute the public function of that name
CREATE FUNCTION tensile._may_execute(role oid, function name) RETURNS bool
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM pg_proc p JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid
                       JOIN pg_extension e ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
                   WHERE p.proname = $2 AND e.extname = 'pg_tensile' AND has_function_privilege($1, p.oid, 'EXECUTE'))
$$;

-- Register a model that does not exist to the caller, store the architecture that was chosen for a model without one,
-- and tell the client of both; return the model's id. The lock keeps the model from being dropped until the caller has
-- referred to it.
CREATE FUNCTION tensile._store_architecture(caller oid, m tensile.models, arrays text[]) RETURNS bigint
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    model_id bigint := m.id;
    was_open bool := true;
BEGIN
    IF model_id IS NULL AND NOT tensile._may_execute(caller, 'register_model') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('permission denied to register model "%s"', m.name),
            HINT = 'A role that may call register_model can register it and grant you ''train''.';
    ELSIF model_id IS NULL THEN
        model_id := tensile._insert_model(caller, m.name, m.architecture, m.architecture_reason, NULL, true);
        IF model_id IS NULL THEN
            RAISE EXCEPTION USING ERRCODE = 'object_in_use',
                MESSAGE = format('model "%s" has just been registered by another session', m.name),
                HINT = 'Call train_model again.';
        END IF;
    ELSE
        SELECT o.architecture IS NULL INTO was_open FROM tensile.models o WHERE o.id = model_id FOR KEY SHARE;
        IF NOT FOUND THEN
            RAISE EXCEPTION USING ERRCODE = 'object_in_use',
                MESSAGE = format('model "%s" has just been dropped by another session', m.name),
                HINT = 'Call train_model again.';
        END IF;
        UPDATE tensile.models SET architecture = m.architecture, architecture_reason = m.architecture_reason,
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
-- architecture and, unless something else refers to the model, its registration. A transaction that goes on may be about
-- to refer to it, so its lock counts as a reference.
CREATE FUNCTION tensile._undo_submission(model bigint) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF EXISTS (SELECT FROM tensile.model_versions v WHERE v.model = $1)
       OR EXISTS (SELECT FROM tensile.jobs j WHERE j.model = $1
                  AND (j.ended_at IS NULL OR EXISTS (SELECT FROM tensile.epochs e WHERE e.job = j.id)))
       OR EXISTS (SELECT FROM tensile.tunings t WHERE t.model = $1 AND t.ended_at IS NULL) THEN
        RETURN;
    END IF;
    UPDATE tensile.models m SET architecture = NULL, architecture_reason = NULL, updated_at = clock_timestamp()
        WHERE m.id = $1 AND m.architecture_reason IS NOT NULL;
    PERFORM FROM tensile.models m WHERE m.id = $1 AND m.auto_registered AND m.memory_budget IS NULL
            AND m.keep_versions IS NULL FOR UPDATE SKIP LOCKED;
    IF FOUND AND NOT EXISTS (SELECT FROM tensile.model_grants g WHERE g.model = $1)
       AND NOT EXISTS (SELECT FROM tensile.schedules s WHERE s.model = $1)
       AND NOT EXISTS (SELECT FROM tensile.evaluation_schedules s WHERE s.model = $1) THEN
        DELETE FROM tensile.checkpoints c USING tensile.jobs j WHERE c.job = j.id AND j.model = $1;
        DELETE FROM tensile.traces t USING tensile.jobs j WHERE t.job = j.id AND j.model = $1;
        DELETE FROM tensile.models m WHERE m.id = $1;
    END IF;
END $$;

-- Return the model to train; raise the errors that train_model and explain_training have in common. A model that does
-- not exist has no id; one without an architecture gets one if the query has no array. Neither is stored. Which
-- architecture takes an array depends on its values, so the job chooses it. `arrays`: names of the features that are
-- arrays; null: not known
CREATE FUNCTION tensile._check_submission(caller oid, arguments jsonb, arrays text[]) RETURNS tensile.models
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile.jobs := tensile._job_of_arguments(arguments);
    m tensile.models;
BEGIN
    SELECT * INTO m FROM tensile.models WHERE name = j.model_name;
    IF NOT FOUND THEN
        PERFORM tensile._check_model_name(j.model_name);
        m := jsonb_populate_record(m, jsonb_build_object('name', j.model_name));
    ELSIF NOT tensile._granted(caller, m.id, 'train') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('permission denied for model "%s"', m.name),
            HINT = format('Its owner can allow it: SELECT grant_model(%L, %L, ''train'').', m.name,
                          pg_get_userbyid(caller));
    END IF;
    PERFORM tensile._check_training(j), tensile._check_split(j), tensile._check_max_time(j.max_time),
            tensile._check_options(j.options), tensile._check_choice(j), tensile._check_compression(j),
            tensile._check_swap_share(j), tensile._check_ranks(j), tensile._check_gate(m, j),
            tensile._check_can_start(caller), tensile._parse_budget(arguments->>'memory_budget');
    IF m.architecture IS NULL AND cardinality(arrays) = 0 THEN
        m := jsonb_populate_record(m, '{"architecture": {"type": "tabular"}, '
                                       '"architecture_reason": "no column is an array"}');
    END IF;
    RETURN m;
END $$;

CREATE FUNCTION tensile._check_priority(priority int) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF priority NOT BETWEEN -1000 AND 1000 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('priority is out of range: %s', priority),
            HINT = 'Use -1000 to 1000; a higher priority starts earlier and loses less time to other jobs'' memory.';
    END IF;
END $$;

CREATE FUNCTION tensile._check_training(j tensile.jobs) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    policies text[] := (SELECT s.enumvals FROM pg_settings s WHERE s.name = 'pg_tensile.policy');
    message text;
    hint text;
BEGIN
    IF j.epochs NOT BETWEEN 1 AND 1000000 THEN
        message := format('epochs is out of range: %s', j.epochs);
        hint := 'Use 1 to 1000000.';
    ELSIF j.batch_size NOT BETWEEN 0 AND 10000000 THEN
        message := format('batch_size is out of range: %s', j.batch_size);
        hint := 'Use 1 to 10000000, and not more than the query has rows, or 0 to have it chosen by plans.';
    ELSIF j.optimizer NOT IN ('sgd', 'adam', 'adamw') THEN
        message := format('unknown optimizer "%s"', j.optimizer);
        hint := 'Use ''sgd'', ''adam'' or ''adamw''.';
    ELSIF NOT (j.learning_rate > 0 AND j.learning_rate < 'Infinity') THEN
        message := format('learning_rate is out of range: %s', j.learning_rate);
        hint := 'Use a positive, finite number such as 0.001, or leave it out to have it chosen.';
    ELSIF NOT (j.validation >= 0 AND j.validation < 1) THEN
        message := format('validation is out of range: %s', j.validation);
        hint := 'Use the share of rows kept for validation: 0 or more, and less than 1.';
    ELSIF j.policy <> ALL (policies) THEN
        message := format('unknown policy "%s"', j.policy);
        hint := format('Use one of ''%s'', or leave it out for the setting pg_tensile.policy.',
                       array_to_string(policies, ''', '''));
    END IF;
    IF message IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = message, HINT = hint;
    END IF;
    PERFORM tensile._check_priority(j.priority);
END $$;

-- The rows for validation are a share of the query's rows, or those of a query of their own. 0.2 is the default share.
CREATE FUNCTION tensile._check_split(j tensile.jobs) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF j.validation_query IS NOT NULL AND j.split_by IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'split_by and validation_query contradict each other',
            HINT = 'Leave split_by out to validate on the rows of the validation query.';
    ELSIF j.validation_query IS NOT NULL AND j.validation <> 0.2 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('validation is %s, but the validation query decides which rows are for validation',
                             j.validation),
            HINT = 'Leave validation out, or validation_query.';
    END IF;
END $$;

-- Raise an error unless the time is at least `shortest` and at most 100 years, so that it can be added to any time of now,
-- and none of its fields is negative: months differ in length, so '1 month -30 days' goes back in some of them. `hint` is
-- about times that are too short.
CREATE FUNCTION tensile._check_time(name text, value interval, shortest interval, hint text) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    negative bool := least(extract(year FROM value), extract(month FROM value), extract(day FROM value),
                           extract(hour FROM value), extract(minute FROM value), extract(second FROM value)) < 0;
BEGIN
    IF negative AND value >= shortest THEN
        hint := 'Its years, months, days and times must not have different signs.';
    END IF;
    IF negative OR NOT (value >= shortest AND extract(epoch FROM value)::float8 <= 3.2e9) THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('%s is out of range: %s', name, value), HINT = hint;
    END IF;
END $$;

CREATE FUNCTION tensile._check_max_time(max_time interval) RETURNS void
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._check_time('max_time', max_time, '1 microsecond',
        'Use a time up to 100 years, such as ''10 minutes'', or leave it out for no limit.')
$$;

-- batch_size => 0: the batch size is chosen by plans, which show what fits.
CREATE FUNCTION tensile._check_choice(j tensile.jobs) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    option text := CASE WHEN j.batch_size IS DISTINCT FROM 0 THEN (SELECT k FROM jsonb_object_keys(j.options) k
                        WHERE k IN ('batch_size_range', 'learning_rate_scaling') ORDER BY k LIMIT 1) END;
BEGIN
    IF option IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('option "%s" requires a batch size chosen by plans, but batch_size is %s', option,
                             coalesce(j.batch_size::text, 'null')),
            HINT = 'Use batch_size => 0, or leave the option out.';
    ELSIF j.batch_size = 0 AND j.policy = 'none' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'cannot choose a batch size with policy "none": without a plan, the memory of a step is unknown',
            HINT = 'Use policy => ''joint'', or give a batch_size.';
    END IF;
END $$;

-- Only swapped tensors are compressed.
CREATE FUNCTION tensile._check_compression(j tensile.jobs) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF j.policy = 'none' AND coalesce(j.options->>'compression', 'none') <> 'none' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('compression "%s" requires a policy that swaps, but the policy is "none"',
                             j.options->>'compression'),
            HINT = 'Use policy => ''joint'', or leave the option "compression" out.';
    END IF;
END $$;

-- The limit is one of the paper's algorithm; other policies would ignore it.
CREATE FUNCTION tensile._check_swap_share(j tensile.jobs) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF j.policy <> 'tensile' AND j.options ? 'swap_share' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('option "swap_share" requires the policy "tensile", but the policy is "%s"', j.policy),
            HINT = 'Use policy => ''tensile'', or leave the option out.';
    END IF;
END $$;

-- Plans show what fits into the memory of one rank, so they choose the batch size of one rank only.
CREATE FUNCTION tensile._check_ranks(j tensile.jobs) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT j.options ? 'ranks' THEN
        RETURN;
    ELSIF j.options->>'start' = 'deployed' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'a job with ranks cannot begin with the weights of the deployed version',
            HINT = 'Leave out the option "start", or the option "ranks".';
    ELSIF j.batch_size = 0 AND j.options->'ranks' NOT IN ('1', '[1, 1]') THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('cannot choose a batch size for several ranks: %s', j.options->'ranks'),
            HINT = 'Give a batch_size, which the ranks divide among themselves, or use one rank.';
    END IF;
    PERFORM tensile._ray_address();
END $$;

-- Address of the Ray cluster; raises an error if there is none
CREATE FUNCTION tensile._ray_address() RETURNS text
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    address text := current_setting('pg_tensile.ray_address');
BEGIN
    IF address = '' THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state', MESSAGE = 'no Ray cluster is configured',
            HINT = 'Set pg_tensile.ray_address to the address of one, such as ''ray://head:10001'', and reload; or leave '
                   'out the option "ranks".';
    END IF;
    RETURN address;
END $$;

-- How an executor reaches the Ray cluster, for the JOB frame. Only superusers see the setting of the token's file.
CREATE FUNCTION tensile._ray_access() RETURNS jsonb
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_build_object(
        'address', tensile._ray_address(), 'token_file', current_setting('pg_tensile.ray_token_file'),
        'timeout_s', (SELECT s.setting::int FROM pg_settings s WHERE s.name = 'pg_tensile.ray_timeout'))
$$;

-- Number of bytes of a size such as '8GB'; null for null
CREATE FUNCTION tensile._parse_budget(budget text) RETURNS bigint
    LANGUAGE plpgsql IMMUTABLE STRICT SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    bytes numeric;
    part text[] := regexp_match(lower(budget), '^\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*(b|bytes|kb|mb|gb|tb)?\s*$');
BEGIN
    bytes := trunc(part[1]::numeric * CASE part[2] WHEN 'kb' THEN 1024 WHEN 'mb' THEN 1024 ^ 2 WHEN 'gb' THEN 1024 ^ 3
                                                   WHEN 'tb' THEN 1024 ^ 4 ELSE 1 END);
    IF bytes BETWEEN 1 AND 9223372036854775807 THEN
        RETURN bytes;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = format('invalid memory_budget "%s"', budget),
        HINT = 'Write a size with a unit: ''8GB'', ''512MB''. Units are B, kB, MB, GB and TB.';
END $$;

-- Raise an error if no worker could start for this role in this database.
CREATE FUNCTION tensile._check_can_start(caller oid) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    home text := current_setting('pg_tensile.database');
BEGIN
    IF home <> current_database() THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('jobs do not run in database "%s"', current_database()),
            HINT = format('pg_tensile.database is "%s": connect there, or change the setting and reload.', home);
    ELSIF tensile._is_released() THEN
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
