-- The worker's part of memory scheduling: traces, latencies and plans

CREATE FUNCTION tensile_worker._register_device(name text, total_bytes bigint, out_bytes_per_s float8,
                                                in_bytes_per_s float8, overhead_bytes bigint) RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_register_device';
CREATE FUNCTION tensile_worker._fetch_plan(after bigint, OUT generation bigint, OUT events bytea,
                                           OUT planned_bytes bigint, OUT granted_bytes bigint, OUT link_share float8,
                                           OUT plan_order bytea, OUT groups bytea) RETURNS SETOF record
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_fetch_plan';
CREATE FUNCTION tensile_worker._acknowledge_plan(generation bigint) RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_acknowledge_plan';
CREATE FUNCTION tensile_worker._group_socket(fd int) RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_group_socket';
CREATE FUNCTION tensile_worker._flow_state(OUT waits bool, OUT late bool, OUT fault text) RETURNS record
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_flow_state';

-- TRACE frame: the header, a trace for each graph, and the first time the operators and tensors of the first
-- graph. After its first trace, a job waits for a plan.
CREATE FUNCTION tensile_worker._job_trace(header jsonb, traces bytea[], tables jsonb) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j bigint := tensile_worker._my_job();
    h record;
BEGIN
    -- One without graphs waits with each claim. A captured job that goes on under its plan meanwhile does not.
    IF cardinality(_job_trace.traces) = 0 OR NOT EXISTS (SELECT FROM tensile_internal.traces t WHERE t.job = j) THEN
        PERFORM tensile_worker._job_waits_for();
    END IF;
    SELECT * INTO h FROM jsonb_to_record(header) AS (device text, profile jsonb, revision int, policy text,
        fingerprint text, overhead_bytes bigint, persistent_bytes bigint, parameters bigint, vanilla_bytes bigint,
        least_bytes bigint, operator text, graphs jsonb, load float8, torch text, overhead_measured bool,
        limited_by text);
    INSERT INTO tensile_internal.traces AS t (job, device, revision, policy, fingerprint, overhead_bytes,
                                              persistent_bytes, parameters, vanilla_bytes, least_bytes,
                                              largest_operator, graphs, traces, load, torch, profile, overhead_measured,
                                              limited_by)
        VALUES (j, h.device, h.revision, h.policy, h.fingerprint, h.overhead_bytes, h.persistent_bytes,
                h.parameters, h.vanilla_bytes, h.least_bytes, h.operator, h.graphs, _job_trace.traces, h.load, h.torch,
                CASE WHEN tensile_internal._on_cluster(h.device) THEN h.profile END, h.overhead_measured,
                h.limited_by)
        ON CONFLICT (job) DO UPDATE SET device = EXCLUDED.device, revision = EXCLUDED.revision,
            policy = EXCLUDED.policy, fingerprint = EXCLUDED.fingerprint, overhead_bytes = EXCLUDED.overhead_bytes,
            persistent_bytes = EXCLUDED.persistent_bytes, parameters = EXCLUDED.parameters,
            vanilla_bytes = EXCLUDED.vanilla_bytes, least_bytes = EXCLUDED.least_bytes,
            largest_operator = EXCLUDED.largest_operator, graphs = EXCLUDED.graphs, traces = EXCLUDED.traces,
            refusal = NULL, captured_at = clock_timestamp(), load = EXCLUDED.load, torch = EXCLUDED.torch,
            profile = EXCLUDED.profile, overhead_measured = EXCLUDED.overhead_measured, limited_by = EXCLUDED.limited_by;
    UPDATE tensile_internal.trials k SET least_bytes = h.least_bytes + h.overhead_bytes WHERE k.job = j;
    IF h.profile <> 'null' THEN
        PERFORM tensile_internal._check_profile(h.device, h.profile);
        IF NOT tensile_internal._on_cluster(h.device) THEN
            INSERT INTO tensile_internal.device_profiles (device, profile) VALUES (h.device, h.profile)
                ON CONFLICT DO NOTHING;
        END IF;
    END IF;
    IF tables IS NOT NULL THEN -- another graph: latencies and footprint of the previous one do not apply
        DELETE FROM tensile_internal.operator_latencies l WHERE l.job = j;
        DELETE FROM tensile_internal.plans f WHERE f.job = j;
        PERFORM tensile_internal._keep_tables(j, tables);
    END IF;
    PERFORM tensile_internal._notify(j);
END $$;

-- PROGRESS frame: the memory besides its tensors, and what limits it, as in a TRACE and later than that
CREATE FUNCTION tensile_worker._job_overhead(header jsonb) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile_internal.traces t SET overhead_bytes = h.overhead_bytes, overhead_measured = h.overhead_measured,
            limited_by = h.limited_by
        FROM jsonb_to_record($1) AS h (overhead_bytes bigint, overhead_measured bool, limited_by text)
        WHERE t.job = tensile_worker._my_job();
    UPDATE tensile_internal.trials k SET least_bytes = t.least_bytes + t.overhead_bytes
        FROM tensile_internal.traces t WHERE t.job = k.job AND k.job = tensile_worker._my_job();
    SELECT tensile_internal._notify(tensile_worker._my_job());
