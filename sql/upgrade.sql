-- Schemas. PUBLIC may use pg_tensile as before.
CREATE SCHEMA tensile_internal;
CREATE SCHEMA tensile_worker;
GRANT USAGE ON SCHEMA tensile_worker TO PUBLIC;

-- The predictor's models are in shared memory.
DROP TABLE tensile._loaded_models;

-- Names of tables: epochs are those of which metrics are rows, and no two names differ by an s.
ALTER TABLE tensile.metrics RENAME TO epochs;
ALTER INDEX tensile.metrics_pkey RENAME TO epochs_pkey;
ALTER TABLE tensile.epochs RENAME CONSTRAINT metrics_job_fkey TO epochs_job_fkey;
ALTER TABLE tensile.epochs RENAME CONSTRAINT metrics_split_check TO epochs_split_check;
ALTER TABLE tensile.latencies RENAME TO operator_latencies;
ALTER INDEX tensile.latencies_pkey RENAME TO operator_latencies_pkey;
ALTER TABLE tensile.operator_latencies RENAME CONSTRAINT latencies_job_fkey TO operator_latencies_job_fkey;
ALTER TABLE tensile.footprints RENAME TO plans;
ALTER INDEX tensile.footprints_pkey RENAME TO plans_pkey;
ALTER TABLE tensile.plans RENAME CONSTRAINT footprints_job_fkey TO plans_job_fkey;
ALTER TABLE tensile.searches RENAME TO plan_searches;
ALTER INDEX tensile.searches_pkey RENAME TO plan_searches_pkey;
ALTER TABLE tensile.plan_searches RENAME CONSTRAINT searches_job_fkey TO plan_searches_job_fkey;

ALTER TABLE tensile.models SET SCHEMA tensile_internal;
ALTER TABLE tensile.model_versions SET SCHEMA tensile_internal;
ALTER TABLE tensile.model_weights SET SCHEMA tensile_internal;
ALTER TABLE tensile.model_grants SET SCHEMA tensile_internal;
ALTER TABLE tensile.jobs SET SCHEMA tensile_internal;
ALTER TABLE tensile.checkpoints SET SCHEMA tensile_internal;
ALTER TABLE tensile.checkpoint_chunks SET SCHEMA tensile_internal;
ALTER TABLE tensile.epochs SET SCHEMA tensile_internal;
ALTER TABLE tensile.batch_sizes SET SCHEMA tensile_internal;
ALTER TABLE tensile.traces SET SCHEMA tensile_internal;
ALTER TABLE tensile.operators SET SCHEMA tensile_internal;
ALTER TABLE tensile.tensors SET SCHEMA tensile_internal;
ALTER TABLE tensile.operator_latencies SET SCHEMA tensile_internal;
ALTER TABLE tensile.plans SET SCHEMA tensile_internal;
ALTER TABLE tensile.sparsities SET SCHEMA tensile_internal;
ALTER TABLE tensile.codings SET SCHEMA tensile_internal;
ALTER TABLE tensile.plan_searches SET SCHEMA tensile_internal;
ALTER TABLE tensile.search_results SET SCHEMA tensile_internal;
ALTER TABLE tensile.device_profiles SET SCHEMA tensile_internal;
ALTER TABLE tensile.latency_models SET SCHEMA tensile_internal;
ALTER TABLE tensile.codec_times SET SCHEMA tensile_internal;
ALTER TABLE tensile.scheduler_log SET SCHEMA tensile_internal;

-- Views have most of the comments now; those of tables follow below.
DO $$
DECLARE
    comment pg_catalog.text;
BEGIN
    FOR comment IN
        SELECT CASE WHEN d.objsubid OPERATOR(pg_catalog.=) 0
                    THEN pg_catalog.format('COMMENT ON TABLE %s IS NULL', c.oid::pg_catalog.regclass)
                    ELSE pg_catalog.format('COMMENT ON COLUMN %s.%I IS NULL', c.oid::pg_catalog.regclass, a.attname) END
        FROM pg_catalog.pg_description d JOIN pg_catalog.pg_class c ON c.oid OPERATOR(pg_catalog.=) d.objoid
             LEFT JOIN pg_catalog.pg_attribute a
                 ON a.attrelid OPERATOR(pg_catalog.=) c.oid AND a.attnum OPERATOR(pg_catalog.=) d.objsubid
        WHERE d.classoid OPERATOR(pg_catalog.=) 'pg_catalog.pg_class'::pg_catalog.regclass
          AND c.relnamespace OPERATOR(pg_catalog.=) 'tensile_internal'::pg_catalog.regnamespace LOOP
        EXECUTE comment;
    END LOOP;
END $$;

-- Names of columns: "model" and "owner" are names, "model_id" and "owner_id" numbers.
ALTER TABLE tensile_internal.models RENAME owner TO owner_id;
ALTER TABLE tensile_internal.models RENAME owner_name TO owner;
ALTER TABLE tensile_internal.model_versions RENAME model TO model_id;
ALTER TABLE tensile_internal.model_versions RENAME CONSTRAINT model_versions_model_fkey TO model_versions_model_id_fkey;
ALTER TABLE tensile_internal.model_versions
    RENAME CONSTRAINT model_versions_model_version_key TO model_versions_model_id_version_key;
