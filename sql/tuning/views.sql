-- View of tunings

CREATE VIEW tensile.tunings WITH (security_invoker = true) AS
    SELECT t.id AS tuning, t.model, t.model_id, t.owner, t.owner_id, t.state,
           t.arguments, t.architecture, t.space, t.max_time, t.parallel, t.halving,
           t.trials, k.ended, k.running, k.pruned, k.infeasible, k.failed,
           t.metric, t.best_trial, b.value AS best_value, b.params AS best_params, b.version AS best_version,
           d.decision, t.rows, t.submitted_at, t.started_at, t.ended_at,
           coalesce(t.ended_at, pg_catalog.clock_timestamp()) OPERATOR(pg_catalog.-) t.started_at AS elapsed,
           t.comparison, t.sqlstate, t.error, t.hint, t.warnings
    FROM tensile_internal.tunings t
         CROSS JOIN LATERAL (
             SELECT pg_catalog.count(*) FILTER (WHERE o.ended_at IS NOT NULL) AS ended,
                    pg_catalog.count(*) FILTER (WHERE o.state OPERATOR(pg_catalog.=) 'running') AS running,
                    pg_catalog.count(*) FILTER (WHERE o.state OPERATOR(pg_catalog.=) 'pruned') AS pruned,
                    pg_catalog.count(*) FILTER (WHERE o.state OPERATOR(pg_catalog.=) 'infeasible') AS infeasible,
                    pg_catalog.count(*) FILTER (WHERE o.state OPERATOR(pg_catalog.=) 'failed') AS failed
             FROM tensile_internal.trials o WHERE o.tuning OPERATOR(pg_catalog.=) t.id) k
         LEFT JOIN tensile_internal.trials b ON b.tuning OPERATOR(pg_catalog.=) t.id
             AND b.number OPERATOR(pg_catalog.=) t.best_trial
         LEFT JOIN LATERAL (
             SELECT x.decision FROM tensile_internal.deployments x
             WHERE x.job OPERATOR(pg_catalog.=) coalesce(t.comparison, b.job) ORDER BY x.id LIMIT 1) d ON true;
COMMENT ON VIEW tensile.tunings IS
    'searches for hyperparameters by tune_model, with the progress of their trials and the best one; visible to their '
    'owners and to members of pg_read_all_stats';
COMMENT ON COLUMN tensile.tunings.state IS
    'queued, running, comparing (the best trial''s version with the deployed one), finished, failed or cancelled';
COMMENT ON COLUMN tensile.tunings.trials IS 'number of trials that are to be made';
COMMENT ON COLUMN tensile.tunings.ended IS 'number of trials that have ended, in any way';
COMMENT ON COLUMN tensile.tunings.running IS 'number of trials whose jobs are open';
COMMENT ON COLUMN tensile.tunings.pruned IS 'number of trials that were stopped because others were better';
COMMENT ON COLUMN tensile.tunings.infeasible IS
    'number of trials that did not fit into the memory, or could not be made';
COMMENT ON COLUMN tensile.tunings.failed IS 'number of trials whose jobs have failed';
COMMENT ON COLUMN tensile.tunings.metric IS 'metric by which trials are compared';
COMMENT ON COLUMN tensile.tunings.best_trial IS 'number of the best trial so far';
COMMENT ON COLUMN tensile.tunings.best_value IS 'its value of the metric, on the validation rows';
COMMENT ON COLUMN tensile.tunings.best_params IS 'the values that were chosen for it';
COMMENT ON COLUMN tensile.tunings.best_version IS 'version of the model that its job has trained';
COMMENT ON COLUMN tensile.tunings.decision IS 'deployed or kept, as in deployments; null: not decided';
COMMENT ON COLUMN tensile.tunings.rows IS 'number of rows returned by the query';
COMMENT ON COLUMN tensile.tunings.elapsed IS 'time from the first trial to the end, or until now';
COMMENT ON COLUMN tensile.tunings.model IS 'name of the model, kept after drop_model';
COMMENT ON COLUMN tensile.tunings.owner IS 'name of the role that has called tune_model';
COMMENT ON COLUMN tensile.tunings.architecture IS
    'architecture of the model, which trials vary; null: the first trial has yet to choose it, or the space has types';
COMMENT ON COLUMN tensile.tunings.arguments IS 'arguments of train_model, which trials vary';
COMMENT ON COLUMN tensile.tunings.space IS
    'ranges and lists that values are chosen from, by key; null: not known before the architecture';
COMMENT ON COLUMN tensile.tunings.max_time IS 'time after which no trial starts or continues; null: no limit';
COMMENT ON COLUMN tensile.tunings.parallel IS 'number of trials that train at once, at most';
COMMENT ON COLUMN tensile.tunings.halving IS
    '{"min_epochs", "factor"}: trials are compared after min_epochs, min_epochs * factor, ... epochs, and only the best '
    '1 / factor continue; null: none is pruned';
COMMENT ON COLUMN tensile.tunings.comparison IS
    'job that compares the best trial''s version with the deployed one (option deploy = if_better); null: none does';
COMMENT ON COLUMN tensile.tunings.warnings IS 'problems that did not stop the tuning, such as rows that have changed';

CREATE VIEW tensile.trials WITH (security_invoker = true) AS
    SELECT t.tuning, t.number, t.params, t.state, t.job, t.value, t.epochs, t.rungs, t.least_bytes, t.version,
           t.started_at, t.ended_at, t.sqlstate, t.error
    FROM tensile_internal.trials t;
COMMENT ON VIEW tensile.trials IS
    'trials of tunings, each of which is a job; visible as the tuning is';
COMMENT ON COLUMN tensile.trials.number IS 'number of the trial in its tuning, from 0';
COMMENT ON COLUMN tensile.trials.params IS 'value chosen for each key of the space';
COMMENT ON COLUMN tensile.trials.state IS
    'waiting, running (its job is open), finished, pruned (worse than others after some epochs), infeasible (it does not '
    'fit into the memory, or its values exclude each other), failed or cancelled';
COMMENT ON COLUMN tensile.trials.job IS 'job of the trial; null: not submitted yet';
COMMENT ON COLUMN tensile.trials.value IS
    'metric of the weights that the job has kept; of a pruned trial the best one up to the comparison that it has lost';
COMMENT ON COLUMN tensile.trials.epochs IS 'number of finished epochs';
COMMENT ON COLUMN tensile.trials.rungs IS
    'best values of the metric up to each of the epochs at which trials are compared';
COMMENT ON COLUMN tensile.trials.least_bytes IS
    'least device memory that its training steps need, as admission counts it; null: not known';
COMMENT ON COLUMN tensile.trials.version IS 'version of the model that the job trained; kept for the best trial only';
