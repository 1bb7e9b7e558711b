-- Cancelling jobs and changing their priority

CREATE FUNCTION tensile_internal._notify_stop(job bigint) RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_notify_stop';

CREATE FUNCTION tensile_internal._check_priority(priority int) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF priority NOT BETWEEN -1000 AND 1000 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('priority is out of range: %s', priority),
            HINT = 'Use -1000 to 1000; a higher priority starts earlier and loses less time to other jobs'' memory.';
    END IF;
END $$;

-- Lock and return the job's row; raise an error unless the caller may cancel it or change its priority. The model is
-- locked first, because the end of a job may drop it.
CREATE FUNCTION tensile_internal._own_job(caller oid, job bigint) RETURNS tensile_internal.jobs
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile_internal.jobs;
    own bool;
BEGIN
    PERFORM tensile_internal._lock_model(job);
    SELECT * INTO j FROM tensile_internal.jobs WHERE id = job FOR UPDATE;
    own := tensile_internal._acts_for(caller, j.owner_id, j.owner);
    IF j.id IS NULL OR NOT own AND NOT pg_has_role(caller, 'pg_read_all_stats', 'USAGE')
                               AND NOT pg_has_role(caller, 'pg_signal_backend', 'USAGE') THEN
        PERFORM tensile_worker._no_such_job(job);
    ELSIF NOT own AND (NOT pg_has_role(caller, 'pg_signal_backend', 'USAGE')
                       OR EXISTS (SELECT FROM pg_roles WHERE oid = j.owner_id AND rolsuper)) THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', MESSAGE = format('permission denied for job %s', job),
            HINT = 'Its owner may do that, and members of pg_signal_backend unless the owner is a superuser.';
    END IF;
    RETURN j;
END $$;

CREATE FUNCTION tensile_internal._cancel_job(caller oid, job bigint) RETURNS bool
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile_internal.jobs := tensile_internal._own_job(caller, job);
BEGIN
    IF j.state IN ('queued', 'interrupted') THEN
        UPDATE tensile_internal.jobs SET cancel_requested = true WHERE id = job;
        PERFORM tensile_internal._end_job(job, 'cancelled');
    ELSIF j.state IN ('starting', 'running', 'waiting') THEN
        UPDATE tensile_internal.jobs SET cancel_requested = true WHERE id = job;
        PERFORM tensile_internal._notify_stop(job);
    ELSE
        RETURN false;
    END IF;
    RETURN true;
END $$;

CREATE FUNCTION tensile_internal._set_job_priority(caller oid, job bigint, priority int) RETURNS bool
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile_internal.jobs := tensile_internal._own_job(caller, job);
BEGIN
    PERFORM tensile_internal._not_null('priority', priority::text), tensile_internal._check_priority(priority);
    UPDATE tensile_internal.jobs SET priority = _set_job_priority.priority WHERE id = job AND ended_at IS NULL;
    PERFORM tensile_internal._notify(job);
    RETURN j.ended_at IS NULL;
END $$;
