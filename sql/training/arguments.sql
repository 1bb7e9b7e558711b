-- The arguments of a training, and their checks
--
-- They are one jsonb, {name: value} as train_model declares them. csrc/training/submit.c makes it; schedules and
-- tunings store it without the model's name.

-- The columns of a job that these arguments determine, as they are before the checks. Not the memory budget:
-- _parse_budget has a check of its own. Options that are JSON null are refused later.
CREATE FUNCTION tensile_internal._job_of_arguments(arguments jsonb, OUT j tensile_internal.jobs)
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    j := jsonb_populate_record(j, arguments - 'memory_budget');
    j.policy := coalesce(j.policy, current_setting('pg_tensile.policy'));
    j.options := arguments->'options';
END $$;

CREATE FUNCTION tensile_internal._check_training(j tensile_internal.jobs) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    policies text[] := (SELECT s.enumvals FROM pg_settings s WHERE s.name = 'pg_tensile.policy');
    message text;
    hint text;
BEGIN
    IF j.epochs NOT BETWEEN 1 AND 1000000 THEN
        message := format('epochs is out of range: %s', j.epochs);
        hint := 'Use 1 to 1000000.';
    ELSIF j.batch_size NOT BETWEEN 0 AND 10000000 THEN
        message := format('batch_size is out of range: %s', j.batch_size);
        hint := 'Use 1 to 10000000, and not more than the query has rows, or 0 to have it chosen by plans.';
    ELSIF j.optimizer NOT IN ('sgd', 'adam', 'adamw') THEN
        message := format('unknown optimizer "%s"', j.optimizer);
        hint := 'Use ''sgd'', ''adam'' or ''adamw''.';
    ELSIF NOT (j.learning_rate > 0 AND j.learning_rate < 'Infinity') THEN
        message := format('learning_rate is out of range: %s', j.learning_rate);
        hint := 'Use a positive, finite number such as 0.001, or leave it out to have it chosen.';
    ELSIF NOT (j.validation >= 0 AND j.validation < 1) THEN
        message := format('validation is out of range: %s', j.validation);
        hint := 'Use the share of rows kept for validation: 0 or more, and less than 1.';
    ELSIF j.policy <> ALL (policies) THEN
        message := format('unknown policy "%s"', j.policy);
        hint := format('Use one of ''%s'', or leave it out for the setting pg_tensile.policy.',
                       array_to_string(policies, ''', '''));
    END IF;
    IF message IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = message, HINT = hint;
    END IF;
    PERFORM tensile_internal._check_priority(j.priority);
END $$;

-- The rows for validation are a share of the query's rows, or those of a query of their own. 0.2 is the default share.
CREATE FUNCTION tensile_internal._check_split(j tensile_internal.jobs) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF j.validation_query IS NOT NULL AND j.split_by IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'split_by and validation_query contradict each other',
            HINT = 'Leave split_by out to validate on the rows of the validation query.';
    ELSIF j.validation_query IS NOT NULL AND j.validation <> 0.2 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('validation is %s, but the validation query decides which rows are for validation',
                             j.validation),
            HINT = 'Leave validation out, or validation_query.';
    END IF;
END $$;

-- Raise an error unless the time is at least `shortest` and at most 100 years, so that it can be added to any time of
-- now, and none of its fields is negative: months differ in length, so '1 month -30 days' goes back in some of them.
-- `hint` is about times that are too short.
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
CREATE FUNCTION tensile_internal._check_choice(j tensile_internal.jobs) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    option text := CASE WHEN j.batch_size IS DISTINCT FROM 0 THEN (SELECT k FROM jsonb_object_keys(j.options) k
                        WHERE k IN ('batch_size_range', 'learning_rate_scaling') ORDER BY k LIMIT 1) END;
BEGIN
    IF option IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('option "%s" requires a batch size chosen by plans, but batch_size is %s', option,
                             coalesce(j.batch_size::text, 'null')),
            HINT = 'Use batch_size => 0, or leave the option out.';
    ELSIF j.batch_size = 0 AND j.policy = 'none' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'cannot choose a batch size with policy "none": without a plan, the memory of a step is unknown',
            HINT = 'Use policy => ''joint'', or give a batch_size.';
    END IF;
END $$;

-- Only swapped tensors are compressed.
CREATE FUNCTION tensile_internal._check_compression(j tensile_internal.jobs) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF j.policy = 'none' AND coalesce(j.options->>'compression', 'none') <> 'none' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('compression "%s" requires a policy that swaps, but the policy is "none"',
                             j.options->>'compression'),
            HINT = 'Use policy => ''joint'', or leave the option "compression" out.';
    END IF;
END $$;

-- The limit is one of the paper's algorithm; other policies would ignore it.
CREATE FUNCTION tensile_internal._check_swap_share(j tensile_internal.jobs) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF j.policy <> 'tensile' AND j.options ? 'swap_share' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('option "swap_share" requires the policy "tensile", but the policy is "%s"', j.policy),
            HINT = 'Use policy => ''tensile'', or leave the option out.';
    END IF;
END $$;

-- Plans show what fits into the memory of one rank, so they choose the batch size of one rank only.
CREATE FUNCTION tensile_internal._check_ranks(j tensile_internal.jobs) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT j.options ? 'ranks' THEN
        RETURN;
    ELSIF j.options->>'start' = 'deployed' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'a job with ranks cannot begin with the weights of the deployed version',
            HINT = 'Leave out the option "start", or the option "ranks".';
    ELSIF j.batch_size = 0 AND j.options->'ranks' NOT IN ('1', '[1, 1]') THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('cannot choose a batch size for several ranks: %s', j.options->'ranks'),
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

-- How a trainer reaches the Ray cluster, for the JOB frame. Only superusers see the setting of the token's file.
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
