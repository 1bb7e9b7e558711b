-- The controller: which job starts next, and what became of workers

CREATE FUNCTION tensile_internal._worker_end(job bigint, OUT terminated bool, OUT error text) RETURNS record
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_worker_end';
CREATE FUNCTION tensile_internal._free_slots() RETURNS int
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_free_slots';
CREATE FUNCTION tensile_internal._launch_worker(job bigint, owner oid) RETURNS text
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_launch_worker';
CREATE FUNCTION tensile_internal._job_slots(OUT job bigint, OUT pid int, OUT state text, OUT seconds float8)
    RETURNS SETOF record
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_job_slots';

-- Open jobs with their effective priority, which rises by one for every pg_tensile.ageing seconds since submission
-- so that no job starves.
CREATE VIEW tensile_internal._open_jobs WITH (security_invoker = true) AS
    WITH ageing AS MATERIALIZED ( -- one time for all rows
        SELECT pg_catalog.clock_timestamp() AS moment,
               extract(epoch FROM pg_catalog.current_setting('pg_tensile.ageing')::pg_catalog.interval) AS seconds
    )
    SELECT j.id, j.state, least(j.memory_budget, j.role_memory) AS memory_budget, j.submitted_at, j.not_before,
           CASE WHEN a.seconds OPERATOR(pg_catalog.>) 0
                THEN j.priority OPERATOR(pg_catalog.+) (
                     extract(epoch FROM a.moment OPERATOR(pg_catalog.-) j.submitted_at)
                     OPERATOR(pg_catalog./) a.seconds)
                ELSE j.priority END::pg_catalog.float8 AS aged_priority,
           j.automatic, j.owner_id, j.owner, j.reason
    FROM tensile_internal.jobs j CROSS JOIN ageing a
    WHERE j.ended_at IS NULL;
COMMENT ON VIEW tensile_internal._open_jobs IS 'private: open jobs and their priority with ageing';

-- Jobs that may start now, in the order in which they are to start: max_rows of them, which are locked, and those
-- before them that another transaction holds. Jobs of a role that has as many as it may (pg_tensile.role_max_jobs) are
-- left out, and have that as their reason.
CREATE FUNCTION tensile_internal._queue_next(max_rows int DEFAULT NULL) RETURNS TABLE (job bigint, is_held bool)
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    free int := 0;
    chosen oid[] := '{}'; -- roles of the jobs that are to start
    next record;
BEGIN
    FOR next IN
        WITH roles AS MATERIALIZED (
            SELECT o.owner_id, tensile_internal._role_limit(o.owner_id, 'pg_tensile.role_max_jobs') AS most,
                   count(*) FILTER (WHERE o.state NOT IN ('queued', 'interrupted')) AS running
            FROM tensile_internal._open_jobs o WHERE NOT o.automatic GROUP BY o.owner_id
        )
        SELECT j.id, j.owner_id, j.reason, r.most, r.running,
               format('role "%s" runs %s of %2$s jobs (pg_tensile.role_max_jobs)', j.owner, r.most) AS full_reason
        FROM tensile_internal._open_jobs j LEFT JOIN roles r ON r.owner_id = j.owner_id AND NOT j.automatic
        WHERE j.state IN ('queued', 'interrupted') AND (j.not_before IS NULL OR j.not_before <= clock_timestamp())
        ORDER BY j.aged_priority DESC, j.submitted_at, j.id
    LOOP
        EXIT WHEN free >= max_rows;
        job := next.id;
        IF next.running + cardinality(array_positions(chosen, next.owner_id)) >= next.most THEN
            PERFORM tensile_internal._set_reason(job, next.full_reason)
                WHERE next.reason IS DISTINCT FROM next.full_reason AND tensile_internal._try_lock_job(job);
            CONTINUE;
        END IF;
        is_held := NOT tensile_internal._try_lock_job(job);
        IF NOT is_held THEN
            free := free + 1;
            chosen := chosen || next.owner_id;
            PERFORM tensile_internal._set_reason(job, NULL) WHERE next.reason LIKE '%(pg_tensile.role_max_jobs)';
        END IF;
        RETURN NEXT;
    END LOOP;
END $$;

CREATE FUNCTION tensile_internal._set_reason(job bigint, reason text) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile_internal.jobs j SET reason = $2 WHERE j.id = $1
$$;

-- Milliseconds until the next delayed job may start; null if no job is delayed
CREATE FUNCTION tensile_internal._queue_delay_ms() RETURNS int
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT (1000 * min(least(greatest(extract(epoch FROM j.not_before - clock_timestamp()), 0), 3600)))::int
    FROM tensile_internal.jobs j
    WHERE j.ended_at IS NULL AND j.state = 'interrupted' AND j.not_before > clock_timestamp()
$$;

-- The public function that jobs of this kind are submitted with
CREATE FUNCTION tensile_internal._function_of(j tensile_internal.jobs) RETURNS name
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN j.tuning IS NOT NULL THEN 'tune_model' WHEN j.kind = 'evaluate' THEN 'schedule_evaluation'
                WHEN j.kind = 'calibrate' THEN 'calibrate_device' ELSE 'train_model' END::name
$$;

