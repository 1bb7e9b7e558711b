-- Spaces that a tuning chooses values from
--
-- A space is an object. Its keys are arguments and options of train_model, keys of architectures, and "architecture"
-- itself. A value is a list to choose from, or a range {"low", "high", "log", "step"}. A number for a key that takes an
-- array stands for the array of that number.

-- Options of a job that a space may have: those that change what is learned, but not by which rows or in which unit it
-- is measured
CREATE FUNCTION tensile_internal._tunable_options() RETURNS text[]
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT ARRAY['accumulate', 'average_weights', 'clip', 'early_stopping', 'learning_rate_schedule', 'momentum',
                 'precision', 'target_transform', 'weight_decay']
$$;

-- Rule of each key that a space may have beside "architecture"; one of an architecture appears once for each of the
-- types.
CREATE FUNCTION tensile_internal._space_rules(types text[]) RETURNS TABLE (key text, kind text, rule json)
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT a.key, 'argument', a.rule::json
    FROM (VALUES ('batch_size', '{"type": "integer", "minimum": 1, "maximum": 10000000}'),
                 ('epochs', '{"type": "integer", "minimum": 1, "maximum": 1000000}'),
                 ('learning_rate', '{"type": "number", "exclusiveMinimum": 0, "maximum": 1e+300}'),
                 ('optimizer', '{"type": "string", "enum": ["sgd", "adam", "adamw"]}')) a (key, rule)
    UNION ALL
    SELECT o.key, 'option', tensile_internal._resolved(o.value)
    FROM json_each(tensile_internal._rules()->'options'->'properties') o
        WHERE o.key = ANY (tensile_internal._tunable_options())
    UNION ALL
    SELECT p.key, t.type, tensile_internal._resolved(p.value)
    FROM unnest($1) t (type), json_each(tensile_internal._rules()->'architectures'->t.type->'properties') p
$$;

-- The space that is used if none is given
CREATE FUNCTION tensile_internal._default_space(type text) RETURNS jsonb
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE $1
    WHEN 'boosted' THEN
        jsonb '{"learning_rate": {"low": 0.01, "high": 0.2, "log": true}, "leaves": {"low": 4, "high": 32},
                "least_rows": [5, 10, 20, 50, 100]}'
    WHEN 'linear' THEN
        jsonb '{"penalty": {"low": 0.001, "high": 1000, "log": true}}'
    ELSE
        jsonb '{"learning_rate": {"low": 0.0003, "high": 0.03, "log": true},
                "weight_decay": {"low": 0.000001, "high": 0.1, "log": true}}' ||
        CASE $1
        WHEN 'tabular' THEN
            '{"hidden": [64, 128, 256, 512], "layers": {"low": 1, "high": 4}, "dropout": {"low": 0, "high": 0.5},
              "embedding": [4, 8, 16, 32]}'
        WHEN 'mlp' THEN
            '{"hidden": [[64], [256], [128, 64], [256, 128], [256, 256], [512, 256, 128]],
              "dropout": {"low": 0, "high": 0.5}, "norm": ["none", "batch", "layer"]}'
        WHEN 'cnn' THEN
            '{"channels": [[16, 32], [32, 64], [32, 64, 128]], "kernel": [3, 5], "dropout": {"low": 0, "high": 0.5}}'
        WHEN 'transformer' THEN
            '{"dim": [32, 64, 128], "heads": [2, 4, 8], "layers": {"low": 1, "high": 4},
              "dropout": {"low": 0, "high": 0.3}}'
        WHEN 'pretrained' THEN
            '{"learning_rate": {"low": 0.00001, "high": 0.001, "log": true}, "lora_rank": [4, 8, 16, 32],
              "dropout": {"low": 0, "high": 0.3}}'
        ELSE '{}'::jsonb END
    END
$$;

-- The types of architecture that trials may have, the model's own being `type`; null: the first trial chooses it
CREATE FUNCTION tensile_internal._space_types(space jsonb, type text) RETURNS text[]
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN $1 ? 'architecture' THEN ARRAY(SELECT jsonb_array_elements_text($1->'architecture'))
                WHEN $2 IS NULL THEN '{cnn,tabular,transformer}'
                ELSE ARRAY[$2] END