$$;

-- The most memory besides their tensors that jobs have measured, by device, version of PyTorch, and type of the network.
-- A trainer that executes code of users says what it wants, so it counts for jobs of its own model only. Queries of jobs
-- can call what their workers call, so nothing above 4 GiB counts: no context takes as much.
CREATE FUNCTION tensile_internal._measured_overheads(model_id bigint) RETURNS jsonb
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(jsonb_agg(to_jsonb(o) ORDER BY o.device, o.torch, o.network), '[]')
    FROM (SELECT t.device, t.torch, n.network, max(t.overhead_bytes) AS bytes
          FROM tensile_internal.traces t JOIN tensile_internal.jobs j ON j.id = t.job
               JOIN tensile_internal.models m ON m.id = j.model_id
               CROSS JOIN LATERAL (SELECT coalesce(j.architecture, m.architecture)) a (architecture)
               CROSS JOIN LATERAL (
                   SELECT CASE WHEN a.architecture->>'type' <> 'ensemble' THEN a.architecture->>'type'
                       ELSE coalesce((SELECT e.type FROM jsonb_array_elements_text(a.architecture->'members') e (type)
                                      WHERE e.type NOT IN ('linear', 'boosted')), 'tabular') END) n (network)
          WHERE t.overhead_measured AND t.overhead_bytes BETWEEN 1 AND 4::bigint << 30
              AND NOT tensile_internal._on_cluster(t.device)
              AND ((tensile_internal._rules()->'architectures'->n.network->>'code')::bool IS NOT TRUE OR m.id = $1)
          GROUP BY t.device, t.torch, n.network) o
$$;
CREATE FUNCTION tensile_worker._job_overheads() RETURNS jsonb
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_internal._measured_overheads((SELECT j.model_id FROM tensile_internal.jobs j
                                                 WHERE j.id = tensile_worker._my_job()))
$$;

-- The first profile of a device is used for the jobs of all roles, so an impossible one fails the job that sends it.
CREATE FUNCTION tensile_internal._check_profile(device text, profile jsonb) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    field text;
    number float8;
    least float8;
    most float8;
BEGIN
    FOR field, least, most IN VALUES ('memory_bytes', 1, 2 ^ 50), ('out_bytes_per_s', 1e5, 1e15),
            ('in_bytes_per_s', 1e5, 1e15), ('duplex_factor', 0.5, 1), ('flops_per_s', 1e5, 1e19),
            ('bytes_per_s', 1e5, 1e17), ('transfer_latency_us', 0, 1e6), ('launch_us', 0, 1e6),
            ('handover_us', 0, 1e6), ('process_bytes', 0, (profile->>'memory_bytes')::float8) LOOP
        number := profile->>field;
        IF number IS NULL OR number < least OR number > most THEN
            RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
                MESSAGE = format('%s of device "%s" cannot be %s', field, device, coalesce(profile->>field, 'null')),
                HINT = 'The trainer measured this value; code of the model may have disturbed the measurement.';
        END IF;
    END LOOP;
    FOREACH field IN ARRAY ARRAY['block_bytes', 'small_bytes', 'small_page_bytes', 'large_page_bytes'] LOOP
        number := profile->'allocator'->>field;
        IF number NOT BETWEEN 1 AND 2 ^ 30 THEN
            RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
                MESSAGE = format('%s of the allocator of device "%s" cannot be %s', field, device, number),
                HINT = 'The trainer measured this value; code of the model may have disturbed the measurement.';
        END IF;
    END LOOP;
END $$;

CREATE FUNCTION tensile_internal._keep_tables(job bigint, tables jsonb) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    DELETE FROM tensile_internal.operators o WHERE o.job = $1;
    DELETE FROM tensile_internal.tensors t WHERE t.job = $1;
    INSERT INTO tensile_internal.operators (job, operator, target, phase, module, source, signature, flops, bytes,
                                            random, tensors)
        SELECT $1, o.operator, o.target, o.phase, o.module, o.source, o.signature, o.flops, o.bytes, o.random, o.tensors
        FROM jsonb_to_recordset($2->'operators') AS o (operator int, target text, phase text, module text,
             source text, signature text, flops bigint, bytes bigint, random bool, tensors int[]);
    INSERT INTO tensile_internal.tensors (job, tensor, name, kind, dtype, shape, bytes, first_operator, last_operator)
        SELECT $1, t.tensor, t.name, t.kind, t.dtype, t.shape, t.bytes, t.first_operator, t.last_operator
        FROM jsonb_to_recordset($2->'tensors') AS t (tensor int, name text, kind text, dtype text, shape bigint[],
             bytes bigint, first_operator int, last_operator int);
