-- Views of predictions

CREATE VIEW tensile.predictions WITH (security_invoker = true) AS
    SELECT m.name AS model, v.version, p.rows, p.requests, p.unknown_categories
    FROM tensile_worker._predictions() p
         JOIN tensile_internal.model_versions v ON v.id OPERATOR(pg_catalog.=) p.version
         JOIN tensile_internal.models m ON m.id OPERATOR(pg_catalog.=) v.model_id;
COMMENT ON VIEW tensile.predictions IS
    'predictions since the server started, with the number of categories unknown to the model';
COMMENT ON COLUMN tensile.predictions.rows IS 'number of rows predicted for';
COMMENT ON COLUMN tensile.predictions.requests IS
    'number of requests to the predictor: one per row of predict, one per batch of predict_rows';
COMMENT ON COLUMN tensile.predictions.unknown_categories IS
    'number of values that are not among the categories of the training rows';

CREATE VIEW tensile.loaded_models WITH (security_invoker = true) AS
    SELECT m.name AS model, v.version, l.device, l.memory_budget, l.device_bytes, l.planned_bytes, l.host_bytes
    FROM tensile_worker._loaded_models() l
         LEFT JOIN tensile_internal.model_versions v ON v.id OPERATOR(pg_catalog.=) l.version
         JOIN tensile_internal.models m ON m.id OPERATOR(pg_catalog.=) v.model_id
              OR tensile_worker._base_number(m.id, m.architecture) OPERATOR(pg_catalog.=) l.version;
COMMENT ON VIEW tensile.loaded_models IS
    'models loaded by the predictor, a version once for each memory budget; version null: a pretrained model '
    'without a version';
COMMENT ON COLUMN tensile.loaded_models.device IS
    'device that the model predicts on: pg_tensile.device within a memory budget, else the CPU';
COMMENT ON COLUMN tensile.loaded_models.memory_budget IS
    'memory budget in bytes; null: the model is executed as a whole';
COMMENT ON COLUMN tensile.loaded_models.device_bytes IS
    'device memory accounted for the model: its memory budget, or its weights';
COMMENT ON COLUMN tensile.loaded_models.planned_bytes IS
    'peak device memory of a prediction for one row within the memory budget';
COMMENT ON COLUMN tensile.loaded_models.host_bytes IS
    'bytes of the weights in host memory, besides those on the device';
