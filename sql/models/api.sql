-- Public functions: models and their versions

CREATE FUNCTION @extschema@.register_model(name text, architecture jsonb DEFAULT NULL, description text DEFAULT NULL,
                                           replace bool DEFAULT false) RETURNS bigint
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.register_model(text, jsonb, text, bool) IS
    'register a model, e.g. register_model(''late'', ''{"type": "mlp", "hidden": [128, 64]}''); return its id';
CREATE FUNCTION @extschema@.drop_model(name text) RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.drop_model(text) IS
    'drop a model with its versions, and end its job; for the model''s owner';
CREATE FUNCTION @extschema@.deploy_model(model text, version int, reason text DEFAULT NULL) RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.deploy_model(text, int, text) IS
    'set the version that predictions use from now on; older versions are possible; the reason is kept in '
    'tensile.deployments; for the model''s owner';
CREATE FUNCTION @extschema@.rollback_model(model text, reason text DEFAULT NULL) RETURNS int
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.rollback_model(text, text) IS
    'return to the version that was deployed before the present one; return its number; for the model''s owner';
CREATE FUNCTION @extschema@.grant_model(model text, grantee text, privilege text DEFAULT 'predict') RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.grant_model(text, text, text) IS
    'allow a role (or ''public'') to ''predict'' with a model or to ''train'' it; predictions reveal training '
    'data; for the model''s owner';
CREATE FUNCTION @extschema@.revoke_model(model text, grantee text, privilege text DEFAULT 'predict') RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.revoke_model(text, text, text) IS
    'revoke a privilege granted by grant_model; for the model''s owner';
CREATE FUNCTION @extschema@.set_model_owner(model text, role text) RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.set_model_owner(text, text) IS
    'give a model to another role that the caller is a member of; for the model''s owner, and superusers';

CREATE FUNCTION @extschema@.set_model_memory_budget(model text, memory_budget text) RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.set_model_memory_budget(text, text) IS
    'limit the device memory of predictions with a model, unless a call specifies its own budget; null: no '
    'limit; for the model''s owner';

CREATE FUNCTION @extschema@.drop_model_version(model text, version int) RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.drop_model_version(text, int) IS
    'drop a version of a model that is not deployed, with its weights; for the model''s owner';

CREATE FUNCTION @extschema@.set_model_retention(model text, keep_versions int) RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.set_model_retention(text, int) IS
    'set how many of a model''s newest versions are kept, besides the deployed one, when a version is added; 0: all; '
    'null: as pg_tensile.version_retention says; for the model''s owner';

CREATE FUNCTION @extschema@.models_of_table(source regclass)
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
           EXISTS (SELECT FROM tensile.schedules c WHERE c.model_id = m.model_id), s.relation,
           array_agg(DISTINCT k.name) FILTER (WHERE k.name IS NOT NULL)
    FROM tensile.model_sources s JOIN tensile.models m ON m.model = s.model
         LEFT JOIN LATERAL unnest(s.columns) k (name) ON true
    -- What a view reads is a source of its own.
    WHERE s.relation IN (SELECT r.relation FROM readers r) AND (s.kind <> 'view' OR s.relation = $1)
    GROUP BY s.model, s.version, m.model_id, m.deployed_version, s.relation
    UNION ALL
    SELECT m.model, NULL, false, true, c.source, NULL
    FROM tensile.schedules c JOIN tensile.models m ON m.model_id = c.model_id
    WHERE c.source IN (SELECT r.relation FROM readers r)
    ORDER BY 1, 2 NULLS LAST, 5
$$;
COMMENT ON FUNCTION @extschema@.models_of_table(regclass) IS
    'versions of models that were trained on rows of a table, directly or through views, materialized views and '
    'partitioned tables, and models whose schedule counts its rows; of the models that the caller may see';
