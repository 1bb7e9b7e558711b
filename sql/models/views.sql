-- Views of models

-- Relations have their present names. One that is gone is looked for by its name, as it may have been created again.
CREATE VIEW tensile.model_sources WITH (security_invoker = true) AS
    SELECT m.name AS model, v.version, s.purpose, coalesce(c.oid, d.oid)::pg_catalog.regclass AS relation,
           coalesce(n.nspname, s.schema_name) AS schema_name, coalesce(c.relname, s.relation_name) AS relation_name,
           s.kind, s.columns
    FROM tensile_internal._version_sources s
         JOIN tensile_internal.model_versions v ON v.id OPERATOR(pg_catalog.=) s.version
         JOIN tensile_internal.models m ON m.id OPERATOR(pg_catalog.=) v.model
         LEFT JOIN (pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace)
             ON c.oid OPERATOR(pg_catalog.=) s.relation
         LEFT JOIN (pg_catalog.pg_class d JOIN pg_catalog.pg_namespace e ON e.oid OPERATOR(pg_catalog.=) d.relnamespace)
             ON c.oid IS NULL AND e.nspname OPERATOR(pg_catalog.=) s.schema_name
                AND d.relname OPERATOR(pg_catalog.=) s.relation_name;
COMMENT ON VIEW tensile.model_sources IS
    'tables, views and columns that each version was trained on; what functions read is not known; visible as the model '
    'is';
COMMENT ON COLUMN tensile.model_sources.purpose IS 'training, or validation: the query that has read it';
COMMENT ON COLUMN tensile.model_sources.relation IS
    'the table or view; null: it was dropped, or after a restore there is none of that name';
COMMENT ON COLUMN tensile.model_sources.schema_name IS 'its schema; of one that was dropped, as it was';
COMMENT ON COLUMN tensile.model_sources.relation_name IS 'its name; of one that was dropped, as it was';
COMMENT ON COLUMN tensile.model_sources.kind IS
    'table, partitioned table, foreign table, view, materialized view or sequence; what a view reads is listed as well';
COMMENT ON COLUMN tensile.model_sources.columns IS
    'names, at the time of the training, of the columns that the query reads, in any place';

-- Only rows that are found by an index are joined, and drift is that of the alarm, so that hundreds of models cost little.
CREATE VIEW tensile.model_status WITH (security_invoker = true) AS
    SELECT m.name AS model, m.owner_name AS owner, m.deployed_version, v.task, k.metric,
           CASE WHEN k.metric OPERATOR(pg_catalog.=) 'rmse' THEN x.metrics OPERATOR(pg_catalog.->>) 'rmse'
                ELSE coalesce(x.metrics OPERATOR(pg_catalog.->>) 'calibrated_log_loss',
                              x.metrics OPERATOR(pg_catalog.->>) 'log_loss') END::pg_catalog.float8 AS value,
           x.split, v.rows, d.decided_at AS deployed_at, o.id AS job, s.next_run AS next_training,
           CASE WHEN s.id IS NOT NULL THEN pg_catalog.concat_ws(
               ', ', 'every ' OPERATOR(pg_catalog.||) s.every::pg_catalog.text,
               s.rows::pg_catalog.text OPERATOR(pg_catalog.||) ' new rows of ' OPERATOR(pg_catalog.||)
                   s.source::pg_catalog.text,
               'drift above ' OPERATOR(pg_catalog.||) s.drift::pg_catalog.text) END AS schedule,
           a.column_name AS drifted_column, a.psi AS drift, j.warnings
    FROM tensile_internal.models m
         LEFT JOIN tensile_internal.model_versions v ON v.model OPERATOR(pg_catalog.=) m.id
             AND v.version OPERATOR(pg_catalog.=) m.deployed_version
         CROSS JOIN LATERAL (
             SELECT CASE WHEN v.task OPERATOR(pg_catalog.=) 'regression' THEN 'rmse'
                         WHEN v.task IS NOT NULL THEN 'log_loss' END) k (metric)
         CROSS JOIN LATERAL (
             SELECT CASE WHEN pg_catalog.jsonb_typeof(v.metrics OPERATOR(pg_catalog.->) 'validation')
                              OPERATOR(pg_catalog.=) 'object' THEN 'validation'
                         WHEN v.metrics OPERATOR(pg_catalog.?) 'training' THEN 'training' END) p (split)
         CROSS JOIN LATERAL (SELECT p.split, v.metrics OPERATOR(pg_catalog.->) p.split) x (split, metrics)
         LEFT JOIN tensile_internal.deployments d ON d.model OPERATOR(pg_catalog.=) m.id AND d.ended_at IS NULL
         LEFT JOIN tensile_internal.schedules s ON s.model OPERATOR(pg_catalog.=) m.id
         LEFT JOIN tensile_internal.drift_alarms a ON a.version OPERATOR(pg_catalog.=) v.id
         LEFT JOIN tensile_internal.jobs j ON j.id OPERATOR(pg_catalog.=) v.job
         LEFT JOIN tensile_internal.jobs o ON o.model OPERATOR(pg_catalog.=) m.id AND o.ended_at IS NULL AND o.tuning IS NULL;
COMMENT ON VIEW tensile.model_status IS
    'models with their deployed versions: how good, since when, when trained again, and what to look at; visible as '
    'models are, schedules and warnings as schedules and jobs are, drift as drift_alarms is';
COMMENT ON COLUMN tensile.model_status.model IS 'name of the model';
COMMENT ON COLUMN tensile.model_status.owner IS 'owner of the model';
COMMENT ON COLUMN tensile.model_status.deployed_version IS
    'version that predictions use, which the columns up to deployed_at, drift and warnings are about; null: none yet';
COMMENT ON COLUMN tensile.model_status.task IS 'regression, binary or multiclass';
COMMENT ON COLUMN tensile.model_status.metric IS
    'metric by which versions are compared unless another one is named: rmse, or log_loss (after calibration)';
COMMENT ON COLUMN tensile.model_status.value IS
    'its value after the epoch whose weights the version has; null: not known';
COMMENT ON COLUMN tensile.model_status.split IS 'rows that the value is of: validation or, without such rows, training';
COMMENT ON COLUMN tensile.model_status.rows IS 'number of rows returned by the training query';
COMMENT ON COLUMN tensile.model_status.deployed_at IS 'time since which predictions use the version';
COMMENT ON COLUMN tensile.model_status.job IS 'open job that trains the model, or compares its versions; see progress';
COMMENT ON COLUMN tensile.model_status.next_training IS
    'time of the next training by the schedule; null: none, or not by time';
COMMENT ON COLUMN tensile.model_status.schedule IS 'what causes the next training; null: no schedule';
COMMENT ON COLUMN tensile.model_status.drifted_column IS
    'column of predicted rows that has drifted most from the training rows; null: none above its threshold';
COMMENT ON COLUMN tensile.model_status.drift IS 'population stability index of that column when it exceeded the threshold';
COMMENT ON COLUMN tensile.model_status.warnings IS 'what the job that trained the version warned of; null: nothing';
