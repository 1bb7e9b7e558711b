------------------------------------------------------------------------------------------------------------------------
-- Model files: export_model and import_model
--
-- A model file is a safetensors file: 8 bytes with the length of its header (little-endian), the header (JSON, padded
-- with spaces to a multiple of 8), the tensors. "__metadata__" in the header has
--     format          "pg_tensile"
--     format_version  "1"
--     description     JSON: name, description, architecture, preprocessing, metrics, rows, training, reference, pg_tensile
--     sha256          of the header, with 64 zeros in the place of this hash, and the SHA-256 of the tensors behind it
-- All JSON is the text of a jsonb, so that equal models have equal bytes, in every database.
------------------------------------------------------------------------------------------------------------------------

-- Raise the error of a file that cannot be read.
CREATE FUNCTION tensile._refuse_file(reason text, hint text DEFAULT NULL, detail text DEFAULT NULL) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM tensile._raise('22P03', 'this is not a usable model file: ' || reason,
                           coalesce(hint, 'Transfer the file again, in binary, or export the model again.'), detail);
END $$;

-- Length of a safetensors file's header, at most 16 MB
CREATE FUNCTION tensile._header_length(contents bytea) RETURNS int
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    length bigint := 0;
BEGIN
    IF encode(substring(contents FROM 1 FOR 2), 'hex') IN ('504b', '8002', '8003', '8004', '8005') THEN
        PERFORM tensile._refuse_file('it is a pickle or an archive of pickles',
                                     'Pickles are never read, because they can contain code: use export_model.');
    ELSIF octet_length(contents) < 8 THEN
        PERFORM tensile._refuse_file(format('it has %s bytes', octet_length(contents)));
    END IF;
    FOR i IN REVERSE 7 .. 0 LOOP
        length := length * 256 + get_byte(contents, i);
        IF length > 16777216 THEN
            PERFORM tensile._refuse_file('its header would be larger than 16 MB');
        END IF;
    END LOOP;
    IF length < 2 OR 8 + length > octet_length(contents) THEN
        PERFORM tensile._refuse_file(format('it ends within its header, of %s bytes', length));
    END IF;
    RETURN length;
END $$;

-- JSON in a model file, where it must be an object
CREATE FUNCTION tensile._file_object(text bytea, what text) RETURNS jsonb
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    object jsonb;
    reason text;
BEGIN
    BEGIN
        object := convert_from(text, 'UTF8')::jsonb;
    EXCEPTION WHEN data_exception OR program_limit_exceeded OR untranslatable_character THEN -- too deep: 54001
        GET STACKED DIAGNOSTICS reason = MESSAGE_TEXT;
        PERFORM tensile._refuse_file(format('its %s is damaged', what), detail => reason);
    END;
    IF jsonb_typeof(object) IS DISTINCT FROM 'object' THEN
        PERFORM tensile._refuse_file(format('its %s is damaged', what));
    END IF;
    RETURN object;
END $$;

-- Bytes of a safetensors file before its tensors
CREATE FUNCTION tensile._file_header(header jsonb) RETURNS bytea
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT (SELECT decode(string_agg(substring(j.length FROM 15 - 2 * i FOR 2), '' ORDER BY i), 'hex')
            FROM generate_series(0, 7) i) || j.padded
    FROM (SELECT p.padded, encode(int8send(octet_length(p.padded)), 'hex') AS length
          FROM (SELECT t.json || convert_to(repeat(' ', (8 - octet_length(t.json) % 8) % 8), 'UTF8') AS padded
                FROM (SELECT convert_to($1::text, 'UTF8') AS json) t) p) j
$$;

-- Hash of a model file, whose header has 64 zeros in its place
CREATE FUNCTION tensile._file_hash(header bytea, tensors bytea) RETURNS text
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT encode(sha256($1 || sha256($2)), 'hex')
$$;

-- The version (null: the deployed one) of a model, for its owner. Nothing is locked, so that a standby can export.
CREATE FUNCTION tensile._owned_version(caller oid, model text, version int) RETURNS tensile.model_versions
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models;
    v tensile.model_versions;
BEGIN
    PERFORM tensile._not_null('model', model);
    SELECT * INTO m FROM tensile.models WHERE name = model;
    PERFORM tensile._check_owner(caller, m, model);
    IF version IS NULL AND m.deployed_version IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('model "%s" has no version that is deployed', model),
            HINT = 'Train it with train_model, choose a version with deploy_model, or pass a version.';
    END IF;
    PERFORM tensile._check_version(m, coalesce(version, m.deployed_version));
    SELECT * INTO v FROM tensile.model_versions o
        WHERE o.model = m.id AND o.version = coalesce(_owned_version.version, m.deployed_version);
    RETURN v;
END $$;

