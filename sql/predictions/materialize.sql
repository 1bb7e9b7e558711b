-- Materialized predictions

-- Runs a statement as the caller; returns the number of its rows.
CREATE FUNCTION tensile_worker._run_statement(statement text) RETURNS bigint
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_run_statement';

-- Raise an error unless a primary key, or a unique index of whole columns, has these columns and no others.
CREATE FUNCTION tensile_worker._check_unique(kept regclass, names text[], columns text) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (
        SELECT FROM pg_index i
        WHERE i.indrelid = kept AND i.indisunique AND i.indpred IS NULL AND i.indexprs IS NULL
          AND (SELECT array_agg(a.attname::text ORDER BY a.attname::text COLLATE "C")
               FROM pg_attribute a WHERE a.attrelid = kept AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]))
              = (SELECT array_agg(n ORDER BY n COLLATE "C") FROM unnest(names) n)) THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('table %s has no primary key or unique constraint for the key (%s)', kept, columns),
            HINT = format('ALTER TABLE %s ADD PRIMARY KEY (%s), or give the columns of another constraint as key.',
                          kept,
                          columns);
    END IF;
END $$;

CREATE FUNCTION tensile_worker._deployed_version(model text, OUT version int, OUT version_id bigint)
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT v.version, v.version_id FROM tensile.models m JOIN tensile.model_versions v
        ON v.model_id = m.model_id AND v.version = m.deployed_version
    WHERE m.model = $1
$$;

-- `search_path`: the caller's. Every name but the query's is qualified; operators of the key's types are looked up.
CREATE FUNCTION tensile_worker._materialize_predictions(model text, query text, into_table text, key text[],
                                                        memory_budget text, search_path text, OUT predicted bigint,
                                                        OUT unchanged bigint, OUT removed bigint)
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    source text := pg_catalog.format(E'(%s\n)', pg_catalog.regexp_replace(query, ';\s*$', ''));
    kept text; -- the table, quoted
    names text[] := key;
    columns text; -- of the key, quoted
    deployed record;
    -- of a row of the query and the version: one that has replaced a first version has the same number
    hash text := 'pg_catalog.hash_record_extended(q, %s)';
    name text;
