-- The worker: beginning, checkpoints, metrics, the version and the end of its job

CREATE FUNCTION tensile_worker._feed(fd int, query text, target text, settings jsonb, split_by text DEFAULT NULL,
                                     validation_query text DEFAULT NULL) RETURNS bigint
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_feed';

-- The version whose weights training begins with (option start = deployed), as in the JOB frame; null: none. All
-- attempts begin with the same one, as long as it exists.
CREATE FUNCTION tensile_internal._start_of(j tensile_internal.jobs) RETURNS jsonb
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v tensile_internal.model_versions;
BEGIN
    IF coalesce(j.options->>'start', 'scratch') <> 'deployed' THEN
        RETURN NULL;
    END IF;
    SELECT * INTO v FROM tensile_internal.model_versions o WHERE o.id = j.start_version;
    IF NOT FOUND THEN
        SELECT o.* INTO v FROM tensile_internal.model_versions o JOIN tensile_internal.models m ON m.id = o.model_id
            WHERE m.id = j.model_id AND o.version = m.deployed_version;
        UPDATE tensile_internal.jobs o SET start_version = v.id WHERE o.id = j.id;
    END IF;
    RETURN CASE WHEN v.id IS NOT NULL THEN
        jsonb_build_object('id', v.id, 'version', v.version, 'architecture', v.architecture,
                           'preprocessing', v.preprocessing, 'weight_bytes', v.weight_bytes) END;
END $$;

-- A chunk of the weights of that version; null past the end
CREATE FUNCTION tensile_worker._job_start_weights(seq int) RETURNS bytea
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_worker._my_job(); -- the next statement does not call it without a row
    SELECT w.data FROM tensile_internal.model_weights w JOIN tensile_internal.jobs j ON j.start_version = w.version
    WHERE j.id = tensile_worker._my_job() AND w.seq = $1
$$;

-- True for the device of a job with ranks: it belongs to that job alone, and is not on this machine.
-- TENSILE_CLUSTER_PREFIX in csrc/state/device.h and pyworker/cluster_device.py have the same rule.
CREATE FUNCTION tensile_internal._on_cluster(device text) RETURNS bool
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT starts_with($1, 'ray:')
$$;

-- Name of the file with the rows of a tuning, among the server's temporary files. Numbers of tunings may come again,
-- when the extension is created anew.
CREATE FUNCTION tensile_internal._rows_file(t tensile_internal.tunings) RETURNS text
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT format('pgsql_tmp.pg_tensile_tuning.%s.%s', ($1).id, (1e6 * extract(epoch FROM ($1).submitted_at))::bigint)
$$;

-- With extra_float_digits below 1, the numbers in JSON would be rounded ones.
CREATE FUNCTION tensile_worker._job_begin(pid int) RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET extra_float_digits = 1
AS $$
DECLARE
    j tensile_internal.jobs;
BEGIN
    UPDATE tensile_internal.jobs SET state = 'running', reason = NULL,
        started_at = coalesce(started_at, clock_timestamp()),
        role_memory = CASE WHEN NOT automatic
            THEN tensile_internal._role_limit(owner_id, 'pg_tensile.role_job_memory') << 10 END, -- kB
        role_time = CASE WHEN NOT automatic
            THEN tensile_internal._role_limit(owner_id, 'pg_tensile.role_job_time') * interval '1 s' END
        WHERE id = tensile_worker._my_job() AND state = 'starting'
        RETURNING * INTO j;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('job %s is not in state "starting"', tensile_worker._my_job());
    END IF;
    DELETE FROM tensile_internal.model_versions v WHERE v.job = j.id AND v.weight_bytes IS NULL;
    DELETE FROM tensile_internal.checkpoints c WHERE c.job = j.id AND c.meta IS NULL;
    DELETE FROM tensile_internal.traces t WHERE t.job = j.id;
    PERFORM tensile_internal._notify(j.id), tensile_internal._log_event(j.id, 'started');
    RETURN to_jsonb(j) - '{owner,owner_id,state,reason,sqlstate,error,hint,detail,traceback,warnings}'::text[]
        || jsonb_build_object('attempt', j.attempts, 'max_time_s', extract(epoch FROM least(j.max_time, j.role_time)),
               'running', (SELECT count(*) FROM tensile_internal.jobs o
                           WHERE o.ended_at IS NULL AND o.state IN ('starting', 'running')
                             AND (o.id = j.id OR NOT o.automatic)), -- another automatic one is about to end
               'architecture', coalesce(j.architecture, (SELECT m.architecture FROM tensile_internal.models m
                                                         WHERE m.id = j.model_id)),
               'start', tensile_internal._start_of(j),
               'rows_file', (SELECT tensile_internal._rows_file(t) FROM tensile_internal.tunings t WHERE t.id = j.tuning),
               'tuning_rows', (SELECT t.rows FROM tensile_internal.tunings t WHERE t.id = j.tuning),
               'checkpoint', (SELECT c.meta FROM tensile_internal.checkpoints c WHERE c.job = j.id
                              ORDER BY c.generation DESC LIMIT 1));
