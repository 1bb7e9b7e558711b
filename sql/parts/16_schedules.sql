------------------------------------------------------------------------------------------------------------------------
-- Schedules: training again by time, by new rows and by drift
------------------------------------------------------------------------------------------------------------------------

-- The part of schedule_training after the checks of the query, which are those of train_model (csrc/training/submit.c)
CREATE FUNCTION tensile._schedule_training(caller oid, arguments jsonb, every interval, rows bigint, source regclass,
                                           drift float8, search_path text, arrays text[]) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models := tensile._check_submission(caller, arguments, arrays);
    schedule bigint;
BEGIN
    PERFORM tensile._check_schedule(caller, every, rows, source, drift);
    IF m.id IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object', MESSAGE = format('model "%s" does not exist', m.name),
            HINT = 'Train it once with train_model, or register it with register_model.';
    END IF;
    PERFORM tensile._store_architecture(caller, m, arrays);
    INSERT INTO tensile.schedules (model, owner_name, every, rows, source, drift, next_run, counted_rows, settings,
                                   arguments)
        VALUES (m.id, pg_get_userbyid(caller), _schedule_training.every, _schedule_training.rows,
                _schedule_training.source, _schedule_training.drift, clock_timestamp() + _schedule_training.every,
                tensile._inserted_rows(_schedule_training.source),
                tensile._session_settings(_schedule_training.search_path),
                _schedule_training.arguments - 'model')
        ON CONFLICT DO NOTHING
        RETURNING id INTO schedule;
    IF schedule IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'duplicate_object', MESSAGE = format('model "%s" already has a schedule', m.name),
            HINT = 'Remove it with unschedule_training first.';
    END IF;
    PERFORM tensile._notify(-1); -- wakes the controller
    RETURN schedule;
END $$;

CREATE FUNCTION tensile._check_schedule(caller oid, every interval, rows bigint, source regclass, drift float8)
    RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    kind "char" := (SELECT c.relkind FROM pg_class c WHERE c.oid = source);
    message text;
    hint text;
BEGIN
    PERFORM tensile._check_every(every);
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

CREATE FUNCTION tensile._check_every(every interval) RETURNS void
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._check_time('every', every, '1 second', 'Use a time from 1 second to 100 years, such as ''1 day''.')
$$;

-- Raise an error unless the role of a schedule exists and may execute the public function of that name.
CREATE FUNCTION tensile._check_schedule_owner(owner oid, owner_name name, function name) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles r WHERE r.oid = owner AND r.rolname = owner_name) THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object',
            MESSAGE = format('role "%s" was dropped or renamed', owner_name),
            HINT = 'Another role has to make the schedule: remove this one, then schedule again.';
    ELSIF NOT tensile._may_execute(owner, function) THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('permission denied for function %s', function),
            HINT = format('Grant it to the schedule''s owner: GRANT tensile_user TO %I.', owner_name);
    END IF;
END $$;

-- Number of rows that were inserted into a table or its partitions, as autovacuum counts them; null if the table is gone
CREATE FUNCTION tensile._inserted_rows(source regclass) RETURNS bigint
    LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT sum(pg_stat_get_tuples_inserted(r.oid))::bigint
    FROM (SELECT c.oid FROM pg_class c WHERE c.oid = $1 UNION SELECT p.relid FROM pg_partition_tree($1) p) r
$$;

CREATE FUNCTION tensile._unschedule_training(caller oid, model text) RETURNS bool
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    s tensile.schedules;
BEGIN
    SELECT o.* INTO s FROM tensile.schedules o JOIN tensile.models m ON m.id = o.model
        WHERE m.name = _unschedule_training.model FOR UPDATE OF o;
    IF NOT FOUND THEN
        RETURN false;
    ELSIF NOT tensile._acts_for(caller, s.owner, s.owner_name) THEN
        PERFORM tensile._own_model(caller, model);
    END IF;
    DELETE FROM tensile.schedules o WHERE o.id = s.id;
    RETURN true;
END $$;

-- Schedules of which a training is due, without those of models that are being trained
CREATE FUNCTION tensile._due_schedules() RETURNS TABLE (schedule bigint)
    LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT s.id FROM tensile.schedules s
    WHERE CASE WHEN EXISTS (SELECT FROM tensile.jobs j
                            WHERE j.model = s.model AND j.ended_at IS NULL AND j.tuning IS NULL) THEN false
               ELSE tensile._due_reason(s) IS NOT NULL END
    ORDER BY s.next_run, s.id
$$;

-- The reason for which a training of the schedule is due; null: it is not. After a training, drift is that of rows
-- predicted since, and causes another one after a 24th of pg_tensile.drift_window at the earliest, so that a model that
-- cannot become better is not trained all the time.
CREATE FUNCTION tensile._due_reason(s tensile.schedules) RETURNS text
    LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    inserted bigint := tensile._inserted_rows(s.source);
    most record;
