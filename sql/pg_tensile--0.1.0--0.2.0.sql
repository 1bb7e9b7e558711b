\echo Use "ALTER EXTENSION pg_tensile UPDATE" to load this file. \quit

-- claims
-- launches of kernels that nothing read
ALTER TABLE tensile.codec_times DROP COLUMN launch;
DROP FUNCTION tensile._job_codec_times(text, jsonb, jsonb, float8);
-- loop
DROP PROCEDURE tensile.run_controller();
DROP PROCEDURE tensile.run_scheduler();
DROP PROCEDURE tensile.run_inference();
DROP PROCEDURE tensile.run_worker(bigint);
DROP FUNCTION tensile._wait(int, int, bool);
