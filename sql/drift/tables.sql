-- Counts of predicted rows, and alarms

CREATE TABLE tensile_internal.drift_counts (
    version bigint REFERENCES tensile_internal.model_versions ON DELETE CASCADE,
    since   timestamptz,
    rows    bigint NOT NULL,
    counts  bigint[] NOT NULL,
    PRIMARY KEY (version, since)
);
COMMENT ON TABLE tensile_internal.drift_counts IS
    'numbers of predicted rows in the bins of each version''s statistics, of a share of all rows; visible to the model''s '
    'owner and to members of pg_read_all_stats; the view drift compares them with the training rows';
COMMENT ON COLUMN tensile_internal.drift_counts.version IS 'id of the version in model_versions';
COMMENT ON COLUMN tensile_internal.drift_counts.since IS
    'time from which rows were counted, until the next one of the version: a 24th of pg_tensile.drift_window at most';
COMMENT ON COLUMN tensile_internal.drift_counts.rows IS 'number of rows that were counted';
COMMENT ON COLUMN tensile_internal.drift_counts.counts IS
    'numbers of rows in the bins of all columns of model_versions.reference, one column after the other';
ALTER TABLE tensile_internal.drift_counts ENABLE ROW LEVEL SECURITY;

CREATE TABLE tensile_internal.drift_alarms (
    version     bigint PRIMARY KEY REFERENCES tensile_internal.model_versions ON DELETE CASCADE,
    column_name text NOT NULL,
    psi         float8 NOT NULL,
    threshold   float8 NOT NULL,
    at          timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);
COMMENT ON COLUMN tensile_internal.drift_alarms.version IS 'id of the version in model_versions';
ALTER TABLE tensile_internal.drift_alarms ENABLE ROW LEVEL SECURITY;

CREATE POLICY visible ON tensile_internal.drift_counts FOR SELECT USING (
    EXISTS (SELECT FROM tensile_internal.model_versions v
                 JOIN tensile_internal.models m ON m.id OPERATOR(pg_catalog.=) v.model_id
            WHERE v.id OPERATOR(pg_catalog.=) drift_counts.version
              AND (tensile_worker._owned(m.owner_id, m.owner)
                   OR (SELECT pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE')))));
CREATE POLICY visible ON tensile_internal.drift_alarms FOR SELECT USING (
    EXISTS (SELECT FROM tensile_internal.model_versions v
                 JOIN tensile_internal.models m ON m.id OPERATOR(pg_catalog.=) v.model_id
            WHERE v.id OPERATOR(pg_catalog.=) drift_alarms.version
              AND (tensile_worker._owned(m.owner_id, m.owner)
                   OR (SELECT pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE')))));

SELECT pg_catalog.pg_extension_config_dump('tensile_internal.drift_counts',
    'WHERE version IN (SELECT id FROM tensile_internal.model_versions WHERE weight_bytes IS NOT NULL)');
SELECT pg_catalog.pg_extension_config_dump('tensile_internal.drift_alarms',
    'WHERE version IN (SELECT id FROM tensile_internal.model_versions WHERE weight_bytes IS NOT NULL)');