-- Bytes of the version's stored safetensors file
CREATE FUNCTION tensile._stored_weights(v tensile.model_versions) RETURNS bytea
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF v.weight_bytes > 1000000000 THEN -- of 1073741823; the description follows
        RAISE EXCEPTION USING ERRCODE = 'program_limit_exceeded',
            MESSAGE = format('version %s is too large to be exported: its weights have %s bytes', v.version,
                             v.weight_bytes),
            HINT = 'A value has at most 1 GB. Copy the whole database with pg_dump, or use replication.';
    END IF;
    RETURN (SELECT string_agg(w.data, '' ORDER BY w.seq) FROM tensile.model_weights w WHERE w.version = v.id);
END $$;

-- What a model file says about its model besides the tensors
CREATE FUNCTION tensile._description(v tensile.model_versions) RETURNS jsonb
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_build_object('name', m.name, 'description', m.description, 'architecture', v.architecture,
                              'preprocessing', v.preprocessing, 'metrics', v.metrics, 'rows', v.rows,
                              'training', v.training, 'reference', v.reference, 'pg_tensile', tensile._version())
    FROM tensile.models m WHERE m.id = v.model
$$;

CREATE FUNCTION tensile._export_model(caller oid, model text, version int, format text) RETURNS bytea
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v tensile.model_versions;
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
    v := tensile._owned_version(caller, model, version);
    contents := tensile._stored_weights(v);
    IF format = 'torch' THEN
        RETURN contents;
    END IF;
    length := tensile._header_length(contents);
    tensors := substring(contents FROM 9 + length);
    header := tensile._file_header(
        tensile._file_object(substring(contents FROM 9 FOR length), 'header of stored weights')
        || jsonb_build_object('__metadata__', jsonb_build_object(
               'format', 'pg_tensile', 'format_version', '1', 'sha256', zeros,
               'description', tensile._description(v)::text)));
    RETURN overlay(header PLACING convert_to(tensile._file_hash(header, tensors), 'UTF8')
                   FROM position(convert_to('"sha256": "' || zeros, 'UTF8') IN header) + 11) || tensors;
END $$;

-- The spec of the executor that exports a version in the format "onnx"
CREATE FUNCTION tensile._export_spec(caller oid, model text, version int) RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v tensile.model_versions := tensile._owned_version(caller, model, version);
BEGIN
    RETURN tensile._evaluation_spec(v.id, NULL, jsonb_build_object(
        'kind', 'export_model', 'memory_budget', 0,
        'metadata', jsonb_build_object('name', model, 'target', v.preprocessing->'target'->>'name',
                                       'pg_tensile', tensile._version())));
END $$;

-- Raise an error unless the file is a whole one, of a known version. Returns its header.
CREATE FUNCTION tensile._check_file(contents bytea, length int) RETURNS jsonb
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    header jsonb := tensile._file_object(substring(contents FROM 9 FOR length), 'header');
    metadata jsonb := header->'__metadata__';
    hash text := metadata->>'sha256';
    prefix bytea := substring(contents FROM 1 FOR 8 + length);
    place int;
BEGIN
    IF metadata->>'format' IS DISTINCT FROM 'pg_tensile' THEN
        PERFORM tensile._refuse_file('it is a safetensors file that export_model did not write',
                                     'Weights alone do not say of which columns a model makes predictions: name a model '
                                     'of the same architecture and columns with like => ''model''.');
    ELSIF metadata->>'format_version' IS DISTINCT FROM '1' THEN
        RAISE EXCEPTION USING ERRCODE = 'feature_not_supported',
            MESSAGE = format('the model file has format version %s, but this version of pg_tensile reads version 1',
                             left(coalesce(metadata->>'format_version', 'null'), 20)),
            HINT = 'Update pg_tensile to the version that wrote the file, or a newer one.';
    ELSIF hash IS NULL OR hash !~ '^[0-9a-f]{64}$' THEN
        PERFORM tensile._refuse_file('it has no checksum');
    END IF;
    place := position(convert_to(hash, 'UTF8') IN prefix);
    IF place = 0 OR hash <> tensile._file_hash(
            overlay(prefix PLACING convert_to(repeat('0', 64), 'UTF8') FROM place),
            substring(contents FROM 9 + length)) THEN
        PERFORM tensile._refuse_file('its checksum is wrong, so it was damaged or changed');
    END IF;
    RETURN header;
END $$;

-- Raise an error unless the description has what a version needs. The executor checks the rest (kind import_model).
CREATE FUNCTION tensile._check_description(caller oid, description jsonb) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    key text;
    types text[];
