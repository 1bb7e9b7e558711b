-- Public functions: cancelling and waiting, releasing the database

CREATE FUNCTION @extschema@.wait_for_job(job bigint, timeout interval DEFAULT NULL) RETURNS text
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward_reading';
COMMENT ON FUNCTION @extschema@.wait_for_job(bigint, interval) IS
    'wait until a job has ended, and return its state; raise the job''s error if it failed';
CREATE PROCEDURE @extschema@.await_job(job bigint, timeout interval DEFAULT NULL, INOUT state text DEFAULT NULL)
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward_reading';
COMMENT ON PROCEDURE @extschema@.await_job(bigint, interval, text) IS
    'wait like wait_for_job, but commit while waiting, so that no snapshot is held';
CREATE FUNCTION @extschema@.wait_for_first_version(job bigint, timeout interval DEFAULT NULL) RETURNS int
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward_reading';
COMMENT ON FUNCTION @extschema@.wait_for_first_version(bigint, interval) IS
    'wait until a job has trained a first version, which a better one may replace when the job ends, and return its '
    'number; raise the job''s error if it failed';

-- The name in 0.1.0
CREATE PROCEDURE @extschema@.wait_for_job_procedure(job bigint, timeout interval DEFAULT NULL,
                                                    INOUT state text DEFAULT NULL)
    LANGUAGE plpgsql
AS $$
BEGIN
    CALL @extschema@.await_job(job, timeout, state);
END $$;
COMMENT ON PROCEDURE @extschema@.wait_for_job_procedure(bigint, interval, text) IS 'deprecated: await_job';
CREATE FUNCTION @extschema@.cancel_job(job bigint) RETURNS bool
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.cancel_job(bigint) IS
    'stop a job; return false if it has already ended; for the job''s owner and members of pg_signal_backend';
CREATE FUNCTION @extschema@.set_job_priority(job bigint, priority int) RETURNS bool
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.set_job_priority(bigint, int) IS
    'set a job''s priority: a higher one starts earlier and loses less time to other jobs'' memory; return '
    'false if the job has already ended; for roles that may cancel it';

CREATE FUNCTION @extschema@.release_database() RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_release_database';
COMMENT ON FUNCTION @extschema@.release_database() IS
    'end all background processes of pg_tensile in this database, so that it can be renamed, copied or dropped, until '
    'resume_database() or the next start of the server; return when they have ended; jobs continue afterwards; for the '
    'owner of the database, and superusers';
CREATE FUNCTION @extschema@.resume_database() RETURNS bool
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_resume_database';
COMMENT ON FUNCTION @extschema@.resume_database() IS
    'end what release_database() has begun; return false if the database was not released; for the owner of the '
    'database, and superusers';
