"""SQL of the demo: tables, models, training, and queries about them."""

from __future__ import annotations

TABLES = """
CREATE TABLE flights (
    year int2, month int2, day int2, dep_time int2, sched_dep_time int2, dep_delay int2, arr_time int2,
    sched_arr_time int2, arr_delay int2, carrier text, flight int2, tailnum text, origin text, dest text,
    air_time int2, distance int2, hour int2, minute int2, time_hour timestamptz);
CREATE TABLE weather (
    origin text, year int2, month int2, day int2, hour int2, temp float4, dewp float4, humid float4, wind_dir int2,
    wind_speed float4, wind_gust float4, precip float4, pressure float4, visib float4, time_hour timestamptz,
    PRIMARY KEY (origin, time_hour));
CREATE TABLE planes (
    tailnum text PRIMARY KEY, year int2, type text, manufacturer text, model text, engines int2, seats int2,
    speed int2, engine text);
CREATE TABLE digits (id int PRIMARY KEY, label int2, image int2[]);
"""

# It has no features that are known only after the departure.
DEPARTURES = """
CREATE OR REPLACE VIEW departures AS
SELECT f.arr_delay > 15 AS late,
       f.carrier, f.origin, f.dest, f.distance, f.hour, f.time_hour,
       extract(isodow FROM make_date(f.year, f.month, f.day))::int AS weekday,
       w.temp, w.humid, w.wind_speed, w.precip, w.pressure, w.visib,
       p.year AS built, p.seats, p.engine
FROM flights f
LEFT JOIN weather w USING (origin, time_hour)
LEFT JOIN planes p USING (tailnum)
WHERE f.arr_delay IS NOT NULL;
"""

REGISTER = """
SELECT register_model('digit', '{"type": "cnn", "shape": [8, 8], "channels": [64, 128]}',
                      replace => true);
"""

BEFORE_DECEMBER = "SELECT * FROM departures WHERE time_hour < '2013-12-01'"
DECEMBER = "SELECT * FROM departures WHERE time_hour >= '2013-12-01'"
SAMPLE = f"{DECEMBER} ORDER BY hashtext(departures::text) LIMIT 5000"  # the same rows in every run

# The arguments of explain_training and train_model. The tensors saved for the backward pass grow with the rows of a
# step, so the first job takes far more memory than its weights, and a plan can save most of that.
TRAIN = {
    "late_arrival": f"""('late_arrival', target => 'late',
    query => $${BEFORE_DECEMBER}$$,
    split_by => 'time_hour', validation => 0.1, epochs => 3, batch_size => 2048{{more}})""",
    "digit": """('digit', target => 'label',
    query => 'SELECT label, image FROM digits WHERE id <= 1500',
    epochs => 24, options => '{{"task": "classification"{options}}}'{more})""",
}
# During the training
MEMORY = """
SELECT p.model, pg_size_pretty(f.vanilla) AS "without plan",
       pg_size_pretty(f.planned) AS planned,
       pg_size_pretty(p.device_peak_bytes) AS peak,
       pg_size_pretty(p.bytes_swapped) AS swapped,
       (p.stall_us / 1000)::int AS "stall, ms"
FROM tensile.progress p JOIN (
    SELECT job, max(vanilla_bytes) AS vanilla, max(planned_bytes) AS planned
    FROM tensile.footprint GROUP BY job) f USING (job)
WHERE p.phase = 'training' AND p.device_peak_bytes > 0 ORDER BY p.job;
"""

DEVICE = """
SELECT name AS device, jobs, pg_size_pretty(budget_bytes) AS budget,
       pg_size_pretty(granted_bytes) AS granted
FROM tensile.devices WHERE jobs > 0;
"""

PLAN = """
SELECT j.model_name AS model, p.event, p.tensor_name AS tensor, p.bytes,
       p.trigger_operator AS after, split_part(p.trigger_name, '.', 2) AS operator
FROM tensile.plan p JOIN tensile.jobs j ON j.id = p.job
ORDER BY p.bytes DESC, p.job, p.sequence LIMIT 8;
"""

