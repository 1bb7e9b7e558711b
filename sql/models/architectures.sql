-- Checks of architectures and options
--
-- pg_tensile/rules.json has the rules; pg_tensile/rules.py explains their terms and makes the same checks, and a test
-- compares the two on random values. Every error names the key by its path ("early_stopping.patience", "hidden[2]").
-- Checks that need PyTorch, such as whether a function exists, are left to the child process.

CREATE FUNCTION tensile_internal._rules() RETURNS json
    LANGUAGE C IMMUTABLE AS 'MODULE_PATHNAME', 'tensile_rules';

CREATE FUNCTION tensile_internal._check_architecture(architecture jsonb) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    rules json := tensile_internal._rules()->'architectures';
    types text[] := ARRAY(SELECT json_object_keys(rules));
    type text := CASE jsonb_typeof(architecture->'type') WHEN 'string' THEN architecture->>'type' END;
BEGIN
    IF jsonb_typeof(architecture) <> 'object' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'architecture must be a JSON object',
            HINT = 'For example ''{"type": "mlp", "hidden": [128, 64]}''.';
    ELSIF type IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'key "type" is missing in the architecture, or not a text',
            HINT = tensile_internal._names_hint('', types, 'types');
    ELSIF type <> ALL (types) THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('unknown architecture type "%s"', type),
            HINT = tensile_internal._names_hint(type, types, 'types');
    END IF;
    PERFORM tensile_internal._check_object(architecture - 'type', rules->type, format('architecture "%s"', type), '');
END $$;

CREATE FUNCTION tensile_internal._check_options(options jsonb) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF jsonb_typeof(options) <> 'object' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'options must be a JSON object',
            HINT = 'For example ''{"early_stopping": {"patience": 3}}''.';
    END IF;
    PERFORM tensile_internal._check_object(options, tensile_internal._rules()->'options', 'options', '');
END $$;

-- In messages, `what` names the object and `prefix` precedes its keys.
CREATE FUNCTION tensile_internal._check_object(object jsonb, rules json, what text, prefix text) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    properties json := rules->'properties';
    names text[] := ARRAY(SELECT json_object_keys(properties));
    name text;
    item jsonb;
    divisor_key text;
    dividend bigint;
    divisor bigint;
BEGIN
    FOR name, item IN SELECT * FROM jsonb_each(object) LOOP
        IF name <> ALL (names) THEN
            RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
                MESSAGE = format('unknown key "%s" in the %s', prefix || name, what),
                HINT = tensile_internal._names_hint(name, names, 'keys');
        END IF;
        PERFORM tensile_internal._check_value(item, tensile_internal._resolved(properties->name), what, prefix || name);
    END LOOP;
    FOR name IN SELECT json_array_elements_text(rules->'required') LOOP
        IF NOT object ? name THEN
            RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
                MESSAGE = format('key "%s" is missing in the %s', name, what),
                HINT = format('It must be %s.',
                              tensile_internal._describe(tensile_internal._resolved(properties->name)));
        END IF;
    END LOOP;
    FOR name, divisor_key IN SELECT p.key, p.value->>'divisibleBy' FROM json_each(properties) p
                       WHERE p.value->'divisibleBy' IS NOT NULL LOOP
        dividend := coalesce(object->>name, properties->name->>'default')::numeric;
        divisor := coalesce(object->>divisor_key, properties->divisor_key->>'default')::numeric;
        IF dividend % divisor <> 0 THEN
            RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
                MESSAGE = format('key "%s" in the %s is not divisible by "%s": %s, %s',
                                 name, what, divisor_key, dividend, divisor),
                HINT = format('Use a multiple of "%s", for example %s.', divisor_key,
                              divisor * greatest(1, dividend / divisor));
        END IF;
    END LOOP;
END $$;

CREATE FUNCTION tensile_internal._check_value(value jsonb, rule json, what text, path text) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (rule->>'orRange')::bool AND jsonb_typeof(value) = 'array' THEN
        rule := tensile_internal._range_of(rule);
    END IF;
    IF NOT tensile_internal._fits(value, rule) THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('invalid value for key "%s" in the %s: %s', path, what,
                             CASE WHEN length(value::text) > 60 THEN left(value::text, 57) || '...'
                                  ELSE value::text END),
            HINT = format('Use %s.', tensile_internal._describe(rule));
    ELSIF rule->>'type' = 'array' THEN
        FOR i IN 0 .. jsonb_array_length(value) - 1 LOOP
            PERFORM tensile_internal._check_value(value->i, rule->'items', what, format('%s[%s]', path, i));
        END LOOP;
        IF (CASE WHEN (rule->>'ascending')::bool THEN (value->>0)::numeric > (value->>1)::numeric END) THEN
            RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
                MESSAGE = format('key "%s" in the %s is empty: from %s to %s', path, what, value->0, value->1),
                HINT = format('The first number is the least, the second the most: [%s, %s].', value->1, value->0);
        END IF;
    ELSIF rule->'properties' IS NOT NULL THEN
        PERFORM tensile_internal._check_object(value, rule, what, path || '.');
    END IF;