-- Change a job from queued or interrupted to starting, and return the OID of the role to connect as; null if the
-- job may no longer start, or not while another transaction holds it. A job whose role no longer exists fails.
CREATE FUNCTION tensile_internal._job_starting(job bigint) RETURNS oid
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile_internal.jobs;
BEGIN
    IF NOT tensile_internal._try_lock_job(job) THEN
        RETURN NULL;
    END IF;
    SELECT * INTO j FROM tensile_internal.jobs WHERE id = job AND state IN ('queued', 'interrupted');
    IF NOT FOUND THEN
        RETURN NULL;
    ELSIF j.model_id IS NULL AND j.kind NOT IN ('calibrate', 'evaluate') THEN
        PERFORM tensile_internal._end_job(job, 'failed', '42704', format('model "%s" was dropped', j.model),
                                          'Register the model again and submit a new job.');
        RETURN NULL;
    ELSIF NOT EXISTS (SELECT FROM pg_roles WHERE oid = j.owner_id AND rolname = j.owner AND rolcanlogin) THEN
        PERFORM tensile_internal._end_job(job, 'failed', '42704',
            format('role "%s" was dropped, renamed, or may no longer log in', j.owner),
            'The job''s worker connects as the role that submitted it: submit it again as a role with LOGIN.');
        RETURN NULL;
    ELSIF NOT has_schema_privilege(j.owner_id, 'tensile', 'USAGE') THEN
        PERFORM tensile_internal._end_job(job, 'failed', '42501',
            format('role "%s" may no longer use pg_tensile', j.owner),
            format('The job''s worker runs as the role that submitted it: GRANT tensile_user TO %I.', j.owner));
        RETURN NULL;
    ELSIF NOT tensile_internal._may_execute(j.owner_id, tensile_internal._function_of(j)) THEN
        PERFORM tensile_internal._end_job(job, 'failed', '42501',
            format('role "%s" may no longer call %s', j.owner, tensile_internal._function_of(j)),
            format('The job''s worker runs as the role that submitted it: GRANT tensile_user TO %I.', j.owner));
        RETURN NULL;
    END IF;
    IF NOT has_database_privilege(j.owner_id, current_database(), 'CONNECT') THEN
        PERFORM tensile_internal._end_job(job, 'failed', '42501',
            format('role "%s" no longer has the CONNECT privilege for database "%s"', j.owner, current_database()),
            'The job''s worker connects as the role that submitted it: grant it CONNECT and submit the job again.');
        RETURN NULL;
    END IF;
    UPDATE tensile_internal.jobs SET state = 'starting', attempts = attempts + 1, not_before = NULL WHERE id = job;
    PERFORM tensile_internal._notify(job);
    RETURN j.owner_id;
END $$;

-- Return a starting job to its previous state because no worker could be started; true if the reason is new, so
-- that it is logged once.
CREATE FUNCTION tensile_internal._job_requeue(job bigint, reason text) RETURNS bool
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    previous text := (SELECT j.reason FROM tensile_internal.jobs j WHERE j.id = job);
BEGIN
    UPDATE tensile_internal.jobs j SET state = CASE WHEN j.attempts > 1 THEN 'interrupted' ELSE 'queued' END,
            attempts = j.attempts - 1, reason = _job_requeue.reason
        WHERE j.id = job AND j.state = 'starting';
    RETURN previous IS DISTINCT FROM reason;
END $$;

-- Jobs without the worker that they should have, and how their last worker ended, if known. That is asked for after the
-- worker has been found gone: before, it may still be about to tell.
CREATE FUNCTION tensile_internal._orphans()
    RETURNS TABLE (job bigint, state text, attempt int, terminated bool, error text)
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    WITH orphans AS MATERIALIZED (
        SELECT j.id, j.state, j.attempts FROM tensile_internal.jobs j
        WHERE j.ended_at IS NULL AND j.state IN ('starting', 'running', 'waiting')
          AND NOT EXISTS (SELECT FROM tensile_internal._job_slots() s WHERE s.job = j.id)
    )
    SELECT o.id, o.state, o.attempts, w.terminated, w.error
    FROM orphans o CROSS JOIN LATERAL tensile_internal._worker_end(o.id) w
$$;

-- Delete jobs that ended more than pg_tensile.job_retention ago, except those that trained an existing version.
CREATE FUNCTION tensile_internal._forget_jobs() RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    DELETE FROM tensile_internal.jobs WHERE id IN (
        SELECT j.id FROM tensile_internal.jobs j
        WHERE current_setting('pg_tensile.job_retention')::interval > '0'
          AND j.ended_at < clock_timestamp() - current_setting('pg_tensile.job_retention')::interval
          AND NOT EXISTS (SELECT FROM tensile_internal.model_versions v WHERE v.job = j.id)
        FOR UPDATE SKIP LOCKED)
$$;

-- Interrupt an orphan, or end it as failed or cancelled. One that another transaction holds stays one.
CREATE FUNCTION tensile_internal._reap(job bigint, reason text, retry bool) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_internal._interrupt_job($1, $2, $3) WHERE tensile_internal._try_lock_job($1)
$$;

-- Cancel an orphan whose worker was terminated, unless another transaction holds it.
CREATE FUNCTION tensile_internal._reap_terminated(job bigint, reason text) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_internal._end_job($1, 'cancelled', reason => $2) WHERE tensile_internal._try_lock_job($1)
$$;
