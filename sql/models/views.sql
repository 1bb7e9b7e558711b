-- Views of models

-- Relations have their present names. One that is gone is looked for by its name, as it may have been created again.
CREATE VIEW tensile.model_sources WITH (security_invoker = true) AS
    SELECT m.name AS model, v.version, s.purpose, coalesce(c.oid, d.oid)::pg_catalog.regclass AS relation,
           coalesce(n.nspname, s.schema_name) AS schema_name, coalesce(c.relname, s.relation_name) AS relation_name,
           s.kind, s.columns
    FROM tensile_internal.version_sources s
         JOIN tensile_internal.model_versions v ON v.id OPERATOR(pg_catalog.=) s.version
         JOIN tensile_internal.models m ON m.id OPERATOR(pg_catalog.=) v.model_id
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
    'the table or view; null: it was dropped, or after a restore no relation has that name';
COMMENT ON COLUMN tensile.model_sources.schema_name IS 'its schema; of one that was dropped, as it was';
COMMENT ON COLUMN tensile.model_sources.relation_name IS 'its name; of one that was dropped, as it was';
COMMENT ON COLUMN tensile.model_sources.kind IS
    'table, partitioned table, foreign table, view, materialized view or sequence; what a view reads is listed as well';
COMMENT ON COLUMN tensile.model_sources.columns IS
    'names, at the time of the training, of the columns that the query reads, in any place';

-- Only rows that are found by an index are joined, and drift is that of the alarm, so that hundreds of models cost
-- little.
CREATE VIEW tensile.model_status WITH (security_invoker = true) AS
    SELECT m.name AS model, m.owner, m.deployed_version, v.task, k.metric,
           CASE WHEN k.metric OPERATOR(pg_catalog.=) 'rmse' THEN x.metrics OPERATOR(pg_catalog.->>) 'rmse'
                ELSE coalesce(x.metrics OPERATOR(pg_catalog.->>) 'calibrated_log_loss',
                              x.metrics OPERATOR(pg_catalog.->>) 'log_loss') END::pg_catalog.float8 AS value,
           (b.metrics OPERATOR(pg_catalog.->>) k.metric)::pg_catalog.float8 AS baseline, x.split, v.rows,
           d.decided_at AS deployed_at, o.id AS job, s.next_run AS next_training,
           CASE WHEN s.id IS NOT NULL THEN pg_catalog.concat_ws(
               ', ', 'every ' OPERATOR(pg_catalog.||) s.every::pg_catalog.text,
               s.rows::pg_catalog.text OPERATOR(pg_catalog.||) ' new rows of ' OPERATOR(pg_catalog.||)
                   s.source::pg_catalog.text,
               'drift above ' OPERATOR(pg_catalog.||) s.drift::pg_catalog.text) END AS schedule,
           a.column_name AS drifted_column, a.psi AS drift, j.warnings
    FROM tensile_internal.models m
         LEFT JOIN tensile_internal.model_versions v ON v.model_id OPERATOR(pg_catalog.=) m.id
             AND v.version OPERATOR(pg_catalog.=) m.deployed_version
         CROSS JOIN LATERAL (
             SELECT CASE WHEN v.task OPERATOR(pg_catalog.=) 'regression' THEN 'rmse'
                         WHEN v.task IS NOT NULL THEN 'log_loss' END) k (metric)
         CROSS JOIN LATERAL (
             SELECT CASE WHEN pg_catalog.jsonb_typeof(v.metrics OPERATOR(pg_catalog.->) 'validation')
                              OPERATOR(pg_catalog.=) 'object' THEN 'validation'
                         WHEN v.metrics OPERATOR(pg_catalog.?) 'training' THEN 'training' END) p (split)
         CROSS JOIN LATERAL (SELECT p.split, v.metrics OPERATOR(pg_catalog.->) p.split) x (split, metrics)
         CROSS JOIN LATERAL (SELECT v.metrics OPERATOR(pg_catalog.->) 'baseline') b (metrics)
         LEFT JOIN tensile_internal.deployments d ON d.model_id OPERATOR(pg_catalog.=) m.id AND d.ended_at IS NULL
         LEFT JOIN tensile_internal.schedules s ON s.model_id OPERATOR(pg_catalog.=) m.id
         LEFT JOIN tensile_internal.drift_alarms a ON a.version OPERATOR(pg_catalog.=) v.id
         LEFT JOIN tensile_internal.jobs j ON j.id OPERATOR(pg_catalog.=) v.job
         LEFT JOIN tensile_internal.jobs o ON o.model_id OPERATOR(pg_catalog.=) m.id AND o.ended_at IS NULL
             AND o.tuning IS NULL;
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
COMMENT ON COLUMN tensile.model_status.baseline IS
    'its value without a model: for the mean of the training rows, or the frequencies of the classes; null: not known';
