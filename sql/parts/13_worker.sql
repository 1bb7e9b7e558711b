------------------------------------------------------------------------------------------------------------------------
-- Functions for the job's worker
------------------------------------------------------------------------------------------------------------------------

-- True for the device of a job with ranks: it belongs to that job alone, and is not on this machine.
-- TENSILE_CLUSTER_PREFIX in csrc/ledger.h and pyworker/cluster_device.py have the same rule.
CREATE FUNCTION tensile._on_cluster(device text) RETURNS bool
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT starts_with($1, 'ray:')
$$;

-- Name of the file with the rows of a tuning, among the server's temporary files. Numbers of tunings may come again, when
-- the extension is created anew.
CREATE FUNCTION tensile._rows_file(t tensile.tunings) RETURNS text
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT format('pgsql_tmp.pg_tensile_tuning.%s.%s', ($1).id, (1e6 * extract(epoch FROM ($1).submitted_at))::bigint)
$$;

-- With extra_float_digits below 1, the numbers in JSON would be rounded ones.
CREATE FUNCTION tensile._job_begin(pid int) RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET extra_float_digits = 1
AS $$
DECLARE
    j tensile.jobs;
BEGIN
    UPDATE tensile.jobs SET state = 'running', reason = NULL, started_at = coalesce(started_at, clock_timestamp())
        WHERE id = tensile._my_job() AND state = 'starting'
        RETURNING * INTO j;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('job %s is not in state "starting"', tensile._my_job());
    END IF;
    DELETE FROM tensile.model_versions v WHERE v.job = j.id;
    DELETE FROM tensile.checkpoints c WHERE c.job = j.id AND c.meta IS NULL;
    DELETE FROM tensile.traces t WHERE t.job = j.id;
    PERFORM tensile._notify(j.id), tensile._log_event(j.id, 'started');
    RETURN to_jsonb(j) - '{owner,owner_name,state,reason,sqlstate,error,hint,detail,traceback,warnings}'::text[]
        || jsonb_build_object('attempt', j.attempts, 'max_time_s', extract(epoch FROM j.max_time),
               'running', (SELECT count(*) FROM tensile.jobs o
                           WHERE o.ended_at IS NULL AND o.state IN ('starting', 'running')
                             AND (o.id = j.id OR NOT o.automatic)), -- another automatic one is about to end
               'architecture', coalesce(j.architecture, (SELECT m.architecture FROM tensile.models m WHERE m.id = j.model)),
               'start', tensile._start_of(j),
               'rows_file', (SELECT tensile._rows_file(t) FROM tensile.tunings t WHERE t.id = j.tuning),
               'tuning_rows', (SELECT t.rows FROM tensile.tunings t WHERE t.id = j.tuning),
               'checkpoint', (SELECT c.meta FROM tensile.checkpoints c WHERE c.job = j.id
                              ORDER BY c.generation DESC LIMIT 1));
END $$;

CREATE FUNCTION tensile._job_status() RETURNS text
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN j.model IS NULL AND j.kind NOT IN ('calibrate', 'evaluate') THEN 'no_model'
                WHEN j.cancel_requested OR j.automatic AND j.options ? 'stop' THEN 'cancel'
                WHEN t.refusal IS NOT NULL THEN 'refused' ELSE 'ok' END
    FROM tensile.jobs j LEFT JOIN tensile.traces t ON t.job = j.id WHERE j.id = tensile._my_job()
$$;

CREATE FUNCTION tensile._job_rows(rows bigint) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile.jobs SET rows = $1 WHERE id = tensile._my_job();
    SELECT tensile._notify(-1) FROM tensile.jobs j WHERE j.id = tensile._my_job() AND j.tuning IS NOT NULL;
$$;

CREATE FUNCTION tensile._job_checkpoint(generation int, seq int, data bytea) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile.checkpoints (job, generation) VALUES (tensile._my_job(), $1) ON CONFLICT DO NOTHING;
    INSERT INTO tensile.checkpoint_chunks (job, generation, seq, data) VALUES (tensile._my_job(), $1, $2, $3);
