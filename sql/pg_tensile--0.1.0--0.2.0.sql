\echo Use "ALTER EXTENSION pg_tensile UPDATE" to load this file. \quit

-- rules
-- They are PL/pgSQL now, and called by the owner's functions only.
REVOKE EXECUTE ON FUNCTION tensile._check_architecture(jsonb), tensile._check_options(jsonb) FROM PUBLIC;
-- No plan is found to be damaged any more: nothing but the scheduler writes into the plan table.
DROP FUNCTION tensile._job_replan(text);
DROP FUNCTION tensile._schedule_jobs(); -- has another column less
ALTER TABLE tensile.traces DROP COLUMN replans;

-- loop
DROP PROCEDURE tensile.run_controller();
DROP PROCEDURE tensile.run_scheduler();
DROP PROCEDURE tensile.run_inference();
DROP PROCEDURE tensile.run_worker(bigint);
DROP FUNCTION tensile._wait(int, int, bool);
