-- The arguments of a training: one jsonb, and its checks

CREATE FUNCTION tensile_internal._check_training(epochs int, batch_size int, optimizer text, learning_rate float8,
                                        validation float8, policy text, priority int) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    policies text[] := (SELECT s.enumvals FROM pg_settings s WHERE s.name = 'pg_tensile.policy');
    message text;
    hint text;
BEGIN
    IF epochs NOT BETWEEN 1 AND 1000000 THEN
        message := format('epochs is out of range: %s', epochs);
        hint := 'Use 1 to 1000000.';
    ELSIF batch_size NOT BETWEEN 0 AND 10000000 THEN
        message := format('batch_size is out of range: %s', batch_size);
        hint := 'Use 1 to 10000000, and not more than the query has rows, or 0 to have it chosen by plans.';
    ELSIF optimizer NOT IN ('sgd', 'adam', 'adamw') THEN
        message := format('unknown optimizer "%s"', optimizer);
        hint := 'Use ''sgd'', ''adam'' or ''adamw''.';
    ELSIF NOT (learning_rate > 0 AND learning_rate < 'Infinity') THEN
        message := format('learning_rate is out of range: %s', learning_rate);
        hint := 'Use a positive, finite number such as 0.001, or leave it out to have it chosen.';
    ELSIF NOT (validation >= 0 AND validation < 1) THEN
        message := format('validation is out of range: %s', validation);
        hint := 'Use the share of rows kept for validation: 0 or more, and less than 1.';
    ELSIF policy <> ALL (policies) THEN
        message := format('unknown policy "%s"', policy);
        hint := format('Use one of ''%s'', or leave it out for the setting pg_tensile.policy.',
                       array_to_string(policies, ''', '''));
    END IF;
    IF message IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = message, HINT = hint;
    END IF;
    PERFORM tensile_internal._check_priority(priority);
END $$;

-- The rows for validation are a share of the query's rows, or those of a query of their own. 0.2 is the default share.
CREATE FUNCTION tensile_internal._check_split(validation float8, split_by text, validation_query text) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF validation_query IS NOT NULL AND split_by IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'split_by and validation_query contradict each other',
            HINT = 'Leave split_by out to validate on the rows of the validation query.';
    ELSIF validation_query IS NOT NULL AND validation <> 0.2 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('validation is %s, but the validation query decides which rows are for validation',
                             validation),
            HINT = 'Leave validation out, or validation_query.';
    END IF;
END $$;

-- Raise an error unless the time is at least `shortest` and at most 100 years, so that it can be added to any time of now,
-- and none of its fields is negative: months differ in length, so '1 month -30 days' goes back in some of them. `hint` is
-- about times that are too short.
CREATE FUNCTION tensile_internal._check_time(name text, value interval, shortest interval, hint text) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    negative bool := least(extract(year FROM value), extract(month FROM value), extract(day FROM value),
                           extract(hour FROM value), extract(minute FROM value), extract(second FROM value)) < 0;
BEGIN
    IF negative AND value >= shortest THEN
        hint := 'Its years, months, days and times must not have different signs.';
    END IF;
    IF negative OR NOT (value >= shortest AND extract(epoch FROM value)::float8 <= 3.2e9) THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('%s is out of range: %s', name, value), HINT = hint;
    END IF;
END $$;

CREATE FUNCTION tensile_internal._check_max_time(max_time interval) RETURNS void
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_internal._check_time('max_time', max_time, '1 microsecond',
        'Use a time up to 100 years, such as ''10 minutes'', or leave it out for no limit.')
$$;

-- batch_size => 0: the batch size is chosen by plans, which show what fits.
CREATE FUNCTION tensile_internal._check_choice(batch_size int, policy text, options jsonb) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    option text := CASE WHEN batch_size IS DISTINCT FROM 0 THEN (SELECT k FROM jsonb_object_keys(options) k
                        WHERE k IN ('batch_size_range', 'learning_rate_scaling') ORDER BY k LIMIT 1) END;