END $$;

CREATE FUNCTION tensile_worker._job_status() RETURNS text
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN j.model_id IS NULL AND j.kind NOT IN ('calibrate', 'evaluate') THEN 'no_model'
                WHEN j.cancel_requested OR j.automatic AND j.options ? 'stop' THEN 'cancel'
                WHEN t.refusal IS NOT NULL THEN 'refused' ELSE 'ok' END
    FROM tensile_internal.jobs j LEFT JOIN tensile_internal.traces t ON t.job = j.id
        WHERE j.id = tensile_worker._my_job()
$$;

CREATE FUNCTION tensile_worker._job_rows(rows bigint) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile_internal.jobs SET rows = $1 WHERE id = tensile_worker._my_job();
    SELECT tensile_internal._notify(-1) FROM tensile_internal.jobs j
        WHERE j.id = tensile_worker._my_job() AND j.tuning IS NOT NULL;
$$;

CREATE FUNCTION tensile_worker._job_checkpoint(generation int, seq int, data bytea) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile_internal.checkpoints (job, generation) VALUES (tensile_worker._my_job(), $1)
        ON CONFLICT DO NOTHING;
    INSERT INTO tensile_internal.checkpoint_chunks (job, generation, seq, data)
        VALUES (tensile_worker._my_job(), $1, $2, $3);
$$;

-- Mark the checkpoint as complete, and reset the number of faults of a job that makes progress.
CREATE FUNCTION tensile_worker._job_checkpoint_done(generation int, meta jsonb) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile_internal.checkpoints SET meta = $2 WHERE job = tensile_worker._my_job() AND generation = $1;
    DELETE FROM tensile_internal.checkpoints WHERE job = tensile_worker._my_job() AND generation <> $1;
    UPDATE tensile_internal.jobs SET retries = 0, fingerprint = coalesce($2->>'fingerprint', fingerprint)
        WHERE id = tensile_worker._my_job();
$$;

CREATE FUNCTION tensile_worker._job_checkpoint_read(seq int) RETURNS bytea
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT k.data FROM tensile_internal.checkpoint_chunks k
    WHERE k.job = tensile_worker._my_job() AND k.seq = $1
      AND k.generation = (SELECT max(c.generation) FROM tensile_internal.checkpoints c
                          WHERE c.job = tensile_worker._my_job() AND c.meta IS NOT NULL)
$$;

-- METRICS frame: keys that are not columns of epochs are metrics; a metric that does not apply to the task is null.
CREATE FUNCTION tensile_worker._job_metric(metrics jsonb) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile_internal.epochs (job, epoch, split, samples, seconds)
        SELECT tensile_worker._my_job(), r.epoch, r.split, r.samples, r.seconds
        FROM jsonb_to_record($1) AS r (epoch int, split text, samples bigint, seconds float8)
        ON CONFLICT (job, epoch, split)
        DO UPDATE SET samples = EXCLUDED.samples, seconds = EXCLUDED.seconds, at = clock_timestamp();
    DELETE FROM tensile_internal.metrics m
        WHERE m.job = tensile_worker._my_job() AND m.epoch = ($1->>'epoch')::int AND m.split = $1->>'split';
    INSERT INTO tensile_internal.metrics (job, epoch, split, metric, value)
        SELECT tensile_worker._my_job(), ($1->>'epoch')::int, $1->>'split', e.key, e.value::float8
        FROM jsonb_each_text($1 - '{epoch,split,samples,seconds}'::text[]) e
        WHERE e.value IS NOT NULL;