$$;

-- The job waits; `reason`: what for.
CREATE FUNCTION tensile_worker._job_waits_for(reason text DEFAULT 'its memory is being planned') RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile_internal.jobs SET state = 'waiting', reason = $1
        WHERE id = tensile_worker._my_job() AND state IN ('running', 'waiting');
    SELECT tensile_internal._notify(tensile_worker._my_job());
$$;

-- The job waits no more.
CREATE FUNCTION tensile_worker._job_admitted() RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile_internal.jobs SET state = 'running', reason = NULL
        WHERE id = tensile_worker._my_job() AND state = 'waiting';
    SELECT tensile_internal._notify(tensile_worker._my_job());
$$;

-- LATENCY frame: microseconds by operator; NaN: unknown
CREATE FUNCTION tensile_worker._job_latency(header jsonb, predicted real[], measured real[], average real[])
    RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile_internal.operator_latencies (job, predicted, measured, average, samples, total_us, load,
                                                     average_load, alone_us)
        SELECT t.job, $2, $3, $4, h.samples, h.total_us, h.load, h.average_load, h.alone_us
        FROM tensile_internal.traces t,
             jsonb_to_record($1) AS h (samples int, total_us float8, load float8, average_load float8, alone_us float8)
        WHERE t.job = tensile_worker._my_job()
        ON CONFLICT (job) DO UPDATE SET predicted = EXCLUDED.predicted, measured = EXCLUDED.measured,
            average = EXCLUDED.average, samples = EXCLUDED.samples, total_us = EXCLUDED.total_us, load = EXCLUDED.load,
            average_load = EXCLUDED.average_load, alone_us = EXCLUDED.alone_us, at = clock_timestamp();
    SELECT tensile_internal._notify(tensile_worker._my_job());
$$;

-- SPARSITY frame; `moved`: bytes, -1: unknown
CREATE FUNCTION tensile_worker._job_sparsity(revision int, tensors int[], zero_share real[], run_share real[],
                                             lz4_share real[], moved bigint[]) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile_internal.sparsities (job, revision, tensors, zero_share, run_share, lz4_share, moved)
        SELECT t.job, $1, $2, $3, $4, $5, array_replace($6, -1::bigint, NULL)
        FROM tensile_internal.traces t WHERE t.job = tensile_worker._my_job()
        ON CONFLICT (job) DO UPDATE SET revision = EXCLUDED.revision, tensors = EXCLUDED.tensors,
            zero_share = EXCLUDED.zero_share, run_share = EXCLUDED.run_share, lz4_share = EXCLUDED.lz4_share,
            moved = EXCLUDED.moved, at = clock_timestamp();
    SELECT tensile_internal._notify(tensile_worker._my_job());
$$;

-- Store codec times measured by a trainer; only a calibration replaces those that exist. Those of a cluster's device
-- belong to the job's trace.
CREATE FUNCTION tensile_worker._job_codec_times(device text, times jsonb, relative_error float8) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_worker._my_job();
    UPDATE tensile_internal.traces t SET codec_times = $2
        WHERE t.job = tensile_worker._my_job() AND tensile_internal._on_cluster(t.device);
    INSERT INTO tensile_internal.codec_times (device, times, relative_error)
        SELECT $1, $2, $3
        WHERE NOT EXISTS (SELECT FROM tensile_internal.traces t
                          WHERE t.job = tensile_worker._my_job() AND tensile_internal._on_cluster(t.device))
        ON CONFLICT ON CONSTRAINT codec_times_pkey
        DO UPDATE SET times = EXCLUDED.times, relative_error = EXCLUDED.relative_error,
            measured_at = clock_timestamp()
        WHERE (SELECT j.kind FROM tensile_internal.jobs j WHERE j.id = tensile_worker._my_job()) = 'calibrate'
$$;

-- Header of the REFUSE frame for a job that cannot be given memory, or null
CREATE FUNCTION tensile_worker._job_refusal() RETURNS jsonb
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_worker._my_job(); -- the next statement does not call it without a row
    SELECT t.refusal FROM tensile_internal.traces t WHERE t.job = tensile_worker._my_job();
$$;

-- Contents of the JOB frame, for the job's worker only
CREATE FUNCTION tensile_worker._job_profiles() RETURNS jsonb
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_worker._my_job();
    SELECT coalesce(jsonb_object_agg(p.device, p.profile), '{}') FROM tensile_internal.device_profiles p;
$$;
CREATE FUNCTION tensile_worker._job_codecs() RETURNS jsonb
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_worker._my_job();
    SELECT coalesce(jsonb_object_agg(c.device, jsonb_build_object('times', c.times)), '{}')
    FROM tensile_internal.codec_times c;
$$;
CREATE FUNCTION tensile_worker._job_latency_models() RETURNS TABLE (device text, models bytea)
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_worker._my_job();
    SELECT m.device, m.models FROM tensile_internal.latency_models m;
$$;
