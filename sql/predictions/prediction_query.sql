-- Queries for predictions, derived from training queries

CREATE FUNCTION tensile_worker._same_query(query text, other text, settings jsonb) RETURNS bool
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_same_query';
CREATE FUNCTION tensile_worker._check_prediction_query(version bigint, training_query text, query text, settings jsonb)
    RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_check_prediction_query';

-- Keep the query for predictions of the job's version.
CREATE FUNCTION tensile_worker._job_prediction_query(version bigint, derived jsonb) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_worker._my_job(); -- the next statement does not call it without a row
    UPDATE tensile_internal.model_versions v
        SET prediction_query = $2 || jsonb_build_object(
            'settings', (SELECT j.settings FROM tensile_internal.jobs j WHERE j.id = v.job))
        WHERE v.id = $1 AND v.job = tensile_worker._my_job() AND v.weight_bytes IS NULL;
$$;

-- The query for predictions of a version as {"sql", "settings"}, for predict_rows, which has checked the caller's
-- privilege; null if the version cannot be seen. `source`: qualified name of the relation to read in place of its own.
CREATE FUNCTION tensile_internal._prediction_query(version bigint, model text, source text) RETURNS jsonb
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    derived jsonb;
    author oid; -- of the training query: the role that has submitted the job
    query text;
BEGIN
    SELECT coalesce(v.prediction_query, '{}'), r.oid INTO derived, author
        FROM tensile_internal.model_versions v LEFT JOIN tensile_internal.jobs j ON j.id = v.job
             LEFT JOIN pg_roles r ON r.oid = j.owner_id AND r.rolname = j.owner
        WHERE v.id = _prediction_query.version;
    IF derived IS NULL THEN
        RETURN NULL;
    END IF;
    query := CASE WHEN source IS NULL THEN derived->>'query'
                  ELSE format('WITH tensile_source AS (SELECT * FROM %s) (%s)', source, derived->>'template') END;
    IF query IS NULL OR source IS NOT NULL AND derived->>'template' IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('no query for predictions%s is derived from the training query of model "%s"',
                             CASE WHEN source IS NOT NULL THEN ' over another table' ELSE '' END, model),
            DETAIL = coalesce(derived->>'reason', 'The version was imported, or trained by version 0.1.0.'),
            HINT = format('Give the query of the rows: predict_rows(%L, ''SELECT ...'').', model);
    END IF;
    IF author IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('the role that has trained model "%s" is gone', model),
            DETAIL = 'Its query for predictions would be analysed with its rights.',
            HINT = format('Give the query of the rows: predict_rows(%L, ''SELECT ...'').', model);
    END IF;
    RETURN jsonb_build_object('sql', query, 'settings', derived->'settings', 'author', author::text);
END $$;