COMMENT ON COLUMN tensile.model_status.split IS 'rows that the value is of: validation or, without such rows, training';
COMMENT ON COLUMN tensile.model_status.rows IS 'number of rows returned by the training query';
COMMENT ON COLUMN tensile.model_status.deployed_at IS 'time since which predictions use the version';
COMMENT ON COLUMN tensile.model_status.job IS 'open job that trains the model, or compares its versions; see progress';
COMMENT ON COLUMN tensile.model_status.next_training IS
    'time of the next training by the schedule; null: none, or not by time';
COMMENT ON COLUMN tensile.model_status.schedule IS 'what causes the next training; null: no schedule';
COMMENT ON COLUMN tensile.model_status.drifted_column IS
    'column of predicted rows that has drifted most from the training rows; null: none above its threshold';
COMMENT ON COLUMN tensile.model_status.drift IS
    'population stability index of that column when it exceeded the threshold';
COMMENT ON COLUMN tensile.model_status.warnings IS 'what the job that trained the version warned of; null: nothing';

CREATE VIEW tensile.models WITH (security_invoker = true) AS
    SELECT m.name AS model, m.id AS model_id, m.owner, m.owner_id, m.architecture,
           m.architecture_reason, m.description, m.deployed_version, m.memory_budget, m.keep_versions,
           m.auto_registered, m.created_at, m.updated_at
    FROM tensile_internal.models m;
COMMENT ON VIEW tensile.models IS
    'models; visible to their owners and to roles with a grant; dumped by superusers and BYPASSRLS roles only';
COMMENT ON COLUMN tensile.models.model IS 'name of the model';
COMMENT ON COLUMN tensile.models.model_id IS 'number of the model';
COMMENT ON COLUMN tensile.models.owner IS 'name of the owning role';
COMMENT ON COLUMN tensile.models.owner_id IS 'OID of the owning role; null while no role has that name';
COMMENT ON COLUMN tensile.models.architecture IS 'type and keys; null: chosen by the first training';
COMMENT ON COLUMN tensile.models.architecture_reason IS
    'reason for the architecture if a training has chosen it; null: given to register_model, or not chosen yet';
COMMENT ON COLUMN tensile.models.deployed_version IS 'version that predictions use; null while none is deployed';
COMMENT ON COLUMN tensile.models.memory_budget IS
    'device memory for predictions with the model, in bytes, unless a call specifies its own; null: no limit';
COMMENT ON COLUMN tensile.models.keep_versions IS
    'number of newest versions kept whenever one is added; the deployed version is kept as well; 0: all; null: as '
    'pg_tensile.version_retention says';
COMMENT ON COLUMN tensile.models.auto_registered IS
    'true: train_model or tune_model has registered it; it is dropped if its training ends before the first epoch, unless '
    'something else refers to it';

CREATE VIEW tensile.model_versions WITH (security_invoker = true) AS
    SELECT m.name AS model, v.model_id, v.version, v.id AS version_id, v.job, v.task, v.architecture,
           v.preprocessing, v.metrics, v.rows, v.weight_bytes, v.training, v.reference, v.prediction_query,
           v.created_at
    FROM tensile_internal.model_versions v
         JOIN tensile_internal.models m ON m.id OPERATOR(pg_catalog.=) v.model_id;
COMMENT ON VIEW tensile.model_versions IS
    'versions of models, one for each finished job and each import: task, fitted preprocessing, final metrics';
COMMENT ON COLUMN tensile.model_versions.model IS 'name of the model';
COMMENT ON COLUMN tensile.model_versions.model_id IS 'number of the model';
COMMENT ON COLUMN tensile.model_versions.version_id IS 'number of the version among those of all models';
COMMENT ON COLUMN tensile.model_versions.job IS 'job that trained the version; null: imported';
COMMENT ON COLUMN tensile.model_versions.task IS 'regression, binary or multiclass';
COMMENT ON COLUMN tensile.model_versions.preprocessing IS
    'features, means and categories fitted to the training rows; predictions apply them';
