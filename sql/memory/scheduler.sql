-- The memory scheduler: jobs to plan for, grants, plans and their log

-- Scheduler and predictor
CREATE FUNCTION tensile_internal._publish_plan(job bigint, events bytea, planned_bytes bigint, granted_bytes bigint,
                                               link_share float8, plan_order bytea DEFAULT '', groups bytea DEFAULT '')
    RETURNS bigint
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_publish_plan';
CREATE FUNCTION tensile_internal._grants(OUT job bigint, OUT device text, OUT granted_bytes bigint,
                                         OUT overhead_bytes bigint, OUT generation bigint, OUT acknowledged bigint,
                                         OUT planned_bytes bigint, OUT plan_granted_bytes bigint, OUT flows bool)
    RETURNS SETOF record
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_grants';
CREATE FUNCTION tensile_internal._device_memory(OUT device text, OUT total_bytes bigint, OUT budget_bytes bigint,
                                                OUT inference_bytes bigint, OUT wanted_bytes bigint,
                                                OUT claimed_bytes bigint, OUT claimed_s float8) RETURNS SETOF record
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_budgets';
CREATE FUNCTION tensile_internal._lack_memory(device text, bytes bigint[], slowed_bytes bigint, inference_bytes bigint)
    RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_lack_memory';
CREATE FUNCTION tensile_internal._lacking_memory(OUT device text, OUT number bigint, OUT bytes bigint[],
                                                 OUT slowed_bytes bigint) RETURNS SETOF record
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_lacking_memory';

-- Jobs that have sent a trace, and have or need a plan
CREATE FUNCTION tensile_internal._schedule_jobs()
    RETURNS TABLE (job bigint, waiting bool, waited_s float8, priority float8, policy text, memory_budget bigint,
                   device text, revision int, total_us float8, overhead_bytes bigint, least_bytes bigint, refused bool,
                   rejected bigint)
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT j.id, j.state = 'waiting', extract(epoch FROM clock_timestamp() - t.captured_at)::float8, j.aged_priority,
           t.policy, j.memory_budget, t.device, t.revision, l.total_us, t.overhead_bytes, t.least_bytes,
           t.refusal IS NOT NULL, t.rejected
    FROM tensile_internal._open_jobs j JOIN tensile_internal.traces t ON t.job = j.id
         LEFT JOIN tensile_internal.operator_latencies l ON l.job = j.id
    WHERE j.state IN ('waiting', 'running')
$$;

-- Store what a waiting job waits for, unless another transaction holds the job: the scheduler serves all. True if the
-- reason is new.
CREATE FUNCTION tensile_internal._job_waits(job bigint, reason text) RETURNS bool
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM FROM tensile_internal.jobs j
        WHERE j.id = job AND j.state = 'waiting' AND j.reason IS DISTINCT FROM _job_waits.reason
        FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE tensile_internal.jobs j SET reason = _job_waits.reason WHERE j.id = job;
    PERFORM tensile_internal._notify(job);
    RETURN true;
END $$;

-- Record that the job cannot be given memory; `refusal`: header of the REFUSE frame
CREATE FUNCTION tensile_internal._job_refuse(job bigint, refusal jsonb) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile_internal.traces t SET refusal = $2 WHERE t.job = $1;
    SELECT tensile_internal._notify($1);
$$;

-- Write a line to the log; every hundredth line deletes those before the last 10,000.
CREATE FUNCTION tensile_internal._log(event text, job bigint DEFAULT NULL, generation bigint DEFAULT NULL,
                                      device text DEFAULT NULL, reason text DEFAULT NULL, details jsonb DEFAULT NULL)
    RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    line bigint;
BEGIN
    INSERT INTO tensile_internal.scheduler_log (event, job, generation, device, reason, details)
        VALUES ($1, $2, $3, $4, $5, $6) RETURNING id INTO line;
    IF line % 100 = 0 THEN
        DELETE FROM tensile_internal.scheduler_log WHERE id <= line - 10000;
    END IF;
END $$;

-- Store the expected memory use under the job's plan.
CREATE FUNCTION tensile_internal._footprint(job bigint, generation bigint, events bytea, operators int[],
                                            planned bigint[], vanilla bigint[], iteration_us float8, vanilla_us float8,
                                            planned_bytes bigint, granted_bytes bigint, host_bytes bigint,
                                            out_bytes bigint, in_bytes bigint, stall_us float8, recomputes int,
                                            plan_order bytea DEFAULT '', groups bytea DEFAULT '') RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile_internal.plans
        SELECT t.job, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17
        FROM tensile_internal.traces t WHERE t.job = $1
        ON CONFLICT (job) DO UPDATE SET generation = EXCLUDED.generation, events = EXCLUDED.events,
            operators = EXCLUDED.operators, planned = EXCLUDED.planned, vanilla = EXCLUDED.vanilla,
            iteration_us = EXCLUDED.iteration_us, vanilla_us = EXCLUDED.vanilla_us,
            planned_bytes = EXCLUDED.planned_bytes, granted_bytes = EXCLUDED.granted_bytes,
            host_bytes = EXCLUDED.host_bytes, out_bytes = EXCLUDED.out_bytes, in_bytes = EXCLUDED.in_bytes,
            stall_us = EXCLUDED.stall_us, recomputes = EXCLUDED.recomputes, plan_order = EXCLUDED.plan_order,
            groups = EXCLUDED.groups;