BEGIN
    FOR key, types IN VALUES ('architecture', ARRAY['object']), ('preprocessing', ARRAY['object']),
            ('metrics', ARRAY['object', 'null']), ('training', ARRAY['object', 'null']),
            ('reference', ARRAY['object', 'null', 'missing']), -- older files have none
            ('rows', ARRAY['number', 'null']), ('description', ARRAY['string', 'null']) LOOP
        IF coalesce(jsonb_typeof(description->key), 'missing') <> ALL (types) THEN
            PERFORM tensile._refuse_file(format('its description has no usable "%s"', key));
        END IF;
    END LOOP;
    IF jsonb_path_exists(description, '$.**{64}') THEN
        PERFORM tensile._refuse_file('its description is nested more than 64 levels deep');
    ELSIF jsonb_path_exists(description, '$.** ? (@.type() == "number" && (@ > 1.7e308 || @ < -1.7e308))') THEN
        PERFORM tensile._refuse_file('its description has a number that is out of range');
    ELSIF description->'rows' <> 'null' AND ((description->>'rows')::numeric NOT BETWEEN 0 AND 9223372036854775807
                                          OR (description->>'rows')::numeric % 1 <> 0) THEN
        PERFORM tensile._refuse_file('its description has no usable "rows"');
    ELSIF coalesce(description->'preprocessing'->>'task', '') NOT IN ('regression', 'binary', 'multiclass') THEN
        PERFORM tensile._refuse_file('its description has no usable "task"');
    END IF;
    PERFORM tensile._check_architecture(description->'architecture'),
            tensile._check_code(caller, description->'architecture');
END $$;

-- The description of a version with other weights than `v`: nothing that was measured or derived with those of `v`
CREATE FUNCTION tensile._description_like(v tensile.model_versions) RETURNS jsonb
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._description($1) || jsonb_build_object(
        'description', NULL, 'metrics', NULL, 'rows', NULL, 'training', NULL, 'reference', NULL,
        'preprocessing', $1.preprocessing - '{calibration,conformal,rows}'::text[])
$$;

-- Add a version with the contents of a model file (with `template`, of a safetensors file with the weights of a model
-- like the deployed version of that one), and return the spec of the executor that checks it: its error undoes
-- everything, so no other session ever sees a version that was not checked.
CREATE FUNCTION tensile._import_model(caller oid, contents bytea, name text, template text) RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    chunk CONSTANT int := 16777216;
    header jsonb;
    description jsonb;
    m tensile.models;
    v tensile.model_versions;
    length int;
BEGIN
    PERFORM tensile._not_null('contents', CASE WHEN contents IS NOT NULL THEN '' END, 'name', name),
            tensile._check_model_name(name);
    length := tensile._header_length(contents);
    IF template IS NULL THEN
        header := tensile._check_file(contents, length);
        description := tensile._file_object(convert_to(header->'__metadata__'->>'description', 'UTF8'), 'description');
    ELSE
        header := tensile._file_object(substring(contents FROM 9 FOR length), 'header');
        description := tensile._description_like(tensile._owned_version(caller, template, NULL));
    END IF;
    PERFORM tensile._check_description(caller, description);

    PERFORM tensile._insert_model(caller, name, description->'architecture', NULL, description->>'description');
    m := tensile._own_model(caller, name);
    INSERT INTO tensile.model_versions (model, version, task, preprocessing, architecture, metrics, rows, training,
                                        reference)
        VALUES (m.id, tensile._next_version(m.id), description->'preprocessing'->>'task', description->'preprocessing',
                description->'architecture', nullif(description->'metrics', 'null'), (description->>'rows')::bigint,
                nullif(description->'training', 'null'), nullif(description->'reference', 'null'))
        RETURNING * INTO v;
    INSERT INTO tensile.model_weights (version, seq, data)
        SELECT v.id, 0, tensile._file_header(header - '__metadata__')
        UNION ALL
        SELECT v.id, 1 + i, substring(contents FROM 9 + length + i * chunk FOR chunk)
        FROM generate_series(0, (octet_length(contents) - 9 - length) / chunk) i;
    UPDATE tensile.model_versions o
        SET weight_bytes = (SELECT sum(octet_length(w.data)) FROM tensile.model_weights w WHERE w.version = o.id)
        WHERE o.id = v.id;
    IF m.deployed_version IS NULL THEN
        PERFORM tensile._deploy(m, v.version, pg_get_userbyid(caller), 'imported');
    END IF;
    UPDATE tensile.models SET updated_at = clock_timestamp() WHERE id = m.id RETURNING * INTO m;
    PERFORM tensile._drop_old_versions(m);
    RETURN tensile._evaluation_spec(v.id, NULL, jsonb_build_object(
        'kind', 'import_model', 'memory_budget', 0, 'number', v.version, 'reference', v.reference));
END $$;

CREATE FUNCTION @extschema@.export_model(model text, version int DEFAULT NULL, format text DEFAULT 'tensile')
    RETURNS bytea
    LANGUAGE C COST 1000 AS 'MODULE_PATHNAME', 'tensile_export_model';
COMMENT ON FUNCTION @extschema@.export_model(text, int, text) IS
    'a version of a model, or the deployed one, as a file; for the model''s owner';

CREATE FUNCTION @extschema@.import_model(contents bytea, name text, "like" text DEFAULT NULL) RETURNS int
    LANGUAGE C COST 1000 AS 'MODULE_PATHNAME', 'tensile_import_model';
COMMENT ON FUNCTION @extschema@.import_model(bytea, text, text) IS
    'add a model that export_model has written as a version of the model of that name, which is registered if it does '
    'not exist; return the number of the version, which is deployed if no other one is; for the model''s owner';