$$;

-- A value as the rule takes it: a number in place of an array is its only element.
CREATE FUNCTION tensile_internal._as_array(value jsonb, rule json) RETURNS jsonb
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN $2->>'type' = 'array' AND jsonb_typeof($1) = 'number' THEN jsonb_build_array($1) ELSE $1 END
$$;

-- Raise an error unless trials can choose from the space. `type` is that of the model's architecture.
CREATE FUNCTION tensile_internal._check_space(space jsonb, type text) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    known text[] := ARRAY(SELECT json_object_keys(tensile_internal._rules()->'architectures'));
    types text[];
    names text[];
    name text;
    item jsonb;
BEGIN
    IF jsonb_typeof(space) <> 'object' OR space = '{}' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'space must be a JSON object with at least one key',
            HINT = 'For example ''{"learning_rate": {"low": 1e-4, "high": 1e-1, "log": true}, "dropout": [0, 0.2]}''.';
    ELSIF space ? 'architecture' THEN
        PERFORM tensile_internal._check_choices('architecture', space->'architecture');
        FOR item IN SELECT jsonb_array_elements(space->'architecture') LOOP
            PERFORM tensile_internal._check_value(item, json_build_object('type', 'string', 'enum', known), 'space',
                                                  'architecture');
        END LOOP;
    END IF;
    types := tensile_internal._space_types(space, type);
    names := ARRAY(SELECT DISTINCT r.key FROM tensile_internal._space_rules(types) r ORDER BY 1)
        || 'architecture'::text;
    FOR name, item IN SELECT * FROM jsonb_each(space - 'architecture') LOOP
        IF name <> ALL (names) THEN
            RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
                MESSAGE = format('unknown key "%s" in the space', name),
                HINT = tensile_internal._names_hint(name, names, 'keys');
        ELSIF jsonb_typeof(item) = 'object' THEN
            PERFORM tensile_internal._check_range(name, item);
        ELSE
            PERFORM tensile_internal._check_choices(name, item);
        END IF;
        PERFORM tensile_internal._check_domain(name, item, r.rule) FROM tensile_internal._space_rules(types) r
            WHERE r.key = name;
    END LOOP;
END $$;

CREATE FUNCTION tensile_internal._check_choices(name text, item jsonb) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    hint text := 'Use a list such as [64, 128, 256], or a range such as {"low": 0.001, "high": 0.1, "log": true}.';
BEGIN
    IF jsonb_typeof(item) <> 'array' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('key "%s" in the space is neither a list nor a range', name), HINT = hint;
    ELSIF jsonb_array_length(item) NOT BETWEEN 1 AND 1000 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('the list of key "%s" in the space has %s values', name, jsonb_array_length(item)),
            HINT = 'Use 1 to 1000 values.';
    ELSIF (SELECT count(DISTINCT e) < count(*) FROM jsonb_array_elements(item) e) THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('the list of key "%s" in the space has a value twice', name),
            HINT = 'Leave one of them out.';
    END IF;
END $$;

-- Check what a range has in itself.
CREATE FUNCTION tensile_internal._check_range(name text, item jsonb) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    names text[] := ARRAY['low', 'high', 'log', 'step'];
    found text := (SELECT k FROM jsonb_object_keys(item) k WHERE k <> ALL (names) ORDER BY k LIMIT 1);
    low numeric := CASE jsonb_typeof(item->'low') WHEN 'number' THEN (item->>'low')::numeric END;
    high numeric := CASE jsonb_typeof(item->'high') WHEN 'number' THEN (item->>'high')::numeric END;
    step numeric := CASE jsonb_typeof(item->'step') WHEN 'number' THEN (item->>'step')::numeric END;
    is_log bool := CASE jsonb_typeof(item->'log') WHEN 'boolean' THEN (item->>'log')::bool END;
    message text;
    hint text := 'For example {"low": 0.001, "high": 0.1, "log": true}, or {"low": 32, "high": 512, "step": 32}.';