COMMENT ON COLUMN tensile.model_versions.metrics IS
    'metrics of the epoch that the weights are from: {"epoch", "training", "validation"}; in "baseline" those without a '
    'model, as in jobs';
COMMENT ON COLUMN tensile.model_versions.rows IS 'number of rows returned by the training query';
COMMENT ON COLUMN tensile.model_versions.weight_bytes IS
    'size of the weights in bytes; null while they are being written';
COMMENT ON COLUMN tensile.model_versions.training IS
    'settings and course of the training: {"batch_size", "learning_rate", "epochs", "stopped"}; "stopped" is the '
    'reason for its end: epochs, early_stopping or max_time';
COMMENT ON COLUMN tensile.model_versions.reference IS
    'numbers of training rows in the bins of each feature, and of validation rows in those of predictions: {"columns"}; '
    'the view drift compares predicted rows with them';
COMMENT ON COLUMN tensile.model_versions.prediction_query IS
    'query of predict_rows without one, derived from the training query: {"query", "template", "source", "reason", '
    '"settings"}; "template" reads tensile_source in place of "source"; "reason": why "query" or "template" is null';

CREATE VIEW tensile.model_grants WITH (security_invoker = true) AS
    SELECT m.name AS model, g.model_id, g.grantee_name AS grantee, g.privilege, g.grantor_name AS grantor
    FROM tensile_internal.model_grants g
         JOIN tensile_internal.models m ON m.id OPERATOR(pg_catalog.=) g.model_id;
COMMENT ON VIEW tensile.model_grants IS
    'privileges on models granted by their owners';
COMMENT ON COLUMN tensile.model_grants.grantee IS 'name of the role, or public';
COMMENT ON COLUMN tensile.model_grants.privilege IS 'predict or train';
COMMENT ON COLUMN tensile.model_grants.grantor IS 'name of the model''s owner';

CREATE VIEW tensile.deployments WITH (security_invoker = true) AS
    SELECT d.id, m.name AS model, d.model_id, d.version, d.decision, d.reason, d.job, d.decided_by,
           d.decided_at, d.ended_at, d.metric, d.value, d.previous_version, d.previous_value, d.follows
    FROM tensile_internal.deployments d
         JOIN tensile_internal.models m ON m.id OPERATOR(pg_catalog.=) d.model_id;
COMMENT ON VIEW tensile.deployments IS
    'decisions about the versions that predictions use: by whom, when and why; visible as the model is';
COMMENT ON COLUMN tensile.deployments.model IS 'name of the model';
COMMENT ON COLUMN tensile.deployments.model_id IS 'number of the model';
COMMENT ON COLUMN tensile.deployments.version IS 'version that was deployed, or that was not';
COMMENT ON COLUMN tensile.deployments.decision IS
    'deployed, kept (the deployed version stayed, because this one was not better), or rolled back (to this one)';
COMMENT ON COLUMN tensile.deployments.reason IS
    'reason for the decision: that given to deploy_model or rollback_model, or the comparison of a job';
COMMENT ON COLUMN tensile.deployments.job IS 'job that trained the version and decided; null: decided by a function';
COMMENT ON COLUMN tensile.deployments.decided_by IS 'name of the role that called the function or submitted the job';
COMMENT ON COLUMN tensile.deployments.decided_at IS 'time of the decision';
COMMENT ON COLUMN tensile.deployments.ended_at IS
    'time from which predictions used another version; null: they use this one; of a version that was not deployed, '
    'the time of the decision';
COMMENT ON COLUMN tensile.deployments.metric IS 'metric by which versions were compared; null: they were not';
COMMENT ON COLUMN tensile.deployments.value IS 'value of the metric for this version; null: not defined or not known';
COMMENT ON COLUMN tensile.deployments.previous_version IS
    'version that was deployed before, or stayed; null: none was deployed';
COMMENT ON COLUMN tensile.deployments.previous_value IS 'value of the metric for the version that was deployed before';
COMMENT ON COLUMN tensile.deployments.follows IS
    'id of the deployment that rollback_model returns to from this one; null: none';
