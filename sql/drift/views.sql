-- View of drift

CREATE VIEW tensile.drift WITH (security_invoker = true) AS
    SELECT m.name AS model, v.version, d.column_name, d.kind, c.rows, c.since, d.psi, d.ks, t.threshold,
           CASE WHEN c.rows OPERATOR(pg_catalog.>=) l.least_rows
                THEN d.psi OPERATOR(pg_catalog.>) t.threshold END AS drifted
    FROM tensile_internal.models m JOIN tensile_internal.model_versions v ON v.model_id OPERATOR(pg_catalog.=) m.id
         LEFT JOIN tensile_internal.schedules s ON s.model_id OPERATOR(pg_catalog.=) m.id
         CROSS JOIN tensile_worker._drift_limits() l
         CROSS JOIN LATERAL (
             SELECT pg_catalog.sum(x.rows)::pg_catalog.int8 AS rows, pg_catalog.min(x.since) AS since,
                    tensile_worker._sum_counts(x.counts) AS counts
             FROM tensile_internal.drift_counts x
             WHERE x.version OPERATOR(pg_catalog.=) v.id
               AND x.since OPERATOR(pg_catalog.>=) tensile_worker._drift_begin()) c
         CROSS JOIN LATERAL tensile_worker._drift(v.reference, c.counts) d
         CROSS JOIN LATERAL (SELECT CASE WHEN d.kind OPERATOR(pg_catalog.<>) 'time'
                                         THEN coalesce(s.drift, l.threshold) END) t (threshold);
COMMENT ON VIEW tensile.drift IS
    'features and predictions of rows that were predicted in the last pg_tensile.drift_window, compared with the rows '
    'that the version was trained on; a row for each column; visible to the model''s owner and to members of '
    'pg_read_all_stats';
COMMENT ON COLUMN tensile.drift.version IS 'version that has predicted the rows';
COMMENT ON COLUMN tensile.drift.column_name IS 'name of the feature, or of the target';
COMMENT ON COLUMN tensile.drift.kind IS
    'feature, time (a feature that is a time, which has no threshold) or prediction, compared with those for the '
    'validation rows';
COMMENT ON COLUMN tensile.drift.rows IS 'number of rows that were counted: pg_tensile.drift_sample_rate of all';
COMMENT ON COLUMN tensile.drift.since IS 'time from which they were counted';
COMMENT ON COLUMN tensile.drift.psi IS
    'population stability index, less its expectation for rows like the training rows; at least 0';
COMMENT ON COLUMN tensile.drift.ks IS
    'largest distance of the distribution functions of a number, over the bins; 0 to 1; null: no number';
COMMENT ON COLUMN tensile.drift.threshold IS 'psi above which the column has drifted: that of the schedule, or 0.2';
COMMENT ON COLUMN tensile.drift.drifted IS 'true if psi is above the threshold; null: fewer than 200 rows, or a time';

CREATE VIEW tensile.drift_alarms WITH (security_invoker = true) AS
    SELECT m.name AS model, m.id AS model_id, v.version, a.column_name, a.psi, a.threshold, a.at
    FROM tensile_internal.drift_alarms a
         JOIN tensile_internal.model_versions v ON v.id OPERATOR(pg_catalog.=) a.version
         JOIN tensile_internal.models m ON m.id OPERATOR(pg_catalog.=) v.model_id;
COMMENT ON VIEW tensile.drift_alarms IS
    'deployed versions whose drift has exceeded its threshold, until it is below four fifths of it; visible to the '
    'model''s owner and to members of pg_read_all_stats';
COMMENT ON COLUMN tensile.drift_alarms.version IS 'version that has drifted';
COMMENT ON COLUMN tensile.drift_alarms.column_name IS 'column that has drifted most';
COMMENT ON COLUMN tensile.drift_alarms.psi IS 'drift of the column at that time';
COMMENT ON COLUMN tensile.drift_alarms.threshold IS 'threshold at that time';
COMMENT ON COLUMN tensile.drift_alarms.at IS 'time at which the threshold was exceeded';