BEGIN
    IF found IS NOT NULL THEN
        message := format('unknown key "%s.%s" in the space', name, found);
        hint := tensile_internal._names_hint(found, names, 'keys of a range');
    ELSIF low IS NULL OR high IS NULL THEN
        message := format('the range of key "%s" in the space needs the numbers "low" and "high"', name);
    ELSIF low > high THEN
        message := format('the range of key "%s" in the space is empty: from %s to %s', name, low, high);
        hint := format('Use "low": %s, "high": %s.', high, low);
    ELSIF item ? 'log' AND is_log IS NULL OR item ? 'step' AND coalesce(step <= 0, true) THEN
        message := format('"log" of key "%s" in the space must be true or false, and "step" a positive number', name);
    ELSIF is_log AND item ? 'step' THEN
        message := format('the range of key "%s" in the space has "log" and "step"', name);
        hint := 'Leave one of them out.';
    ELSIF is_log AND low <= 0 THEN
        message := format('the range of key "%s" in the space is logarithmic, but begins at %s', name, low);
        hint := 'Let "low" be greater than 0, or leave "log" out.';
    END IF;
    IF message IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = message, HINT = hint;
    END IF;
END $$;

-- Raise an error unless all values of a list or a range follow the rule of the key.
CREATE FUNCTION tensile_internal._check_domain(name text, item jsonb, rule json) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    element json := CASE rule->>'type' WHEN 'array' THEN tensile_internal._resolved(rule->'items') ELSE rule END;
BEGIN
    IF jsonb_typeof(item) = 'array' THEN
        FOR i IN 0 .. jsonb_array_length(item) - 1 LOOP
            PERFORM tensile_internal._check_value(tensile_internal._as_array(item->i, rule), rule, 'space',
                                                  format('%s[%s]', name, i));
        END LOOP;
    ELSIF element->>'type' NOT IN ('integer', 'number') OR element->'not' IS NOT NULL
          OR tensile_internal._as_array('1', rule) <> '1' AND (rule->>'minItems')::int > 1 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('key "%s" in the space is a range, but its values do not form one', name),
            HINT = format('Use a list, each value of which is %s.', tensile_internal._describe(rule));
    ELSE
        PERFORM tensile_internal._check_value(item->'low', element, 'space', name || '.low'),
                tensile_internal._check_value(item->'high', element, 'space', name || '.high');
        IF element->>'type' = 'integer' AND item ? 'step' THEN
            PERFORM tensile_internal._check_value(item->'step',
                                                  '{"type": "integer", "minimum": 1, "maximum": 10000000}',
                                         'space', name || '.step');
        END IF;
    END IF;
END $$;

-- Whether values of a range are integers: of all types that have the key
CREATE FUNCTION tensile_internal._is_integer(name text, types text[]) RETURNS bool
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT bool_or(coalesce(r.rule->'items'->>'type', r.rule->>'type') = 'integer')
    FROM tensile_internal._space_rules($2) r WHERE r.key = $1
$$;

-- The space as the tuner takes it: [{"name", "types", "choices"} or {"name", "types", "low", "high", "log", "step",
-- "integer"}], the architecture first. `types`: the architectures whose key it is; null: an argument or an option
CREATE FUNCTION tensile_internal._space_domains(space jsonb, type text) RETURNS jsonb
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    WITH s AS (SELECT tensile_internal._space_types($1, $2) AS types)
    SELECT jsonb_agg(jsonb_build_object('name', e.key, 'types',
                         (SELECT jsonb_agg(r.kind ORDER BY r.kind) FROM s, tensile_internal._space_rules(s.types) r
                          WHERE r.key = e.key AND r.kind NOT IN ('argument', 'option')))
                     || CASE jsonb_typeof(e.value) WHEN 'array' THEN jsonb_build_object('choices', e.value)
                             ELSE e.value || jsonb_build_object('integer',
                                                                tensile_internal._is_integer(e.key, s.types)) END
                     ORDER BY e.key <> 'architecture', e.key COLLATE "C")
    FROM s, jsonb_each($1) e
$$;

