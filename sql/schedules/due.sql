-- When a schedule is due

-- Number of rows that were inserted into a table or its partitions, as autovacuum counts them; null if the table is
-- gone
CREATE FUNCTION tensile_worker._inserted_rows(source regclass) RETURNS bigint
    LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT sum(pg_stat_get_tuples_inserted(r.oid))::bigint
    FROM (SELECT c.oid FROM pg_class c WHERE c.oid = $1 UNION SELECT p.relid FROM pg_partition_tree($1) p) r
$$;

-- Schedules of which a training is due, without those of models that are being trained
CREATE FUNCTION tensile_internal._due_schedules() RETURNS TABLE (schedule bigint)
    LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT s.id FROM tensile_internal.schedules s
    WHERE CASE WHEN EXISTS (SELECT FROM tensile_internal.jobs j
                            WHERE j.model_id = s.model_id AND j.ended_at IS NULL AND j.tuning IS NULL) THEN false
               ELSE tensile_internal._due_reason(s) IS NOT NULL END
    ORDER BY s.next_run, s.id
$$;

-- The reason for which a training of the schedule is due; null: it is not. After a training, drift is that of rows
-- predicted since, and causes another one after a 24th of pg_tensile.drift_window at the earliest, so that a model that
-- cannot become better is not trained all the time.
CREATE FUNCTION tensile_internal._due_reason(s tensile_internal.schedules) RETURNS text
    LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    inserted bigint := tensile_worker._inserted_rows(s.source);
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
    SELECT * INTO most FROM tensile_internal._most_drifted(s.model_id,
                                                           greatest(s.last_run, tensile_worker._drift_begin()));
    RETURN CASE WHEN most.psi > s.drift
        THEN format('drift %s of "%s"', round(most.psi::numeric, 2), most.column_name) END;
END $$;

-- Milliseconds until the next training by time, or the next evaluation; null if there is none
CREATE FUNCTION tensile_internal._schedule_delay_ms() RETURNS int
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT (1000 * min(least(greatest(extract(epoch FROM n.next_run - clock_timestamp()), 0), 3600)))::int
    FROM (SELECT s.next_run FROM tensile_internal.schedules s
          WHERE s.next_run IS NOT NULL
            AND NOT EXISTS (SELECT FROM tensile_internal.jobs j
                            WHERE j.model_id = s.model_id AND j.ended_at IS NULL AND j.tuning IS NULL)
          UNION ALL
          SELECT e.next_run FROM tensile_internal.evaluation_schedules e
              WHERE NOT tensile_internal._evaluates(e.last_job)) n
$$;

-- The first time after now that is a whole number of intervals after `start`
CREATE FUNCTION tensile_internal._next_run(start timestamptz, every interval) RETURNS timestamptz
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
