\echo Use "ALTER EXTENSION pg_tensile UPDATE" to load this file. \quit

-- loop
DROP PROCEDURE tensile.run_controller();
DROP PROCEDURE tensile.run_scheduler();
DROP PROCEDURE tensile.run_inference();
DROP PROCEDURE tensile.run_worker(bigint);
DROP FUNCTION tensile._wait(int, int, bool);

-- ledger
DROP FUNCTION tensile._orphans();
DROP FUNCTION tensile._end_job(bigint, text, text, text, text, text, text, text[]);
DROP FUNCTION tensile._job_end(text, text, text, text, text, text, text[]);
COMMENT ON COLUMN tensile.jobs.reason IS 'why the job waits or was interrupted, or by what it was cancelled';
