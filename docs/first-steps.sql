-- First steps with pg_tensile, for psql in the database of pg_tensile.database: from CREATE EXTENSION to predictions in
-- queries, with a small table, a larger one and one with an array. No function and no view is used here before the
-- output has shown its name; tests/server/test_first_steps.py runs the script and checks that.
\set ON_ERROR_STOP on

CREATE EXTENSION pg_tensile CASCADE;

-- What is there? The list has the arguments of each function, too.
\df
\dn

-- ---------------------------------------------------------------------------------------------------------------------
-- 891 passengers: who survives?
-- ---------------------------------------------------------------------------------------------------------------------

SELECT setseed(0.5);
CREATE TABLE passengers AS
SELECT i AS id, class, sex, age, round((80 / class * (0.5 + random()))::numeric, 2) AS fare, port,
       CASE WHEN random() < 1 / (1 + exp(1.2 * (class - 2) - CASE sex WHEN 'female' THEN 1.5 ELSE -1.5 END
                                         + coalesce(age - 30, 0) / 30)) THEN 'yes' ELSE 'no' END AS survived
FROM (SELECT i, 1 + floor(3 * random())::int AS class, CASE WHEN random() < 0.35 THEN 'female' ELSE 'male' END AS sex,
             CASE WHEN random() < 0.8 THEN round((1 + 70 * random() ^ 1.3)::numeric) END AS age,
             (ARRAY['C', 'Q', 'S'])[1 + floor(3 * random() ^ 0.4)::int] AS port
      FROM generate_series(1, 891) i) p;

SELECT train_model('survival', 'SELECT class, sex, age, fare, port, survived FROM passengers', 'survived', epochs => 20)
    AS job \gset
SELECT wait_for_job(:job);

SELECT p.id, p.sex, p.class, p.age, p.survived, predict_class('survival', p) AS predicted
FROM passengers p ORDER BY p.id LIMIT 5;
SELECT round(avg((survived = predict_class('survival', p))::int), 3) AS right_share FROM passengers p;

-- Someone else
SELECT predict_class('survival', r) AS predicted
FROM (SELECT 1 AS class, 'female' AS sex, 29 AS age, 80.0 AS fare, 'S' AS port) r;

-- ---------------------------------------------------------------------------------------------------------------------
-- 40,000 trips: how many minutes do they take?
-- ---------------------------------------------------------------------------------------------------------------------

CREATE TABLE trips AS
SELECT started_at, km, extract(hour FROM started_at)::int AS hour, rain,
       3 + 2.2 * km * (1 + 0.5 * (extract(hour FROM started_at) IN (7, 8, 16, 17, 18))::int + 0.3 * rain::int)
         + 4 * (random() - 0.5) AS minutes
FROM (SELECT timestamp '2026-01-01' + i * interval '9 minutes' AS started_at, round((1 + 14 * random())::numeric, 1) AS km,
             random() < 0.2 AS rain
      FROM generate_series(1, 40000) i) t;

-- The newest trips are those to test with; the first call says what the training would take.
SELECT explain_training('duration', 'SELECT * FROM trips', 'minutes', epochs => 3, split_by => 'started_at');
SELECT train_model('duration', 'SELECT * FROM trips', 'minutes', epochs => 3, split_by => 'started_at') AS job \gset
SELECT wait_for_job(:job);

SELECT t.started_at, t.km, round(t.minutes::numeric, 1) AS minutes, round(predict('duration', t)::numeric, 1) AS predicted
FROM trips t ORDER BY t.started_at DESC LIMIT 5;
SELECT count(*), round(avg(prediction)::numeric, 1) AS mean_minutes
FROM predict_rows('duration', 'SELECT started_at, km, hour, rain FROM trips');

-- ---------------------------------------------------------------------------------------------------------------------
-- 1,000 sensors with 24 numbers each, in an array: which one is broken?
-- ---------------------------------------------------------------------------------------------------------------------

CREATE TABLE sensors AS
SELECT i AS sensor, i % 4 = 0 AS broken,
       ARRAY(SELECT (20 + 5 * sin(h / 24.0 * 2 * pi() + random() * 0.3) * CASE WHEN i % 4 = 0 THEN random() ELSE 1 END)::real
             FROM generate_series(0, 23) h) AS hours
FROM generate_series(1, 1000) i;

SELECT train_model('broken', 'SELECT hours, broken FROM sensors', 'broken', epochs => 10) AS job \gset
SELECT wait_for_job(:job);

SELECT s.sensor, s.broken, round(predict('broken', s)::numeric, 3) AS probability
FROM sensors s ORDER BY s.sensor LIMIT 5;

-- ---------------------------------------------------------------------------------------------------------------------
-- What has happened
-- ---------------------------------------------------------------------------------------------------------------------

\dv tensile.*
SELECT job, model, state, rows, epochs, ran_for FROM tensile.job_history ORDER BY job;