$$;

-- Add a version of the job's model, which is not visible yet: its weights follow in chunks, each in its own
-- transaction, and it is complete when the job has finished, or with _job_first_version. Any other end of the attempt
-- deletes it. `architecture`: what the version consists of. The job's code may call this, too, so it is checked.
CREATE FUNCTION tensile_worker._job_version(task text, preprocessing jsonb, metrics jsonb, fingerprint text,
                                            training jsonb DEFAULT NULL, reference jsonb DEFAULT NULL,
                                            architecture jsonb DEFAULT NULL) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile_internal.jobs;
    m tensile_internal.models;
    result bigint;
BEGIN
    SELECT * INTO j FROM tensile_internal.jobs WHERE id = tensile_worker._my_job();
    m := tensile_internal._trained_model(j);
    architecture := coalesce(nullif(architecture, 'null'), j.architecture, m.architecture);
    PERFORM tensile_internal._check_architecture(architecture), tensile_internal._check_code(j.owner_id, architecture);
    INSERT INTO tensile_internal.model_versions (model_id, version, job, task, preprocessing, architecture, metrics,
                                                 rows, training, reference)
        VALUES (m.id, tensile_internal._next_version(m.id), j.id, _job_version.task, _job_version.preprocessing,
                _job_version.architecture, _job_version.metrics, j.rows, _job_version.training, _job_version.reference)
        RETURNING id INTO result;
    UPDATE tensile_internal.jobs
        SET fingerprint = _job_version.fingerprint, kept_epoch = (_job_version.metrics->>'epoch')::int,
            stopped = _job_version.training->>'stopped', baseline = _job_version.metrics->'baseline'
        WHERE id = j.id;
    RETURN result;
END $$;

CREATE FUNCTION tensile_worker._job_weights(version bigint, seq int, data bytea) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO tensile_internal.model_weights (version, seq, data)
        SELECT v.id, _job_weights.seq, _job_weights.data FROM tensile_internal.model_versions v
        WHERE v.id = _job_weights.version AND v.job = tensile_worker._my_job() AND v.weight_bytes IS NULL;
    IF NOT FOUND THEN
        PERFORM tensile_internal._trained_model(j) FROM tensile_internal.jobs j WHERE j.id = tensile_worker._my_job();
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('version %s does not belong to job %s', version, tensile_worker._my_job());
    END IF;
END $$;

-- Make the first version of a job that goes on visible, and deploy it as the job's options say. With if_better, it
-- is compared with the deployed version only at the end, when another version has replaced it.
CREATE FUNCTION tensile_worker._job_first_version() RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile_internal.jobs;
    m tensile_internal.models;
BEGIN
    SELECT * INTO j FROM tensile_internal.jobs WHERE id = tensile_worker._my_job();
    m := tensile_internal._trained_model(j);
    PERFORM tensile_internal._make_visible(j);
    IF tensile_internal._deploys(j.options) = 'always'
       OR tensile_internal._deploys(j.options) = 'if_better' AND m.deployed_version IS NULL THEN
        PERFORM tensile_internal._deploy(m, (SELECT o.version FROM tensile_internal.jobs o WHERE o.id = j.id), j.owner,
                                         format('first version of job %s', j.id), job => j.id);
    END IF;
    PERFORM tensile_internal._notify(j.id);
END $$;

