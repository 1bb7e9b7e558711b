"""SQL of the demo: tables, training, and queries."""

from __future__ import annotations

TABLES = """
CREATE TABLE diamonds (id int PRIMARY KEY, carat real, cut text, color text, clarity text, price int);
CREATE TABLE digits (id int PRIMARY KEY, label int2, image int2[]);
"""

FIRST_ROWS = """
SELECT * FROM diamonds ORDER BY id LIMIT 5;
"""

KNOWN = "SELECT carat, cut, color, clarity, price FROM diamonds WHERE id <= 4000"
UNSEEN = "SELECT carat, cut, color, clarity, price FROM diamonds WHERE id > 52000"

LEARN = f"""
SELECT train_model('price', '{KNOWN}',
                   target => 'price');
"""

ERRORS = """
SELECT count(*) AS diamonds, avg(price)::int AS "average price",
       avg(abs(price - (SELECT avg(price) FROM diamonds WHERE id <= 4000)))::int AS "guessing the average is off by",
       avg(abs(price - predict('price', d)))::int AS "the model is off by"
FROM diamonds d WHERE id > 52000;
"""

BY_CUT = """
SELECT cut, count(*) AS diamonds, avg(price)::int AS "average price",
       avg(predict('price', d))::int AS "average prediction"
FROM diamonds d WHERE id > 52000
GROUP BY cut ORDER BY 3;
"""

ONE = """
SELECT predict('price', '{"carat": 1.2, "cut": "Ideal", "color": "G", "clarity": "VS1"}'::jsonb)::int AS price;
"""

# The arguments of explain_training and train_model. The tensors saved for the backward pass grow with the rows of a
# step, so the first job takes far more memory than its weights, and a plan can save most of that.
TRAIN = {
    "price_2": """('price_2',
    'SELECT carat, cut, color, clarity, price FROM diamonds WHERE id <= 16384',
    target => 'price', epochs => 4, batch_size => 2048{more})""",
    "digit": """('digit',
    'SELECT label::text, image FROM digits WHERE id <= 1500',
    target => 'label', epochs => 30{more})""",
}

# During the training
MEMORY = """
SELECT p.model, pg_size_pretty(f.vanilla) AS "needs",
       pg_size_pretty(f.planned) AS "planned",
       pg_size_pretty(p.device_peak_bytes) AS "took",
       pg_size_pretty(p.bytes_swapped) AS "moved out and in"
FROM tensile.progress p JOIN (
    SELECT job, max(vanilla_bytes) AS vanilla, max(planned_bytes) AS planned
    FROM tensile.footprint GROUP BY job) f USING (job)
WHERE p.phase = 'training' AND p.device_peak_bytes > 0 ORDER BY p.job;
"""

WEIGHTS = """
SELECT v.job, v.model, j.policy,
       left(encode(sha256(string_agg(w.data, '' ORDER BY w.seq)), 'hex'), 16) AS "digest of the weights"
FROM tensile.model_versions v
JOIN tensile.jobs j USING (job)
JOIN tensile_internal.model_weights w ON w.version = v.version_id
WHERE v.job = ANY (%(jobs)s)
GROUP BY v.job, v.model, j.policy ORDER BY v.model, v.job;
"""

DIGITS = """
SELECT count(*) AS images, count(*) FILTER (WHERE predict_class('digit', d) = label::text) AS "read correctly"
FROM digits d WHERE id > 1500;
"""