DURING = {
    "While both trained, each kept to its plan:": MEMORY,
    "and both to one budget:": DEVICE,
    "The largest events of their plans were:": PLAN,
}

LATENCY = """
SELECT j.model_name AS model, l.phase, split_part(l.target, '.', 2) AS operator,
       l.predicted_us::int AS predicted, l.measured_us::int AS measured,
       l.average_us::int AS average, l.samples
FROM tensile.latency l JOIN tensile.jobs j ON j.id = l.job
WHERE l.job = ANY (%(jobs)s)
ORDER BY l.average_us DESC LIMIT 8;
"""

WEIGHTS = """
SELECT v.job, j.policy, m.name AS model, v.version,
       left(encode(sha256(string_agg(w.data, '' ORDER BY w.seq)), 'hex'), 16) AS "digest of the weights"
FROM tensile.model_versions v
JOIN tensile.models m ON m.id = v.model JOIN tensile.jobs j ON j.id = v.job
JOIN tensile.model_weights w ON w.version = v.id
WHERE v.job = ANY (%(jobs)s)
GROUP BY v.job, j.policy, m.name, v.version ORDER BY m.name, v.job;
"""

EVALUATION = f"""
SELECT metric, trim_scale(round(value::numeric, 4)) AS value
FROM evaluate_model('late_arrival', $${DECEMBER}$$)
WHERE metric IN ('rows', 'accuracy', 'roc_auc', 'log_loss', 'brier');
"""

CALIBRATION = f"""
SELECT (100 * max(value) FILTER (WHERE metric = 'calibration_probability'))::int AS "predicted late, %",
       (100 * max(value) FILTER (WHERE metric = 'calibration_frequency'))::int AS "really late, %",
       max(value) FILTER (WHERE metric = 'calibration_rows')::int AS flights
FROM evaluate_model('late_arrival', $${DECEMBER}$$)
WHERE metric ^@ 'calibration' GROUP BY quantile ORDER BY quantile;
"""

LATE = """
SELECT (100 * avg(late::int) FILTER (WHERE time_hour >= '2013-12-01'))::int,
       (100 * avg(late::int) FILTER (WHERE time_hour < '2013-12-01'))::int
FROM departures;
"""

IMPORTANCE = f"""
SELECT feature, round(importance::numeric, 4) AS importance, round(deviation::numeric, 4) AS "±"
FROM feature_importance('late_arrival', $${SAMPLE}$$)
LIMIT 6;
"""

# What gradient boosting gets: the same columns, the time as a number
ROWS_OF_BOTH = """
SELECT late, carrier, origin, dest, distance, hour, extract(epoch FROM time_hour)::float8 AS time_hour,
       weekday, temp, humid, wind_speed, precip, pressure, visib, built, seats, engine,
       time_hour >= '2013-12-01' AS december
FROM departures;
"""

ROUTES = """
SELECT origin, dest, count(*) AS flights,
       (100 * avg(predict('late_arrival', d)))::int AS "predicted late, %",
       (100 * avg(late::int))::int AS "really late, %"
FROM departures d
WHERE time_hour >= '2013-12-01'
GROUP BY origin, dest HAVING count(*) >= 100
ORDER BY 4 DESC LIMIT 10;
"""

YEAR = """
SELECT count(*) AS flights, (100 * avg(prediction))::int AS "predicted late, %"
FROM predict_rows('late_arrival', 'SELECT * FROM departures');
"""

DIGITS = """
SELECT label AS digit, count(*) AS images,
       count(*) FILTER (WHERE read = label) AS "read correctly",
       string_agg(read::text, ' ') FILTER (WHERE read <> label) AS "misread as"
FROM (SELECT label, predict_class('digit', d)::int AS read
      FROM digits d WHERE id > 1500) AS unseen
GROUP BY label ORDER BY label;
"""