BEGIN
    IF option IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('option "%s" requires a batch size chosen by plans, but batch_size is %s', option,
                             coalesce(batch_size::text, 'null')),
            HINT = 'Use batch_size => 0, or leave the option out.';
    ELSIF batch_size = 0 AND coalesce(policy, current_setting('pg_tensile.policy')) = 'none' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'cannot choose a batch size with policy "none": without a plan, the memory of a step is unknown',
            HINT = 'Use policy => ''joint'', or give a batch_size.';
    END IF;
END $$;

-- Only swapped tensors are compressed.
CREATE FUNCTION tensile_internal._check_compression(policy text, options jsonb) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF coalesce(policy, current_setting('pg_tensile.policy')) = 'none'
       AND coalesce(options->>'compression', 'none') <> 'none' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('compression "%s" requires a policy that swaps, but the policy is "none"',
                             options->>'compression'),
            HINT = 'Use policy => ''joint'', or leave the option "compression" out.';
    END IF;
END $$;

-- The limit is one of the paper's algorithm; other policies would ignore it.
CREATE FUNCTION tensile_internal._check_swap_share(policy text, options jsonb) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    chosen text := coalesce(policy, current_setting('pg_tensile.policy'));
BEGIN
    IF chosen <> 'tensile' AND options ? 'swap_share' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('option "swap_share" requires the policy "tensile", but the policy is "%s"', chosen),
            HINT = 'Use policy => ''tensile'', or leave the option out.';
    END IF;
END $$;

-- Plans show what fits into the memory of one rank, so they choose the batch size of one rank only.
CREATE FUNCTION tensile_internal._check_ranks(batch_size int, options jsonb) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT options ? 'ranks' THEN
        RETURN;
    ELSIF options->>'start' = 'deployed' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'a job with ranks cannot begin with the weights of the deployed version',
            HINT = 'Leave out the option "start", or the option "ranks".';
    ELSIF batch_size = 0 AND options->'ranks' NOT IN ('1', '[1, 1]') THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('cannot choose a batch size for several ranks: %s', options->'ranks'),
            HINT = 'Give a batch_size, which the ranks divide among themselves, or use one rank.';
    END IF;
    PERFORM tensile_internal._ray_address();
END $$;

-- Address of the Ray cluster; raises an error if there is none
CREATE FUNCTION tensile_internal._ray_address() RETURNS text
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    address text := current_setting('pg_tensile.ray_address');
BEGIN
    IF address = '' THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state', MESSAGE = 'no Ray cluster is configured',
            HINT = 'Set pg_tensile.ray_address to the address of one, such as ''ray://head:10001'', and reload; or leave '
                   'out the option "ranks".';
    END IF;
    RETURN address;
END $$;

-- How an executor reaches the Ray cluster, for the JOB frame. Only superusers see the setting of the token's file.
CREATE FUNCTION tensile_internal._ray_access() RETURNS jsonb
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_build_object(
        'address', tensile_internal._ray_address(), 'token_file', current_setting('pg_tensile.ray_token_file'),
        'timeout_s', (SELECT s.setting::int FROM pg_settings s WHERE s.name = 'pg_tensile.ray_timeout'))
$$;

-- Number of bytes of a size such as '8GB'; null for null
CREATE FUNCTION tensile_internal._parse_budget(budget text) RETURNS bigint
    LANGUAGE plpgsql IMMUTABLE STRICT SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    bytes numeric;
    part text[] := regexp_match(lower(budget), '^\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*(b|bytes|kb|mb|gb|tb)?\s*$');
BEGIN
    bytes := trunc(part[1]::numeric * CASE part[2] WHEN 'kb' THEN 1024 WHEN 'mb' THEN 1024 ^ 2 WHEN 'gb' THEN 1024 ^ 3
                                                   WHEN 'tb' THEN 1024 ^ 4 ELSE 1 END);
    IF bytes BETWEEN 1 AND 9223372036854775807 THEN
        RETURN bytes;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = format('invalid memory_budget "%s"', budget),
        HINT = 'Write a size with a unit: ''8GB'', ''512MB''. Units are B, kB, MB, GB and TB.';
END $$;