$$;

-- Mark the checkpoint as complete, and reset the number of faults of a job that makes progress.
CREATE FUNCTION tensile._job_checkpoint_done(generation int, meta jsonb) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile.checkpoints SET meta = $2 WHERE job = tensile._my_job() AND generation = $1;
    DELETE FROM tensile.checkpoints WHERE job = tensile._my_job() AND generation <> $1;
    UPDATE tensile.jobs SET retries = 0, fingerprint = coalesce($2->>'fingerprint', fingerprint)
        WHERE id = tensile._my_job();
$$;

CREATE FUNCTION tensile._job_checkpoint_read(seq int) RETURNS bytea
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT k.data FROM tensile.checkpoint_chunks k
    WHERE k.job = tensile._my_job() AND k.seq = $1
      AND k.generation = (SELECT max(c.generation) FROM tensile.checkpoints c
                          WHERE c.job = tensile._my_job() AND c.meta IS NOT NULL)
$$;

-- METRICS frame: keys that are not columns of epochs are metrics; a metric that does not apply to the task is null.
CREATE FUNCTION tensile._job_metric(metrics jsonb) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile.epochs (job, epoch, split, samples, seconds)
        SELECT tensile._my_job(), r.epoch, r.split, r.samples, r.seconds
        FROM jsonb_to_record($1) AS r (epoch int, split text, samples bigint, seconds float8)
        ON CONFLICT (job, epoch, split)
        DO UPDATE SET samples = EXCLUDED.samples, seconds = EXCLUDED.seconds, at = clock_timestamp();
    DELETE FROM tensile.metrics m
        WHERE m.job = tensile._my_job() AND m.epoch = ($1->>'epoch')::int AND m.split = $1->>'split';
    INSERT INTO tensile.metrics (job, epoch, split, metric, value)
        SELECT tensile._my_job(), ($1->>'epoch')::int, $1->>'split', e.key, e.value::float8
        FROM jsonb_each_text($1 - '{epoch,split,samples,seconds}'::text[]) e
        WHERE e.value IS NOT NULL;
$$;

-- Add a version of the job's model, which is not visible yet: its weights follow in chunks, each in its own
-- transaction, and it is complete when the job has finished. Any other end of the attempt deletes it.
CREATE FUNCTION tensile._job_version(task text, preprocessing jsonb, metrics jsonb, fingerprint text,
                                     training jsonb DEFAULT NULL, reference jsonb DEFAULT NULL) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile.jobs;
    m tensile.models;
    result bigint;
BEGIN
    SELECT * INTO j FROM tensile.jobs WHERE id = tensile._my_job();
    m := tensile._trained_model(j);
    INSERT INTO tensile.model_versions (model, version, job, task, preprocessing, architecture, metrics, rows, training,
                                        reference)
        VALUES (m.id, tensile._next_version(m.id), j.id, _job_version.task, _job_version.preprocessing,
                coalesce(j.architecture, m.architecture), _job_version.metrics, j.rows, _job_version.training,
                _job_version.reference)
        RETURNING id INTO result;
    UPDATE tensile.jobs
        SET fingerprint = _job_version.fingerprint, kept_epoch = (_job_version.metrics->>'epoch')::int,
            stopped = _job_version.training->>'stopped'
        WHERE id = j.id;
    RETURN result;
END $$;

CREATE FUNCTION tensile._job_weights(version bigint, seq int, data bytea) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO tensile.model_weights (version, seq, data)
        SELECT v.id, _job_weights.seq, _job_weights.data FROM tensile.model_versions v
        WHERE v.id = _job_weights.version AND v.job = tensile._my_job() AND v.weight_bytes IS NULL;
    IF NOT FOUND THEN
        PERFORM tensile._trained_model(j) FROM tensile.jobs j WHERE j.id = tensile._my_job();
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('version %s does not belong to job %s', version, tensile._my_job());
    END IF;
