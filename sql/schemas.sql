/*
 * pg_tensile 0.2.0: the catalogue and the SQL surface.
 *
 * Schemas: functions for users are in the extension's schema, views for users in "tensile". "tensile_internal" has the
 * tables and the private functions; "tensile_worker" the functions that workers, views and functions with the caller's
 * rights call. That orders them and does not protect: a worker runs as the role that submitted its job.
 *
 * Writing: no role writes the tables directly. A public function that changes something is the C function
 * tensile_forward, which calls the private function _<same name> with the caller's OID as the first argument. The
 * private function is SECURITY DEFINER and therefore cannot determine the caller itself; no other role may execute it.
 * The bookkeeping functions tensile_worker._job_* have no argument for the job: they call _my_job(), which raises an
 * error outside a worker.
 *
 * Executing: members of tensile_user have USAGE on schemas "tensile" and "tensile_worker", and EXECUTE on the public
 * functions; members of tensile_predictor have the same USAGE, and EXECUTE on those that predict and evaluate. Without
 * USAGE, the privileges of PUBLIC there (SELECT and EXECUTE) have no effect. Functions with the caller's rights name
 * nothing in "tensile_internal".
 *
 * Reading: row-level security shows each role its own rows, and members of pg_read_all_stats all rows except
 * weights and checkpoints. Superusers bypass it.
 *
 * Owners are stored as OID and name, and both must match: the OID of a dropped role may be reused, and a restore
 * into another cluster finds the role by its name. The OID is null while no role has that name.
 */

\echo Use "CREATE EXTENSION pg_tensile" to load this file. \quit

-- Members may use the extension, or predict and evaluate only; PUBLIC may not. Roles belong to the cluster: another
-- database may have created these.
DO $$
DECLARE
    role pg_catalog.text;
BEGIN
    FOREACH role IN ARRAY ARRAY['tensile_user', 'tensile_predictor'] LOOP
        BEGIN
            IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname OPERATOR(pg_catalog.=) role) THEN
                EXECUTE pg_catalog.format('CREATE ROLE %I NOLOGIN', role);
            END IF;
        EXCEPTION WHEN duplicate_object OR unique_violation THEN
            NULL; -- created by another session at the same time
        END;
    END LOOP;
END $$;

CREATE SCHEMA tensile;
CREATE SCHEMA tensile_internal;
CREATE SCHEMA tensile_worker;
GRANT USAGE ON SCHEMA tensile, tensile_worker TO tensile_user, tensile_predictor;
COMMENT ON SCHEMA tensile IS 'pg_tensile: views of models, jobs, metrics, plans and devices';
COMMENT ON SCHEMA tensile_internal IS 'pg_tensile: tables and private functions';
COMMENT ON SCHEMA tensile_worker IS 'pg_tensile: functions that its workers and views call';