BEGIN
    IF s.next_run <= clock_timestamp() THEN
        RETURN 'time';
    ELSIF s.source IS NOT NULL AND inserted IS NULL AND s.counted_rows IS NOT NULL THEN -- report it once
        RETURN 'the source was dropped';
    END IF;
    inserted := inserted - CASE WHEN inserted < s.counted_rows THEN 0 ELSE s.counted_rows END;
    IF inserted >= s.rows THEN
        RETURN format('%s new rows', inserted);
    ELSIF s.drift IS NULL
            OR s.last_run > clock_timestamp() - current_setting('pg_tensile.drift_window')::interval / 24 THEN
        RETURN NULL;
    END IF;
    SELECT * INTO most FROM tensile._most_drifted(s.model, greatest(s.last_run, tensile._drift_begin()));
    RETURN CASE WHEN most.psi > s.drift THEN format('drift %s of "%s"', round(most.psi::numeric, 2), most.column_name) END;
END $$;

-- Milliseconds until the next training by time, or the next evaluation; null if there is none
CREATE FUNCTION tensile._schedule_delay_ms() RETURNS int
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT (1000 * min(least(greatest(extract(epoch FROM n.next_run - clock_timestamp()), 0), 3600)))::int
    FROM (SELECT s.next_run FROM tensile.schedules s
          WHERE s.next_run IS NOT NULL
            AND NOT EXISTS (SELECT FROM tensile.jobs j WHERE j.model = s.model AND j.ended_at IS NULL AND j.tuning IS NULL)
          UNION ALL
          SELECT e.next_run FROM tensile.evaluation_schedules e WHERE NOT tensile._evaluates(e.last_job)) n
$$;

-- The first time after now that is a whole number of intervals after `start`
CREATE FUNCTION tensile._next_run(start timestamptz, every interval) RETURNS timestamptz
    LANGUAGE plpgsql VOLATILE STRICT SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    months bool := extract(month FROM every) + extract(year FROM every) <> 0;
    passed float8 := extract(epoch FROM clock_timestamp() - start) / extract(epoch FROM every);
    -- Begin below the number and count up: months and days differ in length.
    -- _check_time sees to it that each step goes forwards; at most a twentieth of them are counted.
    number bigint := greatest(floor(passed * CASE WHEN months THEN 0.97 ELSE 1 END) - 1, 1);
BEGIN
    WHILE start + number * every <= clock_timestamp() LOOP
        number := number + 1;
    END LOOP;
    RETURN start + number * every;
END $$;

-- Submit the training that is due, as train_model would for the schedule's owner. A refusal is kept in the schedule, and
-- the next time is the next try. If a job of the model has just been submitted, the training waits for its end.
CREATE FUNCTION tensile._run_schedule(schedule bigint) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    s tensile.schedules;
    reason text;
    text_of_error text;
    text_of_hint text;
    code text;
    submitted bigint;
BEGIN
    SELECT * INTO s FROM tensile.schedules o WHERE o.id = schedule FOR UPDATE SKIP LOCKED;
    reason := tensile._due_reason(s);
    IF reason IS NULL THEN -- the schedule was removed or changed, or is about to be
        RETURN;
    END IF;
    BEGIN
        submitted := tensile._submit_scheduled(s);
    EXCEPTION
        WHEN object_in_use OR lock_not_available THEN
            RETURN;
        WHEN OTHERS THEN
            GET STACKED DIAGNOSTICS code = RETURNED_SQLSTATE, text_of_error = MESSAGE_TEXT,
                                    text_of_hint = PG_EXCEPTION_HINT;
            IF s.error IS DISTINCT FROM text_of_error THEN
                PERFORM tensile._log_job(format('pg_tensile: schedule %s refused: owner="%s" sqlstate=%s reason="%s"',
                                                s.id, s.owner_name, code, text_of_error));
            END IF;
    END;
    UPDATE tensile.schedules o
        SET last_run = clock_timestamp(), last_reason = reason, last_job = submitted, sqlstate = code, error = text_of_error,
            hint = nullif(text_of_hint, ''), next_run = tensile._next_run(s.created_at, s.every),
            counted_rows = tensile._inserted_rows(s.source)
        WHERE o.id = s.id;
END $$;

CREATE FUNCTION tensile._submit_scheduled(s tensile.schedules) RETURNS bigint
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    job bigint;
BEGIN
    PERFORM tensile._check_schedule_owner(s.owner, s.owner_name, 'train_model');
    IF s.source IS NOT NULL AND tensile._inserted_rows(s.source) IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object', MESSAGE = 'the source of the schedule was dropped',
            HINT = 'Schedule the training again with another source.';
    END IF;
    job := tensile._submit_training(
        s.owner, s.arguments || (SELECT jsonb_build_object('model', m.name) FROM tensile.models m WHERE m.id = s.model),
        s.settings, '{}');
    PERFORM tensile._notify(job);
    RETURN job;
END $$;
