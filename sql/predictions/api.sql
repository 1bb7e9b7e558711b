-- Public functions: predictions

CREATE FUNCTION @extschema@.predict(model text, features record, memory_budget text DEFAULT NULL) RETURNS float8
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_record';
CREATE FUNCTION @extschema@.predict(model text, features float8[], memory_budget text DEFAULT NULL) RETURNS float8
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_array';
CREATE FUNCTION @extschema@.predict(model text, features jsonb, memory_budget text DEFAULT NULL) RETURNS float8
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_jsonb';
CREATE FUNCTION @extschema@.predict(model text, features json, memory_budget text DEFAULT NULL) RETURNS float8
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_text';
CREATE FUNCTION @extschema@.predict(model text, features text, memory_budget text DEFAULT NULL) RETURNS float8
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_text';
CREATE FUNCTION @extschema@.predict_class(model text, features record, memory_budget text DEFAULT NULL) RETURNS text
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_class_record';
CREATE FUNCTION @extschema@.predict_class(model text, features float8[], memory_budget text DEFAULT NULL) RETURNS text
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_class_array';
CREATE FUNCTION @extschema@.predict_class(model text, features jsonb, memory_budget text DEFAULT NULL) RETURNS text
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_class_jsonb';
CREATE FUNCTION @extschema@.predict_class(model text, features json, memory_budget text DEFAULT NULL) RETURNS text
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_class_text';
CREATE FUNCTION @extschema@.predict_class(model text, features text, memory_budget text DEFAULT NULL) RETURNS text
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_class_text';
CREATE FUNCTION @extschema@.predict_rows(model text, query text, memory_budget text DEFAULT NULL)
    RETURNS TABLE (row_number bigint, prediction float8, label text, probability float8)
    LANGUAGE C COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_rows';
CREATE FUNCTION @extschema@.predict_table(model text, source regclass DEFAULT NULL, memory_budget text DEFAULT NULL)
    RETURNS TABLE (row_number bigint, prediction float8, label text, probability float8)
    LANGUAGE C COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_table';
CREATE FUNCTION @extschema@.embed(model text, document text) RETURNS real[]
    LANGUAGE C STABLE STRICT PARALLEL SAFE COST 10000 AS 'MODULE_PATHNAME', 'tensile_embed';
CREATE FUNCTION @extschema@.embed_rows(model text, query text)
    RETURNS TABLE (row_number bigint, embedding real[])
    LANGUAGE C COST 10000 AS 'MODULE_PATHNAME', 'tensile_embed_rows';
COMMENT ON FUNCTION @extschema@.embed(text, text) IS
    'vector of a text by a pretrained transformer: that of the deployed version, or of the folder if the model has '
    'no version';
COMMENT ON FUNCTION @extschema@.embed_rows(text, text) IS
    'vectors of the texts that a query of one column returns, in batches; null for null';
COMMENT ON FUNCTION @extschema@.predict(text, record, text) IS
    'predict for a row, with columns matched by name: a number, or the probability of the second of two classes';
COMMENT ON FUNCTION @extschema@.predict(text, float8[], text) IS
    'predict for features in the order of the training query';
COMMENT ON FUNCTION @extschema@.predict(text, jsonb, text) IS 'predict for an object {"feature": value, ...}';
COMMENT ON FUNCTION @extschema@.predict(text, json, text) IS 'predict for an object given as json';
COMMENT ON FUNCTION @extschema@.predict(text, text, text) IS 'predict for an object given as text';
COMMENT ON FUNCTION @extschema@.predict_class(text, record, text) IS
    'predict the most probable class for a row, with columns matched by name';
COMMENT ON FUNCTION @extschema@.predict_class(text, float8[], text) IS
    'predict the most probable class for features in the order of the training query';
COMMENT ON FUNCTION @extschema@.predict_class(text, jsonb, text) IS
    'predict the most probable class for an object {"feature": value, ...}';
COMMENT ON FUNCTION @extschema@.predict_class(text, json, text) IS
    'predict the most probable class for an object given as json';
COMMENT ON FUNCTION @extschema@.predict_class(text, text, text) IS
    'predict the most probable class for an object given as text';
COMMENT ON FUNCTION @extschema@.predict_rows(text, text, text) IS
    'predict for every row of a query, in batches';
COMMENT ON FUNCTION @extschema@.predict_table(text, regclass, text) IS
    'predict for every row of the query that is derived from the training query; it reads "source" in place of its own '
    'table, unless that is null; with the caller''s privileges';
