-- Making and removing schedules

-- The part of schedule_training after the checks of the query, which are those of train_model (csrc/training/submit.c)
CREATE FUNCTION tensile_internal._schedule_training(caller oid, arguments jsonb, every interval, rows bigint,
                                                    source regclass, drift float8, search_path text, arrays text[])
    RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile_internal.models := tensile_internal._check_submission(caller, arguments, arrays);
    schedule bigint;
BEGIN
    PERFORM tensile_internal._check_schedule(caller, every, rows, source, drift);
    IF m.id IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object', MESSAGE = format('model "%s" does not exist', m.name),
            HINT = 'Train it once with train_model, or register it with register_model.';
    END IF;
    PERFORM tensile_internal._store_architecture(caller, m, arrays);
    INSERT INTO tensile_internal.schedules (model_id, owner, every, rows, source, drift, next_run, counted_rows,
                                            settings, arguments)
        VALUES (m.id, pg_get_userbyid(caller), _schedule_training.every, _schedule_training.rows,
                _schedule_training.source, _schedule_training.drift, clock_timestamp() + _schedule_training.every,
                tensile_worker._inserted_rows(_schedule_training.source),
                tensile_internal._session_settings(_schedule_training.search_path),
                _schedule_training.arguments - 'model')
        ON CONFLICT DO NOTHING
        RETURNING id INTO schedule;
    IF schedule IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'duplicate_object',
            MESSAGE = format('model "%s" already has a schedule', m.name),
            HINT = 'Remove it with unschedule_training first.';
    END IF;
    PERFORM tensile_internal._notify(-1); -- wakes the controller
    RETURN schedule;
END $$;

CREATE FUNCTION tensile_internal._check_schedule(caller oid, every interval, rows bigint, source regclass, drift float8)
    RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    kind "char" := (SELECT c.relkind FROM pg_class c WHERE c.oid = source);
    message text;
    hint text;
BEGIN
    PERFORM tensile_internal._check_every(every);
    IF every IS NULL AND rows IS NULL AND drift IS NULL THEN
        message := 'a schedule needs a time, a number of rows or a drift';
        hint := 'For example every => ''1 day'', rows => 10000 with source => ''orders'', or drift => 0.2.';
    ELSIF NOT (drift > 0 AND drift <= 10) THEN -- NaN is greater than all numbers
        message := format('drift is out of range: %s', drift);
        hint := 'Use a number above 0, up to 10, such as 0.2.';
    ELSIF rows < 1 THEN
        message := format('rows is out of range: %s', rows);
        hint := 'Use the number of new rows that are worth a training.';
    ELSIF rows IS NOT NULL AND source IS NULL THEN
        message := 'rows needs the table whose new rows count';
        hint := 'Name it, for example source => ''orders''.';
    ELSIF source IS NOT NULL AND rows IS NULL THEN
        message := 'source is given without rows';
        hint := 'Add the number of its new rows that cause a training, or leave source out.';
    ELSIF source IS NOT NULL AND coalesce(kind NOT IN ('r', 'p'), true) THEN
        message := format('source "%s" is not a table', source);
        hint := 'New rows are counted by the statistics of tables and of partitions.';
    ELSIF source IS NOT NULL AND NOT has_table_privilege(caller, source, 'SELECT') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('permission denied for table %s', source),
            HINT = format('Its owner can allow it: GRANT SELECT ON %s TO %I.', source, pg_get_userbyid(caller));
    END IF;
    IF message IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = message, HINT = hint;
    END IF;
END $$;

CREATE FUNCTION tensile_internal._check_every(every interval) RETURNS void
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_internal._check_time('every', every, '1 second',
                                        'Use a time from 1 second to 100 years, such as ''1 day''.')
$$;

-- Raise an error unless the role of a schedule exists and may execute the public function of that name.
CREATE FUNCTION tensile_internal._check_schedule_owner(owner_id oid, owner name, function name) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles r WHERE r.oid = owner_id AND r.rolname = owner) THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object',
            MESSAGE = format('role "%s" was dropped or renamed', owner),
            HINT = 'Another role has to make the schedule: remove this one, then schedule again.';
    ELSIF NOT tensile_internal._may_execute(owner_id, function) THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('permission denied for function %s', function),
            HINT = format('Grant it to the schedule''s owner: GRANT tensile_user TO %I.', owner);
    END IF;
END $$;

CREATE FUNCTION tensile_internal._unschedule_training(caller oid, model text) RETURNS bool
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    s tensile_internal.schedules;
BEGIN
    SELECT o.* INTO s FROM tensile_internal.schedules o JOIN tensile_internal.models m ON m.id = o.model_id
        WHERE m.name = _unschedule_training.model FOR UPDATE OF o;
    IF NOT FOUND THEN
        RETURN false;
    ELSIF NOT tensile_internal._acts_for(caller, s.owner_id, s.owner) THEN
        PERFORM tensile_internal._own_model(caller, model);
    END IF;
    DELETE FROM tensile_internal.schedules o WHERE o.id = s.id;
    RETURN true;
END $$;
