-- Public functions: evaluation

CREATE FUNCTION @extschema@.schedule_evaluation(model text, query text, every interval, metric text DEFAULT NULL)
    RETURNS bigint
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_schedule_evaluation';
COMMENT ON FUNCTION @extschema@.schedule_evaluation(text, text, interval, text) IS
    'evaluate the deployed version of a model again and again on the rows of a query, as evaluate_model does, and keep '
    'the values in tensile.evaluations; return the id of the schedule; for roles that may predict with the model';
CREATE FUNCTION @extschema@.unschedule_evaluation(model text) RETURNS bool
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.unschedule_evaluation(text) IS
    'remove a model''s schedule of evaluations; return false if it has none; the values stay; for the owner of the '
    'schedule, and of the model';

CREATE FUNCTION @extschema@.evaluate_model(model text, query text, by text DEFAULT NULL, version int DEFAULT NULL,
                                           memory_budget text DEFAULT NULL)
    RETURNS TABLE (group_value text, metric text, label text, predicted text, quantile float8, value float8,
                   baseline float8)
    LANGUAGE C COST 1000 AS 'MODULE_PATHNAME', 'tensile_evaluate_model';
COMMENT ON FUNCTION @extschema@.evaluate_model(text, text, text, int, text) IS
    'compare a model''s predictions with the target for every row of a query, or for each value of the column "by", '
    'beside a baseline without a model; '
    'for roles that may predict with the model';

CREATE FUNCTION @extschema@.feature_importance(model text, query text, repeats int DEFAULT 5, metric text DEFAULT NULL,
                                               seed bigint DEFAULT 0)
    RETURNS TABLE (feature text, importance float8, deviation float8, metric_used text)
    LANGUAGE C COST 1000 AS 'MODULE_PATHNAME', 'tensile_feature_importance';
COMMENT ON FUNCTION @extschema@.feature_importance(text, text, int, text, bigint) IS
    'measure how much worse a model''s metric becomes on the rows of a query when a feature''s values are shuffled; '
    'for roles that may predict with the model';
