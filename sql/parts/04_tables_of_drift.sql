------------------------------------------------------------------------------------------------------------------------
-- Tables: drift_counts, drift_alarms
------------------------------------------------------------------------------------------------------------------------

CREATE TABLE tensile.drift_counts (
    version bigint REFERENCES tensile.model_versions ON DELETE CASCADE,
    since   timestamptz,
    rows    bigint NOT NULL,
    counts  bigint[] NOT NULL,
    PRIMARY KEY (version, since)
);
COMMENT ON TABLE tensile.drift_counts IS
    'numbers of predicted rows in the bins of each version''s statistics, of a share of all rows; visible to the model''s '
    'owner and to members of pg_read_all_stats; the view drift compares them with the training rows';
COMMENT ON COLUMN tensile.drift_counts.version IS 'id of the version in model_versions';
COMMENT ON COLUMN tensile.drift_counts.since IS
    'time from which rows were counted, until the next one of the version: a 24th of pg_tensile.drift_window at most';
COMMENT ON COLUMN tensile.drift_counts.rows IS 'number of rows that were counted';
COMMENT ON COLUMN tensile.drift_counts.counts IS
    'numbers of rows in the bins of all columns of model_versions.reference, one column after the other';

CREATE TABLE tensile.drift_alarms (
    version     bigint PRIMARY KEY REFERENCES tensile.model_versions ON DELETE CASCADE,
    column_name text NOT NULL,
    psi         float8 NOT NULL,
    threshold   float8 NOT NULL,
    at          timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);
COMMENT ON TABLE tensile.drift_alarms IS
    'deployed versions whose drift has exceeded its threshold, until it is below four fifths of it; visible as '
    'drift_counts';
COMMENT ON COLUMN tensile.drift_alarms.version IS 'id of the version in model_versions';
COMMENT ON COLUMN tensile.drift_alarms.column_name IS 'column that has drifted most';
COMMENT ON COLUMN tensile.drift_alarms.psi IS 'drift of the column at that time';
COMMENT ON COLUMN tensile.drift_alarms.threshold IS 'threshold at that time';
COMMENT ON COLUMN tensile.drift_alarms.at IS 'time at which the threshold was exceeded';
