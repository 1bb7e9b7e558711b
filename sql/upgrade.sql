-- Models: retention of versions
ALTER TABLE tensile.models ADD keep_versions int CHECK (keep_versions OPERATOR(pg_catalog.>) 0);

-- Architectures that train_model chooses
ALTER TABLE tensile.models ALTER architecture DROP NOT NULL, ADD architecture_reason text;

-- Recipes, divisions of the rows, and limits of time
ALTER TABLE tensile.jobs ALTER batch_size DROP NOT NULL, ALTER learning_rate DROP NOT NULL,
    ADD chosen_learning_rate float8, ADD split_by text, ADD validation_query text, ADD max_time interval;
UPDATE tensile.jobs j SET chosen_learning_rate = b.learning_rate
    FROM tensile.batch_sizes b WHERE b.job OPERATOR(pg_catalog.=) j.id AND b.chosen;
ALTER TABLE tensile.model_versions ADD training jsonb;

-- Versions are visible when they are complete, and the space of deleted weights and checkpoints is reused soon.
ALTER POLICY visible ON tensile.model_versions USING (
    weight_bytes IS NOT NULL AND EXISTS (SELECT FROM tensile.models m WHERE m.id OPERATOR(pg_catalog.=) model));
ALTER TABLE tensile.model_weights SET (
    toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 5000);
ALTER TABLE tensile.checkpoint_chunks SET (
    toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 5000);

-- Metrics by name: the table of metrics becomes that of epochs, its columns become rows.
ALTER TABLE tensile.metrics RENAME TO epochs;
ALTER INDEX tensile.metrics_pkey RENAME TO epochs_pkey;
ALTER TABLE tensile.epochs RENAME CONSTRAINT metrics_job_fkey TO epochs_job_fkey;
ALTER TABLE tensile.epochs RENAME CONSTRAINT metrics_split_check TO epochs_split_check;
CREATE TABLE tensile.metrics (
    job    bigint,
    epoch  int,
    split  text,
    metric text,
    value  float8 NOT NULL,
    PRIMARY KEY (job, epoch, split, metric),
    FOREIGN KEY (job, epoch, split) REFERENCES tensile.epochs ON DELETE CASCADE
);
INSERT INTO tensile.metrics (job, epoch, split, metric, value)
    SELECT e.job, e.epoch, e.split, m.metric, m.value
    FROM tensile.epochs e
         CROSS JOIN LATERAL (VALUES ('loss', e.loss), ('accuracy', e.accuracy), ('f1', e.f1), ('rmse', e.rmse),
                                    ('r2', e.r2)) m (metric, value)
    WHERE m.value IS NOT NULL;
ALTER TABLE tensile.epochs DROP COLUMN loss, DROP COLUMN accuracy, DROP COLUMN f1, DROP COLUMN rmse, DROP COLUMN r2;
ALTER TABLE tensile.metrics ENABLE ROW LEVEL SECURITY;
CREATE POLICY visible ON tensile.metrics FOR SELECT USING (
    EXISTS (SELECT FROM tensile.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
SELECT pg_catalog.pg_extension_config_dump('tensile.metrics',
    'WHERE job IN (SELECT id FROM tensile.jobs WHERE ended_at IS NOT NULL)');

-- Only the scheduler writes into the plan table, so executors find no damaged plans.
ALTER TABLE tensile.traces DROP COLUMN replans;

-- Launch times of kernels, which nothing read
ALTER TABLE tensile.codec_times DROP COLUMN launch;

-- Plans count with the load of the device at present.
ALTER TABLE tensile.traces ADD load float8;
ALTER TABLE tensile.latencies ADD average_load float8;

-- Memory flows between jobs.
ALTER TABLE tensile.footprints ADD groups bytea NOT NULL DEFAULT '';

-- The predictor's models are in shared memory.
DROP TABLE tensile._loaded_models;

-- Automatic calibrations
ALTER TABLE tensile.jobs ADD automatic bool NOT NULL DEFAULT false;
DROP INDEX tensile.jobs_one_calibration;
CREATE UNIQUE INDEX jobs_one_calibration ON tensile.jobs (automatic)
    WHERE ended_at IS NULL AND kind OPERATOR(pg_catalog.=) 'calibrate';
ALTER TABLE tensile.latency_models ADD torch text, ADD known_kinds text[];
ALTER TABLE tensile.traces ADD torch text;

-- Jobs with ranks
ALTER TABLE tensile.traces ADD profile jsonb, ADD codec_times jsonb;
CREATE TABLE tensile.rank_reports (
    job   bigint PRIMARY KEY REFERENCES tensile.jobs ON DELETE CASCADE,
    ranks jsonb NOT NULL,
    at    timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);
ALTER TABLE tensile.rank_reports ENABLE ROW LEVEL SECURITY;
CREATE POLICY visible ON tensile.rank_reports FOR SELECT USING (
    EXISTS (SELECT FROM tensile.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));

-- The owner's functions alone call these checks.
REVOKE EXECUTE ON FUNCTION tensile._check_architecture(jsonb), tensile._check_options(jsonb) FROM PUBLIC;

-- Role tensile_user has what PUBLIC had in 0.1.0, but an upgrade revokes nothing. (Extension scripts show no NOTICE.)
DO $$
BEGIN
    RAISE WARNING USING MESSAGE = 'PUBLIC may use pg_tensile as before',
        HINT = 'In a new installation only members of tensile_user may: docs/operations.md explains how to switch.';
END $$;
