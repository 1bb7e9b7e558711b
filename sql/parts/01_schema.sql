/*
 * pg_tensile 0.2.0: the catalogue and the SQL surface.
 *
 * Schemas: functions for users go to the extension's schema, everything else to "tensile". Names in "tensile" that
 * begin with an underscore are private.
 *
 * Who may write: nobody writes the tables directly. A public function that changes something is the C function
 * tensile_forward: it calls the private function tensile._<same name>, a SECURITY DEFINER function nobody else may
 * execute, with the caller's OID as the first argument (inside SECURITY DEFINER the caller can't be told any more).
 * The bookkeeping functions tensile._job_* take no job: they ask tensile._my_job(), which raises outside a worker.
 *
 * Who may use it: members of tensile_user, who have USAGE of schema "tensile" and EXECUTE on the public functions. What
 * PUBLIC has in that schema (SELECT, and EXECUTE on what views and workers call) is of no use without USAGE.
 *
 * Who may read: row-level security. Own rows, or for members of pg_read_all_stats all of them except weights and
 * checkpoints. Superusers bypass it.
 *
 * Owners are kept as OID and name and both must match: the OID of a dropped role may be used again, and a restore into
 * another cluster finds the role by its name. The OID is null while no role has that name.
 */

\echo Use "CREATE EXTENSION pg_tensile" to load this file. \quit

-- Its members may use the extension; PUBLIC may not. Roles belong to the cluster, so another database may have made it.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname OPERATOR(pg_catalog.=) 'tensile_user') THEN
        CREATE ROLE tensile_user NOLOGIN;
    END IF;
EXCEPTION WHEN duplicate_object OR unique_violation THEN
    NULL; -- by another session, at the same time
END $$;

CREATE SCHEMA tensile;
GRANT USAGE ON SCHEMA tensile TO tensile_user;
COMMENT ON SCHEMA tensile IS
    'pg_tensile: models, jobs, metrics and live views; names that begin with an underscore are private';
