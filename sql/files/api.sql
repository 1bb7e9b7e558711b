-- Public functions: files of models

CREATE FUNCTION @extschema@.export_model(model text, version int DEFAULT NULL, format text DEFAULT 'tensile')
    RETURNS bytea
    LANGUAGE C COST 1000 AS 'MODULE_PATHNAME', 'tensile_export_model';
COMMENT ON FUNCTION @extschema@.export_model(text, int, text) IS
    'a version of a model, or the deployed one, as a file; for the model''s owner';

CREATE FUNCTION @extschema@.import_model(contents bytea, model text, template text DEFAULT NULL) RETURNS int
    LANGUAGE C COST 1000 AS 'MODULE_PATHNAME', 'tensile_import_model';
COMMENT ON FUNCTION @extschema@.import_model(bytea, text, text) IS
    'add a model that export_model has written as a version of the model of that name, which is registered if it does '
    'not exist; return the number of the version, which is deployed if no other one is; for the model''s owner';