-- Architecture of a trial: the model's, or one of another type, with the values that were chosen for its keys; null:
-- the trial chooses it
CREATE FUNCTION tensile_internal._trial_architecture(architecture jsonb, params jsonb) RETURNS jsonb
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN t.type = $1->>'type' THEN $1 WHEN t.type IS NOT NULL THEN jsonb_build_object('type', t.type) END
        || (SELECT coalesce(jsonb_object_agg(p.key, tensile_internal._as_array(p.value, r.rule)), '{}')
            FROM jsonb_each($2) p
                 JOIN tensile_internal._space_rules(ARRAY[t.type]) r ON r.key = p.key AND r.kind = t.type)
    FROM (SELECT coalesce($2->>'architecture', $1->>'type')) t (type)
$$;

-- Arguments of train_model for a trial: those of the tuning, with the values that were chosen
CREATE FUNCTION tensile_internal._trial_arguments(arguments jsonb, params jsonb) RETURNS jsonb
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT $1 || v.arguments || jsonb_build_object('options', $1->'options' || v.options)
    FROM (SELECT coalesce(jsonb_object_agg(p.key, p.value) FILTER (WHERE r.kind = 'argument'), '{}'),
                 coalesce(jsonb_object_agg(p.key, p.value) FILTER (WHERE r.kind = 'option'), '{}')
          FROM jsonb_each($2) p JOIN tensile_internal._space_rules('{}') r ON r.key = p.key) v (arguments, options)
$$;

-- Keys of a space that have a value already
CREATE FUNCTION tensile_internal._given_keys(architecture jsonb, arguments jsonb) RETURNS text[]
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT ARRAY(SELECT jsonb_object_keys($1) UNION SELECT jsonb_object_keys($2->'options')
                 UNION SELECT a FROM unnest('{batch_size,learning_rate}'::text[]) a WHERE $2->>a IS NOT NULL)
$$;

-- True while the first trial has yet to choose the architecture by the values of arrays.
CREATE FUNCTION tensile_internal._is_open(t tensile_internal.tunings) RETURNS bool
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT ($1).architecture IS NULL AND NOT coalesce(($1).space ? 'architecture', false)
$$;

-- Complete a tuning whose first trial has chosen the architecture. The space is the default one, or the keys of the
-- given one that the architecture has.
CREATE FUNCTION tensile_internal._settle_space(tuning bigint, architecture jsonb) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile_internal.tunings t
        SET architecture = $2,
            space = CASE WHEN t.space IS NULL
                THEN tensile_internal._default_space($2->>'type')
                     - tensile_internal._given_keys($2, t.arguments)
                ELSE (SELECT coalesce(jsonb_object_agg(e.key, e.value), '{}') FROM jsonb_each(t.space) e
                      WHERE e.key IN (SELECT r.key FROM tensile_internal._space_rules(ARRAY[$2->>'type']) r)) END
        WHERE t.id = $1 AND tensile_internal._is_open(t);
    SELECT tensile_internal._notify(-1) WHERE $1 IS NOT NULL; -- the controller's next turn chooses other trials
$$;

-- Raise an error if an argument or an option is given, and is to be chosen as well.
CREATE FUNCTION tensile_internal._check_given(space jsonb, arguments jsonb) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    given text := (SELECT k FROM unnest(tensile_internal._given_keys('{}', arguments)) k
                   WHERE space ? k ORDER BY k LIMIT 1);
BEGIN
    IF given IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('"%s" has a value, and is in the space', given), HINT = 'Leave one of them out.';
    ELSIF space = '{}' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'there is nothing to choose from',
            HINT = 'Give a space.';
    END IF;
END $$;

-- Raise an error if trials would run code that the caller may not run on the server.
CREATE FUNCTION tensile_internal._check_space_code(caller oid, architecture jsonb, space jsonb) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    types text[] := tensile_internal._space_types(space, architecture->>'type');
BEGIN
    IF EXISTS (SELECT FROM tensile_internal._space_rules(types) r
               WHERE space ? r.key AND r.kind NOT IN ('argument', 'option'))
       OR space ? 'architecture' THEN
        PERFORM tensile_internal._check_code(caller, jsonb_build_object('type', t)) FROM unnest(types) t;
    END IF;
END $$;
