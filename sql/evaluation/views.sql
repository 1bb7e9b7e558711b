-- View of scheduled evaluations

CREATE VIEW tensile.evaluation_status WITH (security_invoker = true) AS
    SELECT s.id, m.name AS model, s.owner_name AS owner, s.query, s.metric, s.every, s.next_run, s.last_run, s.last_job,
           CASE WHEN s.error IS NOT NULL THEN 'refused' ELSE j.state END AS last_state,
           coalesce(s.sqlstate, j.sqlstate) AS last_sqlstate, coalesce(s.error, j.error) AS last_error,
           coalesce(s.hint, j.hint) AS last_hint
    FROM tensile_internal.evaluation_schedules s LEFT JOIN tensile_internal.models m ON m.id OPERATOR(pg_catalog.=) s.model
         LEFT JOIN tensile_internal.jobs j ON j.id OPERATOR(pg_catalog.=) s.last_job;
COMMENT ON VIEW tensile.evaluation_status IS
    'schedules of evaluations, their next runs, and the outcomes of their last ones; evaluations has the values';
COMMENT ON COLUMN tensile.evaluation_status.id IS 'id of the schedule';
COMMENT ON COLUMN tensile.evaluation_status.model IS
    'name of the model; null: the owner of the schedule may not use it any more';
COMMENT ON COLUMN tensile.evaluation_status.owner IS 'role that runs the query';
COMMENT ON COLUMN tensile.evaluation_status.query IS 'query of the rows, with the target';
COMMENT ON COLUMN tensile.evaluation_status.metric IS 'metric that is kept; null: all';
COMMENT ON COLUMN tensile.evaluation_status.every IS 'time between two evaluations';
COMMENT ON COLUMN tensile.evaluation_status.next_run IS 'time of the next evaluation';
COMMENT ON COLUMN tensile.evaluation_status.last_run IS 'time at which an evaluation was last due';
COMMENT ON COLUMN tensile.evaluation_status.last_job IS 'job of the last evaluation; null: none yet, or it was refused';
COMMENT ON COLUMN tensile.evaluation_status.last_state IS
    'refused, or the state of that job; null: none yet, or the job was deleted';
COMMENT ON COLUMN tensile.evaluation_status.last_sqlstate IS 'SQLSTATE of the refusal, or of the job''s failure';
COMMENT ON COLUMN tensile.evaluation_status.last_error IS 'message of the refusal, or of the job''s failure';
COMMENT ON COLUMN tensile.evaluation_status.last_hint IS 'hint of the refusal, or of the job''s failure';
