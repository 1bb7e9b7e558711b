-- View of tunings

CREATE VIEW tensile.tuning_status WITH (security_invoker = true) AS
    SELECT t.id, t.model_name AS model, t.owner_name AS owner, t.state, t.trials, k.ended, k.running, k.pruned, k.infeasible,
           k.failed, t.metric, t.best_trial, b.value AS best_value, b.params AS best_params, b.version AS best_version,
           d.decision, t.rows, t.submitted_at, t.started_at, t.ended_at,
           coalesce(t.ended_at, pg_catalog.clock_timestamp()) OPERATOR(pg_catalog.-) t.started_at AS elapsed, t.error
    FROM tensile_internal.tunings t
         CROSS JOIN LATERAL (
             SELECT pg_catalog.count(*) FILTER (WHERE o.ended_at IS NOT NULL) AS ended,
                    pg_catalog.count(*) FILTER (WHERE o.state OPERATOR(pg_catalog.=) 'running') AS running,
                    pg_catalog.count(*) FILTER (WHERE o.state OPERATOR(pg_catalog.=) 'pruned') AS pruned,
                    pg_catalog.count(*) FILTER (WHERE o.state OPERATOR(pg_catalog.=) 'infeasible') AS infeasible,
                    pg_catalog.count(*) FILTER (WHERE o.state OPERATOR(pg_catalog.=) 'failed') AS failed
             FROM tensile_internal.trials o WHERE o.tuning OPERATOR(pg_catalog.=) t.id) k
         LEFT JOIN tensile_internal.trials b ON b.tuning OPERATOR(pg_catalog.=) t.id AND b.number OPERATOR(pg_catalog.=) t.best_trial
         LEFT JOIN LATERAL (
             SELECT x.decision FROM tensile_internal.deployments x
             WHERE x.job OPERATOR(pg_catalog.=) coalesce(t.comparison, b.job) ORDER BY x.id LIMIT 1) d ON true;
COMMENT ON VIEW tensile.tuning_status IS 'tunings with the progress of their trials, and the best one';
COMMENT ON COLUMN tensile.tuning_status.state IS 'state as in tunings';
COMMENT ON COLUMN tensile.tuning_status.trials IS 'number of trials that are to be made';
COMMENT ON COLUMN tensile.tuning_status.ended IS 'number of trials that have ended, in any way';
COMMENT ON COLUMN tensile.tuning_status.running IS 'number of trials whose jobs are open';
COMMENT ON COLUMN tensile.tuning_status.pruned IS 'number of trials that were stopped because others were better';
COMMENT ON COLUMN tensile.tuning_status.infeasible IS 'number of trials that did not fit into the memory, or could not be made';
COMMENT ON COLUMN tensile.tuning_status.failed IS 'number of trials whose jobs have failed';
COMMENT ON COLUMN tensile.tuning_status.metric IS 'metric by which trials are compared';
COMMENT ON COLUMN tensile.tuning_status.best_trial IS 'number of the best trial so far';
COMMENT ON COLUMN tensile.tuning_status.best_value IS 'its value of the metric, on the validation rows';
COMMENT ON COLUMN tensile.tuning_status.best_params IS 'the values that were chosen for it';
COMMENT ON COLUMN tensile.tuning_status.best_version IS 'version of the model that its job has trained';
COMMENT ON COLUMN tensile.tuning_status.decision IS 'deployed or kept, as in deployments; null: not decided';
COMMENT ON COLUMN tensile.tuning_status.rows IS 'number of rows returned by the query';
COMMENT ON COLUMN tensile.tuning_status.elapsed IS 'time from the first trial to the end, or until now';
