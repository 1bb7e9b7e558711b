-- Members may use the extension, PUBLIC may not. Roles belong to the cluster: another database may have created
-- this one.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname OPERATOR(pg_catalog.=) 'tensile_user') THEN
        CREATE ROLE tensile_user NOLOGIN;
    END IF;
EXCEPTION WHEN duplicate_object OR unique_violation THEN
    NULL; -- created by another session at the same time
END $$;

CREATE SCHEMA tensile;
GRANT USAGE ON SCHEMA tensile TO tensile_user;
COMMENT ON SCHEMA tensile IS
    'pg_tensile: models, jobs, metrics and live views; names that begin with an underscore are private';