ALTER TABLE tensile_internal.model_grants RENAME model TO model_id;
ALTER TABLE tensile_internal.model_grants RENAME CONSTRAINT model_grants_model_fkey TO model_grants_model_id_fkey;
ALTER TABLE tensile_internal.jobs RENAME model TO model_id;
ALTER TABLE tensile_internal.jobs RENAME model_name TO model;
ALTER TABLE tensile_internal.jobs RENAME owner TO owner_id;
ALTER TABLE tensile_internal.jobs RENAME owner_name TO owner;
ALTER TABLE tensile_internal.jobs RENAME CONSTRAINT jobs_model_fkey TO jobs_model_id_fkey;

-- Models: retention of versions, and architectures that train_model chooses. The models that exist keep all versions, as
-- before.
ALTER TABLE tensile_internal.models ADD keep_versions int CHECK (keep_versions OPERATOR(pg_catalog.>=) 0),
    ALTER architecture DROP NOT NULL, ADD architecture_reason text, ADD auto_registered bool NOT NULL DEFAULT false;
UPDATE tensile_internal.models SET keep_versions = 0;

-- Versions: the course of the training, drift, and queries for predictions, derived from training queries
ALTER TABLE tensile_internal.model_versions ADD training jsonb, ADD reference jsonb, ADD prediction_query jsonb;

-- Jobs: recipes, divisions of the rows, limits of time, automatic calibrations, jobs that begin with the weights of a
-- version, and tunings, whose trials are jobs of the same model that train at once
ALTER TABLE tensile_internal.jobs ALTER batch_size DROP NOT NULL, ALTER learning_rate DROP NOT NULL,
    ADD chosen_learning_rate float8, ADD split_by text, ADD validation_query text, ADD max_time interval,
    ADD automatic bool NOT NULL DEFAULT false, ADD start_version bigint,
    ADD architecture jsonb, ADD tuning bigint, ADD kept_epoch int, ADD stopped text, ADD architecture_reason text,
    ADD baseline jsonb, ADD role_memory bigint, ADD role_time interval,
    DROP CONSTRAINT jobs_kind_check,
    ADD CONSTRAINT jobs_kind_check CHECK (kind OPERATOR(pg_catalog.=) ANY (ARRAY['train', 'calibrate', 'compare',
                                                                           'evaluate']));
UPDATE tensile_internal.jobs j SET chosen_learning_rate = b.learning_rate
    FROM tensile_internal.batch_sizes b WHERE b.job OPERATOR(pg_catalog.=) j.id AND b.chosen;
DROP INDEX tensile_internal.jobs_one_per_model, tensile_internal.jobs_one_calibration;
CREATE UNIQUE INDEX jobs_one_per_model ON tensile_internal.jobs (model_id) WHERE ended_at IS NULL AND tuning IS NULL;
CREATE INDEX jobs_of_tuning ON tensile_internal.jobs (tuning) WHERE tuning IS NOT NULL;
CREATE UNIQUE INDEX jobs_one_calibration ON tensile_internal.jobs (automatic)
    WHERE ended_at IS NULL AND kind OPERATOR(pg_catalog.=) 'calibrate';

-- The space of deleted weights and checkpoints is reused soon.
ALTER TABLE tensile_internal.model_weights SET (
    toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 5000);
ALTER TABLE tensile_internal.checkpoint_chunks SET (
    toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 5000);

-- Only the scheduler writes into the plan table, so trainers find no damaged plans; nothing read the launch times of
-- kernels. Plans count with the load of the device at present, and memory flows between jobs.
ALTER TABLE tensile_internal.traces DROP COLUMN replans, ADD load float8, ADD torch text, ADD profile jsonb,
    ADD codec_times jsonb, ADD overhead_measured bool NOT NULL DEFAULT false, ADD limited_by text;
ALTER TABLE tensile_internal.codec_times DROP COLUMN launch;
ALTER TABLE tensile_internal.operator_latencies ADD average_load float8, ADD alone_us float8;
ALTER TABLE tensile_internal.plans ADD groups bytea NOT NULL DEFAULT '';
ALTER TABLE tensile_internal.latency_models ADD torch text, ADD known_kinds text[];

-- Behind the new objects

-- Metrics by name: columns of epochs become rows.
INSERT INTO tensile_internal.metrics (job, epoch, split, metric, value)
    SELECT e.job, e.epoch, e.split, m.metric, m.value
    FROM tensile_internal.epochs e
         CROSS JOIN LATERAL (VALUES ('loss', e.loss), ('accuracy', e.accuracy), ('f1', e.f1), ('rmse', e.rmse),
                                    ('r2', e.r2)) m (metric, value)
    WHERE m.value IS NOT NULL;
ALTER TABLE tensile_internal.epochs DROP CONSTRAINT epochs_split_check,
    ADD CONSTRAINT epochs_split_check
        CHECK (split OPERATOR(pg_catalog.=) ANY (ARRAY['training', 'validation', 'version']));
ALTER TABLE tensile_internal.epochs DROP COLUMN loss, DROP COLUMN accuracy, DROP COLUMN f1, DROP COLUMN rmse,
    DROP COLUMN r2;

INSERT INTO tensile_internal.deployments (model_id, version, decision, reason, decided_by, decided_at)
    SELECT m.id, m.deployed_version, 'deployed', 'deployed before the update to version 0.2.0', m.owner, m.updated_at
    FROM tensile_internal.models m WHERE m.deployed_version IS NOT NULL;

-- Role tensile_user has what PUBLIC had in 0.1.0, but an upgrade revokes nothing. (Extension scripts show no NOTICE.)
DO $$
BEGIN
    RAISE WARNING USING MESSAGE = 'PUBLIC may use pg_tensile as before',
        HINT = 'In a new installation only members of tensile_user may: docs/operations.md explains how to switch.';
END $$;
