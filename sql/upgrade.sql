-- rules
-- They are PL/pgSQL now, and called by the owner's functions only.
REVOKE EXECUTE ON FUNCTION tensile._check_architecture(jsonb), tensile._check_options(jsonb) FROM PUBLIC;
-- No plan is found to be damaged any more: nothing but the scheduler writes into the plan table.
DROP FUNCTION tensile._job_replan(text);
DROP FUNCTION tensile._schedule_jobs(); -- has another column less
ALTER TABLE tensile.traces DROP COLUMN replans;
-- checkpoints
ALTER TABLE tensile.models ADD keep_versions int CHECK (keep_versions OPERATOR(pg_catalog.>) 0);
COMMENT ON COLUMN tensile.models.keep_versions IS
    'versions that stay when a job adds one: the newest ones, and the deployed one; null: all';
ALTER TABLE tensile.model_weights SET (
    toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 5000);
ALTER TABLE tensile.checkpoint_chunks SET (
    toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 5000);
ALTER POLICY visible ON tensile.model_versions USING (
    weight_bytes IS NOT NULL AND EXISTS (SELECT FROM tensile.models m WHERE m.id OPERATOR(pg_catalog.=) model));
DROP FUNCTION tensile._job_version(text, jsonb, jsonb); -- it has another argument; for PUBLIC, as the one before

-- predictor
DROP VIEW tensile.loaded_models;
DROP TABLE tensile._loaded_models;

-- loop
DROP PROCEDURE tensile.run_controller();
DROP PROCEDURE tensile.run_scheduler();
DROP PROCEDURE tensile.run_inference();
DROP PROCEDURE tensile.run_worker(bigint);
DROP FUNCTION tensile._wait(int, int, bool);

-- surface
-- Metrics by name: what was their table keeps the epochs, their columns become rows.
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
-- Role tensile_user stands for what PUBLIC had, but an upgrade takes nothing away.
-- (A WARNING, because extension scripts show no NOTICE.)
DO $$
BEGIN
    RAISE WARNING USING MESSAGE = 'PUBLIC may use pg_tensile as before',
        HINT = 'In a new installation only members of tensile_user may: docs/operations.md says how to change over.';
END $$;


-- ledger
DROP FUNCTION tensile._orphans();
DROP FUNCTION tensile._end_job(bigint, text, text, text, text, text, text, text[]);
DROP FUNCTION tensile._job_end(text, text, text, text, text, text, text[]);
COMMENT ON COLUMN tensile.jobs.reason IS 'why the job waits or was interrupted, or by what it was cancelled';
-- claims
-- launches of kernels that nothing read
ALTER TABLE tensile.codec_times DROP COLUMN launch;
DROP FUNCTION tensile._job_codec_times(text, jsonb, jsonb, float8);