-- ARCHITECTURE frame: what the trainer has chosen by the values of the arrays for a model without an architecture. The
-- job's code may call this, too, so it is checked as in register_model.
CREATE FUNCTION tensile_worker._job_architecture(architecture jsonb, reason text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    own bigint := tensile_worker._my_job();
    j tensile_internal.jobs;
    m tensile_internal.models;
BEGIN
    SELECT * INTO j FROM tensile_internal.jobs WHERE id = own;
    m := tensile_internal._trained_model(j);
    IF m.architecture IS NOT NULL OR j.architecture IS NOT NULL THEN
        RETURN;
    END IF;
    PERFORM tensile_internal._check_architecture($1), tensile_internal._check_code(j.owner_id, $1);
    UPDATE tensile_internal.models SET architecture = $1, architecture_reason = $2, updated_at = clock_timestamp()
        WHERE id = m.id;
    UPDATE tensile_internal.jobs SET architecture = $1, architecture_reason = $2 WHERE id = own;
    PERFORM tensile_internal._settle_space(j.tuning, $1);
END $$;

-- SETTINGS frame: what the trainer has chosen of the settings that the job leaves open
CREATE FUNCTION tensile_worker._job_settings(settings jsonb) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile_internal.jobs
        SET chosen_batch_size = CASE WHEN batch_size IS NULL THEN ($1->>'batch_size')::int END,
            chosen_learning_rate = CASE WHEN learning_rate IS NULL THEN ($1->>'learning_rate')::float8 END
        WHERE id = tensile_worker._my_job()
$$;

-- CHOICE frame: the batch size chosen for the job, and those that it was compared with
CREATE FUNCTION tensile_worker._job_choice(choice jsonb) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j bigint := tensile_worker._my_job();
BEGIN
    UPDATE tensile_internal.jobs SET chosen_batch_size = (choice->>'batch_size')::int,
            chosen_learning_rate = (choice->>'learning_rate')::float8
        WHERE id = j;
    DELETE FROM tensile_internal.batch_sizes b WHERE b.job = j;
    INSERT INTO tensile_internal.batch_sizes (job, batch_size, chosen, feasible, learning_rate, samples_per_s,
                                              iteration_us, stall_us, device_bytes, measured_us, reason)
        SELECT j, c.batch_size, c.batch_size = (choice->>'batch_size')::int, c.feasible, c.learning_rate,
               c.samples_per_s, c.iteration_us, c.stall_us, c.device_bytes, c.measured_us, c.reason
        FROM jsonb_populate_recordset(NULL::tensile_internal.batch_sizes, choice->'candidates') c;
    PERFORM tensile_internal._log('batch size', j, NULL, choice->>'device', choice->>'reason',
                                  choice - '{device,reason}'::text[]);
    PERFORM tensile_internal._notify(j);
END $$;

-- The last reports of the job's ranks: [{rank, node, device, state, step, samples_per_s, device_bytes}]
CREATE FUNCTION tensile_worker._job_ranks(ranks jsonb) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile_internal.rank_reports (job, ranks) VALUES (tensile_worker._my_job(), $1)
        ON CONFLICT (job) DO UPDATE SET ranks = EXCLUDED.ranks, at = clock_timestamp()
$$;

-- For the JOB frame; null for a job without ranks
CREATE FUNCTION tensile_worker._job_ray() RETURNS jsonb
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_worker._my_job(); -- the next statement does not call it without a row
    SELECT tensile_internal._ray_access()
    FROM tensile_internal.jobs j WHERE j.id = tensile_worker._my_job() AND j.options ? 'ranks'
$$;

-- Write a line to the log; the scheduler is notified of a rejected plan.
CREATE FUNCTION tensile_worker._job_log(event text, reason text, generation bigint) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile_internal.traces SET rejected = $3 WHERE job = tensile_worker._my_job() AND $1 = 'rejected';
    SELECT tensile_internal._notify(tensile_worker._my_job()) WHERE $1 = 'rejected';
    SELECT tensile_internal._log($1, m.job, $3, (SELECT t.device FROM tensile_internal.traces t WHERE t.job = m.job),
                                 $2)
    FROM (SELECT tensile_worker._my_job()) m (job)
$$;

CREATE FUNCTION tensile_worker._job_end(state text, sqlstate text DEFAULT NULL, error text DEFAULT NULL,
                                        hint text DEFAULT NULL, detail text DEFAULT NULL, traceback text DEFAULT NULL,
                                        warnings text[] DEFAULT NULL, reason text DEFAULT NULL) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_internal._end_job(tensile_worker._my_job(), $1, $2, $3, $4, $5, $6, $7, $8)
$$;

CREATE FUNCTION tensile_worker._job_interrupt(reason text, retry bool, traceback text DEFAULT NULL) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_internal._interrupt_job(tensile_worker._my_job(), $1, $2, $3)
$$;