CREATE FUNCTION @extschema@.predict_interval(model text, features record, coverage float8 DEFAULT 0.9,
                                             memory_budget text DEFAULT NULL, OUT lower float8, OUT prediction float8,
                                             OUT upper float8)
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_interval_record';
CREATE FUNCTION @extschema@.predict_interval(model text, features float8[], coverage float8 DEFAULT 0.9,
                                             memory_budget text DEFAULT NULL, OUT lower float8, OUT prediction float8,
                                             OUT upper float8)
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_interval_array';
CREATE FUNCTION @extschema@.predict_interval(model text, features jsonb, coverage float8 DEFAULT 0.9,
                                             memory_budget text DEFAULT NULL, OUT lower float8, OUT prediction float8,
                                             OUT upper float8)
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_interval_jsonb';
CREATE FUNCTION @extschema@.predict_interval(model text, features json, coverage float8 DEFAULT 0.9,
                                             memory_budget text DEFAULT NULL, OUT lower float8, OUT prediction float8,
                                             OUT upper float8)
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_interval_text';
CREATE FUNCTION @extschema@.predict_interval(model text, features text, coverage float8 DEFAULT 0.9,
                                             memory_budget text DEFAULT NULL, OUT lower float8, OUT prediction float8,
                                             OUT upper float8)
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_interval_text';
COMMENT ON FUNCTION @extschema@.predict_interval(text, record, float8, text) IS
    'predict for a row, with columns matched by name, with an interval in which the target lies with the '
    'probability `coverage`; for regressions';
COMMENT ON FUNCTION @extschema@.predict_interval(text, float8[], float8, text) IS
    'predict for features in the order of the training query, with an interval in which the target lies with the '
    'probability `coverage`; for regressions';
COMMENT ON FUNCTION @extschema@.predict_interval(text, jsonb, float8, text) IS
    'predict for an object {"feature": value, ...}, with an interval in which the target lies with the '
    'probability `coverage`; for regressions';
COMMENT ON FUNCTION @extschema@.predict_interval(text, json, float8, text) IS
    'predict for an object given as json, with an interval in which the target lies with the probability `coverage`; '
    'for regressions';
COMMENT ON FUNCTION @extschema@.predict_interval(text, text, float8, text) IS
    'predict for an object given as text, with an interval in which the target lies with the probability `coverage`; '
    'for regressions';
CREATE FUNCTION @extschema@.predict_probabilities(model text, features record, memory_budget text DEFAULT NULL)
    RETURNS TABLE (label text, probability float8)
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 ROWS 5 AS 'MODULE_PATHNAME', 'tensile_predict_probabilities_record';
CREATE FUNCTION @extschema@.predict_probabilities(model text, features float8[], memory_budget text DEFAULT NULL)
    RETURNS TABLE (label text, probability float8)
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 ROWS 5 AS 'MODULE_PATHNAME', 'tensile_predict_probabilities_array';
CREATE FUNCTION @extschema@.predict_probabilities(model text, features jsonb, memory_budget text DEFAULT NULL)
    RETURNS TABLE (label text, probability float8)
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 ROWS 5 AS 'MODULE_PATHNAME', 'tensile_predict_probabilities_jsonb';
CREATE FUNCTION @extschema@.predict_probabilities(model text, features json, memory_budget text DEFAULT NULL)
    RETURNS TABLE (label text, probability float8)
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 ROWS 5 AS 'MODULE_PATHNAME', 'tensile_predict_probabilities_text';
CREATE FUNCTION @extschema@.predict_probabilities(model text, features text, memory_budget text DEFAULT NULL)
    RETURNS TABLE (label text, probability float8)
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 ROWS 5 AS 'MODULE_PATHNAME', 'tensile_predict_probabilities_text';
COMMENT ON FUNCTION @extschema@.predict_probabilities(text, record, text) IS
    'predict the probabilities of all classes for a row, with columns matched by name; the most probable class first';
COMMENT ON FUNCTION @extschema@.predict_probabilities(text, float8[], text) IS
    'predict the probabilities of all classes for features in the order of the training query; the most probable '
    'class first';
COMMENT ON FUNCTION @extschema@.predict_probabilities(text, jsonb, text) IS
    'predict the probabilities of all classes for an object {"feature": value, ...}; the most probable class first';
COMMENT ON FUNCTION @extschema@.predict_probabilities(text, json, text) IS
    'predict the probabilities of all classes for an object given as json; the most probable class first';
COMMENT ON FUNCTION @extschema@.predict_probabilities(text, text, text) IS
    'predict the probabilities of all classes for an object given as text; the most probable class first';
CREATE FUNCTION @extschema@.predict_all(model text, features record, coverage float8 DEFAULT 0.9,
                                        memory_budget text DEFAULT NULL) RETURNS jsonb
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_all_record';
CREATE FUNCTION @extschema@.predict_all(model text, features float8[], coverage float8 DEFAULT 0.9,
                                        memory_budget text DEFAULT NULL) RETURNS jsonb
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_all_array';
CREATE FUNCTION @extschema@.predict_all(model text, features jsonb, coverage float8 DEFAULT 0.9,
                                        memory_budget text DEFAULT NULL) RETURNS jsonb
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_all_jsonb';
CREATE FUNCTION @extschema@.predict_all(model text, features json, coverage float8 DEFAULT 0.9,
                                        memory_budget text DEFAULT NULL) RETURNS jsonb
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_all_text';
CREATE FUNCTION @extschema@.predict_all(model text, features text, coverage float8 DEFAULT 0.9,
                                        memory_budget text DEFAULT NULL) RETURNS jsonb
    LANGUAGE C STABLE PARALLEL SAFE COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_all_text';
