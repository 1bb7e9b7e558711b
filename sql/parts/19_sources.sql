------------------------------------------------------------------------------------------------------------------------
-- Lineage, as users see it
------------------------------------------------------------------------------------------------------------------------

-- Relations have their present names. One that is gone is looked for by its name, as it may have been created again.
CREATE VIEW tensile.model_sources WITH (security_invoker = true) AS
    SELECT m.name AS model, v.version, s.purpose, coalesce(c.oid, d.oid)::pg_catalog.regclass AS relation,
           coalesce(n.nspname, s.schema_name) AS schema_name, coalesce(c.relname, s.relation_name) AS relation_name,
           s.kind, s.columns
    FROM tensile._version_sources s
         JOIN tensile.model_versions v ON v.id OPERATOR(pg_catalog.=) s.version
         JOIN tensile.models m ON m.id OPERATOR(pg_catalog.=) v.model
         LEFT JOIN (pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace)
             ON c.oid OPERATOR(pg_catalog.=) s.relation
         LEFT JOIN (pg_catalog.pg_class d JOIN pg_catalog.pg_namespace e ON e.oid OPERATOR(pg_catalog.=) d.relnamespace)
             ON c.oid IS NULL AND e.nspname OPERATOR(pg_catalog.=) s.schema_name
                AND d.relname OPERATOR(pg_catalog.=) s.relation_name;
COMMENT ON VIEW tensile.model_sources IS
    'tables, views and columns that each version was trained on; what functions read is not known; visible as the model '
    'is';
COMMENT ON COLUMN tensile.model_sources.purpose IS 'training, or validation: the query that has read it';
COMMENT ON COLUMN tensile.model_sources.relation IS
    'the table or view; null: it was dropped, or after a restore no relation has that name';
COMMENT ON COLUMN tensile.model_sources.schema_name IS 'its schema; of one that was dropped, as it was';
COMMENT ON COLUMN tensile.model_sources.relation_name IS 'its name; of one that was dropped, as it was';
COMMENT ON COLUMN tensile.model_sources.kind IS
    'table, partitioned table, foreign table, view, materialized view or sequence; what a view reads is listed as well';
COMMENT ON COLUMN tensile.model_sources.columns IS
    'names, at the time of the training, of the columns that the query reads, in any place';

GRANT SELECT ON tensile.model_sources TO PUBLIC;

CREATE FUNCTION @extschema@.models_of_table(relation regclass)
    RETURNS TABLE (model text, version int, deployed bool, scheduled bool, trained_on regclass, columns name[])
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    -- The relation and what has rows of it: partitioned tables, parents, views and materialized views
    WITH RECURSIVE readers (relation) AS (
        SELECT $1::oid
        UNION
        SELECT x.relation
        FROM readers r CROSS JOIN LATERAL (
            SELECT i.inhparent FROM pg_inherits i WHERE i.inhrelid = r.relation
            UNION ALL
            SELECT w.ev_class FROM pg_depend d JOIN pg_rewrite w ON w.oid = d.objid
            WHERE d.classid = 'pg_rewrite'::regclass AND d.refclassid = 'pg_class'::regclass
              AND d.refobjid = r.relation AND w.ev_type = '1' AND w.is_instead) x (relation)
    )
    SELECT s.model, s.version, m.deployed_version IS NOT DISTINCT FROM s.version,
           EXISTS (SELECT FROM tensile.schedules c WHERE c.model = m.id), s.relation,
           array_agg(DISTINCT k.name) FILTER (WHERE k.name IS NOT NULL)
    FROM tensile.model_sources s JOIN tensile.models m ON m.name = s.model
         LEFT JOIN LATERAL unnest(s.columns) k (name) ON true
    -- What a view reads is a source of its own.
    WHERE s.relation IN (SELECT r.relation FROM readers r) AND (s.kind <> 'view' OR s.relation = $1)
    GROUP BY s.model, s.version, m.id, s.relation
    UNION ALL
    SELECT m.name, NULL, false, true, c.source, NULL
    FROM tensile.schedules c JOIN tensile.models m ON m.id = c.model
    WHERE c.source IN (SELECT r.relation FROM readers r)
    ORDER BY 1, 2 NULLS LAST, 5
$$;
COMMENT ON FUNCTION @extschema@.models_of_table(regclass) IS
    'versions of models that were trained on rows of a table, directly or through views, materialized views and '
    'partitioned tables, and models whose schedule counts its rows; of the models that the caller may see';