BEGIN
    IF model IS NULL OR query IS NULL OR into_table IS NULL THEN
        PERFORM tensile_worker._raise('22004', 'model, query and into_table must not be null', 'Give all three.', NULL);
    END IF;
    PERFORM pg_catalog.set_config('search_path', search_path, true); -- until the function ends
    -- The errors of a model without a version, of a caller who may not use it, and of a query without its features
    PERFORM FROM @extschema@.predict_rows(model, pg_catalog.format('SELECT * FROM %s q LIMIT 0', source),
                                          memory_budget);
    deployed := tensile_worker._deployed_version(model);

    SELECT pg_catalog.string_agg(pg_catalog.quote_ident(p.part), '.' ORDER BY p.number) INTO kept
        FROM pg_catalog.unnest(pg_catalog.parse_ident(into_table)) WITH ORDINALITY p (part, number);
    IF names IS NULL THEN
        SELECT pg_catalog.array_agg(a.attname::pg_catalog.text ORDER BY k.number) INTO names
            FROM pg_catalog.pg_index i
                 CROSS JOIN LATERAL pg_catalog.unnest(i.indkey::pg_catalog.int2[]) WITH ORDINALITY k (attribute, number)
                 JOIN pg_catalog.pg_attribute a ON a.attrelid OPERATOR(pg_catalog.=) i.indrelid
                                               AND a.attnum OPERATOR(pg_catalog.=) k.attribute
            WHERE i.indrelid OPERATOR(pg_catalog.=) pg_catalog.to_regclass(kept)::pg_catalog.oid AND i.indisprimary;
    END IF;
    IF coalesce(pg_catalog.cardinality(names), 0) OPERATOR(pg_catalog.=) 0
       OR pg_catalog.array_position(names, NULL) IS NOT NULL THEN
        PERFORM tensile_worker._raise('22004', pg_catalog.format('the key of table %s is not known', kept),
                                      'Name the columns of the query that identify a row: key => ''{id}''.', NULL);
    END IF;
    SELECT pg_catalog.string_agg(pg_catalog.quote_ident(n.name), ', ' ORDER BY n.number) INTO columns
        FROM pg_catalog.unnest(names) WITH ORDINALITY n (name, number);
    FOREACH name IN ARRAY ARRAY['prediction', 'label', 'probability', 'version', 'predicted_at', 'row_hash',
                                'tensile_row', 'tensile_hash', 'tensile_version', 'tensile_known'] LOOP
        IF name OPERATOR(pg_catalog.=) ANY (names) THEN
            PERFORM tensile_worker._raise(
                '42701', pg_catalog.format('the key cannot have a column "%s"', name),
                'The table of predictions has a column of that name: give the key another one with AS.', NULL);
        END IF;
    END LOOP;
    IF pg_catalog.to_regclass(kept) IS NOT NULL THEN
        IF (SELECT pg_catalog.count(*) FROM pg_catalog.pg_attribute a
            WHERE a.attrelid OPERATOR(pg_catalog.=) pg_catalog.to_regclass(kept)::pg_catalog.oid
              AND a.attname OPERATOR(pg_catalog.=) ANY (ARRAY['prediction', 'label', 'probability', 'version',
                                                              'predicted_at', 'row_hash'])) OPERATOR(pg_catalog.<>) 6 THEN
            PERFORM tensile_worker._raise('55000',
                                          pg_catalog.format('table %s was not made by materialize_predictions', kept),
                                   'Use another name, or drop the table.', NULL);
        END IF;
        PERFORM tensile_worker._check_unique(kept, names, columns);
    ELSE
        PERFORM tensile_worker._run_statement(pg_catalog.format(
            'CREATE TABLE %s AS SELECT %s, NULL::pg_catalog.float8 AS prediction, NULL::pg_catalog.text AS label, '
            'NULL::pg_catalog.float8 AS probability, NULL::pg_catalog.int4 AS version, '
            'NULL::pg_catalog.timestamptz AS predicted_at, NULL::pg_catalog.int8 AS row_hash FROM %s q WITH NO DATA',
            kept, columns, source));
        PERFORM tensile_worker._run_statement(pg_catalog.format('ALTER TABLE %s ADD PRIMARY KEY (%s)', kept, columns));
    END IF;
    PERFORM tensile_worker._run_statement(
        pg_catalog.format('LOCK TABLE %s IN SHARE ROW EXCLUSIVE MODE', kept)); -- one refresh at a time
    hash := pg_catalog.format(hash, deployed.version_id);
    BEGIN -- a row of nulls needs the hash functions of all columns
        EXECUTE pg_catalog.format(
            'SELECT %s FROM (SELECT x.* FROM (SELECT) d LEFT JOIN (SELECT * FROM %s y LIMIT 0) x ON true) q', hash, source);
    EXCEPTION WHEN undefined_function THEN -- a type such as json has none
        hash := pg_catalog.format('pg_catalog.hashtextextended(q::pg_catalog.text COLLATE pg_catalog."C", %s)',
                                  deployed.version_id);
    END;

    PERFORM tensile_worker._run_statement(pg_catalog.format(
        'CREATE TEMPORARY TABLE tensile_changed_rows ON COMMIT DROP AS '
        'SELECT pg_catalog.row_number() OVER () AS tensile_row, c.* '
        'FROM (SELECT q.*, %5$s AS tensile_hash FROM %1$s q) c '
        'LEFT JOIN (SELECT %2$s, t.version AS tensile_version, t.row_hash AS tensile_known FROM %3$s t) t USING (%2$s) '
        'WHERE (t.tensile_known, t.tensile_version) IS DISTINCT FROM (c.tensile_hash, %4$L::pg_catalog.int4)',
        source, columns, kept, deployed.version, hash));
    BEGIN
        predicted := tensile_worker._run_statement(pg_catalog.format(
            'INSERT INTO %1$s (%2$s, prediction, label, probability, version, predicted_at, row_hash) OVERRIDING SYSTEM VALUE '
            'SELECT %2$s, p.prediction, p.label, p.probability, %3$L::pg_catalog.int4, pg_catalog.now(), s.tensile_hash '
            'FROM @extschema@.predict_rows(%4$L, ''SELECT * FROM pg_temp.tensile_changed_rows ORDER BY tensile_row'', %5$L) '
            'p (n, prediction, label, probability) '
            'JOIN (SELECT %2$s, tensile_row, tensile_hash FROM pg_temp.tensile_changed_rows) s '
            'ON s.tensile_row OPERATOR(pg_catalog.=) p.n '
            'ON CONFLICT (%2$s) DO UPDATE SET prediction = EXCLUDED.prediction, label = EXCLUDED.label, '
            'probability = EXCLUDED.probability, version = EXCLUDED.version, predicted_at = EXCLUDED.predicted_at, '
            'row_hash = EXCLUDED.row_hash',
            kept, columns, deployed.version, model, memory_budget));
    EXCEPTION WHEN cardinality_violation THEN
        PERFORM tensile_worker._raise('21000',
                                      pg_catalog.format('the query has more than one row with the same key (%s)',
                                                        columns),
                                      'Add columns to the key until it identifies a row.', NULL);
    END;
    DROP TABLE pg_temp.tensile_changed_rows;
    IF NOT EXISTS (SELECT FROM tensile_worker._deployed_version(model) d
                   WHERE d.version_id OPERATOR(pg_catalog.=) deployed.version_id) THEN
        PERFORM tensile_worker._raise('40001',
                                      pg_catalog.format('another version of model "%s" was deployed meanwhile', model),
                                      'Call it again.', NULL);
    END IF;
    removed := tensile_worker._run_statement(pg_catalog.format(
        'DELETE FROM %1$s t WHERE NOT EXISTS (SELECT FROM (SELECT %2$s FROM %3$s q) s WHERE (%4$s) = (%5$s))',
        kept, columns, source,
        (SELECT pg_catalog.string_agg(pg_catalog.format('s.%I', n.name), ', ' ORDER BY n.number)
         FROM pg_catalog.unnest(names) WITH ORDINALITY n (name, number)),
        (SELECT pg_catalog.string_agg(pg_catalog.format('t.%I', n.name), ', ' ORDER BY n.number)
         FROM pg_catalog.unnest(names) WITH ORDINALITY n (name, number))));
    EXECUTE pg_catalog.format('SELECT pg_catalog.count(*) FROM %s', kept) INTO unchanged;
    unchanged := unchanged OPERATOR(pg_catalog.-) predicted;
END $$;