END $$;

-- TRACE frame: the header, a trace for each graph, and the first time the operators and tensors of the first
-- graph. After its first trace, a job waits for a plan.
CREATE FUNCTION tensile._job_trace(header jsonb, traces bytea[], tables jsonb) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j bigint := tensile._my_job();
    h record;
BEGIN
    -- One without graphs waits with each claim. A captured job that goes on under its plan meanwhile does not.
    IF cardinality(_job_trace.traces) = 0 OR NOT EXISTS (SELECT FROM tensile.traces t WHERE t.job = j) THEN
        PERFORM tensile._job_waits_for();
    END IF;
    SELECT * INTO h FROM jsonb_to_record(header) AS (device text, profile jsonb, revision int, policy text,
        fingerprint text, overhead_bytes bigint, persistent_bytes bigint, parameters bigint, vanilla_bytes bigint,
        least_bytes bigint, operator text, graphs jsonb, load float8, torch text);
    INSERT INTO tensile.traces AS t (job, device, revision, policy, fingerprint, overhead_bytes, persistent_bytes,
                                     parameters, vanilla_bytes, least_bytes, largest_operator, graphs, traces, load,
                                     torch, profile)
        VALUES (j, h.device, h.revision, h.policy, h.fingerprint, h.overhead_bytes, h.persistent_bytes,
                h.parameters, h.vanilla_bytes, h.least_bytes, h.operator, h.graphs, _job_trace.traces, h.load, h.torch,
                CASE WHEN tensile._on_cluster(h.device) THEN h.profile END)
        ON CONFLICT (job) DO UPDATE SET device = EXCLUDED.device, revision = EXCLUDED.revision,
            policy = EXCLUDED.policy, fingerprint = EXCLUDED.fingerprint, overhead_bytes = EXCLUDED.overhead_bytes,
            persistent_bytes = EXCLUDED.persistent_bytes, parameters = EXCLUDED.parameters,
            vanilla_bytes = EXCLUDED.vanilla_bytes, least_bytes = EXCLUDED.least_bytes,
            largest_operator = EXCLUDED.largest_operator, graphs = EXCLUDED.graphs, traces = EXCLUDED.traces,
            refusal = NULL, captured_at = clock_timestamp(), load = EXCLUDED.load, torch = EXCLUDED.torch,
            profile = EXCLUDED.profile;
    UPDATE tensile.trials k SET least_bytes = h.least_bytes + h.overhead_bytes WHERE k.job = j;
    IF h.profile <> 'null' THEN
        PERFORM tensile._check_profile(h.device, h.profile);
        IF NOT tensile._on_cluster(h.device) THEN
            INSERT INTO tensile.device_profiles (device, profile) VALUES (h.device, h.profile) ON CONFLICT DO NOTHING;
        END IF;
    END IF;
    IF tables IS NOT NULL THEN -- another graph: latencies and footprint of the previous one do not apply
        DELETE FROM tensile.latencies l WHERE l.job = j;
        DELETE FROM tensile.footprints f WHERE f.job = j;
        PERFORM tensile._keep_tables(j, tables);
    END IF;
    PERFORM tensile._notify(j);
END $$;

-- The first profile of a device is used for the jobs of all roles, so an impossible one fails the job that sends it.
CREATE FUNCTION tensile._check_profile(device text, profile jsonb) RETURNS void
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
                HINT = 'The executor measured this value; code of the model may have disturbed the measurement.';
        END IF;
    END LOOP;
END $$;