COMMENT ON FUNCTION @extschema@.predict_all(text, record, float8, text) IS
    'predict for a row, with columns matched by name: an object with the value and, if the model has one, its '
    'interval, or with the label, its probability and those of all labels';
COMMENT ON FUNCTION @extschema@.predict_all(text, float8[], float8, text) IS
    'predict for features in the order of the training query: an object with the value and, if the model has one, '
    'its interval, or with the label, its probability and those of all labels';
COMMENT ON FUNCTION @extschema@.predict_all(text, jsonb, float8, text) IS
    'predict for an object {"feature": value, ...}: an object with the value and, if the model has one, its '
    'interval, or with the label, its probability and those of all labels';
COMMENT ON FUNCTION @extschema@.predict_all(text, json, float8, text) IS
    'predict for an object given as json: an object with the value and, if the model has one, its interval, or with '
    'the label, its probability and those of all labels';
COMMENT ON FUNCTION @extschema@.predict_all(text, text, float8, text) IS
    'predict for an object given as text: an object with the value and, if the model has one, its interval, or with '
    'the label, its probability and those of all labels';
CREATE FUNCTION @extschema@.explain_prediction(model text, features record, memory_budget text DEFAULT NULL)
    RETURNS TABLE (feature text, value text, attribution float8)
    LANGUAGE C STABLE PARALLEL SAFE COST 100000 ROWS 20 AS 'MODULE_PATHNAME', 'tensile_explain_prediction_record';
CREATE FUNCTION @extschema@.explain_prediction(model text, features float8[], memory_budget text DEFAULT NULL)
    RETURNS TABLE (feature text, value text, attribution float8)
    LANGUAGE C STABLE PARALLEL SAFE COST 100000 ROWS 20 AS 'MODULE_PATHNAME', 'tensile_explain_prediction_array';
CREATE FUNCTION @extschema@.explain_prediction(model text, features jsonb, memory_budget text DEFAULT NULL)
    RETURNS TABLE (feature text, value text, attribution float8)
    LANGUAGE C STABLE PARALLEL SAFE COST 100000 ROWS 20 AS 'MODULE_PATHNAME', 'tensile_explain_prediction_jsonb';
CREATE FUNCTION @extschema@.explain_prediction(model text, features json, memory_budget text DEFAULT NULL)
    RETURNS TABLE (feature text, value text, attribution float8)
    LANGUAGE C STABLE PARALLEL SAFE COST 100000 ROWS 20 AS 'MODULE_PATHNAME', 'tensile_explain_prediction_text';
CREATE FUNCTION @extschema@.explain_prediction(model text, features text, memory_budget text DEFAULT NULL)
    RETURNS TABLE (feature text, value text, attribution float8)
    LANGUAGE C STABLE PARALLEL SAFE COST 100000 ROWS 20 AS 'MODULE_PATHNAME', 'tensile_explain_prediction_text';
COMMENT ON FUNCTION @extschema@.explain_prediction(text, record, text) IS
    'attribute the prediction for a row, with columns matched by name, to the features; the attribution without a '
    'feature is the prediction for average features, and all together are the prediction';
COMMENT ON FUNCTION @extschema@.explain_prediction(text, float8[], text) IS
    'attribute the prediction for features in the order of the training query, to the features; the attribution '
    'without a feature is the prediction for average features, and all together are the prediction';
COMMENT ON FUNCTION @extschema@.explain_prediction(text, jsonb, text) IS
    'attribute the prediction for an object {"feature": value, ...}, to the features; the attribution without a '
    'feature is the prediction for average features, and all together are the prediction';
COMMENT ON FUNCTION @extschema@.explain_prediction(text, json, text) IS
    'attribute the prediction for an object given as json, to the features; the attribution without a feature is the '
    'prediction for average features, and all together are the prediction';
COMMENT ON FUNCTION @extschema@.explain_prediction(text, text, text) IS
    'attribute the prediction for an object given as text, to the features; the attribution without a feature is the '
    'prediction for average features, and all together are the prediction';

CREATE FUNCTION @extschema@.materialize_predictions(model text, query text, into_table text, key text[] DEFAULT NULL,
                                                    memory_budget text DEFAULT NULL, OUT predicted bigint,
                                                    OUT unchanged bigint, OUT removed bigint)
    LANGUAGE C COST 1000 AS 'MODULE_PATHNAME', 'tensile_materialize_predictions';
COMMENT ON FUNCTION @extschema@.materialize_predictions(text, text, text, text[], text) IS
    'keep the predictions for the rows of a query in a table: predict for new and changed rows, and for all when another '
    'version is deployed, and remove rows that are gone; for roles that may predict with the model';
