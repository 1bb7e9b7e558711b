\echo Use "ALTER EXTENSION pg_tensile UPDATE" to load this file. \quit

-- loop
DROP PROCEDURE tensile.run_controller();
DROP PROCEDURE tensile.run_scheduler();
DROP PROCEDURE tensile.run_inference();
DROP PROCEDURE tensile.run_worker(bigint);
DROP FUNCTION tensile._wait(int, int, bool);
