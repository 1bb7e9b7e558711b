\echo Use "ALTER EXTENSION pg_tensile UPDATE" to load this file. \quit

-- claims
-- launches of kernels that nothing read
ALTER TABLE tensile.codec_times DROP COLUMN launch;
DROP FUNCTION tensile._job_codec_times(text, jsonb, jsonb, float8);
