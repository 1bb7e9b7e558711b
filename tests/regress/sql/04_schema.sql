-- The public functions are in the schema of the extension, where everything works the same; three schemas have views,
-- tables and private functions, and the functions of workers.
\set SHOW_CONTEXT never
SET client_min_messages = warning;
CREATE SCHEMA ml;
CREATE EXTENSION pg_tensile SCHEMA ml CASCADE;
SELECT n.nspname, array_agg(DISTINCT c.relkind ORDER BY c.relkind) FILTER (WHERE c.relkind <> 'S') AS relations,
       bool_or(p.oid IS NOT NULL) AS routines, obj_description(n.oid, 'pg_namespace') AS description
FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid AND e.extname = 'pg_tensile' AND d.deptype = 'e'
     LEFT JOIN pg_class c ON d.classid = 'pg_class'::regclass AND c.oid = d.objid
     LEFT JOIN pg_proc p ON d.classid = 'pg_proc'::regclass AND p.oid = d.objid
     JOIN pg_namespace n ON n.oid IN (c.relnamespace, p.pronamespace)
GROUP BY n.oid, n.nspname ORDER BY 1;
SELECT ml.register_model('m', '{"type": "mlp"}') IS NOT NULL AS registered;
BEGIN;
SELECT ml.train_model('m', 'VALUES (1, 2), (3, 4)', 'column2') AS job \gset
SELECT ml.cancel_job(:job);
ROLLBACK;
SELECT ml.drop_model('m');
ALTER EXTENSION pg_tensile SET SCHEMA public;
DROP EXTENSION pg_tensile CASCADE;
DROP SCHEMA ml;
SELECT nspname FROM pg_namespace WHERE nspname ~ '^tensile';
