-- View of scheduled evaluations

CREATE VIEW tensile.evaluation_schedules WITH (security_invoker = true) AS
    SELECT s.id, m.name AS model, s.model_id, s.owner, s.owner_id, s.query,
           s.metric, s.every, s.next_run, s.last_run, s.last_job,
           CASE WHEN s.error IS NOT NULL THEN 'refused' ELSE j.state END AS last_state,
           coalesce(s.sqlstate, j.sqlstate) AS last_sqlstate, coalesce(s.error, j.error) AS last_error,
           coalesce(s.hint, j.hint) AS last_hint
    FROM tensile_internal.evaluation_schedules s
         LEFT JOIN tensile_internal.models m ON m.id OPERATOR(pg_catalog.=) s.model_id
         LEFT JOIN tensile_internal.jobs j ON j.id OPERATOR(pg_catalog.=) s.last_job;
COMMENT ON VIEW tensile.evaluation_schedules IS
    'schedules of evaluations, their next runs, and the outcomes of their last ones; evaluations has the values';
COMMENT ON COLUMN tensile.evaluation_schedules.id IS 'id of the schedule';
COMMENT ON COLUMN tensile.evaluation_schedules.model IS
    'name of the model; null: the owner of the schedule may not use it any more';
COMMENT ON COLUMN tensile.evaluation_schedules.owner IS 'role that runs the query';
COMMENT ON COLUMN tensile.evaluation_schedules.query IS 'query of the rows, with the target';
COMMENT ON COLUMN tensile.evaluation_schedules.metric IS 'metric that is kept; null: all';
COMMENT ON COLUMN tensile.evaluation_schedules.every IS 'time between two evaluations';
COMMENT ON COLUMN tensile.evaluation_schedules.next_run IS 'time of the next evaluation';
COMMENT ON COLUMN tensile.evaluation_schedules.last_run IS 'time at which an evaluation was last due';
COMMENT ON COLUMN tensile.evaluation_schedules.last_job IS
    'job of the last evaluation; null: none yet, or it was refused';
COMMENT ON COLUMN tensile.evaluation_schedules.last_state IS
    'refused, or the state of that job; null: none yet, or the job was deleted';
COMMENT ON COLUMN tensile.evaluation_schedules.last_sqlstate IS 'SQLSTATE of the refusal, or of the job''s failure';
COMMENT ON COLUMN tensile.evaluation_schedules.last_error IS 'message of the refusal, or of the job''s failure';
COMMENT ON COLUMN tensile.evaluation_schedules.last_hint IS 'hint of the refusal, or of the job''s failure';

CREATE VIEW tensile.evaluations WITH (security_invoker = true) AS
    SELECT e.id, m.name AS model, e.model_id, e.version, e.at, e.rows, e.metric, e.value, e.baseline
    FROM tensile_internal.evaluations e
         JOIN tensile_internal.models m ON m.id OPERATOR(pg_catalog.=) e.model_id;
COMMENT ON VIEW tensile.evaluations IS
    'results of scheduled evaluations, a row for each metric; visible as the model is';
COMMENT ON COLUMN tensile.evaluations.model IS 'name of the model';
COMMENT ON COLUMN tensile.evaluations.model_id IS 'number of the model';
COMMENT ON COLUMN tensile.evaluations.version IS 'version that was deployed then';
COMMENT ON COLUMN tensile.evaluations.at IS 'time of the evaluation';
COMMENT ON COLUMN tensile.evaluations.rows IS 'number of rows that the query returned';
COMMENT ON COLUMN tensile.evaluations.metric IS 'name of the metric, as in evaluate_model';
COMMENT ON COLUMN tensile.evaluations.value IS 'value of the metric; null: the rows do not define it';
COMMENT ON COLUMN tensile.evaluations.baseline IS
    'its value without a model; null: the rows do not define it, or the version was trained by an earlier release';
