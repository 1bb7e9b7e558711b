-- The public functions are in the schema of the extension, where everything works the same.
\set SHOW_CONTEXT never
SET client_min_messages = warning;
CREATE SCHEMA ml;
CREATE EXTENSION pg_tensile SCHEMA ml CASCADE;
SELECT ml.register_model('m', '{"type": "mlp"}') IS NOT NULL AS registered;
BEGIN;
SELECT ml.train_model('m', 'VALUES (1, 2), (3, 4)', 'column2') AS job \gset
SELECT ml.cancel_job(:job);
ROLLBACK;
SELECT ml.drop_model('m');
ALTER EXTENSION pg_tensile SET SCHEMA public;
DROP EXTENSION pg_tensile CASCADE;
DROP SCHEMA ml;
