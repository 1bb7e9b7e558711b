-- View of schedules

CREATE VIEW tensile.schedules WITH (security_invoker = true) AS
    SELECT s.id, m.name AS model, s.model_id, s.owner, s.owner_id, s.arguments, s.every,
           s.rows, s.source, s.next_run,
           CASE WHEN i.inserted OPERATOR(pg_catalog.<) s.counted_rows THEN i.inserted
                ELSE i.inserted OPERATOR(pg_catalog.-) s.counted_rows END AS new_rows,
           s.last_run, s.last_job,
           CASE WHEN s.error IS NOT NULL THEN 'refused' ELSE j.state END AS last_state, j.version AS last_version,
           d.decision, coalesce(s.sqlstate, j.sqlstate) AS last_sqlstate, coalesce(s.error, j.error) AS last_error,
           coalesce(s.hint, j.hint) AS last_hint, s.drift, s.last_reason
    FROM tensile_internal.schedules s LEFT JOIN tensile_internal.models m ON m.id OPERATOR(pg_catalog.=) s.model_id
         LEFT JOIN tensile_internal.jobs j ON j.id OPERATOR(pg_catalog.=) s.last_job
         LEFT JOIN tensile_internal.deployments d ON d.job OPERATOR(pg_catalog.=) j.id
         CROSS JOIN LATERAL tensile_worker._inserted_rows(s.source) i (inserted);
COMMENT ON VIEW tensile.schedules IS
    'schedules of trainings, their next runs, and the outcomes of their last ones; visible to their owners and to members '
    'of pg_read_all_stats';
COMMENT ON COLUMN tensile.schedules.id IS 'id of the schedule';
COMMENT ON COLUMN tensile.schedules.model IS
    'name of the model; null: the owner of the schedule may not use it any more';
COMMENT ON COLUMN tensile.schedules.owner IS 'role that submits the jobs';
COMMENT ON COLUMN tensile.schedules.every IS 'time between two trainings; null: not by time';
COMMENT ON COLUMN tensile.schedules.rows IS 'number of new rows that cause a training; null: not by rows';
COMMENT ON COLUMN tensile.schedules.source IS 'table whose new rows count';
COMMENT ON COLUMN tensile.schedules.next_run IS
    'time of the next training; one in the past waits for the model''s job to end; null: not by time';
COMMENT ON COLUMN tensile.schedules.new_rows IS 'number of rows inserted into the source since the last training';
COMMENT ON COLUMN tensile.schedules.last_run IS 'time at which a training was last due';
COMMENT ON COLUMN tensile.schedules.last_job IS 'job of the last training; null: none yet, or it was refused';
COMMENT ON COLUMN tensile.schedules.last_state IS
    'refused, or the state of that job; null: none yet, or the job was deleted';
COMMENT ON COLUMN tensile.schedules.last_version IS 'version that the job has trained';
COMMENT ON COLUMN tensile.schedules.decision IS 'deployed or kept, as in deployments; null: not decided';
COMMENT ON COLUMN tensile.schedules.last_sqlstate IS 'SQLSTATE of the refusal, or of the job''s failure';
COMMENT ON COLUMN tensile.schedules.last_error IS 'message of the refusal, or of the job''s failure';
COMMENT ON COLUMN tensile.schedules.last_hint IS 'hint of the refusal, or of the job''s failure';
COMMENT ON COLUMN tensile.schedules.drift IS
    'drift of the deployed version above which it is trained again; null: not by drift';
COMMENT ON COLUMN tensile.schedules.last_reason IS
    'reason for which the last training was due: time, a number of new rows, or a drift';
COMMENT ON COLUMN tensile.schedules.arguments IS 'arguments of train_model';
