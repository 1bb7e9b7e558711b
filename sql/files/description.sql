-- The description of a model in a file, and its checks
--
-- A model file is a safetensors file: 8 bytes with the length of its header (little-endian), the header (JSON, padded
-- with spaces to a multiple of 8), the tensors. "__metadata__" in the header has
--     format          "pg_tensile"
--     format_version  "1"
--     description     JSON: name, description, architecture, preprocessing, metrics, rows, training, reference, pg_tensile
--     sha256          of the header, with 64 zeros in the place of this hash, and the SHA-256 of the tensors behind it
-- All JSON is the text of a jsonb, so that equal models have equal bytes, in every database.

-- Raise the error of a file that cannot be read.
CREATE FUNCTION tensile_internal._refuse_file(reason text, hint text DEFAULT NULL, detail text DEFAULT NULL)
    RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM tensile_worker._raise(
        '22P03', 'this is not a usable model file: ' || reason,
        coalesce(hint, 'Transfer the file again, in binary, or export the model again.'), detail);
END $$;

-- Length of a safetensors file's header, at most 16 MB
CREATE FUNCTION tensile_internal._header_length(contents bytea) RETURNS int
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    length bigint := 0;
BEGIN
    IF encode(substring(contents FROM 1 FOR 2), 'hex') IN ('504b', '8002', '8003', '8004', '8005') THEN
        PERFORM tensile_internal._refuse_file(
            'it is a pickle or an archive of pickles',
            'Pickles are never read, because they can contain code: use export_model.');
    ELSIF octet_length(contents) < 8 THEN
        PERFORM tensile_internal._refuse_file(format('it has %s bytes', octet_length(contents)));
    END IF;
    FOR i IN REVERSE 7 .. 0 LOOP
        length := length * 256 + get_byte(contents, i);
        IF length > 16777216 THEN
            PERFORM tensile_internal._refuse_file('its header would be larger than 16 MB');
        END IF;
    END LOOP;
    IF length < 2 OR 8 + length > octet_length(contents) THEN
        PERFORM tensile_internal._refuse_file(format('it ends within its header, of %s bytes', length));
    END IF;
    RETURN length;
END $$;

-- JSON in a model file, where it must be an object
CREATE FUNCTION tensile_internal._file_object(text bytea, what text) RETURNS jsonb
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
        PERFORM tensile_internal._refuse_file(format('its %s is damaged', what), detail => reason);
    END;
    IF jsonb_typeof(object) IS DISTINCT FROM 'object' THEN
        PERFORM tensile_internal._refuse_file(format('its %s is damaged', what));
    END IF;
    RETURN object;
END $$;

-- Bytes of a safetensors file before its tensors
CREATE FUNCTION tensile_internal._file_header(header jsonb) RETURNS bytea
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT (SELECT decode(string_agg(substring(j.length FROM 15 - 2 * i FOR 2), '' ORDER BY i), 'hex')
            FROM generate_series(0, 7) i) || j.padded
    FROM (SELECT p.padded, encode(int8send(octet_length(p.padded)), 'hex') AS length
          FROM (SELECT t.json || convert_to(repeat(' ', (8 - octet_length(t.json) % 8) % 8), 'UTF8') AS padded
                FROM (SELECT convert_to($1::text, 'UTF8') AS json) t) p) j
$$;

-- Hash of a model file, whose header has 64 zeros in its place
CREATE FUNCTION tensile_internal._file_hash(header bytea, tensors bytea) RETURNS text
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT encode(sha256($1 || sha256($2)), 'hex')
$$;

-- What a model file says about its model besides the tensors
CREATE FUNCTION tensile_internal._description(v tensile_internal.model_versions) RETURNS jsonb
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_build_object('name', m.name, 'description', m.description, 'architecture', v.architecture,
                              'preprocessing', v.preprocessing, 'metrics', v.metrics, 'rows', v.rows,
                              'training', v.training, 'reference', v.reference, 'pg_tensile', tensile_worker._version())
    FROM tensile_internal.models m WHERE m.id = v.model_id
$$;

-- Raise an error unless the file is a whole one, of a known version. Returns its header.
CREATE FUNCTION tensile_internal._check_file(contents bytea, length int) RETURNS jsonb
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    header jsonb := tensile_internal._file_object(substring(contents FROM 9 FOR length), 'header');
    metadata jsonb := header->'__metadata__';
    hash text := metadata->>'sha256';
    prefix bytea := substring(contents FROM 1 FOR 8 + length);
    place int;
BEGIN
    IF metadata->>'format' IS DISTINCT FROM 'pg_tensile' THEN
        PERFORM tensile_internal._refuse_file(
            'it is a safetensors file that export_model did not write',
            'Weights alone do not say of which columns a model makes predictions: name a model of the same '
            'architecture and columns with template => ''model''.');
    ELSIF metadata->>'format_version' IS DISTINCT FROM '1' THEN
        RAISE EXCEPTION USING ERRCODE = 'feature_not_supported',
            MESSAGE = format('the model file has format version %s, but this version of pg_tensile reads version 1',
                             left(coalesce(metadata->>'format_version', 'null'), 20)),
            HINT = 'Update pg_tensile to the version that wrote the file, or a newer one.';
    ELSIF hash IS NULL OR hash !~ '^[0-9a-f]{64}$' THEN
        PERFORM tensile_internal._refuse_file('it has no checksum');
    END IF;
    place := position(convert_to(hash, 'UTF8') IN prefix);
    IF place = 0 OR hash <> tensile_internal._file_hash(
            overlay(prefix PLACING convert_to(repeat('0', 64), 'UTF8') FROM place),
            substring(contents FROM 9 + length)) THEN
        PERFORM tensile_internal._refuse_file('its checksum is wrong, so it was damaged or changed');
    END IF;
    RETURN header;
END $$;

-- Raise an error unless the description has what a version needs. The trainer checks the rest (kind import_model).
CREATE FUNCTION tensile_internal._check_description(caller oid, description jsonb) RETURNS void
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
            PERFORM tensile_internal._refuse_file(format('its description has no usable "%s"', key));
        END IF;
    END LOOP;
    IF jsonb_path_exists(description, '$.**{64}') THEN
        PERFORM tensile_internal._refuse_file('its description is nested more than 64 levels deep');
    ELSIF jsonb_path_exists(description, '$.** ? (@.type() == "number" && (@ > 1.7e308 || @ < -1.7e308))') THEN
        PERFORM tensile_internal._refuse_file('its description has a number that is out of range');
    ELSIF description->'rows' <> 'null' AND ((description->>'rows')::numeric NOT BETWEEN 0 AND 9223372036854775807
                                          OR (description->>'rows')::numeric % 1 <> 0) THEN
        PERFORM tensile_internal._refuse_file('its description has no usable "rows"');
    ELSIF coalesce(description->'preprocessing'->>'task', '') NOT IN ('regression', 'binary', 'multiclass') THEN
        PERFORM tensile_internal._refuse_file('its description has no usable "task"');
    END IF;
    PERFORM tensile_internal._check_architecture(description->'architecture'),
            tensile_internal._check_code(caller, description->'architecture');
END $$;

-- The description of a version with other weights than `v`: nothing that was measured or derived with those of `v`
CREATE FUNCTION tensile_internal._description_like(v tensile_internal.model_versions) RETURNS jsonb
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_internal._description($1) || jsonb_build_object(
        'description', NULL, 'metrics', NULL, 'rows', NULL, 'training', NULL, 'reference', NULL,
        'preprocessing', $1.preprocessing - '{calibration,conformal,baseline,rows}'::text[])
$$;