$$;

-- Store the decisions about compressing the job's tensors: [{tensor, codec, coded_bytes, coded_us, plain_us,
-- compressed}]
CREATE FUNCTION tensile_internal._coding(job bigint, decisions jsonb) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile_internal.codings (job, decisions) SELECT t.job, $2 FROM tensile_internal.traces t
        WHERE t.job = $1
        ON CONFLICT (job) DO UPDATE SET decisions = EXCLUDED.decisions, at = clock_timestamp();
$$;

-- Store the progress of a search for a better plan; `state`: queued, searching (starts its time), finished,
-- stopped or failed.
CREATE FUNCTION tensile_internal._search(job bigint, state text, budget_bytes bigint, seconds float8, cached bool,
                                         first_us float8, best_us float8, generation int, evaluations bigint)
    RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile_internal.plan_searches AS s (job, state, budget_bytes, seconds, cached, first_us, best_us,
                                                     generation, evaluations, ended_at)
        SELECT t.job, $2, $3, $4, $5, $6, $7, $8, $9, CASE WHEN $2 = 'finished' THEN clock_timestamp() END
        FROM tensile_internal.traces t WHERE t.job = $1
        ON CONFLICT ON CONSTRAINT plan_searches_pkey DO UPDATE SET state = EXCLUDED.state,
            budget_bytes = EXCLUDED.budget_bytes, seconds = EXCLUDED.seconds, cached = EXCLUDED.cached,
            first_us = EXCLUDED.first_us, best_us = EXCLUDED.best_us, generation = EXCLUDED.generation,
            evaluations = EXCLUDED.evaluations,
            started_at = CASE EXCLUDED.state WHEN 'queued' THEN NULL
                WHEN 'searching' THEN coalesce(s.started_at, clock_timestamp()) ELSE s.started_at END,
            ended_at = CASE WHEN EXCLUDED.state NOT IN ('queued', 'searching')
                THEN coalesce(s.ended_at, clock_timestamp()) END
$$;

-- Store the best plan that a search found for the job's graph and device, unless a longer search has stored one. No
-- other job has the device of a job with ranks.
CREATE FUNCTION tensile_internal._search_result(job bigint, bucket_bytes bigint, device_peak_bytes bigint, events bytea,
                                                plan_order bytea, iteration_us float8, seconds float8, generations int)
    RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile_internal.search_results AS r (fingerprint, device, bucket_bytes, device_peak_bytes, events,
                                                      plan_order, iteration_us, seconds, generations)
        SELECT t.fingerprint, t.device, $2, $3, $4, $5, $6, $7, $8
        FROM tensile_internal.traces t
        WHERE t.job = $1 AND t.fingerprint IS NOT NULL AND NOT tensile_internal._on_cluster(t.device)
        ON CONFLICT ON CONSTRAINT search_results_pkey DO UPDATE SET device_peak_bytes = EXCLUDED.device_peak_bytes,
            events = EXCLUDED.events, plan_order = EXCLUDED.plan_order, iteration_us = EXCLUDED.iteration_us,
            seconds = EXCLUDED.seconds, generations = EXCLUDED.generations, found_at = EXCLUDED.found_at
        WHERE r.seconds <= EXCLUDED.seconds
$$;

-- Profile and codec times of a device: this machine's, or those of the job that has it on a Ray cluster
CREATE FUNCTION tensile_internal._device_description(device text, OUT profile jsonb, OUT codec_times jsonb)
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce((SELECT p.profile FROM tensile_internal.device_profiles p WHERE p.device = $1),
                    (SELECT t.profile FROM tensile_internal.traces t
                     WHERE t.device = $1 AND tensile_internal._on_cluster($1))),
           coalesce((SELECT c.times FROM tensile_internal.codec_times c WHERE c.device = $1),
                    (SELECT t.codec_times FROM tensile_internal.traces t
                     WHERE t.device = $1 AND tensile_internal._on_cluster($1)))
$$;

-- The best search result for the job's graph and device that fits into the given memory
CREATE FUNCTION tensile_internal._searched(job bigint, budget_bytes bigint)
    RETURNS TABLE (bucket_bytes bigint, events bytea, plan_order bytea, iteration_us float8, seconds float8,
                   generations int)
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT r.bucket_bytes, r.events, r.plan_order, r.iteration_us, r.seconds, r.generations
    FROM tensile_internal.traces t
         JOIN tensile_internal.search_results r ON r.fingerprint = t.fingerprint AND r.device = t.device
    WHERE t.job = $1 AND r.device_peak_bytes <= $2
    ORDER BY r.bucket_bytes DESC, r.iteration_us LIMIT 1
$$;