-- ARCHITECTURE frame: what the executor has chosen by the values of the arrays for a model without an architecture. The
-- job's code may call this, too, so it is checked as in register_model.
CREATE FUNCTION tensile._job_architecture(architecture jsonb, reason text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    own bigint := tensile._my_job();
    j tensile.jobs;
    m tensile.models;
BEGIN
    SELECT * INTO j FROM tensile.jobs WHERE id = own;
    m := tensile._trained_model(j);
    IF m.architecture IS NOT NULL OR j.architecture IS NOT NULL THEN
        RETURN;
    END IF;
    PERFORM tensile._check_architecture($1), tensile._check_code(j.owner, $1);
    UPDATE tensile.models SET architecture = $1, architecture_reason = $2, updated_at = clock_timestamp()
        WHERE id = m.id;
    UPDATE tensile.jobs SET architecture = $1, architecture_reason = $2 WHERE id = own;
    PERFORM tensile._settle_space(j.tuning, $1);
END $$;

-- SETTINGS frame: what the executor has chosen of the settings that the job leaves open
CREATE FUNCTION tensile._job_settings(settings jsonb) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile.jobs
        SET chosen_batch_size = CASE WHEN batch_size IS NULL THEN ($1->>'batch_size')::int END,
            chosen_learning_rate = CASE WHEN learning_rate IS NULL THEN ($1->>'learning_rate')::float8 END
        WHERE id = tensile._my_job()
$$;

-- CHOICE frame: the batch size chosen for the job, and those that it was compared with
CREATE FUNCTION tensile._job_choice(choice jsonb) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j bigint := tensile._my_job();
BEGIN
    UPDATE tensile.jobs SET chosen_batch_size = (choice->>'batch_size')::int,
            chosen_learning_rate = (choice->>'learning_rate')::float8
        WHERE id = j;
    DELETE FROM tensile.batch_sizes b WHERE b.job = j;
    INSERT INTO tensile.batch_sizes (job, batch_size, chosen, feasible, learning_rate, samples_per_s, iteration_us,
                                     stall_us, device_bytes, measured_us, reason)
        SELECT j, c.batch_size, c.batch_size = (choice->>'batch_size')::int, c.feasible, c.learning_rate,
               c.samples_per_s, c.iteration_us, c.stall_us, c.device_bytes, c.measured_us, c.reason
        FROM jsonb_to_recordset(choice->'candidates') AS c (
             batch_size int, feasible bool, learning_rate float8, samples_per_s float8, iteration_us float8,
             stall_us float8, device_bytes bigint, measured_us float8, reason text);
    PERFORM tensile._log('batch size', j, NULL, choice->>'device', choice->>'reason',
                         choice - '{device,reason}'::text[]);
    PERFORM tensile._notify(j);
END $$;

CREATE FUNCTION tensile._keep_tables(job bigint, tables jsonb) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    DELETE FROM tensile.operators o WHERE o.job = $1;
    DELETE FROM tensile.tensors t WHERE t.job = $1;
    INSERT INTO tensile.operators (job, operator, target, phase, module, source, signature, flops, bytes, random,
                                   tensors)
        SELECT $1, o.operator, o.target, o.phase, o.module, o.source, o.signature, o.flops, o.bytes, o.random, o.tensors
        FROM jsonb_to_recordset($2->'operators') AS o (operator int, target text, phase text, module text,
             source text, signature text, flops bigint, bytes bigint, random bool, tensors int[]);
    INSERT INTO tensile.tensors (job, tensor, name, kind, dtype, shape, bytes, first_operator, last_operator)
        SELECT $1, t.tensor, t.name, t.kind, t.dtype, t.shape, t.bytes, t.first_operator, t.last_operator
        FROM jsonb_to_recordset($2->'tensors') AS t (tensor int, name text, kind text, dtype text, shape bigint[],
             bytes bigint, first_operator int, last_operator int);
$$;

-- The job waits; `reason`: what for.
CREATE FUNCTION tensile._job_waits_for(reason text DEFAULT 'its memory is being planned') RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile.jobs SET state = 'waiting', reason = $1
        WHERE id = tensile._my_job() AND state IN ('running', 'waiting');
    SELECT tensile._notify(tensile._my_job());
$$;

-- The job waits no more.
CREATE FUNCTION tensile._job_admitted() RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile.jobs SET state = 'running', reason = NULL WHERE id = tensile._my_job() AND state = 'waiting';
    SELECT tensile._notify(tensile._my_job());
$$;

-- LATENCY frame: microseconds by operator; NaN: unknown
CREATE FUNCTION tensile._job_latency(header jsonb, predicted real[], measured real[], average real[]) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile.latencies (job, predicted, measured, average, samples, total_us, load, average_load,
                                   alone_us)
        SELECT t.job, $2, $3, $4, h.samples, h.total_us, h.load, h.average_load, h.alone_us
        FROM tensile.traces t,
             jsonb_to_record($1) AS h (samples int, total_us float8, load float8, average_load float8, alone_us float8)
        WHERE t.job = tensile._my_job()
        ON CONFLICT (job) DO UPDATE SET predicted = EXCLUDED.predicted, measured = EXCLUDED.measured,
            average = EXCLUDED.average, samples = EXCLUDED.samples, total_us = EXCLUDED.total_us, load = EXCLUDED.load,
            average_load = EXCLUDED.average_load, alone_us = EXCLUDED.alone_us, at = clock_timestamp();
    SELECT tensile._notify(tensile._my_job());
$$;

-- SPARSITY frame; `moved`: bytes, -1: unknown
CREATE FUNCTION tensile._job_sparsity(revision int, tensors int[], zero_share real[], run_share real[],
                                      lz4_share real[], moved bigint[]) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile.sparsities (job, revision, tensors, zero_share, run_share, lz4_share, moved)
        SELECT t.job, $1, $2, $3, $4, $5, array_replace($6, -1::bigint, NULL)
        FROM tensile.traces t WHERE t.job = tensile._my_job()
        ON CONFLICT (job) DO UPDATE SET revision = EXCLUDED.revision, tensors = EXCLUDED.tensors,
            zero_share = EXCLUDED.zero_share, run_share = EXCLUDED.run_share, lz4_share = EXCLUDED.lz4_share,
            moved = EXCLUDED.moved, at = clock_timestamp();
    SELECT tensile._notify(tensile._my_job());
$$;

-- Store codec times measured by an executor; only a calibration replaces those that exist. Those of a cluster's device
-- belong to the job's trace.
CREATE FUNCTION tensile._job_codec_times(device text, times jsonb, relative_error float8) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._my_job();
    UPDATE tensile.traces t SET codec_times = $2 WHERE t.job = tensile._my_job() AND tensile._on_cluster(t.device);
    INSERT INTO tensile.codec_times (device, times, relative_error)
        SELECT $1, $2, $3
        WHERE NOT EXISTS (SELECT FROM tensile.traces t
                          WHERE t.job = tensile._my_job() AND tensile._on_cluster(t.device))
        ON CONFLICT ON CONSTRAINT codec_times_pkey
        DO UPDATE SET times = EXCLUDED.times, relative_error = EXCLUDED.relative_error,
            measured_at = clock_timestamp()
        WHERE (SELECT j.kind FROM tensile.jobs j WHERE j.id = tensile._my_job()) = 'calibrate'
$$;

-- The last reports of the job's ranks: [{rank, node, device, state, step, samples_per_s, device_bytes}]
CREATE FUNCTION tensile._job_ranks(ranks jsonb) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile.rank_reports (job, ranks) VALUES (tensile._my_job(), $1)
        ON CONFLICT (job) DO UPDATE SET ranks = EXCLUDED.ranks, at = clock_timestamp()
$$;

-- For the JOB frame; null for a job without ranks
CREATE FUNCTION tensile._job_ray() RETURNS jsonb
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._my_job(); -- the next statement does not call it without a row
    SELECT tensile._ray_access()
    FROM tensile.jobs j WHERE j.id = tensile._my_job() AND j.options ? 'ranks'
$$;

-- Header of the REFUSE frame for a job that cannot be given memory, or null
CREATE FUNCTION tensile._job_refusal() RETURNS jsonb
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._my_job(); -- the next statement does not call it without a row
    SELECT t.refusal FROM tensile.traces t WHERE t.job = tensile._my_job();
$$;

-- Write a line to the log; the scheduler is notified of a rejected plan.
CREATE FUNCTION tensile._job_log(event text, reason text, generation bigint) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile.traces SET rejected = $3 WHERE job = tensile._my_job() AND $1 = 'rejected';
    SELECT tensile._notify(tensile._my_job()) WHERE $1 = 'rejected';
    SELECT tensile._log($1, m.job, $3, (SELECT t.device FROM tensile.traces t WHERE t.job = m.job), $2)
    FROM (SELECT tensile._my_job()) m (job)
$$;

-- Contents of the JOB frame, for the job's worker only
CREATE FUNCTION tensile._job_profiles() RETURNS jsonb
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._my_job();
    SELECT coalesce(jsonb_object_agg(p.device, p.profile), '{}') FROM tensile.device_profiles p;
$$;
CREATE FUNCTION tensile._job_codecs() RETURNS jsonb
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._my_job();
    SELECT coalesce(jsonb_object_agg(c.device, jsonb_build_object('times', c.times)), '{}')
    FROM tensile.codec_times c;
$$;
CREATE FUNCTION tensile._job_latency_models() RETURNS TABLE (device text, models bytea)
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._my_job();
    SELECT m.device, m.models FROM tensile.latency_models m;
$$;

-- Store the result of a calibration. `known_kinds`: those of the operators that were to be measured. Those of jobs count as
-- known as well, because a kind that cannot be measured must not cause another calibration.
CREATE FUNCTION tensile._calibrate_done(device text, profile jsonb, models bytea, kinds int, samples int, error float8,
                                        known_kinds text[], torch text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM tensile.jobs j WHERE j.id = tensile._my_job() AND j.kind = 'calibrate') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('job %s is not a calibration', tensile._my_job());
    END IF;
    INSERT INTO tensile.device_profiles (device, profile) VALUES ($1, $2)
        ON CONFLICT ON CONSTRAINT device_profiles_pkey
        DO UPDATE SET profile = EXCLUDED.profile, measured_at = clock_timestamp();
    INSERT INTO tensile.latency_models (device, models, kinds, samples, error, job, known_kinds, torch)
        VALUES ($1, $3, $4, $5, $6, tensile._my_job(),
                ARRAY(SELECT unnest($7) UNION
                      SELECT tensile._operator_kind(o.target, o.signature)
                      FROM tensile.operators o JOIN tensile.traces t ON t.job = o.job
                      WHERE t.device = $1 ORDER BY 1),
                $8)
        ON CONFLICT ON CONSTRAINT latency_models_pkey
        DO UPDATE SET models = EXCLUDED.models, kinds = EXCLUDED.kinds, samples = EXCLUDED.samples,
            error = EXCLUDED.error, job = EXCLUDED.job, known_kinds = EXCLUDED.known_kinds, torch = EXCLUDED.torch,
            calibrated_at = clock_timestamp();
    PERFORM tensile._log('calibration', tensile._my_job(), NULL, $1, 'finished',
                         jsonb_build_object('kinds', $4, 'samples', $5, 'error', $6));
END $$;

CREATE FUNCTION tensile._job_end(state text, sqlstate text DEFAULT NULL, error text DEFAULT NULL,
                                 hint text DEFAULT NULL, detail text DEFAULT NULL, traceback text DEFAULT NULL,
                                 warnings text[] DEFAULT NULL, reason text DEFAULT NULL)
    RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._end_job(tensile._my_job(), $1, $2, $3, $4, $5, $6, $7, $8)
$$;

CREATE FUNCTION tensile._job_interrupt(reason text, retry bool, traceback text DEFAULT NULL) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._interrupt_job(tensile._my_job(), $1, $2, $3)
$$;
