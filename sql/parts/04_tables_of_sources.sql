------------------------------------------------------------------------------------------------------------------------
-- Tables: what versions were trained on
------------------------------------------------------------------------------------------------------------------------

-- A row for each relation that a query of the version has read. The OID finds it when it was renamed, the name when it
-- was created again or restored; nothing keeps it from being dropped.
CREATE TABLE tensile._version_sources (
    version       bigint REFERENCES tensile.model_versions ON DELETE CASCADE,
    purpose       text CHECK (purpose OPERATOR(pg_catalog.=) ANY (ARRAY['training', 'validation'])),
    relation      oid,
    schema_name   name,
    relation_name name,
    kind          text NOT NULL,
    columns       name[] NOT NULL,
    PRIMARY KEY (version, purpose, schema_name, relation_name)
);
CREATE INDEX version_sources_of_relation ON tensile._version_sources (relation);
COMMENT ON TABLE tensile._version_sources IS 'relations and columns that each version was trained on';
