-- Export of a model into a file, and import

-- Bytes of the version's stored safetensors file
CREATE FUNCTION tensile_internal._stored_weights(v tensile_internal.model_versions) RETURNS bytea
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF v.weight_bytes > 1000000000 THEN -- of 1073741823; the description follows
        RAISE EXCEPTION USING ERRCODE = 'program_limit_exceeded',
            MESSAGE = format('version %s is too large to be exported: its weights have %s bytes', v.version,
                             v.weight_bytes),
            HINT = 'A value has at most 1 GB. Copy the whole database with pg_dump, or use replication.';
    END IF;
    RETURN (SELECT string_agg(w.data, '' ORDER BY w.seq) FROM tensile_internal.model_weights w WHERE w.version = v.id);
END $$;

CREATE FUNCTION tensile_internal._export_model(caller oid, model text, version int, format text) RETURNS bytea
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v tensile_internal.model_versions;
    contents bytea;
    tensors bytea;
    header bytea;
    zeros text := repeat('0', 64);
    length int;
BEGIN
    IF format IS NULL OR format NOT IN ('tensile', 'torch') THEN -- "onnx" is csrc/predicting/model_file.c's
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('unknown format "%s"', coalesce(format, 'null')),
            HINT = 'The formats are "tensile", "torch" and "onnx".';
    END IF;
    v := tensile_internal._owned_version(caller, model, version);
    contents := tensile_internal._stored_weights(v);
    IF format = 'torch' THEN
        RETURN contents;
    END IF;
    length := tensile_internal._header_length(contents);
    tensors := substring(contents FROM 9 + length);
    header := tensile_internal._file_header(
        tensile_internal._file_object(substring(contents FROM 9 FOR length), 'header of stored weights')
        || jsonb_build_object('__metadata__', jsonb_build_object(
               'format', 'pg_tensile', 'format_version', '1', 'sha256', zeros,
               'description', tensile_internal._description(v)::text)));
    RETURN overlay(header PLACING convert_to(tensile_internal._file_hash(header, tensors), 'UTF8')
                   FROM position(convert_to('"sha256": "' || zeros, 'UTF8') IN header) + 11) || tensors;
END $$;

-- The spec of the trainer that exports a version in the format "onnx"
CREATE FUNCTION tensile_internal._export_spec(caller oid, model text, version int) RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v tensile_internal.model_versions := tensile_internal._owned_version(caller, model, version);
BEGIN
    RETURN tensile_internal._evaluation_spec(v.id, NULL, jsonb_build_object(
        'kind', 'export_model', 'memory_budget', 0,
        'metadata', jsonb_build_object('name', model, 'target', v.preprocessing->'target'->>'name',
                                       'pg_tensile', tensile_worker._version())));
END $$;

-- Add a version with the contents of a model file (with `template`, of a safetensors file with the weights of a model
-- like the deployed version of that one), and return the spec of the trainer that checks it: its error undoes
-- everything, so no other session ever sees a version that was not checked.
CREATE FUNCTION tensile_internal._import_model(caller oid, contents bytea, model text, template text) RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    chunk CONSTANT int := 16777216;
    header jsonb;
    description jsonb;
    m tensile_internal.models;
    v tensile_internal.model_versions;
    length int;
BEGIN
    PERFORM tensile_internal._not_null('contents', CASE WHEN contents IS NOT NULL THEN '' END, 'model', model),
            tensile_internal._check_model_name(model);
    length := tensile_internal._header_length(contents);
    IF template IS NULL THEN
        header := tensile_internal._check_file(contents, length);
        description := tensile_internal._file_object(convert_to(header->'__metadata__'->>'description', 'UTF8'),
                                                     'description');
    ELSE
        header := tensile_internal._file_object(substring(contents FROM 9 FOR length), 'header');
        description := tensile_internal._description_like(tensile_internal._owned_version(caller, template, NULL));
    END IF;
    PERFORM tensile_internal._check_description(caller, description);

    PERFORM tensile_internal._insert_model(caller, model, description->'architecture', NULL,
                                           description->>'description');
    m := tensile_internal._own_model(caller, model);
    INSERT INTO tensile_internal.model_versions (model_id, version, task, preprocessing, architecture, metrics, rows,
                                                 training, reference)
        VALUES (m.id, tensile_internal._next_version(m.id), description->'preprocessing'->>'task',
                description->'preprocessing',
                description->'architecture', nullif(description->'metrics', 'null'), (description->>'rows')::bigint,
                nullif(description->'training', 'null'), nullif(description->'reference', 'null'))
        RETURNING * INTO v;
    INSERT INTO tensile_internal.model_weights (version, seq, data)
        SELECT v.id, 0, tensile_internal._file_header(header - '__metadata__')
        UNION ALL
        SELECT v.id, 1 + i, substring(contents FROM 9 + length + i * chunk FOR chunk)
        FROM generate_series(0, (octet_length(contents) - 9 - length) / chunk) i;
    UPDATE tensile_internal.model_versions o
        SET weight_bytes = (SELECT sum(octet_length(w.data)) FROM tensile_internal.model_weights w
                            WHERE w.version = o.id)
        WHERE o.id = v.id;
    IF m.deployed_version IS NULL THEN
        PERFORM tensile_internal._deploy(m, v.version, pg_get_userbyid(caller), 'imported');
    END IF;
    UPDATE tensile_internal.models SET updated_at = clock_timestamp() WHERE id = m.id RETURNING * INTO m;
    PERFORM tensile_internal._drop_old_versions(m);
    RETURN tensile_internal._evaluation_spec(v.id, NULL, jsonb_build_object(
        'kind', 'import_model', 'memory_budget', 0, 'number', v.version, 'reference', v.reference));
END $$;