END $$;

-- True if a value satisfies a rule, apart from the elements that it contains. Numbers are compared as float8, as
-- readers of JSON see them.
CREATE FUNCTION tensile_internal._fits(value jsonb, rule json) RETURNS bool
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    kind text := rule->>'type';
    content text := value #>> '{}';
    number float8;
BEGIN
    IF (rule->>'orBoolean')::bool AND jsonb_typeof(value) = 'boolean' THEN
        RETURN true;
    ELSIF jsonb_typeof(value) <> replace(kind, 'integer', 'number') THEN
        RETURN false;
    ELSIF kind IN ('integer', 'number') THEN
        number := CASE WHEN abs(content::numeric) > 1.7976931348623157e308
                       THEN sign(content::numeric) * 'Infinity'::float8
                       WHEN abs(content::numeric) < 4.9e-324 THEN 0 ELSE content::float8 END;
        RETURN number >= coalesce((rule->>'minimum')::float8, '-Infinity')
           AND number <= coalesce((rule->>'maximum')::float8, 'Infinity')
           AND number > coalesce((rule->>'exclusiveMinimum')::float8, '-Infinity')
           AND number < coalesce((rule->>'exclusiveMaximum')::float8, 'Infinity')
           AND (kind = 'number' OR number = floor(number))
           AND (rule->'not' IS NULL OR number::numeric % (rule->'not'->>'multipleOf')::numeric <> 0);
    ELSIF kind = 'string' THEN
        RETURN length(content) >= coalesce((rule->>'minLength')::int, 0)
           AND content ~ ('^(?:' || coalesce(rule->>'pattern', '.*') || ')$')
           AND (rule->'enum' IS NULL OR content IN (SELECT json_array_elements_text(rule->'enum')));
    END IF;
    RETURN kind <> 'array' OR jsonb_array_length(value) BETWEEN (rule->>'minItems')::int AND (rule->>'maxItems')::int;
END $$;

-- The rule of an array of the least and the largest of the values that follow the rule
CREATE FUNCTION tensile_internal._range_of(rule json) RETURNS json
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT json_build_object('type', 'array', 'minItems', 2, 'maxItems', 2, 'ascending', true,
                             'items', $1::jsonb - 'orRange')
$$;

-- The rule itself, or the shared rule that it refers to
CREATE FUNCTION tensile_internal._resolved(rule json) RETURNS json
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN $1->'$ref' IS NULL THEN $1 ELSE tensile_internal._rules()->'shared'->($1->>'$ref') END
$$;

-- Description of the permitted values, for hints: "an integer from 1 to 100"
CREATE FUNCTION tensile_internal._describe(rule json) RETURNS text
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    kind text := rule->>'type';
BEGIN
    RETURN CASE
        WHEN rule->'enum' IS NOT NULL THEN
            'one of ' || (SELECT string_agg(e.value::text, ', ') FROM json_array_elements(rule->'enum') e)
            || CASE WHEN rule->'orBoolean' IS NOT NULL THEN ', or true or false' ELSE '' END
        WHEN kind = 'integer' THEN
            format('an %sinteger from %s to %s%s', CASE WHEN rule->'not' IS NOT NULL THEN 'odd ' END, rule->>'minimum',
                   rule->>'maximum',
                   CASE WHEN rule->'orRange' IS NOT NULL THEN ', or an array of the least and the most' END)
        WHEN kind = 'number' THEN
            format('a number %s and %s',
                   coalesce('of at least ' || (rule->>'minimum'), 'greater than ' || (rule->>'exclusiveMinimum')),
                   coalesce('at most ' || (rule->>'maximum'), 'less than ' || (rule->>'exclusiveMaximum')))
        WHEN kind = 'boolean' THEN 'true or false'
        WHEN kind = 'string' THEN
            coalesce('a text such as ' || (rule->'examples'->0)::text, 'a text that is not empty')
        WHEN kind = 'array' THEN
            format('an array of %s values, each %s',
                   concat_ws(' to ', nullif(rule->>'minItems', rule->>'maxItems'), rule->>'maxItems'),
                   tensile_internal._describe(rule->'items'))
        ELSE 'an object {...}' END;
END $$;

-- Hint for an unknown name: the nearest of the known names, or all of them
CREATE FUNCTION tensile_internal._names_hint(name text, names text[], what text) RETURNS text
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce('Did you mean "' || tensile_internal._nearest($1, $2) || '"?',
                    format('The %s are %s.', $3, (SELECT string_agg(to_json(n)::text, ', ') FROM unnest($2) n)))
$$;
