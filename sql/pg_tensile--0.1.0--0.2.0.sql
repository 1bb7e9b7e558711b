\echo Use "ALTER EXTENSION pg_tensile UPDATE" to load this file. \quit

-- rules
-- They are PL/pgSQL now, and called by the owner's functions only.
REVOKE EXECUTE ON FUNCTION tensile._check_architecture(jsonb), tensile._check_options(jsonb) FROM PUBLIC;
-- No plan is found to be damaged any more: nothing but the scheduler writes into the plan table.
DROP FUNCTION tensile._job_replan(text);
DROP FUNCTION tensile._schedule_jobs(); -- has another column less
ALTER TABLE tensile.traces DROP COLUMN replans;
-- checkpoints
ALTER TABLE tensile.models ADD keep_versions int CHECK (keep_versions OPERATOR(pg_catalog.>) 0);
COMMENT ON COLUMN tensile.models.keep_versions IS
    'versions that stay when a job adds one: the newest ones, and the deployed one; null: all';
ALTER TABLE tensile.model_weights SET (
    toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 5000);
ALTER TABLE tensile.checkpoint_chunks SET (
    toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 5000);
ALTER POLICY visible ON tensile.model_versions USING (
    weight_bytes IS NOT NULL AND EXISTS (SELECT FROM tensile.models m WHERE m.id OPERATOR(pg_catalog.=) model));
DROP FUNCTION tensile._job_version(text, jsonb, jsonb); -- it has another argument; for PUBLIC, as the one before

-- loop
DROP PROCEDURE tensile.run_controller();
DROP PROCEDURE tensile.run_scheduler();
DROP PROCEDURE tensile.run_inference();
DROP PROCEDURE tensile.run_worker(bigint);
DROP FUNCTION tensile._wait(int, int, bool);
