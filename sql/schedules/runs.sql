-- What a schedule that is due submits

-- Submit the training that is due, as train_model would for the schedule's owner. A refusal is kept in the schedule,
-- and the next time is the next try. If a job of the model has just been submitted, the training waits for its end.
CREATE FUNCTION tensile_internal._run_schedule(schedule bigint) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    s tensile_internal.schedules;
    reason text;
    text_of_error text;
    text_of_hint text;
    code text;
    submitted bigint;
BEGIN
    SELECT * INTO s FROM tensile_internal.schedules o WHERE o.id = schedule FOR UPDATE SKIP LOCKED;
    reason := tensile_internal._due_reason(s);
    IF reason IS NULL THEN -- the schedule was removed or changed, or is about to be
        RETURN;
    END IF;
    BEGIN
        submitted := tensile_internal._submit_scheduled(s);
    EXCEPTION
        WHEN object_in_use OR lock_not_available THEN
            RETURN;
        WHEN OTHERS THEN
            GET STACKED DIAGNOSTICS code = RETURNED_SQLSTATE, text_of_error = MESSAGE_TEXT,
                                    text_of_hint = PG_EXCEPTION_HINT;
            IF s.error IS DISTINCT FROM text_of_error THEN
                PERFORM tensile_internal._log_job(
                    format('pg_tensile: schedule %s refused: owner="%s" sqlstate=%s reason="%s"',
                           s.id, s.owner, code, text_of_error));
            END IF;
    END;
    UPDATE tensile_internal.schedules o
        SET last_run = clock_timestamp(), last_reason = reason, last_job = submitted, sqlstate = code,
            error = text_of_error,
            hint = nullif(text_of_hint, ''), next_run = tensile_internal._next_run(s.created_at, s.every),
            counted_rows = tensile_worker._inserted_rows(s.source)
        WHERE o.id = s.id;
END $$;

CREATE FUNCTION tensile_internal._submit_scheduled(s tensile_internal.schedules) RETURNS bigint
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    job bigint;
BEGIN
    PERFORM tensile_internal._check_schedule_owner(s.owner_id, s.owner, 'train_model');
    IF s.source IS NOT NULL AND tensile_worker._inserted_rows(s.source) IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object', MESSAGE = 'the source of the schedule was dropped',
            HINT = 'Schedule the training again with another source.';
    END IF;
    job := tensile_internal._submit_training(
        s.owner_id, s.arguments || (SELECT jsonb_build_object('model', m.name) FROM tensile_internal.models m
                                    WHERE m.id = s.model_id),
        s.settings, '{}');
    PERFORM tensile_internal._notify(job);
    RETURN job;
END $$;
