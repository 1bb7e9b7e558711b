-- Relations and columns that a training has read

CREATE FUNCTION tensile_worker._training_sources(query text, settings jsonb, validation_query text) RETURNS json
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_training_sources';

-- Keep what the job's version was trained on: the result of _training_sources when its rows were read. A relation may
-- have been renamed since, so its OID is not that of the name.
CREATE FUNCTION tensile_worker._job_sources(version bigint, sources jsonb) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_worker._my_job(); -- the next statements do not call it without a row
    INSERT INTO tensile_internal.version_sources (version, purpose, schema_name, relation_name, kind, columns)
        SELECT v.id, s.purpose, s.schema, s.name, s.kind, s.columns
        FROM tensile_internal.model_versions v
             CROSS JOIN jsonb_to_recordset($2) s (purpose text, schema name, name name, kind text, columns name[])
        WHERE v.id = $1 AND v.job = tensile_worker._my_job() AND v.weight_bytes IS NULL;
    UPDATE tensile_internal.version_sources o SET relation = s.relation
        FROM jsonb_to_recordset($2) s (purpose text, schema name, name name, relation oid),
            tensile_internal.model_versions v
        WHERE o.version = $1 AND v.id = o.version AND v.job = tensile_worker._my_job() AND v.weight_bytes IS NULL
          AND o.purpose = s.purpose AND o.schema_name = s.schema AND o.relation_name = s.name
          AND o.relation IS DISTINCT FROM s.relation;
$$;
