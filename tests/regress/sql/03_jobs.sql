-- Errors that train_model raises at submission. No job starts here: every submission is rolled back.
\set SHOW_CONTEXT never
CREATE TABLE flights (distance float8, carrier text, legs int[], notes jsonb, late bool);
SELECT register_model('late', '{"type": "mlp", "hidden": [8]}') IS NOT NULL AS registered;

SELECT train_model('', 'SELECT distance, late FROM flights', 'late');
SELECT train_model('late', NULL, 'late');
SELECT train_model('late', 'SELECT distance, late FRM flights', 'late');
SELECT train_model('late', 'SELECT distance, late FROM flights WHERE dist > 3', 'late');
SELECT train_model('late', 'SELECT distance, late FROM flights; DROP TABLE flights', 'late');
SELECT train_model('late', 'DELETE FROM flights RETURNING *', 'late');
SELECT train_model('late', 'WITH f AS (DELETE FROM flights RETURNING *) SELECT distance, late FROM f', 'late');
SELECT train_model('late', 'SELECT distance, late FROM flights FOR UPDATE', 'late');
SELECT train_model('late', 'SELECT distance, late, late FROM flights', 'late');
SELECT train_model('late', 'SELECT distance, carrier FROM flights', 'carier');
SELECT train_model('late', 'SELECT late FROM flights', 'late');
SELECT train_model('late', 'SELECT notes, late FROM flights', 'late');
SELECT train_model('late', 'SELECT distance, legs FROM flights', 'legs');
SELECT train_model('late', 'SELECT distance, late FROM flights', 'late', epochs => 0);
SELECT train_model('late', 'SELECT distance, late FROM flights', 'late', optimizer => 'adm');
SELECT train_model('late', 'SELECT distance, late FROM flights', 'late', memory_budget => '8 gigs');
SELECT train_model('late', 'SELECT distance, late FROM flights', 'late', policy => 'best');
SELECT train_model('late', 'SELECT distance, late FROM flights', 'late', options => '{"early_stoping": {}}');
SELECT train_model('late', 'SELECT distance, late FROM flights', 'late', options => '{"early_stopping": {"patience": -1}}');
SELECT train_model('late', 'SELECT distance, late FROM flights', 'late', options => '{"keep": "first"}');
SELECT train_model('late', 'SELECT distance, late FROM flights', 'late', max_time => '0 s');
SELECT train_model('late', 'SELECT distance, late FROM flights', 'late', split_by => 'distanc');
SELECT train_model('late', 'SELECT distance, late FROM flights', 'late', split_by => 'late');
SELECT train_model('late', 'SELECT distance, late FROM flights', 'late', validation_query => 'DROP TABLE flights');
SELECT train_model('late', 'SELECT distance, late FROM flights', 'late', validation_query => 'SELECT carrier, late FROM flights');
SELECT train_model('late', 'SELECT distance, late FROM flights', 'late', validation => 0.1, validation_query => 'TABLE flights');
SELECT count(*) FROM tensile.jobs;

BEGIN;
SELECT train_model('late', 'SELECT distance, legs, late FROM flights', 'late', memory_budget => '8GB', priority => 3) AS job \gset
SELECT model, query, target, epochs, batch_size, optimizer, learning_rate, validation, seed, policy, memory_budget,
       priority, options, state, attempts, settings->'search_path' AS search_path
FROM tensile.jobs WHERE job = :job;
SAVEPOINT s;
\set VERBOSITY sqlstate
SELECT train_model('late', 'SELECT distance, late FROM flights', 'late');
ROLLBACK TO s;
SELECT wait_for_job(:job);
ROLLBACK TO s;
\set VERBOSITY default
SELECT cancel_job(:job), cancel_job(:job) AS again;
SELECT state, reason FROM tensile.jobs WHERE job = :job;
SELECT state FROM tensile.job_history WHERE job = :job;
ROLLBACK;

-- A name that is not registered
BEGIN;
SELECT train_model('unknown', 'SELECT distance, late FROM flights', 'late') IS NOT NULL AS submitted;
SELECT model, architecture, architecture_reason FROM tensile.models WHERE model = 'unknown';
ROLLBACK;

SELECT wait_for_job(987654321);
SELECT cancel_job(987654321);
SELECT * FROM tensile.progress;
SELECT drop_model('late');
DROP TABLE flights;

-- Models and jobs are removed, and dropping the extension leaves nothing behind
SELECT count(*) FROM tensile.jobs;
SET client_min_messages = warning;
DROP EXTENSION pg_tensile CASCADE;
SELECT count(*) FROM pg_namespace WHERE nspname ~ '^tensile';
