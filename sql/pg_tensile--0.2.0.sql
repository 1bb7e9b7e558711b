/*
 * pg_tensile 0.2.0: the catalogue and the SQL surface.
 *
 * Schemas: functions for users go to the extension's schema, everything else to "tensile". Names in "tensile" that
 * begin with an underscore are private.
 *
 * Who may write: nobody writes the tables directly. A public function that changes something is the C function
 * tensile_forward: it calls the private function tensile._<same name>, a SECURITY DEFINER function nobody else may
 * execute, with the caller's OID as the first argument (inside SECURITY DEFINER the caller can't be told any more).
 * The bookkeeping functions tensile._job_* take no job: they ask tensile._my_job(), which raises outside a worker.
 *
 * Who may use it: members of tensile_user, who have USAGE of schema "tensile" and EXECUTE on the public functions. What
 * PUBLIC has in that schema (SELECT, and EXECUTE on what views and workers call) is of no use without USAGE.
 *
 * Who may read: row-level security. Own rows, or for members of pg_read_all_stats all of them except weights and
 * checkpoints. Superusers bypass it.
 *
 * Owners are kept as OID and name and both must match: the OID of a dropped role may be used again, and a restore into
 * another cluster finds the role by its name. The OID is null while no role has that name.
 */

\echo Use "CREATE EXTENSION pg_tensile" to load this file. \quit

-- Its members may use the extension; PUBLIC may not. Roles belong to the cluster, so another database may have made it.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname OPERATOR(pg_catalog.=) 'tensile_user') THEN
        CREATE ROLE tensile_user NOLOGIN;
    END IF;
EXCEPTION WHEN duplicate_object OR unique_violation THEN
    NULL; -- by another session, at the same time
END $$;

CREATE SCHEMA tensile;
GRANT USAGE ON SCHEMA tensile TO tensile_user;
COMMENT ON SCHEMA tensile IS
    'pg_tensile: models, jobs, metrics and live views; names that begin with an underscore are private';

------------------------------------------------------------------------------------------------------------------------
-- C functions: private
------------------------------------------------------------------------------------------------------------------------

CREATE FUNCTION tensile._version() RETURNS text
    LANGUAGE C STABLE AS 'MODULE_PATHNAME', 'tensile_version';

-- Waiting and notifying
CREATE FUNCTION tensile._wait_for_change(timeout_ms int) RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_wait_for_change';
CREATE FUNCTION tensile._notify(job bigint) RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_notify';
CREATE FUNCTION tensile._notify_stop(job bigint) RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_notify_stop';
CREATE FUNCTION tensile._log_job(line text) RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_log_job';
CREATE FUNCTION tensile._submitted_here(job bigint) RETURNS bool
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_submitted_here';
CREATE FUNCTION tensile._models_changed() RETURNS trigger
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_models_changed';

-- Workers
CREATE FUNCTION tensile._process() RETURNS text
    LANGUAGE C STABLE AS 'MODULE_PATHNAME', 'tensile_my_process';
CREATE FUNCTION tensile._my_job() RETURNS bigint
    LANGUAGE C STABLE AS 'MODULE_PATHNAME', 'tensile_my_job';
CREATE FUNCTION tensile._stop_cause() RETURNS text
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_stop_cause';
CREATE FUNCTION tensile._take_interrupt() RETURNS bool
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_take_interrupt';
CREATE FUNCTION tensile._worker_end(job bigint, OUT terminated bool, OUT error text) RETURNS record
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_worker_end';
CREATE FUNCTION tensile._free_slots() RETURNS int
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_free_slots';
CREATE FUNCTION tensile._launch_worker(job bigint, owner oid) RETURNS text
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_launch_worker';
CREATE FUNCTION tensile._job_slots(OUT job bigint, OUT pid int, OUT state text, OUT seconds float8) RETURNS SETOF record
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_job_slots';
CREATE FUNCTION tensile._report(phase text, epoch int, epochs int, step bigint, steps bigint, loss float8,
                                samples_per_s float8, device_bytes bigint, device_peak_bytes bigint,
                                bytes_swapped bigint, stall_us bigint, passive_swap_ins bigint, utilisation float8,
                                raw_bytes_swapped bigint DEFAULT NULL) RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_report';
CREATE FUNCTION tensile._register_device(name text, total_bytes bigint, out_bytes_per_s float8, in_bytes_per_s float8,
                                         overhead_bytes bigint) RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_register_device';
CREATE FUNCTION tensile._fetch_plan(after bigint, OUT generation bigint, OUT events bytea, OUT planned_bytes bigint,
                                    OUT granted_bytes bigint, OUT link_share float8, OUT plan_order bytea)
    RETURNS SETOF record
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_fetch_plan';
CREATE FUNCTION tensile._acknowledge_plan(generation bigint) RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_acknowledge_plan';
CREATE FUNCTION tensile._feed(fd int, query text, target text, settings jsonb) RETURNS bigint
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_feed';

-- Scheduler and predictor
CREATE FUNCTION tensile._publish_plan(job bigint, events bytea, planned_bytes bigint, granted_bytes bigint,
                                      link_share float8, plan_order bytea DEFAULT '') RETURNS bigint
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_publish_plan';
CREATE FUNCTION tensile._grants(OUT job bigint, OUT device text, OUT granted_bytes bigint, OUT overhead_bytes bigint,
                                OUT generation bigint, OUT acknowledged bigint, OUT planned_bytes bigint,
                                OUT plan_granted_bytes bigint) RETURNS SETOF record
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_grants';
CREATE FUNCTION tensile._device_memory(OUT device text, OUT total_bytes bigint, OUT budget_bytes bigint,
                                       OUT inference_bytes bigint) RETURNS SETOF record
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_budgets';
CREATE FUNCTION tensile._inference_memory(device text, total_bytes bigint, least_bytes bigint,
                                          wanted_bytes bigint) RETURNS bigint
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_inference_memory';
CREATE FUNCTION tensile._report_loaded(models bigint[]) RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_report_loaded';
CREATE FUNCTION tensile._predictor_socket() RETURNS text
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_predictor_socket';

-- Shared memory; rows are filtered by role in C
CREATE FUNCTION tensile._progress(OUT job bigint, OUT pid int, OUT phase text, OUT epoch int, OUT epochs int,
                                  OUT step bigint, OUT steps bigint, OUT loss float8, OUT samples_per_s float8,
                                  OUT device_bytes bigint, OUT device_peak_bytes bigint, OUT bytes_swapped bigint,
                                  OUT stall_us bigint, OUT passive_swap_ins bigint, OUT utilisation float8,
                                  OUT raw_bytes_swapped bigint, OUT plan_generation bigint, OUT heartbeat timestamptz)
    RETURNS SETOF record
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_progress';
CREATE FUNCTION tensile._devices(OUT name text, OUT total_bytes bigint, OUT budget_bytes bigint,
                                 OUT granted_bytes bigint, OUT in_use_bytes bigint, OUT inference_bytes bigint,
                                 OUT jobs int, OUT out_bytes_per_s float8, OUT in_bytes_per_s float8,
                                 OUT utilisation float8)
    RETURNS SETOF record
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_devices';
CREATE FUNCTION tensile._plan(OUT job bigint, OUT generation bigint, OUT sequence int, OUT event text,
                              OUT tensor int, OUT version int, OUT trigger_operator int, OUT delay_us bigint,
                              OUT deadline_operator int, OUT bytes bigint, OUT codec text)
    RETURNS SETOF record
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_plan';
CREATE FUNCTION tensile._predictions(OUT version bigint, OUT rows bigint, OUT requests bigint,
                                     OUT unknown_categories bigint)
    RETURNS SETOF record
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_predictions';
CREATE FUNCTION tensile._loaded_models(OUT version bigint, OUT memory_budget bigint, OUT device_bytes bigint,
                                       OUT planned_bytes bigint, OUT host_bytes bigint) RETURNS SETOF record
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_loaded_models';

-- Roles, checks, errors
CREATE FUNCTION tensile._owned(owner oid, name name) RETURNS bool
    LANGUAGE C STABLE STRICT AS 'MODULE_PATHNAME', 'tensile_owned';
CREATE FUNCTION tensile._rules() RETURNS json
    LANGUAGE C IMMUTABLE AS 'MODULE_PATHNAME', 'tensile_rules';
CREATE FUNCTION tensile._nearest(name text, names text[]) RETURNS text
    LANGUAGE C IMMUTABLE STRICT AS 'MODULE_PATHNAME', 'tensile_nearest';
CREATE FUNCTION tensile._raise(sqlstate text, message text, hint text, detail text) RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_raise';

------------------------------------------------------------------------------------------------------------------------
-- Tables
------------------------------------------------------------------------------------------------------------------------

CREATE TABLE tensile.models (
    id               bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    name             text NOT NULL UNIQUE,
    owner            oid,
    owner_name       name NOT NULL,
    architecture     jsonb NOT NULL,
    description      text,
    deployed_version int,
    memory_budget    bigint CHECK (memory_budget OPERATOR(pg_catalog.>) 0),
    created_at       timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    updated_at       timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    keep_versions    int CHECK (keep_versions OPERATOR(pg_catalog.>) 0)
);
COMMENT ON TABLE tensile.models IS
    'models by name; you see your own and those granted to you; only superusers and BYPASSRLS roles can dump them';
COMMENT ON COLUMN tensile.models.owner IS 'OID of the owning role; null while no role has the name owner_name';
COMMENT ON COLUMN tensile.models.deployed_version IS
    'the version that predict uses; null before the first finished job';
COMMENT ON COLUMN tensile.models.memory_budget IS
    'device memory that predictions execute it within, in bytes, unless they say otherwise; null: all that it takes';
COMMENT ON COLUMN tensile.models.keep_versions IS
    'versions that stay when a job adds one: the newest ones, and the deployed one; null: all';

CREATE TABLE tensile.model_versions (
    id            bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    model         bigint NOT NULL REFERENCES tensile.models ON DELETE CASCADE,
    version       int NOT NULL,
    job           bigint,
    task          text NOT NULL CHECK (task OPERATOR(pg_catalog.=) ANY (ARRAY['regression', 'binary', 'multiclass'])),
    preprocessing jsonb NOT NULL,
    architecture  jsonb NOT NULL,
    metrics       jsonb,
    rows          bigint,
    weight_bytes  bigint,
    created_at    timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    UNIQUE (model, version)
);
CREATE INDEX model_versions_of_job ON tensile.model_versions (job);
COMMENT ON TABLE tensile.model_versions IS
    'what each finished job made of a model: task, fitted preprocessing, final metrics';
COMMENT ON COLUMN tensile.model_versions.job IS 'job that made the version';
COMMENT ON COLUMN tensile.model_versions.task IS 'regression, binary or multiclass';
COMMENT ON COLUMN tensile.model_versions.preprocessing IS
    'what was fitted to the training rows (features, means, categories); predictions apply it';
COMMENT ON COLUMN tensile.model_versions.metrics IS
    'metrics of the epoch whose weights the version has: {"epoch", "training", "validation"}';
COMMENT ON COLUMN tensile.model_versions.rows IS 'rows that the training query returned';
COMMENT ON COLUMN tensile.model_versions.weight_bytes IS 'size of the weights; null while they are being written';

CREATE TABLE tensile.model_weights (
    version bigint REFERENCES tensile.model_versions ON DELETE CASCADE,
    seq     int,
    data    bytea NOT NULL,
    PRIMARY KEY (version, seq)
);
ALTER TABLE tensile.model_weights ALTER data SET STORAGE EXTERNAL;
ALTER TABLE tensile.model_weights SET (
    toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 5000); -- 10 MB
COMMENT ON TABLE tensile.model_weights IS 'one safetensors file a version, in chunks; only the model''s owner sees it';
COMMENT ON COLUMN tensile.model_weights.version IS 'id of the row in model_versions';
COMMENT ON COLUMN tensile.model_weights.seq IS 'number of the chunk, from 0';
COMMENT ON COLUMN tensile.model_weights.data IS 'the chunk''s bytes, 16 MB at most';

CREATE TABLE tensile.model_grants (
    model        bigint REFERENCES tensile.models ON DELETE CASCADE,
    grantee      oid,
    grantee_name name,
    privilege    text CHECK (privilege OPERATOR(pg_catalog.=) ANY (ARRAY['predict', 'train'])),
    grantor      oid,
    grantor_name name NOT NULL,
    PRIMARY KEY (model, grantee_name, privilege)
);
COMMENT ON TABLE tensile.model_grants IS 'who besides the owner may predict with or train a model';
COMMENT ON COLUMN tensile.model_grants.grantee IS
    'OID of the role; 0 stands for public; null while no role has that name';
COMMENT ON COLUMN tensile.model_grants.grantor IS 'the model''s owner';
COMMENT ON COLUMN tensile.model_grants.grantee_name IS 'name of the role, or public';
COMMENT ON COLUMN tensile.model_grants.privilege IS 'predict or train';

CREATE TABLE tensile.jobs (
    id               bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    kind             text NOT NULL DEFAULT 'train'
                     CHECK (kind OPERATOR(pg_catalog.=) ANY (ARRAY['train', 'calibrate'])),
    model            bigint REFERENCES tensile.models ON DELETE SET NULL,
    model_name       text NOT NULL,
    owner            oid,
    owner_name       name NOT NULL,
    query            text NOT NULL,
    target           text NOT NULL,
    epochs           int NOT NULL,
    batch_size       int NOT NULL,
    optimizer        text NOT NULL,
    learning_rate    float8 NOT NULL,
    validation       float8 NOT NULL,
    seed             bigint NOT NULL,
    policy           text,
    memory_budget    bigint,
    priority         int NOT NULL,
    options          jsonb NOT NULL,
    chosen_batch_size int,
    settings         jsonb NOT NULL,
    state            text NOT NULL DEFAULT 'queued'
                     CHECK (state OPERATOR(pg_catalog.=) ANY (
                         ARRAY['queued', 'starting', 'running', 'waiting', 'finished', 'failed', 'cancelled',
                               'interrupted'])),
    reason           text,
    cancel_requested bool NOT NULL DEFAULT false,
    attempts         int NOT NULL DEFAULT 0,
    retries          int NOT NULL DEFAULT 0,
    not_before       timestamptz,
    version          int,
    submitted_at     timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    started_at       timestamptz,
    ended_at         timestamptz,
    rows             bigint,
    fingerprint      text,
    sqlstate         text,
    error            text,
    hint             text,
    detail           text,
    traceback        text,
    warnings         text[],
    CHECK ((state OPERATOR(pg_catalog.=) ANY (ARRAY['finished', 'failed', 'cancelled']))
           OPERATOR(pg_catalog.=) (ended_at IS NOT NULL))
);
CREATE UNIQUE INDEX jobs_one_per_model ON tensile.jobs (model) WHERE ended_at IS NULL;
CREATE UNIQUE INDEX jobs_one_calibration ON tensile.jobs (kind)
    WHERE ended_at IS NULL AND kind OPERATOR(pg_catalog.=) 'calibrate';
CREATE INDEX jobs_open ON tensile.jobs (id) WHERE ended_at IS NULL;
CREATE INDEX jobs_of_model ON tensile.jobs (model);
COMMENT ON TABLE tensile.jobs IS 'training jobs; you see your own, members of pg_read_all_stats see all';
COMMENT ON COLUMN tensile.jobs.kind IS
    'train, or calibrate: trains no model, but measures operators for the latency models of a device';
COMMENT ON COLUMN tensile.jobs.state IS
    'queued, starting, running, waiting (for device memory), finished, failed, cancelled, or interrupted (continues)';
COMMENT ON COLUMN tensile.jobs.model IS 'null after drop_model, and for a calibration';
COMMENT ON COLUMN tensile.jobs.model_name IS 'name of the model, also after drop_model';
COMMENT ON COLUMN tensile.jobs.cancel_requested IS 'cancel_job was called while it ran: its worker stops it';
COMMENT ON COLUMN tensile.jobs.not_before IS 'when an interrupted job is tried again; null: as soon as there is room';
COMMENT ON COLUMN tensile.jobs.rows IS 'number of rows that the query returned';
COMMENT ON COLUMN tensile.jobs.warnings IS 'what did not stop the job, such as rows that were skipped';
COMMENT ON COLUMN tensile.jobs.batch_size IS 'as it was asked for; 0: to be chosen, see chosen_batch_size';
COMMENT ON COLUMN tensile.jobs.learning_rate IS 'as it was asked for; of batches of 64 rows where the batch size is chosen';
COMMENT ON COLUMN tensile.jobs.chosen_batch_size IS
    'batch size that the job trains with; its learning rate is in batch_sizes; null: not chosen (yet)';
COMMENT ON COLUMN tensile.jobs.memory_budget IS 'device memory this job may use, in bytes';
COMMENT ON COLUMN tensile.jobs.settings IS
    'search_path, TimeZone, DateStyle and IntervalStyle of the session that submitted it';
COMMENT ON COLUMN tensile.jobs.reason IS 'why the job waits or was interrupted, or by what it was cancelled';
COMMENT ON COLUMN tensile.jobs.attempts IS 'how often a worker was started for it';
COMMENT ON COLUMN tensile.jobs.retries IS
    'faults since the last checkpoint; more than pg_tensile.max_retries fail the job';
COMMENT ON COLUMN tensile.jobs.version IS 'the version of the model that it made';
COMMENT ON COLUMN tensile.jobs.fingerprint IS 'fingerprint of the data: number of rows, and the sum of the row hashes';
COMMENT ON COLUMN tensile.jobs.traceback IS 'traceback of the child process, when the job failed there';

CREATE TABLE tensile.checkpoints (
    job        bigint REFERENCES tensile.jobs ON DELETE CASCADE,
    generation int,
    meta       jsonb,
    created_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    PRIMARY KEY (job, generation)
);
COMMENT ON TABLE tensile.checkpoints IS
    'state of unfinished jobs; meta is null until the checkpoint is whole; never dumped';
COMMENT ON COLUMN tensile.checkpoints.generation IS 'number of the checkpoint; the newest whole one counts';
COMMENT ON COLUMN tensile.checkpoints.meta IS 'how far the job was; null until the checkpoint is whole';

CREATE TABLE tensile.checkpoint_chunks (
    job        bigint,
    generation int,
    seq        int,
    data       bytea NOT NULL,
    PRIMARY KEY (job, generation, seq),
    FOREIGN KEY (job, generation) REFERENCES tensile.checkpoints ON DELETE CASCADE
);
ALTER TABLE tensile.checkpoint_chunks ALTER data SET STORAGE EXTERNAL;
-- Each checkpoint replaces the one before, so its place has to be free by the next one: a fifth of the table, the
-- default, may be many dead checkpoints of small models beside a large one.
ALTER TABLE tensile.checkpoint_chunks SET (
    toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 5000); -- 10 MB
COMMENT ON TABLE tensile.checkpoint_chunks IS
    'one safetensors file a checkpoint, in chunks; only the job''s owner sees it';
COMMENT ON COLUMN tensile.checkpoint_chunks.generation IS 'number of the checkpoint';
COMMENT ON COLUMN tensile.checkpoint_chunks.seq IS 'number of the chunk, from 0';
COMMENT ON COLUMN tensile.checkpoint_chunks.data IS 'the chunk''s bytes, 16 MB at most';

CREATE TABLE tensile.epochs (
    job     bigint REFERENCES tensile.jobs ON DELETE CASCADE,
    epoch   int,
    split   text CHECK (split OPERATOR(pg_catalog.=) ANY (ARRAY['training', 'validation'])),
    samples bigint,
    seconds float8,
    at      timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    PRIMARY KEY (job, epoch, split)
);
COMMENT ON TABLE tensile.epochs IS 'finished epochs of each job, and the validation after each of them';
COMMENT ON COLUMN tensile.epochs.epoch IS 'number of the epoch, from 1';
COMMENT ON COLUMN tensile.epochs.split IS 'training (metrics summed up during the epoch) or validation (after it)';
COMMENT ON COLUMN tensile.epochs.samples IS 'number of rows behind the metrics';
COMMENT ON COLUMN tensile.epochs.seconds IS 'duration';
COMMENT ON COLUMN tensile.epochs.at IS 'time of the end';

CREATE TABLE tensile.metrics (
    job    bigint,
    epoch  int,
    split  text,
    metric text,
    value  float8 NOT NULL,
    PRIMARY KEY (job, epoch, split, metric),
    FOREIGN KEY (job, epoch, split) REFERENCES tensile.epochs ON DELETE CASCADE
);
COMMENT ON TABLE tensile.metrics IS
    'metrics of every epoch by name; without those that do not fit the task; epoch_metrics has a row for each epoch';
COMMENT ON COLUMN tensile.metrics.epoch IS 'number of the epoch, from 1';
COMMENT ON COLUMN tensile.metrics.split IS 'training or validation, as in epochs';
COMMENT ON COLUMN tensile.metrics.metric IS 'loss, accuracy, f1, rmse or r2: columns of epoch_metrics; others may come';
COMMENT ON COLUMN tensile.metrics.value IS 'value of the metric, over all rows of the split';

CREATE TABLE tensile.batch_sizes (
    job           bigint REFERENCES tensile.jobs ON DELETE CASCADE,
    batch_size    int,
    chosen        bool NOT NULL,
    feasible      bool NOT NULL,
    learning_rate float8,
    samples_per_s float8,
    iteration_us  float8,
    stall_us      float8,
    device_bytes  bigint,
    measured_us   float8,
    reason        text,
    PRIMARY KEY (job, batch_size)
);
COMMENT ON TABLE tensile.batch_sizes IS
    'the batch sizes that were compared for each job that was submitted with batch_size => 0';
COMMENT ON COLUMN tensile.batch_sizes.chosen IS 'whether the job trains with it';
COMMENT ON COLUMN tensile.batch_sizes.feasible IS 'whether it fits into the memory that the job may have';
COMMENT ON COLUMN tensile.batch_sizes.learning_rate IS
    'learning rate for this batch size, by the option learning_rate_scaling';
COMMENT ON COLUMN tensile.batch_sizes.samples_per_s IS 'rows trained on in a second, predicted; null where there is no plan';
COMMENT ON COLUMN tensile.batch_sizes.iteration_us IS
    'expected duration of a step under its plan, by measurements where there are any';
COMMENT ON COLUMN tensile.batch_sizes.stall_us IS 'time of a step spent waiting for copies';
COMMENT ON COLUMN tensile.batch_sizes.device_bytes IS 'device memory that the step''s plan takes';
COMMENT ON COLUMN tensile.batch_sizes.measured_us IS
    'duration of a step among the first of the job; null: none had this size';
COMMENT ON COLUMN tensile.batch_sizes.reason IS 'why it is not feasible, or what its plan does';

-- Memory: what executors and the scheduler found out. A job's rows stay until a later job of its model ends. None of it
-- is dumped: it is true of one machine, and made again by the next job.

CREATE TABLE tensile.traces (
    job              bigint PRIMARY KEY REFERENCES tensile.jobs ON DELETE CASCADE,
    device           text NOT NULL,
    revision         int NOT NULL,
    policy           text NOT NULL,
    fingerprint      text,
    overhead_bytes   bigint NOT NULL,
    persistent_bytes bigint,
    parameters       bigint,
    vanilla_bytes    bigint,
    least_bytes      bigint NOT NULL,
    largest_operator text,
    graphs           jsonb NOT NULL,
    traces           bytea[] NOT NULL,
    rejected         bigint,
    refusal          jsonb,
    captured_at      timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);
COMMENT ON TABLE tensile.traces IS 'what each job''s executor captured: the graphs of an iteration, and what they need';
COMMENT ON COLUMN tensile.traces.fingerprint IS
    'fingerprint of the graph: equal ones mean equal graphs; null: not captured';
COMMENT ON COLUMN tensile.traces.persistent_bytes IS 'bytes of parameters, optimizer state and buffers';
COMMENT ON COLUMN tensile.traces.parameters IS 'number of trained parameters';
COMMENT ON COLUMN tensile.traces.traces IS 'the graphs, in the library''s binary form';
COMMENT ON COLUMN tensile.traces.revision IS 'how often the executor has sent it, with other workspaces each time';
COMMENT ON COLUMN tensile.traces.overhead_bytes IS 'device memory that the executor takes besides its tensors';
COMMENT ON COLUMN tensile.traces.vanilla_bytes IS 'device memory without a plan; null for a job that is not captured';
COMMENT ON COLUMN tensile.traces.least_bytes IS 'device memory that no plan can go below';
COMMENT ON COLUMN tensile.traces.largest_operator IS 'the operator that needs the most of it';
COMMENT ON COLUMN tensile.traces.graphs IS 'names and numbers of rows of the graphs in column traces';
COMMENT ON COLUMN tensile.traces.rejected IS 'the last generation of its plans that the executor could not use';
COMMENT ON COLUMN tensile.traces.refusal IS 'why the job cannot be given memory; null: it can';

CREATE TABLE tensile.operators (
    job       bigint REFERENCES tensile.traces ON DELETE CASCADE,
    operator  int,
    target    text NOT NULL,
    phase     text,
    module    text,
    source    text,
    signature text,
    flops     bigint,
    bytes     bigint,
    random    bool,
    tensors   int[],
    PRIMARY KEY (job, operator)
);
COMMENT ON TABLE tensile.operators IS 'the operators of a training iteration of each job, in the order of their execution';
COMMENT ON COLUMN tensile.operators.operator IS 'number of the operator, in the order of execution';
COMMENT ON COLUMN tensile.operators.phase IS 'forward, backward or optimizer';
COMMENT ON COLUMN tensile.operators.flops IS 'floating point operations; 0 where none are known';
COMMENT ON COLUMN tensile.operators.random IS 'whether it draws random numbers';
COMMENT ON COLUMN tensile.operators.target IS 'name of the PyTorch operator';
COMMENT ON COLUMN tensile.operators.module IS 'module of the model where the operator comes from';
COMMENT ON COLUMN tensile.operators.source IS 'line of the model''s code, where the operator comes from';
COMMENT ON COLUMN tensile.operators.signature IS 'types of operands and scalar arguments: equal ones mean equal work';
COMMENT ON COLUMN tensile.operators.bytes IS 'bytes read and written';
COMMENT ON COLUMN tensile.operators.tensors IS 'numbers of the tensors that the operator accesses';

CREATE TABLE tensile.tensors (
    job            bigint REFERENCES tensile.traces ON DELETE CASCADE,
    tensor         int,
    name           text,
    kind           text,
    dtype          text,
    shape          bigint[],
    bytes          bigint,
    first_operator int,
    last_operator  int,
    PRIMARY KEY (job, tensor)
);
COMMENT ON TABLE tensile.tensors IS 'the tensors of a training iteration of each job; all views of a storage are one tensor';
COMMENT ON COLUMN tensile.tensors.tensor IS 'number of the tensor';
COMMENT ON COLUMN tensile.tensors.kind IS
    'parameter, optimizer_state, buffer, constant, input, activation, gradient or temporary';
COMMENT ON COLUMN tensile.tensors.first_operator IS 'first operator that accesses the tensor';
COMMENT ON COLUMN tensile.tensors.last_operator IS 'last operator that accesses the tensor';

CREATE TABLE tensile.latencies (
    job       bigint PRIMARY KEY REFERENCES tensile.traces ON DELETE CASCADE,
    predicted real[] NOT NULL,
    measured  real[] NOT NULL,
    average   real[] NOT NULL,
    samples   int NOT NULL,
    total_us  float8 NOT NULL,
    load      float8,
    at        timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);
COMMENT ON TABLE tensile.latencies IS 'latencies of each job''s operators in microseconds, by operator; see view latency';
COMMENT ON COLUMN tensile.latencies.predicted IS 'predictions from before anything ran';
COMMENT ON COLUMN tensile.latencies.measured IS 'measurements of the last measured iteration';
COMMENT ON COLUMN tensile.latencies.average IS 'moving averages, see pg_tensile.latency_weight';
COMMENT ON COLUMN tensile.latencies.samples IS 'number of measured iterations';
COMMENT ON COLUMN tensile.latencies.total_us IS 'duration of an iteration: the sum of the averages';
COMMENT ON COLUMN tensile.latencies.load IS 'share of the time that others kept the device busy meanwhile: 0 to 1';

-- The plan table in shared memory has the same rows, but only as long as the job has a worker: reports of ended jobs and
-- the client's plan() read them here, together with the numbers of the same generation.
CREATE TABLE tensile.footprints (
    job           bigint PRIMARY KEY REFERENCES tensile.traces ON DELETE CASCADE,
    generation    bigint NOT NULL,
    events        bytea NOT NULL,
    operators     int[] NOT NULL,
    planned       bigint[] NOT NULL,
    vanilla       bigint[] NOT NULL,
    iteration_us  float8,
    vanilla_us    float8,
    planned_bytes bigint,
    granted_bytes bigint,
    host_bytes    bigint,
    out_bytes     bigint,
    in_bytes      bigint,
    stall_us      float8,
    recomputes    int,
    plan_order    bytea NOT NULL DEFAULT ''
);
COMMENT ON TABLE tensile.footprints IS 'what the newest plan of each job was planned to need; see view footprint';
COMMENT ON COLUMN tensile.footprints.events IS 'rows of the plan, as in the plan table';
COMMENT ON COLUMN tensile.footprints.operators IS 'operator executed in each step of an iteration under the plan';
COMMENT ON COLUMN tensile.footprints.planned IS 'bytes on the device in each step';
COMMENT ON COLUMN tensile.footprints.vanilla IS 'bytes on the device in each step without a plan';
COMMENT ON COLUMN tensile.footprints.generation IS 'generation of the plan';
COMMENT ON COLUMN tensile.footprints.iteration_us IS 'expected duration of an iteration under the plan';
COMMENT ON COLUMN tensile.footprints.vanilla_us IS 'expected duration of an iteration without a plan';
COMMENT ON COLUMN tensile.footprints.planned_bytes IS 'the most device memory at any step';
COMMENT ON COLUMN tensile.footprints.granted_bytes IS 'device memory that the executor may take';
COMMENT ON COLUMN tensile.footprints.host_bytes IS 'host memory for copies of tensors';
COMMENT ON COLUMN tensile.footprints.out_bytes IS 'bytes copied to the host in an iteration';
COMMENT ON COLUMN tensile.footprints.in_bytes IS 'bytes copied to the device in an iteration';
COMMENT ON COLUMN tensile.footprints.stall_us IS 'time of an iteration spent waiting for copies';
COMMENT ON COLUMN tensile.footprints.recomputes IS 'operators executed again in an iteration';
COMMENT ON COLUMN tensile.footprints.plan_order IS
    'the operators in the order in which the plan has them executed, int32 each; empty: as captured';

CREATE TABLE tensile.sparsities (
    job        bigint PRIMARY KEY REFERENCES tensile.traces ON DELETE CASCADE,
    revision   int NOT NULL,
    tensors    int[] NOT NULL,
    zero_share real[] NOT NULL,
    run_share  real[] NOT NULL,
    lz4_share  real[] NOT NULL,
    moved      bigint[] NOT NULL,
    at         timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);
COMMENT ON TABLE tensile.sparsities IS
    'zeros in the tensors that a job with compression swaps, counted once an epoch; see view compression';
COMMENT ON COLUMN tensile.sparsities.revision IS 'number of changes that were large enough for new plans';
COMMENT ON COLUMN tensile.sparsities.tensors IS 'numbers of the tensors in tensile.tensors';
COMMENT ON COLUMN tensile.sparsities.zero_share IS 'share of zeros among the words of each tensor: 0 to 1';
COMMENT ON COLUMN tensile.sparsities.run_share IS 'runs of zeros in each, as a share of its words';
COMMENT ON COLUMN tensile.sparsities.lz4_share IS 'bytes of each with LZ4, as a share of its bytes, from samples';
COMMENT ON COLUMN tensile.sparsities.moved IS 'bytes of each that its last copy to the host moved; null: not compressed yet';

CREATE TABLE tensile.codings (
    job       bigint PRIMARY KEY REFERENCES tensile.traces ON DELETE CASCADE,
    decisions jsonb NOT NULL,
    at        timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);
COMMENT ON TABLE tensile.codings IS
    'what the scheduler decided about compressing the tensors of each job last; see view compression';
COMMENT ON COLUMN tensile.codings.decisions IS 'for each tensor: codec, expected bytes, and times with and without it';

CREATE TABLE tensile.searches (
    job          bigint PRIMARY KEY REFERENCES tensile.traces ON DELETE CASCADE,
    state        text NOT NULL,
    budget_bytes bigint NOT NULL,
    seconds      float8 NOT NULL,
    cached       bool NOT NULL,
    first_us     float8,
    best_us      float8,
    generation   int NOT NULL DEFAULT 0,
    evaluations  bigint NOT NULL DEFAULT 0,
    started_at   timestamptz,
    ended_at     timestamptz
);
COMMENT ON TABLE tensile.searches IS 'the search for a better plan of each job of policy swapadvisor; see view search';
COMMENT ON COLUMN tensile.searches.state IS 'queued, searching, finished, stopped or failed';
COMMENT ON COLUMN tensile.searches.budget_bytes IS 'device memory that a plan may take';
COMMENT ON COLUMN tensile.searches.seconds IS 'time allowed for the search';
COMMENT ON COLUMN tensile.searches.cached IS 'whether it had the result of an earlier search';
COMMENT ON COLUMN tensile.searches.first_us IS
    'expected duration of an iteration under the plan that the search began with';
COMMENT ON COLUMN tensile.searches.best_us IS 'expected duration of an iteration under the best plan so far';
COMMENT ON COLUMN tensile.searches.generation IS
    'generation of plans bred from each other in which the best one was found';
COMMENT ON COLUMN tensile.searches.evaluations IS 'number of plans evaluated until then';

CREATE TABLE tensile.search_results (
    fingerprint       text,
    device            text,
    bucket_bytes      bigint,
    device_peak_bytes bigint NOT NULL,
    events            bytea NOT NULL,
    plan_order        bytea NOT NULL,
    iteration_us      float8 NOT NULL,
    seconds           float8 NOT NULL,
    generations       int NOT NULL,
    found_at          timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    PRIMARY KEY (fingerprint, device, bucket_bytes)
);
COMMENT ON TABLE tensile.search_results IS 'the best plans that searches have found, for later jobs with the same graph';
COMMENT ON COLUMN tensile.search_results.fingerprint IS 'fingerprint of the graph, as in traces';
COMMENT ON COLUMN tensile.search_results.bucket_bytes IS
    'device memory that a plan could take, rounded down to one of 32 steps between powers of two';
COMMENT ON COLUMN tensile.search_results.device_peak_bytes IS 'device memory that this plan takes';
COMMENT ON COLUMN tensile.search_results.events IS 'rows of the plan, as in the plan table';
COMMENT ON COLUMN tensile.search_results.plan_order IS
    'the operators in the order in which the plan has them executed, int32 each; empty: as captured';
COMMENT ON COLUMN tensile.search_results.iteration_us IS 'expected duration of an iteration under the plan';
COMMENT ON COLUMN tensile.search_results.seconds IS 'time that the search was allowed to take';
COMMENT ON COLUMN tensile.search_results.generations IS 'number of generations of plans until this one was found';
COMMENT ON COLUMN tensile.search_results.found_at IS 'time of the end of that search';

CREATE TABLE tensile.device_profiles (
    device      text PRIMARY KEY,
    profile     jsonb NOT NULL,
    measured_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);
COMMENT ON TABLE tensile.device_profiles IS 'measured rates of this machine''s devices';
COMMENT ON COLUMN tensile.device_profiles.profile IS
    'memory, rates of the link to the host each way, arithmetic, memory bandwidth, overheads';

CREATE TABLE tensile.latency_models (
    device        text PRIMARY KEY,
    models        bytea NOT NULL,
    kinds         int NOT NULL,
    samples       int NOT NULL,
    error         float8,
    job           bigint REFERENCES tensile.jobs ON DELETE SET NULL,
    calibrated_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);
COMMENT ON TABLE tensile.latency_models IS 'models that predict the latency of operators on this machine''s devices';
COMMENT ON COLUMN tensile.latency_models.models IS 'small neural networks, in a binary form without code';
COMMENT ON COLUMN tensile.latency_models.samples IS 'number of measurements for training and testing the models';
COMMENT ON COLUMN tensile.latency_models.kinds IS 'number of kinds of operators with a model of their own';
COMMENT ON COLUMN tensile.latency_models.error IS 'median relative error on operators that were held out';
COMMENT ON COLUMN tensile.latency_models.job IS 'calibration job that measured the operators';

CREATE TABLE tensile.codec_times (
    device         text PRIMARY KEY,
    times          jsonb NOT NULL,
    relative_error float8,
    measured_at    timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);
COMMENT ON TABLE tensile.codec_times IS
    'how long compressing and decompressing takes on this machine''s devices, by codec, size and sparsity';
COMMENT ON COLUMN tensile.codec_times.times IS
    'coefficients of linear models, one for each codec and range of sparsity; waking_us, which every coded transfer takes more';
COMMENT ON COLUMN tensile.codec_times.relative_error IS
    'relative error of the models: sum of absolute errors, divided by that of the mean of all times';

CREATE TABLE tensile.scheduler_log (
    id         bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    at         timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    event      text NOT NULL,
    job        bigint,
    generation bigint,
    device     text,
    reason     text,
    details    jsonb
);
COMMENT ON TABLE tensile.scheduler_log IS 'what the memory scheduler decided, and why; the last 10,000 lines';
COMMENT ON COLUMN tensile.scheduler_log.event IS
    'scheduled, planned, waits, refused, failed, note, planner (it died), search, rejected (a plan), batch size (chosen)';
COMMENT ON COLUMN tensile.scheduler_log.job IS
    'null: about a whole device; only members of pg_read_all_stats see such lines';
COMMENT ON COLUMN tensile.scheduler_log.generation IS 'generation of the plan';
COMMENT ON COLUMN tensile.scheduler_log.details IS 'the numbers of a plan, or of a turn of planning';

-- The OIDs of roles follow from their names, also when the row comes from a dump of another cluster.
CREATE FUNCTION tensile._resolve_owner() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    NEW.owner := (SELECT oid FROM pg_roles WHERE rolname = NEW.owner_name);
    RETURN NEW;
END $$;
CREATE FUNCTION tensile._resolve_grant() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    NEW.grantor := (SELECT oid FROM pg_roles WHERE rolname = NEW.grantor_name);
    NEW.grantee := CASE WHEN NEW.grantee_name = 'public' THEN 0
                        ELSE (SELECT oid FROM pg_roles WHERE rolname = NEW.grantee_name) END;
    RETURN NEW;
END $$;
CREATE TRIGGER resolve_owner BEFORE INSERT ON tensile.models
    FOR EACH ROW EXECUTE FUNCTION tensile._resolve_owner();
CREATE TRIGGER resolve_owner BEFORE INSERT ON tensile.jobs
    FOR EACH ROW EXECUTE FUNCTION tensile._resolve_owner();
CREATE TRIGGER resolve_grant BEFORE INSERT ON tensile.model_grants
    FOR EACH ROW EXECUTE FUNCTION tensile._resolve_grant();

-- Sessions and the predictor keep models; these tell them to look again.
CREATE TRIGGER models_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON tensile.models
    FOR EACH STATEMENT EXECUTE FUNCTION tensile._models_changed();
CREATE TRIGGER models_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON tensile.model_versions
    FOR EACH STATEMENT EXECUTE FUNCTION tensile._models_changed();
CREATE TRIGGER models_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON tensile.model_grants
    FOR EACH STATEMENT EXECUTE FUNCTION tensile._models_changed();

-- What a dump contains: models whole, only ended jobs (so that a restore starts nothing), no checkpoints.
SELECT pg_catalog.pg_extension_config_dump('tensile.models', '');
SELECT pg_catalog.pg_extension_config_dump('tensile.model_versions', 'WHERE weight_bytes IS NOT NULL');
SELECT pg_catalog.pg_extension_config_dump('tensile.model_weights',
    'WHERE version IN (SELECT id FROM tensile.model_versions WHERE weight_bytes IS NOT NULL)');
SELECT pg_catalog.pg_extension_config_dump('tensile.model_grants', '');
SELECT pg_catalog.pg_extension_config_dump('tensile.jobs', 'WHERE ended_at IS NOT NULL');
SELECT pg_catalog.pg_extension_config_dump('tensile.epochs',
    'WHERE job IN (SELECT id FROM tensile.jobs WHERE ended_at IS NOT NULL)');
SELECT pg_catalog.pg_extension_config_dump('tensile.metrics',
    'WHERE job IN (SELECT id FROM tensile.jobs WHERE ended_at IS NOT NULL)');
SELECT pg_catalog.pg_extension_config_dump('tensile.batch_sizes',
    'WHERE job IN (SELECT id FROM tensile.jobs WHERE ended_at IS NOT NULL)');
SELECT pg_catalog.pg_extension_config_dump('tensile.models_id_seq', '');
SELECT pg_catalog.pg_extension_config_dump('tensile.model_versions_id_seq', '');
SELECT pg_catalog.pg_extension_config_dump('tensile.jobs_id_seq', '');

------------------------------------------------------------------------------------------------------------------------
-- Who sees which rows
------------------------------------------------------------------------------------------------------------------------

ALTER TABLE tensile.models ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.model_versions ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.model_weights ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.model_grants ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.jobs ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.checkpoints ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.checkpoint_chunks ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.epochs ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.metrics ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.batch_sizes ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.traces ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.operators ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.tensors ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.latencies ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.footprints ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.sparsities ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.codings ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.codec_times ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.searches ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.search_results ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.device_profiles ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.latency_models ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.scheduler_log ENABLE ROW LEVEL SECURITY;

-- A grant names its grantor, so that this policy needn't ask models, whose policy asks model_grants.
CREATE POLICY visible ON tensile.model_grants FOR SELECT USING (
    grantee OPERATOR(pg_catalog.=) 0 OR tensile._owned(grantee, grantee_name) OR tensile._owned(grantor, grantor_name)
    OR (SELECT pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE')));
CREATE POLICY visible ON tensile.models FOR SELECT USING (
    tensile._owned(owner, owner_name)
    OR EXISTS (SELECT FROM tensile.model_grants g WHERE g.model OPERATOR(pg_catalog.=) id
               AND (g.grantee OPERATOR(pg_catalog.=) 0 OR tensile._owned(g.grantee, g.grantee_name)))
    OR (SELECT pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE')));
CREATE POLICY visible ON tensile.model_versions FOR SELECT USING (
    weight_bytes IS NOT NULL AND EXISTS (SELECT FROM tensile.models m WHERE m.id OPERATOR(pg_catalog.=) model));
CREATE POLICY owner ON tensile.model_weights FOR SELECT USING (
    EXISTS (SELECT FROM tensile.model_versions v JOIN tensile.models m ON m.id OPERATOR(pg_catalog.=) v.model
            WHERE v.id OPERATOR(pg_catalog.=) model_weights.version AND tensile._owned(m.owner, m.owner_name)));
CREATE POLICY visible ON tensile.jobs FOR SELECT USING (
    tensile._owned(owner, owner_name) OR (SELECT pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE')));
CREATE POLICY visible ON tensile.epochs FOR SELECT USING (
    EXISTS (SELECT FROM tensile.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile.metrics FOR SELECT USING (
    EXISTS (SELECT FROM tensile.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile.batch_sizes FOR SELECT USING (
    EXISTS (SELECT FROM tensile.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile.traces FOR SELECT USING (
    EXISTS (SELECT FROM tensile.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile.operators FOR SELECT USING (
    EXISTS (SELECT FROM tensile.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile.tensors FOR SELECT USING (
    EXISTS (SELECT FROM tensile.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile.latencies FOR SELECT USING (
    EXISTS (SELECT FROM tensile.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile.footprints FOR SELECT USING (
    EXISTS (SELECT FROM tensile.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile.sparsities FOR SELECT USING (
    EXISTS (SELECT FROM tensile.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile.codings FOR SELECT USING (
    EXISTS (SELECT FROM tensile.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile.codec_times FOR SELECT USING (true);
CREATE POLICY visible ON tensile.searches FOR SELECT USING (
    EXISTS (SELECT FROM tensile.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile.search_results FOR SELECT USING (
    EXISTS (SELECT FROM tensile.traces t
            WHERE t.fingerprint OPERATOR(pg_catalog.=) search_results.fingerprint)
    OR (SELECT pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE')));
CREATE POLICY visible ON tensile.device_profiles FOR SELECT USING (true);
CREATE POLICY visible ON tensile.latency_models FOR SELECT USING (true);
CREATE POLICY visible ON tensile.scheduler_log FOR SELECT USING (
    CASE WHEN job IS NULL THEN (SELECT pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE'))
         ELSE EXISTS (SELECT FROM tensile.jobs j WHERE j.id OPERATOR(pg_catalog.=) job) END);
CREATE POLICY owner ON tensile.checkpoints FOR SELECT USING (
    EXISTS (SELECT FROM tensile.jobs j
            WHERE j.id OPERATOR(pg_catalog.=) job AND tensile._owned(j.owner, j.owner_name)));
CREATE POLICY owner ON tensile.checkpoint_chunks FOR SELECT USING (
    EXISTS (SELECT FROM tensile.jobs j
            WHERE j.id OPERATOR(pg_catalog.=) job AND tensile._owned(j.owner, j.owner_name)));

-- Within reach of those who have USAGE of the schema, and then of the policies
GRANT SELECT ON tensile.models, tensile.model_versions, tensile.model_weights, tensile.model_grants,
    tensile.jobs, tensile.checkpoints, tensile.checkpoint_chunks, tensile.epochs, tensile.metrics,
    tensile.batch_sizes, tensile.traces, tensile.operators,
    tensile.tensors, tensile.latencies, tensile.footprints, tensile.searches, tensile.search_results,
    tensile.device_profiles, tensile.latency_models,
    tensile.sparsities, tensile.codings, tensile.codec_times, tensile.scheduler_log TO PUBLIC;

------------------------------------------------------------------------------------------------------------------------
-- Models
------------------------------------------------------------------------------------------------------------------------

-- May the caller act for this owner? Superusers may act for an owner who is gone, too.
CREATE FUNCTION tensile._acts_for(caller oid, owner oid, owner_name name) RETURNS bool
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(c.rolsuper OR pg_has_role(c.oid, o.oid, 'USAGE'), false)
    FROM pg_roles c LEFT JOIN pg_roles o ON o.oid = $2 AND o.rolname = $3
    WHERE c.oid = $1
$$;

-- Does the caller own the model or hold the privilege on it? Called from C, too (tensile_model_granted).
CREATE FUNCTION tensile._granted(caller oid, model bigint, privilege text) RETURNS bool
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM tensile.models m WHERE m.id = $2 AND tensile._acts_for($1, m.owner, m.owner_name))
        OR EXISTS (SELECT FROM tensile.model_grants g
                   WHERE g.model = $2 AND g.privilege = $3
                   AND (g.grantee = 0 OR tensile._acts_for($1, g.grantee, g.grantee_name)))
$$;

-- The model's row, locked, after making sure that the caller may change it
CREATE FUNCTION tensile._own_model(caller oid, name text) RETURNS tensile.models
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models;
BEGIN
    SELECT * INTO m FROM tensile.models WHERE models.name = _own_model.name FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object', MESSAGE = format('model "%s" does not exist', name),
            HINT = 'The models you may use are listed in tensile.models; register_model makes a new one.';
    ELSIF NOT tensile._acts_for(caller, m.owner, m.owner_name) THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', MESSAGE = format('must be owner of model "%s"', name),
            HINT = format('It belongs to role "%s".', m.owner_name);
    END IF;
    RETURN m;
END $$;

CREATE FUNCTION tensile._not_null(variadic arguments text[]) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    FOR i IN 1 .. array_length(arguments, 1) BY 2 LOOP
        IF arguments[i + 1] IS NULL THEN
            RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed',
                MESSAGE = format('argument "%s" must not be null', arguments[i]),
                HINT = 'Pass a value, or leave the argument out if it has a default.';
        END IF;
    END LOOP;
END $$;

CREATE FUNCTION tensile._register_model(caller oid, name text, architecture jsonb, description text, replace bool)
    RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models;
    model bigint;
BEGIN
    PERFORM tensile._not_null('name', name, 'architecture', architecture::text, 'replace', replace::text);
    IF length(name) NOT BETWEEN 1 AND 200 OR name ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'invalid name of a model',
            HINT = 'A name has 1 to 200 characters and no control characters.';
    END IF;
    PERFORM tensile._check_architecture(architecture);
    IF (tensile._rules()->'architectures'->(architecture->>'type')->>'code')::bool
       AND NOT pg_has_role(caller, 'pg_execute_server_program', 'USAGE') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('permission denied for architecture type "%s"', architecture->>'type'),
            DETAIL = 'It runs code as the operating-system user of the server.',
            HINT = format('Only members of role pg_execute_server_program may register it; for everybody are %s.',
                          (SELECT string_agg(to_json(a.key)::text, ', ')
                           FROM json_each(tensile._rules()->'architectures') a WHERE a.value->'code' IS NULL));
    END IF;

    INSERT INTO tensile.models (name, owner_name, architecture, description)
        SELECT _register_model.name, r.rolname, _register_model.architecture, _register_model.description
        FROM pg_roles r WHERE r.oid = caller
        ON CONFLICT DO NOTHING
        RETURNING id INTO model;
    IF model IS NOT NULL THEN
        RETURN model;
    ELSIF NOT replace THEN
        RAISE EXCEPTION USING ERRCODE = 'duplicate_object', MESSAGE = format('model "%s" already exists', name),
            HINT = 'Its owner can give it a new architecture with replace => true.';
    END IF;

    m := tensile._own_model(caller, name);
    PERFORM tensile._no_open_job(m);
    UPDATE tensile.models SET architecture = _register_model.architecture, description = _register_model.description,
        updated_at = clock_timestamp() WHERE id = m.id;
    RETURN m.id;
END $$;

-- Architectures and options by the rules of pg_tensile/rules.json, whose terms pg_tensile/rules.py explains. That module
-- makes the same checks; a test compares the two on random values. Every error names the key by its path
-- ("early_stopping.patience", "hidden[2]"). What only PyTorch can know (is there such a function?) is found by the child.

CREATE FUNCTION tensile._check_architecture(architecture jsonb) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    rules json := tensile._rules()->'architectures';
    types text[] := ARRAY(SELECT json_object_keys(rules));
    type text := CASE jsonb_typeof(architecture->'type') WHEN 'string' THEN architecture->>'type' END;
BEGIN
    IF jsonb_typeof(architecture) <> 'object' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'architecture must be a JSON object',
            HINT = 'For example ''{"type": "mlp", "hidden": [128, 64]}''.';
    ELSIF type IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'key "type" is missing in the architecture, or not a text',
            HINT = tensile._names_hint('', types, 'types');
    ELSIF type <> ALL (types) THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('unknown architecture type "%s"', type), HINT = tensile._names_hint(type, types, 'types');
    END IF;
    PERFORM tensile._check_object(architecture - 'type', rules->type, format('architecture "%s"', type), '');
END $$;

CREATE FUNCTION tensile._check_options(options jsonb) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF jsonb_typeof(options) <> 'object' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'options must be a JSON object',
            HINT = 'For example ''{"early_stopping": {"patience": 3}}''.';
    END IF;
    PERFORM tensile._check_object(options, tensile._rules()->'options', 'options', '');
END $$;

-- `what` is looked at, for messages; `prefix` stands before its keys in them.
CREATE FUNCTION tensile._check_object(object jsonb, rules json, what text, prefix text) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    properties json := rules->'properties';
    names text[] := ARRAY(SELECT json_object_keys(properties));
    name text;
    item jsonb;
    other text;
    dividend bigint;
    divisor bigint;
BEGIN
    FOR name, item IN SELECT * FROM jsonb_each(object) LOOP
        IF name <> ALL (names) THEN
            RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
                MESSAGE = format('unknown key "%s" in the %s', prefix || name, what),
                HINT = tensile._names_hint(name, names, 'keys');
        END IF;
        PERFORM tensile._check_value(item, tensile._resolved(properties->name), what, prefix || name);
    END LOOP;
    FOR name IN SELECT json_array_elements_text(rules->'required') LOOP
        IF NOT object ? name THEN
            RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
                MESSAGE = format('key "%s" is missing in the %s', name, what),
                HINT = format('It must be %s.', tensile._describe(tensile._resolved(properties->name)));
        END IF;
    END LOOP;
    FOR name, other IN SELECT p.key, p.value->>'divisibleBy' FROM json_each(properties) p
                       WHERE p.value->'divisibleBy' IS NOT NULL LOOP
        dividend := coalesce(object->>name, properties->name->>'default')::numeric;
        divisor := coalesce(object->>other, properties->other->>'default')::numeric;
        IF dividend % divisor <> 0 THEN
            RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
                MESSAGE = format('key "%s" in the %s is not divisible by "%s": %s, %s', name, what, other, dividend,
                                 divisor),
                HINT = format('Use a multiple of "%s", for example %s.', other,
                              divisor * greatest(1, dividend / divisor));
        END IF;
    END LOOP;
END $$;

CREATE FUNCTION tensile._check_value(value jsonb, rule json, what text, path text) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT tensile._fits(value, rule) THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('invalid value for key "%s" in the %s: %s', path, what,
                             CASE WHEN length(value::text) > 60 THEN left(value::text, 57) || '...'
                                  ELSE value::text END),
            HINT = format('Use %s.', tensile._describe(rule));
    ELSIF rule->>'type' = 'array' THEN
        FOR i IN 0 .. jsonb_array_length(value) - 1 LOOP
            PERFORM tensile._check_value(value->i, rule->'items', what, format('%s[%s]', path, i));
        END LOOP;
        IF (rule->>'ascending')::bool AND (value->>0)::numeric > (value->>1)::numeric THEN
            RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
                MESSAGE = format('key "%s" in the %s is empty: from %s to %s', path, what, value->0, value->1),
                HINT = format('The first number is the least, the second the most: [%s, %s].', value->1, value->0);
        END IF;
    ELSIF rule->'properties' IS NOT NULL THEN
        PERFORM tensile._check_object(value, rule, what, path || '.');
    END IF;
END $$;

-- Is the value what the rule says, but for what it contains? Numbers count as what readers of JSON see, float8.
CREATE FUNCTION tensile._fits(value jsonb, rule json) RETURNS bool
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    kind text := rule->>'type';
    content text := value #>> '{}';
    number float8;
BEGIN
    IF jsonb_typeof(value) <> replace(kind, 'integer', 'number') THEN
        RETURN false;
    ELSIF kind IN ('integer', 'number') THEN
        number := CASE WHEN abs(content::numeric) > 1.7976931348623157e308 THEN sign(content::numeric) * 'Infinity'::float8
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

-- The rule itself, or the shared one that it refers to
CREATE FUNCTION tensile._resolved(rule json) RETURNS json
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN $1->'$ref' IS NULL THEN $1 ELSE tensile._rules()->'shared'->($1->>'$ref') END
$$;

-- What a value must be, for hints: "an integer from 1 to 100"
CREATE FUNCTION tensile._describe(rule json) RETURNS text
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    kind text := rule->>'type';
BEGIN
    RETURN CASE
        WHEN rule->'enum' IS NOT NULL THEN
            'one of ' || (SELECT string_agg(e.value::text, ', ') FROM json_array_elements(rule->'enum') e)
        WHEN kind = 'integer' THEN
            format('an %sinteger from %s to %s', CASE WHEN rule->'not' IS NOT NULL THEN 'odd ' END, rule->>'minimum',
                   rule->>'maximum')
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
                   tensile._describe(rule->'items'))
        ELSE 'an object {...}' END;
END $$;

-- For a name that is none of these: the nearest one, or all of them
CREATE FUNCTION tensile._names_hint(name text, names text[], what text) RETURNS text
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce('Did you mean "' || tensile._nearest($1, $2) || '"?',
                    format('The %s are %s.', $3, (SELECT string_agg(to_json(n)::text, ', ') FROM unnest($2) n)))
$$;

CREATE FUNCTION tensile._no_open_job(model tensile.models) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    job bigint := (SELECT j.id FROM tensile.jobs j WHERE j.model = (_no_open_job.model).id AND j.ended_at IS NULL);
BEGIN
    IF job IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'object_in_use',
            MESSAGE = format('model "%s" is being trained by job %s', (model).name, job),
            HINT = format('Wait with wait_for_job(%s) or stop it with cancel_job(%1$s).', job);
    END IF;
END $$;

CREATE FUNCTION tensile._drop_model(caller oid, name text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models := tensile._own_model(caller, name);
    job record;
BEGIN
    FOR job IN SELECT j.id, j.state FROM tensile.jobs j WHERE j.model = m.id FOR UPDATE LOOP
        IF job.state IN ('queued', 'interrupted') THEN
            PERFORM tensile._end_job(job.id, 'failed', '42704', format('model "%s" was dropped', name),
                                     'Register the model again and submit a new job.');
        END IF;
        DELETE FROM tensile.checkpoints c WHERE c.job = job.id;
        -- A worker that has not noticed yet goes on writing; its job's trace goes with the job's end.
        DELETE FROM tensile.traces t WHERE t.job = job.id AND job.state NOT IN ('starting', 'running', 'waiting');
        PERFORM tensile._notify_stop(job.id);
    END LOOP;
    DELETE FROM tensile.models WHERE id = m.id;
END $$;

-- Raises unless the model has this version, complete.
CREATE FUNCTION tensile._check_version(m tensile.models, version int) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM tensile.model_versions v WHERE v.model = m.id AND v.version = _check_version.version
                   AND v.weight_bytes IS NOT NULL) THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object',
            MESSAGE = format('model "%s" has no version %s', m.name, coalesce(version::text, 'null')),
            HINT = coalesce((SELECT 'It has: ' || string_agg(v.version::text, ', ' ORDER BY v.version) || '.'
                             FROM tensile.model_versions v WHERE v.model = m.id AND v.weight_bytes IS NOT NULL),
                            'Train it first: train_model makes a version.');
    END IF;
END $$;

CREATE FUNCTION tensile._deploy_model(caller oid, model text, version int) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models := tensile._own_model(caller, model);
BEGIN
    PERFORM tensile._check_version(m, version);
    UPDATE tensile.models SET deployed_version = _deploy_model.version, updated_at = clock_timestamp() WHERE id = m.id;
END $$;

CREATE FUNCTION tensile._set_model_memory_budget(caller oid, model text, memory_budget text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models := tensile._own_model(caller, model);
BEGIN
    UPDATE tensile.models SET memory_budget = tensile._parse_budget(_set_model_memory_budget.memory_budget),
        updated_at = clock_timestamp() WHERE id = m.id;
END $$;

CREATE FUNCTION tensile._drop_version(caller oid, model text, version int) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models := tensile._own_model(caller, model);
BEGIN
    PERFORM tensile._check_version(m, version);
    IF version = m.deployed_version THEN
        RAISE EXCEPTION USING ERRCODE = 'object_in_use',
            MESSAGE = format('cannot drop version %s of model "%s" because it is deployed', version, model),
            HINT = 'Deploy another version with deploy_model first, or drop the model with drop_model.';
    END IF;
    DELETE FROM tensile.model_versions v WHERE v.model = m.id AND v.version = _drop_version.version;
END $$;

CREATE FUNCTION tensile._set_model_retention(caller oid, model text, keep_versions int) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models := tensile._own_model(caller, model);
BEGIN
    IF keep_versions < 1 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('keep_versions is out of range: %s', keep_versions),
            HINT = 'Use 1 or more, or null to keep all versions.';
    END IF;
    UPDATE tensile.models SET keep_versions = _set_model_retention.keep_versions, updated_at = clock_timestamp()
        WHERE id = m.id;
END $$;

-- The role's name as stored in model_grants; raises unless it exists.
CREATE FUNCTION tensile._role_name(role text) RETURNS name
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF role = 'public' OR EXISTS (SELECT FROM pg_roles WHERE rolname = role) THEN
        RETURN role;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'undefined_object', MESSAGE = format('role "%s" does not exist', role),
        HINT = 'Role names are case-sensitive here; see pg_roles.';
END $$;

CREATE FUNCTION tensile._check_privilege(privilege text) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF privilege IN ('predict', 'train') THEN
        RETURN;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
        MESSAGE = format('unknown privilege "%s" on a model', privilege), HINT = 'Use ''predict'' or ''train''.';
END $$;

CREATE FUNCTION tensile._grant_model(caller oid, model text, grantee text, privilege text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models := tensile._own_model(caller, model);
BEGIN
    PERFORM tensile._not_null('grantee', grantee), tensile._check_privilege(privilege);
    INSERT INTO tensile.model_grants (model, grantee_name, privilege, grantor_name)
        VALUES (m.id, tensile._role_name(grantee), _grant_model.privilege, m.owner_name)
        ON CONFLICT ON CONSTRAINT model_grants_pkey DO UPDATE SET grantee = EXCLUDED.grantee;
END $$;

CREATE FUNCTION tensile._revoke_model(caller oid, model text, grantee text, privilege text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models := tensile._own_model(caller, model);
BEGIN
    PERFORM tensile._not_null('grantee', grantee), tensile._check_privilege(privilege);
    DELETE FROM tensile.model_grants g
        WHERE g.model = m.id AND g.grantee_name = _revoke_model.grantee AND g.privilege = _revoke_model.privilege;
END $$;

CREATE FUNCTION tensile._set_model_owner(caller oid, model text, role text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models := tensile._own_model(caller, model);
    new_owner oid;
BEGIN
    PERFORM tensile._not_null('role', role);
    new_owner := (SELECT oid FROM pg_roles WHERE rolname = tensile._role_name(role));
    IF new_owner IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'public cannot own a model',
            HINT = 'Name a role; grant_model gives everybody the use of a model.';
    ELSIF NOT pg_has_role(caller, new_owner, 'MEMBER') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', MESSAGE = format('must be member of role "%s"', role),
            HINT = 'A superuser can give a model to any role.';
    END IF;
    UPDATE tensile.models SET owner = new_owner, owner_name = role, updated_at = clock_timestamp() WHERE id = m.id;
    UPDATE tensile.model_grants g SET grantor = new_owner, grantor_name = role WHERE g.model = m.id;
END $$;

------------------------------------------------------------------------------------------------------------------------
-- Jobs: submitting, cancelling, waiting
------------------------------------------------------------------------------------------------------------------------

-- The part of train_model behind the checks of the query, which need the caller's rights and are in csrc/submit.c
CREATE FUNCTION tensile._train_model(caller oid, model text, query text, target text, epochs int, batch_size int,
                                     optimizer text, learning_rate float8, validation float8, seed bigint,
                                     policy text, memory_budget text, priority int, options jsonb, search_path text)
    RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models := tensile._check_submission(caller, model, epochs, batch_size, optimizer, learning_rate,
                                                  validation, policy, priority, options);
    job bigint;
    budget bigint;
BEGIN
    budget := tensile._parse_budget(memory_budget);

    INSERT INTO tensile.jobs (model, model_name, owner_name, query, target, epochs, batch_size, optimizer,
                              learning_rate, validation, seed, policy, memory_budget, priority, options, settings)
        VALUES (m.id, m.name, pg_get_userbyid(caller), _train_model.query, _train_model.target, _train_model.epochs,
                _train_model.batch_size, _train_model.optimizer, _train_model.learning_rate, _train_model.validation,
                _train_model.seed, coalesce(_train_model.policy, current_setting('pg_tensile.policy')), budget,
                _train_model.priority, _train_model.options,
                jsonb_build_object('search_path', _train_model.search_path, 'TimeZone', current_setting('TimeZone'),
                                   'DateStyle', current_setting('DateStyle'),
                                   'IntervalStyle', current_setting('IntervalStyle')))
        ON CONFLICT DO NOTHING
        RETURNING id INTO job;
    IF job IS NULL THEN
        PERFORM tensile._no_open_job(m);
        RAISE EXCEPTION USING ERRCODE = 'object_in_use', MESSAGE = format('model "%s" is being trained', model),
            HINT = 'Wait until that job has ended, or stop it with cancel_job.';
    END IF;
    PERFORM tensile._log_event(job, 'submitted');
    RETURN job;
END $$;

-- The model to train, if the caller may train it this way and here. What train_model and explain_training refuse alike
CREATE FUNCTION tensile._check_submission(caller oid, model text, epochs int, batch_size int, optimizer text,
                                          learning_rate float8, validation float8, policy text, priority int,
                                          options jsonb) RETURNS tensile.models
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models;
BEGIN
    SELECT * INTO m FROM tensile.models WHERE name = model;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object', MESSAGE = format('model "%s" does not exist', model),
            HINT = 'Make it with register_model(name, architecture); existing ones are listed in tensile.models.';
    ELSIF NOT tensile._granted(caller, m.id, 'train') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('permission denied for model "%s"', model),
            HINT = format('Its owner can allow it: SELECT grant_model(%L, %L, ''train'').', model,
                          pg_get_userbyid(caller));
    END IF;
    PERFORM tensile._check_training(epochs, batch_size, optimizer, learning_rate, validation, policy, priority),
            tensile._check_options(options), tensile._check_choice(batch_size, policy, options),
            tensile._check_compression(policy, options),
            tensile._check_can_start(caller);
    RETURN m;
END $$;

CREATE FUNCTION tensile._check_priority(priority int) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF priority NOT BETWEEN -1000 AND 1000 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('priority is out of range: %s', priority),
            HINT = 'Use -1000 to 1000; higher starts earlier, and loses less time to others'' memory.';
    END IF;
END $$;

CREATE FUNCTION tensile._check_training(epochs int, batch_size int, optimizer text, learning_rate float8,
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
        hint := 'Use 1 to 10000000, and not more than the query has rows, or 0 to have it chosen.';
    ELSIF optimizer NOT IN ('sgd', 'adam', 'adamw') THEN
        message := format('unknown optimizer "%s"', optimizer);
        hint := 'Use ''sgd'', ''adam'' or ''adamw''.';
    ELSIF NOT (learning_rate > 0 AND learning_rate < 'Infinity') THEN
        message := format('learning_rate is out of range: %s', learning_rate);
        hint := 'Use a positive, finite number such as 0.001.';
    ELSIF NOT (validation >= 0 AND validation < 1) THEN
        message := format('validation is out of range: %s', validation);
        hint := 'It is the share of rows kept for validation: 0 or more, and less than 1.';
    ELSIF policy <> ALL (policies) THEN
        message := format('unknown policy "%s"', policy);
        hint := format('Use one of ''%s'', or leave it out for the setting pg_tensile.policy.',
                       array_to_string(policies, ''', '''));
    END IF;
    IF message IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = message, HINT = hint;
    END IF;
    PERFORM tensile._check_priority(priority);
END $$;

-- batch_size => 0 has the batch size chosen: with plans, which say what fits.
CREATE FUNCTION tensile._check_choice(batch_size int, policy text, options jsonb) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    option text := CASE WHEN batch_size <> 0 THEN (SELECT k FROM jsonb_object_keys(options) k
                        WHERE k IN ('batch_size_range', 'learning_rate_scaling') ORDER BY k LIMIT 1) END;
BEGIN
    IF option IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('the option "%s" is for a batch size that is chosen, but batch_size is %s', option, batch_size),
            HINT = 'Use batch_size => 0, or leave the option out.';
    ELSIF batch_size = 0 AND coalesce(policy, current_setting('pg_tensile.policy')) = 'none' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'no batch size can be chosen for the policy "none": what a step takes is not known without a plan',
            HINT = 'Use policy => ''joint'', or give a batch_size.';
    END IF;
END $$;

-- Compression is of swapped tensors.
CREATE FUNCTION tensile._check_compression(policy text, options jsonb) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF coalesce(policy, current_setting('pg_tensile.policy')) = 'none'
       AND coalesce(options->>'compression', 'none') <> 'none' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('compression "%s" needs a policy that swaps: "none" swaps nothing',
                             options->>'compression'),
            HINT = 'Use policy => ''joint'', or leave the option "compression" out.';
    END IF;
END $$;

-- '8GB' in bytes; null stays null
CREATE FUNCTION tensile._parse_budget(budget text) RETURNS bigint
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

-- Would a worker for this role start at all?
CREATE FUNCTION tensile._check_can_start(caller oid) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    home text := current_setting('pg_tensile.database');
BEGIN
    IF home <> current_database() THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('jobs do not run in database "%s"', current_database()),
            HINT = format('pg_tensile.database is "%s": connect there, or change the setting and reload.', home);
    ELSIF NOT (SELECT rolcanlogin FROM pg_roles WHERE oid = caller) THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('role "%s" is not permitted to log in', pg_get_userbyid(caller)),
            HINT = 'The job''s worker connects as the role that submits it: submit as a role with LOGIN.';
    ELSIF NOT has_schema_privilege(caller, 'tensile', 'USAGE') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('role "%s" has no USAGE privilege for schema "tensile"', pg_get_userbyid(caller)),
            HINT = format('The job''s worker runs as the role that submits it: GRANT tensile_user TO %I.',
                          pg_get_userbyid(caller));
    ELSIF NOT has_database_privilege(caller, current_database(), 'CONNECT') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('role "%s" has no CONNECT privilege for database "%s"',
                             pg_get_userbyid(caller), current_database()),
            HINT = 'The job''s worker connects as the role that submits it: grant it CONNECT.';
    END IF;
END $$;

-- The job's row, locked, after making sure that the caller may cancel it or change its priority
CREATE FUNCTION tensile._own_job(caller oid, job bigint) RETURNS tensile.jobs
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile.jobs;
    own bool;
BEGIN
    SELECT * INTO j FROM tensile.jobs WHERE id = job FOR UPDATE;
    own := tensile._acts_for(caller, j.owner, j.owner_name);
    IF j.id IS NULL OR NOT own AND NOT pg_has_role(caller, 'pg_read_all_stats', 'USAGE')
                               AND NOT pg_has_role(caller, 'pg_signal_backend', 'USAGE') THEN
        PERFORM tensile._no_such_job(job);
    ELSIF NOT own AND (NOT pg_has_role(caller, 'pg_signal_backend', 'USAGE')
                       OR EXISTS (SELECT FROM pg_roles WHERE oid = j.owner AND rolsuper)) THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', MESSAGE = format('permission denied for job %s', job),
            HINT = 'Its owner may do that, and members of pg_signal_backend unless the owner is a superuser.';
    END IF;
    RETURN j;
END $$;

CREATE FUNCTION tensile._cancel_job(caller oid, job bigint) RETURNS bool
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile.jobs := tensile._own_job(caller, job);
BEGIN
    IF j.state IN ('queued', 'interrupted') THEN
        UPDATE tensile.jobs SET cancel_requested = true WHERE id = job;
        PERFORM tensile._end_job(job, 'cancelled');
    ELSIF j.state IN ('starting', 'running', 'waiting') THEN
        UPDATE tensile.jobs SET cancel_requested = true WHERE id = job;
        PERFORM tensile._notify_stop(job);
    ELSE
        RETURN false;
    END IF;
    RETURN true;
END $$;

CREATE FUNCTION tensile._set_job_priority(caller oid, job bigint, priority int) RETURNS bool
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile.jobs := tensile._own_job(caller, job);
BEGIN
    PERFORM tensile._not_null('priority', priority::text), tensile._check_priority(priority);
    UPDATE tensile.jobs SET priority = _set_job_priority.priority WHERE id = job AND ended_at IS NULL;
    PERFORM tensile._notify(job);
    RETURN j.ended_at IS NULL;
END $$;

CREATE FUNCTION tensile._no_such_job(job bigint) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'undefined_object',
        MESSAGE = format('job %s does not exist', coalesce(job::text, 'null')),
        HINT = 'The jobs you may see are listed in tensile.jobs.';
END $$;

-- The final state, or null while the job goes on; raises the job's own error if it failed. Reads as the caller.
CREATE FUNCTION tensile._job_result(job bigint, deadline timestamptz) RETURNS text
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET row_security = on
AS $$
DECLARE
    j tensile.jobs;
BEGIN
    SELECT * INTO j FROM tensile.jobs WHERE id = job;
    IF NOT FOUND THEN
        PERFORM tensile._no_such_job(job);
    ELSIF j.state = 'failed' THEN
        PERFORM tensile._raise(j.sqlstate, j.error, j.hint, j.detail);
    ELSIF j.state IN ('finished', 'cancelled') THEN
        RETURN j.state;
    ELSIF clock_timestamp() >= deadline THEN
        RAISE EXCEPTION USING ERRCODE = 'query_canceled',
            MESSAGE = format('job %s has not ended in time: it is %s', job, j.state),
            DETAIL = coalesce(j.reason, 'It goes on.'),
            HINT = format('Wait longer, see how far it is in tensile.progress, or stop it with cancel_job(%s).', job);
    END IF;
    RETURN NULL;
END $$;

-- Until some job changes, a second at most.
CREATE FUNCTION tensile._wait_round(deadline timestamptz) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._wait_for_change(CASE WHEN $1 IS NULL THEN 1000
        ELSE least(1000, greatest(1, 1 + 1000 * extract(epoch FROM $1 - clock_timestamp())))::int END)
$$;

-- Not SECURITY DEFINER: it reads as the caller.
CREATE FUNCTION tensile._wait_for_job(caller oid, job bigint, timeout interval) RETURNS text
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    deadline timestamptz := clock_timestamp() + timeout;
    result text;
BEGIN
    IF tensile._submitted_here(job) THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('job %s was submitted by this transaction and cannot start before it commits', job),
            HINT = 'Commit first, then wait.';
    ELSIF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('wait_for_job cannot see changes in a transaction with isolation level %s',
                             current_setting('transaction_isolation')),
            HINT = 'CALL wait_for_job_procedure(...) outside a transaction block, or use READ COMMITTED.';
    END IF;
    LOOP
        result := tensile._job_result(job, deadline);
        EXIT WHEN result IS NOT NULL;
        PERFORM tensile._wait_round(deadline);
    END LOOP;
    RETURN result;
END $$;
CREATE FUNCTION @extschema@.wait_for_job(job bigint, timeout interval DEFAULT NULL) RETURNS text
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.wait_for_job(bigint, interval) IS
    'waits until a job has ended and returns its state; raises the job''s own error if it failed';

-- No SET here: a procedure with SET can't commit. So every name is qualified.
CREATE PROCEDURE @extschema@.wait_for_job_procedure(job bigint, timeout interval DEFAULT NULL,
                                                    INOUT state text DEFAULT NULL)
    LANGUAGE plpgsql
AS $$
DECLARE
    deadline timestamptz := pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) timeout;
BEGIN
    state := NULL;
    COMMIT;
    LOOP
        state := tensile._job_result(job, deadline);
        EXIT WHEN state IS NOT NULL;
        COMMIT;
        PERFORM tensile._wait_round(deadline);
        COMMIT;
    END LOOP;
END $$;
COMMENT ON PROCEDURE @extschema@.wait_for_job_procedure(bigint, interval, text) IS
    'waits like wait_for_job, but commits while it waits and so holds no snapshot';

------------------------------------------------------------------------------------------------------------------------
-- Jobs: from state to state. Every change of state ends in _notify.
------------------------------------------------------------------------------------------------------------------------

-- The model that the job trains, locked
CREATE FUNCTION tensile._trained_model(j tensile.jobs) RETURNS tensile.models
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models;
BEGIN
    SELECT * INTO m FROM tensile.models WHERE id = j.model FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object', MESSAGE = format('model "%s" was dropped', j.model_name),
            HINT = 'Register the model again and submit a new job.';
    END IF;
    RETURN m;
END $$;

-- A line of the server's log about the job: "submitted", "started", "interrupted" or the state that it ended in
CREATE FUNCTION tensile._log_event(job bigint, event text) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._log_job(format('pg_tensile: job %s %s: model="%s" owner="%s"', j.id, $2, j.model_name, j.owner_name)
        || CASE WHEN $2 IN ('started', 'interrupted') THEN format(' attempt=%s', j.attempts) ELSE '' END
        || coalesce(' seconds=' || round(extract(epoch FROM j.ended_at - j.started_at), 3), '')
        || coalesce(' sqlstate=' || j.sqlstate, '')
        || coalesce(' reason="' || coalesce(j.error, j.reason) || '"', ''))
    FROM tensile.jobs j WHERE j.id = $1
$$;

-- LISTEN pg_tensile: whoever listens hears of every job that ends, so the payload names nothing but its number and state.
-- A full queue would fail the transaction that ends the job.
CREATE FUNCTION tensile._announce_end(job bigint, state text) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT pg_notify('pg_tensile', json_build_object('job', $1, 'state', $2)::text)
    WHERE pg_notification_queue_usage() < 0.95
$$;

-- finished, failed or cancelled. A failed job keeps its last whole checkpoint until a later job of the model finishes.
-- `reason`: who cancelled it, if not cancel_job.
CREATE FUNCTION tensile._end_job(job bigint, state text, sqlstate text DEFAULT NULL, error text DEFAULT NULL,
                                 hint text DEFAULT NULL, detail text DEFAULT NULL, traceback text DEFAULT NULL,
                                 warnings text[] DEFAULT NULL, reason text DEFAULT NULL) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile.jobs;
BEGIN
    IF state = 'finished' THEN -- the model is locked before its job, as drop_model does
        PERFORM FROM tensile.models m JOIN tensile.jobs o ON o.model = m.id WHERE o.id = job FOR NO KEY UPDATE OF m;
    END IF;
    UPDATE tensile.jobs o SET state = _end_job.state, ended_at = clock_timestamp(), not_before = NULL,
            reason = CASE WHEN _end_job.state <> 'cancelled' THEN NULL WHEN o.cancel_requested THEN 'cancelled by cancel_job'
                          ELSE _end_job.reason END,
            sqlstate = _end_job.sqlstate, error = _end_job.error, hint = _end_job.hint, detail = _end_job.detail,
            traceback = _end_job.traceback, warnings = _end_job.warnings
        WHERE id = job AND ended_at IS NULL
        RETURNING * INTO j;
    IF NOT FOUND THEN
        RETURN;
    ELSIF state = 'finished' THEN
        IF j.kind = 'train' THEN
            PERFORM tensile._complete_version(j);
        END IF;
    ELSE
        DELETE FROM tensile.model_versions v WHERE v.job = j.id;
        DELETE FROM tensile.checkpoints c
            WHERE c.job = j.id AND (j.state = 'cancelled' OR c.meta IS NULL);
    END IF;
    -- The trace of the model's last job stays to be looked at, with all that belongs to it.
    DELETE FROM tensile.traces t USING tensile.jobs o
        WHERE t.job = o.id AND CASE WHEN j.model IS NULL THEN o.id = j.id ELSE o.model = j.model AND o.id <> j.id END;
    PERFORM tensile._notify(job), tensile._log_event(job, state), tensile._announce_end(job, state);
END $$;

-- From now on the job's version is seen. The oldest ones go, as far as the model's retention says so.
CREATE FUNCTION tensile._complete_version(j tensile.jobs) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile.models := tensile._trained_model(j);
    number int;
BEGIN
    UPDATE tensile.model_versions v
        SET weight_bytes = (SELECT coalesce(sum(octet_length(w.data)), 0)
                            FROM tensile.model_weights w WHERE w.version = v.id),
            created_at = clock_timestamp()
        WHERE v.job = j.id
        RETURNING v.version INTO number;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('job %s cannot finish without a version of its model', j.id);
    END IF;
    UPDATE tensile.jobs SET version = number WHERE id = j.id;
    IF coalesce((j.options->>'deploy')::bool, true) THEN
        UPDATE tensile.models SET deployed_version = number, updated_at = clock_timestamp() WHERE id = m.id
            RETURNING * INTO m;
    END IF;
    DELETE FROM tensile.model_versions v
        WHERE v.model = m.id AND v.version IS DISTINCT FROM m.deployed_version
          AND v.version <= (SELECT o.version FROM tensile.model_versions o WHERE o.model = m.id
                            ORDER BY o.version DESC OFFSET m.keep_versions LIMIT 1)
          AND m.keep_versions IS NOT NULL;
    DELETE FROM tensile.checkpoints c USING tensile.jobs o
        WHERE c.job = o.id AND o.model = j.model AND o.ended_at IS NOT NULL;
END $$;

-- interrupted: to be continued from the last checkpoint. With retry it counts against pg_tensile.max_retries, and the
-- next attempt waits 1, 2, 4 ... s, at most an hour.
CREATE FUNCTION tensile._interrupt_job(job bigint, reason text, retry bool, traceback text DEFAULT NULL) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile.jobs;
    failures int;
BEGIN
    SELECT * INTO j FROM tensile.jobs WHERE id = job AND state IN ('starting', 'running', 'waiting') FOR UPDATE;
    failures := j.retries + retry::int;
    IF NOT FOUND THEN
        RETURN;
    ELSIF j.cancel_requested THEN
        PERFORM tensile._end_job(job, 'cancelled');
        RETURN;
    ELSIF retry AND failures > current_setting('pg_tensile.max_retries')::int THEN
        PERFORM tensile._end_job(job, 'failed', '58000', reason,
            format('It was tried %s times in a row; pg_tensile.max_retries allows more. '
                   'The server''s log may say more.', failures), NULL, traceback);
        RETURN;
    END IF;
    DELETE FROM tensile.model_versions v WHERE v.job = j.id;
    DELETE FROM tensile.checkpoints c WHERE c.job = j.id AND c.meta IS NULL;
    UPDATE tensile.jobs SET state = 'interrupted', reason = _interrupt_job.reason,
            traceback = _interrupt_job.traceback, retries = failures,
            not_before = CASE WHEN retry THEN clock_timestamp() + least(2.0 ^ (failures - 1), 3600) * interval '1 s' END
        WHERE id = job;
    PERFORM tensile._notify(job), tensile._log_event(job, 'interrupted');
END $$;

-- For the controller ------------------------------------------------------------------------------------------------

-- Jobs that have not ended, with the priority that counts: waiting pg_tensile.ageing seconds is worth one step, so nobody
-- starves.
CREATE VIEW tensile._open_jobs WITH (security_invoker = true) AS
    SELECT j.id, j.state, j.memory_budget, j.submitted_at, j.not_before,
           CASE WHEN a.seconds OPERATOR(pg_catalog.>) 0
                THEN j.priority OPERATOR(pg_catalog.+) (
                     extract(epoch FROM pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) j.submitted_at)
                     OPERATOR(pg_catalog./) a.seconds)
                ELSE j.priority END::pg_catalog.float8 AS aged_priority
    FROM tensile.jobs j,
         (SELECT extract(epoch FROM pg_catalog.current_setting('pg_tensile.ageing')::pg_catalog.interval)) a (seconds)
    WHERE j.ended_at IS NULL;
COMMENT ON VIEW tensile._open_jobs IS 'private: open jobs and their priority with ageing';

-- The jobs that may start now, the one to start first first
CREATE FUNCTION tensile._queue_next(max_rows int DEFAULT NULL) RETURNS TABLE (job bigint)
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT j.id FROM tensile._open_jobs j
    WHERE j.state IN ('queued', 'interrupted') AND (j.not_before IS NULL OR j.not_before <= clock_timestamp())
    ORDER BY j.aged_priority DESC, j.submitted_at, j.id
    LIMIT $1
$$;

-- Milliseconds until the next job that waits for its time may start; null if none waits
CREATE FUNCTION tensile._queue_delay_ms() RETURNS int
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT (1000 * min(least(greatest(extract(epoch FROM j.not_before - clock_timestamp()), 0), 3600)))::int
    FROM tensile.jobs j
    WHERE j.ended_at IS NULL AND j.state = 'interrupted' AND j.not_before > clock_timestamp()
$$;

-- queued or interrupted -> starting: the OID of the role to connect as. Null: it may not start any more; a job whose
-- role is gone fails.
CREATE FUNCTION tensile._job_starting(job bigint) RETURNS oid
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile.jobs;
BEGIN
    SELECT * INTO j FROM tensile.jobs WHERE id = job AND state IN ('queued', 'interrupted') FOR UPDATE;
    IF NOT FOUND THEN
        RETURN NULL;
    ELSIF j.model IS NULL AND j.kind = 'train' THEN
        PERFORM tensile._end_job(job, 'failed', '42704', format('model "%s" was dropped', j.model_name),
                                 'Register the model again and submit a new job.');
        RETURN NULL;
    ELSIF NOT EXISTS (SELECT FROM pg_roles WHERE oid = j.owner AND rolname = j.owner_name AND rolcanlogin) THEN
        PERFORM tensile._end_job(job, 'failed', '42704',
            format('role "%s" was dropped, renamed or may not log in any more', j.owner_name),
            'The job''s worker connects as the role that submitted it: submit it again as a role with LOGIN.');
        RETURN NULL;
    ELSIF NOT has_schema_privilege(j.owner, 'tensile', 'USAGE') THEN
        PERFORM tensile._end_job(job, 'failed', '42501',
            format('role "%s" may not use pg_tensile any more', j.owner_name),
            format('The job''s worker runs as the role that submitted it: GRANT tensile_user TO %I.', j.owner_name));
        RETURN NULL;
    END IF;
    IF NOT has_database_privilege(j.owner, current_database(), 'CONNECT') THEN
        PERFORM tensile._end_job(job, 'failed', '42501',
            format('role "%s" has no CONNECT privilege for database "%s" any more', j.owner_name, current_database()),
            'The job''s worker connects as the role that submitted it: grant it CONNECT and submit the job again.');
        RETURN NULL;
    END IF;
    UPDATE tensile.jobs SET state = 'starting', attempts = attempts + 1, not_before = NULL WHERE id = job;
    PERFORM tensile._notify(job);
    RETURN j.owner;
END $$;

-- starting -> what it was, because no worker could be started; true if the reason is new (so that it is logged once).
CREATE FUNCTION tensile._job_requeue(job bigint, reason text) RETURNS bool
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    former text := (SELECT j.reason FROM tensile.jobs j WHERE j.id = job);
BEGIN
    UPDATE tensile.jobs j SET state = CASE WHEN j.attempts > 1 THEN 'interrupted' ELSE 'queued' END,
            attempts = j.attempts - 1, reason = _job_requeue.reason
        WHERE j.id = job AND j.state = 'starting';
    RETURN former IS DISTINCT FROM reason;
END $$;

-- Jobs that should have a worker and have none, and how their last one left, if that is known
CREATE FUNCTION tensile._orphans() RETURNS TABLE (job bigint, state text, attempt int, terminated bool, error text)
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT j.id, j.state, j.attempts, w.terminated, w.error
    FROM tensile.jobs j CROSS JOIN LATERAL tensile._worker_end(j.id) w
    WHERE j.ended_at IS NULL AND j.state IN ('starting', 'running', 'waiting')
      AND NOT EXISTS (SELECT FROM tensile._job_slots() s WHERE s.job = j.id)
$$;

-- Ended jobs beyond pg_tensile.job_retention go, with all that belongs to them. Where a version came from stays known.
CREATE FUNCTION tensile._forget_jobs() RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    DELETE FROM tensile.jobs j
    WHERE current_setting('pg_tensile.job_retention')::interval > '0'
      AND j.ended_at < clock_timestamp() - current_setting('pg_tensile.job_retention')::interval
      AND NOT EXISTS (SELECT FROM tensile.model_versions v WHERE v.job = j.id)
$$;

-- An orphan becomes interrupted (or failed, or cancelled).
CREATE FUNCTION tensile._reap(job bigint, reason text, retry bool) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._interrupt_job($1, $2, $3)
$$;

-- An orphan whose worker was terminated is cancelled.
CREATE FUNCTION tensile._reap_terminated(job bigint, reason text) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._end_job($1, 'cancelled', reason => $2)
$$;

-- For the job's worker ----------------------------------------------------------------------------------------------

-- Numbers in JSON are printed with extra_float_digits: below 1 they would not be those of the job's row.
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
            MESSAGE = format('job %s is not to be started', tensile._my_job());
    END IF;
    DELETE FROM tensile.model_versions v WHERE v.job = j.id;
    DELETE FROM tensile.checkpoints c WHERE c.job = j.id AND c.meta IS NULL;
    DELETE FROM tensile.traces t WHERE t.job = j.id;
    PERFORM tensile._notify(j.id), tensile._log_event(j.id, 'started');
    RETURN to_jsonb(j) - '{owner,owner_name,state,reason,sqlstate,error,hint,detail,traceback,warnings}'::text[]
        || jsonb_build_object('attempt', j.attempts,
               'running', (SELECT count(*) FROM tensile.jobs o
                           WHERE o.ended_at IS NULL AND o.state IN ('starting', 'running')),
               'architecture', (SELECT m.architecture FROM tensile.models m WHERE m.id = j.model),
               'checkpoint', (SELECT c.meta FROM tensile.checkpoints c WHERE c.job = j.id
                              ORDER BY c.generation DESC LIMIT 1));
END $$;

CREATE FUNCTION tensile._job_status() RETURNS text
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN j.model IS NULL AND j.kind = 'train' THEN 'no_model' WHEN j.cancel_requested THEN 'cancel'
                WHEN t.refusal IS NOT NULL THEN 'refused' ELSE 'ok' END
    FROM tensile.jobs j LEFT JOIN tensile.traces t ON t.job = j.id WHERE j.id = tensile._my_job()
$$;

CREATE FUNCTION tensile._job_rows(rows bigint) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile.jobs SET rows = $1 WHERE id = tensile._my_job()
$$;

CREATE FUNCTION tensile._job_checkpoint(generation int, seq int, data bytea) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile.checkpoints (job, generation) VALUES (tensile._my_job(), $1) ON CONFLICT DO NOTHING;
    INSERT INTO tensile.checkpoint_chunks (job, generation, seq, data) VALUES (tensile._my_job(), $1, $2, $3);
$$;

-- Now it is whole. A job that gets on has its faults forgiven.
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

-- METRICS: what is no column of epochs is a metric; null: it does not fit the task.
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

-- A version of the job's model that nobody sees yet: its weights come one by one, each in a transaction of its own, and
-- it is complete when the job has finished. Every other end of the attempt deletes it.
CREATE FUNCTION tensile._job_version(task text, preprocessing jsonb, metrics jsonb, fingerprint text) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j tensile.jobs;
    m tensile.models;
    result bigint;
BEGIN
    SELECT * INTO j FROM tensile.jobs WHERE id = tensile._my_job();
    m := tensile._trained_model(j);
    INSERT INTO tensile.model_versions (model, version, job, task, preprocessing, architecture, metrics, rows)
        VALUES (m.id, 1 + greatest((SELECT max(o.version) FROM tensile.model_versions o WHERE o.model = m.id),
                                   (SELECT max(o.version) FROM tensile.jobs o WHERE o.model = m.id), 0),
                j.id, _job_version.task, _job_version.preprocessing, m.architecture, _job_version.metrics, j.rows)
        RETURNING id INTO result;
    UPDATE tensile.jobs SET fingerprint = _job_version.fingerprint WHERE id = j.id;
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
            MESSAGE = format('version %s was not made by job %s', version, tensile._my_job());
    END IF;
END $$;

-- TRACE: the header, a trace for each graph, and at first the operators and tensors of the first graph. A job's first
-- trace makes it wait for a plan.
CREATE FUNCTION tensile._job_trace(header jsonb, traces bytea[], tables jsonb) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j bigint := tensile._my_job();
    h record;
BEGIN
    IF NOT EXISTS (SELECT FROM tensile.traces t WHERE t.job = j) THEN
        UPDATE tensile.jobs SET state = 'waiting', reason = 'its memory is being planned'
            WHERE id = j AND state = 'running';
    END IF;
    SELECT * INTO h FROM jsonb_to_record(header) AS (device text, profile jsonb, revision int, policy text,
        fingerprint text, overhead_bytes bigint, persistent_bytes bigint, parameters bigint, vanilla_bytes bigint,
        least_bytes bigint, operator text, graphs jsonb);
    INSERT INTO tensile.traces AS t (job, device, revision, policy, fingerprint, overhead_bytes, persistent_bytes,
                                     parameters, vanilla_bytes, least_bytes, largest_operator, graphs, traces)
        VALUES (j, h.device, h.revision, h.policy, h.fingerprint, h.overhead_bytes, h.persistent_bytes,
                h.parameters, h.vanilla_bytes, h.least_bytes, h.operator, h.graphs, _job_trace.traces)
        ON CONFLICT (job) DO UPDATE SET device = EXCLUDED.device, revision = EXCLUDED.revision,
            policy = EXCLUDED.policy, fingerprint = EXCLUDED.fingerprint, overhead_bytes = EXCLUDED.overhead_bytes,
            persistent_bytes = EXCLUDED.persistent_bytes, parameters = EXCLUDED.parameters,
            vanilla_bytes = EXCLUDED.vanilla_bytes, least_bytes = EXCLUDED.least_bytes,
            largest_operator = EXCLUDED.largest_operator, graphs = EXCLUDED.graphs, traces = EXCLUDED.traces,
            refusal = NULL, captured_at = clock_timestamp();
    IF h.profile <> 'null' THEN
        PERFORM tensile._check_profile(h.device, h.profile);
        INSERT INTO tensile.device_profiles (device, profile) VALUES (h.device, h.profile) ON CONFLICT DO NOTHING;
    END IF;
    IF tables IS NOT NULL THEN -- another graph: what is known of the one before is not true of it
        DELETE FROM tensile.latencies l WHERE l.job = j;
        DELETE FROM tensile.footprints f WHERE f.job = j;
        PERFORM tensile._keep_tables(j, tables);
    END IF;
    PERFORM tensile._notify(j);
END $$;

-- The first profile of a device counts for the jobs of all roles: one that no device can have is an error of its own job.
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
            ('bytes_per_s', 1e5, 1e17), ('transfer_latency_us', 0, 1e6), ('launch_us', 0, 1e6), ('handover_us', 0, 1e6) LOOP
        number := profile->>field;
        IF number IS NULL OR number < least OR number > most THEN
            RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
                MESSAGE = format('%s of device "%s" cannot be %s', field, device, coalesce(profile->>field, 'null')),
                HINT = 'The executor measured it; the code of the model may have disturbed that.';
        END IF;
    END LOOP;
END $$;

-- CHOICE: the batch size that was chosen for the job, and those that it was compared with
CREATE FUNCTION tensile._job_choice(choice jsonb) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    j bigint := tensile._my_job();
BEGIN
    UPDATE tensile.jobs SET chosen_batch_size = (choice->>'batch_size')::int WHERE id = j;
    DELETE FROM tensile.batch_sizes b WHERE b.job = j;
    INSERT INTO tensile.batch_sizes (job, batch_size, chosen, feasible, learning_rate, samples_per_s, iteration_us,
                                     stall_us, device_bytes, measured_us, reason)
        SELECT j, c.batch_size, c.batch_size = (choice->>'batch_size')::int, c.feasible, c.learning_rate,
               c.samples_per_s, c.iteration_us, c.stall_us, c.device_bytes, c.measured_us, c.reason
        FROM jsonb_to_recordset(choice->'candidates') AS c (batch_size int, feasible bool, learning_rate float8,
             samples_per_s float8, iteration_us float8, stall_us float8, device_bytes bigint, measured_us float8, reason text);
    PERFORM tensile._log('batch size', j, NULL, choice->>'device', choice->>'reason', choice - '{device,reason}'::text[]);
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

-- Its executor has a plan.
CREATE FUNCTION tensile._job_admitted() RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile.jobs SET state = 'running', reason = NULL WHERE id = tensile._my_job() AND state = 'waiting';
    SELECT tensile._notify(tensile._my_job());
$$;

-- LATENCY; in microseconds, by operator, NaN: not known.
CREATE FUNCTION tensile._job_latency(header jsonb, predicted real[], measured real[], average real[]) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile.latencies (job, predicted, measured, average, samples, total_us, load)
        SELECT t.job, $2, $3, $4, h.samples, h.total_us, h.load
        FROM tensile.traces t, jsonb_to_record($1) AS h (samples int, total_us float8, load float8)
        WHERE t.job = tensile._my_job()
        ON CONFLICT (job) DO UPDATE SET predicted = EXCLUDED.predicted, measured = EXCLUDED.measured,
            average = EXCLUDED.average, samples = EXCLUDED.samples, total_us = EXCLUDED.total_us, load = EXCLUDED.load,
            at = clock_timestamp();
    SELECT tensile._notify(tensile._my_job());
$$;

-- SPARSITY; `moved`: bytes, -1: not known.
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

-- What an executor has measured of its device's codecs; what is known already gives way to a calibration only.
CREATE FUNCTION tensile._job_codec_times(device text, times jsonb, relative_error float8) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._my_job();
    INSERT INTO tensile.codec_times (device, times, relative_error) VALUES ($1, $2, $3)
        ON CONFLICT ON CONSTRAINT codec_times_pkey
        DO UPDATE SET times = EXCLUDED.times, relative_error = EXCLUDED.relative_error,
            measured_at = clock_timestamp()
        WHERE (SELECT j.kind FROM tensile.jobs j WHERE j.id = tensile._my_job()) = 'calibrate'
$$;

-- Why the job can't be given memory (REFUSE), or null
CREATE FUNCTION tensile._job_refusal() RETURNS jsonb
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile._my_job(); -- in the next statement it isn't called if there is no row
    SELECT t.refusal FROM tensile.traces t WHERE t.job = tensile._my_job();
$$;

-- A line of the log; the scheduler hears of a plan that was rejected.
CREATE FUNCTION tensile._job_log(event text, reason text, generation bigint) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile.traces SET rejected = $3 WHERE job = tensile._my_job() AND $1 = 'rejected';
    SELECT tensile._notify(tensile._my_job()) WHERE $1 = 'rejected';
    SELECT tensile._log($1, m.job, $3, (SELECT t.device FROM tensile.traces t WHERE t.job = m.job), $2)
    FROM (SELECT tensile._my_job()) m (job)
$$;

-- For the JOB frame; only the job's worker may ask.
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

-- The result of a calibration
CREATE FUNCTION tensile._calibrate_done(device text, profile jsonb, models bytea, kinds int, samples int, error float8)
    RETURNS void
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
    INSERT INTO tensile.latency_models (device, models, kinds, samples, error, job)
        VALUES ($1, $3, $4, $5, $6, tensile._my_job())
        ON CONFLICT ON CONSTRAINT latency_models_pkey
        DO UPDATE SET models = EXCLUDED.models, kinds = EXCLUDED.kinds, samples = EXCLUDED.samples,
            error = EXCLUDED.error, job = EXCLUDED.job, calibrated_at = clock_timestamp();
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

-- For the scheduler -------------------------------------------------------------------------------------------------

-- Jobs that have sent a trace and have, or want, a plan
CREATE FUNCTION tensile._schedule_jobs()
    RETURNS TABLE (job bigint, waiting bool, waited_s float8, priority float8, policy text, memory_budget bigint,
                   device text, revision int, total_us float8, overhead_bytes bigint, least_bytes bigint, refused bool,
                   rejected bigint)
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT j.id, j.state = 'waiting', extract(epoch FROM clock_timestamp() - t.captured_at)::float8, j.aged_priority,
           t.policy, j.memory_budget, t.device, t.revision, l.total_us, t.overhead_bytes, t.least_bytes,
           t.refusal IS NOT NULL, t.rejected
    FROM tensile._open_jobs j JOIN tensile.traces t ON t.job = j.id LEFT JOIN tensile.latencies l ON l.job = j.id
    WHERE j.state IN ('waiting', 'running')
$$;

-- What a waiting job waits for; true if that is new.
CREATE FUNCTION tensile._job_waits(job bigint, reason text) RETURNS bool
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    UPDATE tensile.jobs j SET reason = _job_waits.reason
        WHERE j.id = job AND j.state = 'waiting' AND j.reason IS DISTINCT FROM _job_waits.reason;
    IF FOUND THEN
        PERFORM tensile._notify(job);
    END IF;
    RETURN FOUND;
END $$;

-- The job can't be given memory; `refusal`: REFUSE's header.
CREATE FUNCTION tensile._job_refuse(job bigint, refusal jsonb) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE tensile.traces t SET refusal = $2 WHERE t.job = $1;
    SELECT tensile._notify($1);
$$;

-- A line of the log; now and then the oldest lines go.
CREATE FUNCTION tensile._log(event text, job bigint DEFAULT NULL, generation bigint DEFAULT NULL,
                             device text DEFAULT NULL, reason text DEFAULT NULL, details jsonb DEFAULT NULL)
    RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    line bigint;
BEGIN
    INSERT INTO tensile.scheduler_log (event, job, generation, device, reason, details)
        VALUES ($1, $2, $3, $4, $5, $6) RETURNING id INTO line;
    IF line % 100 = 0 THEN
        DELETE FROM tensile.scheduler_log WHERE id <= line - 10000;
    END IF;
END $$;

-- What the job's plan was planned to need
CREATE FUNCTION tensile._footprint(job bigint, generation bigint, events bytea, operators int[], planned bigint[],
                                   vanilla bigint[], iteration_us float8, vanilla_us float8, planned_bytes bigint,
                                   granted_bytes bigint, host_bytes bigint, out_bytes bigint, in_bytes bigint,
                                   stall_us float8, recomputes int, plan_order bytea DEFAULT '') RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile.footprints
        SELECT t.job, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16
        FROM tensile.traces t WHERE t.job = $1
        ON CONFLICT (job) DO UPDATE SET generation = EXCLUDED.generation, events = EXCLUDED.events,
            operators = EXCLUDED.operators, planned = EXCLUDED.planned, vanilla = EXCLUDED.vanilla,
            iteration_us = EXCLUDED.iteration_us, vanilla_us = EXCLUDED.vanilla_us, planned_bytes = EXCLUDED.planned_bytes,
            granted_bytes = EXCLUDED.granted_bytes, host_bytes = EXCLUDED.host_bytes, out_bytes = EXCLUDED.out_bytes,
            in_bytes = EXCLUDED.in_bytes, stall_us = EXCLUDED.stall_us, recomputes = EXCLUDED.recomputes,
            plan_order = EXCLUDED.plan_order;
$$;

-- What was decided about compressing the job's tensors: [{tensor, codec, coded_bytes, coded_us, plain_us, compressed}]
CREATE FUNCTION tensile._coding(job bigint, decisions jsonb) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile.codings (job, decisions) SELECT t.job, $2 FROM tensile.traces t WHERE t.job = $1
        ON CONFLICT (job) DO UPDATE SET decisions = EXCLUDED.decisions, at = clock_timestamp();
$$;

-- A search for a better plan: `state` queued, searching (which starts its time), finished, stopped or failed
CREATE FUNCTION tensile._search(job bigint, state text, budget_bytes bigint, seconds float8, cached bool,
                                first_us float8, best_us float8, generation int, evaluations bigint) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile.searches AS s (job, state, budget_bytes, seconds, cached, first_us, best_us, generation,
                                       evaluations, ended_at)
        SELECT t.job, $2, $3, $4, $5, $6, $7, $8, $9, CASE WHEN $2 = 'finished' THEN clock_timestamp() END
        FROM tensile.traces t WHERE t.job = $1
        ON CONFLICT ON CONSTRAINT searches_pkey DO UPDATE SET state = EXCLUDED.state,
            budget_bytes = EXCLUDED.budget_bytes, seconds = EXCLUDED.seconds, cached = EXCLUDED.cached,
            first_us = EXCLUDED.first_us, best_us = EXCLUDED.best_us, generation = EXCLUDED.generation,
            evaluations = EXCLUDED.evaluations,
            started_at = CASE EXCLUDED.state WHEN 'queued' THEN NULL
                WHEN 'searching' THEN coalesce(s.started_at, clock_timestamp()) ELSE s.started_at END,
            ended_at = CASE WHEN EXCLUDED.state NOT IN ('queued', 'searching')
                THEN coalesce(s.ended_at, clock_timestamp()) END
$$;

-- What a search has found for the job's graph on its device; that of a longer search stays
CREATE FUNCTION tensile._search_result(job bigint, bucket_bytes bigint, device_peak_bytes bigint, events bytea,
                                       plan_order bytea, iteration_us float8, seconds float8, generations int)
    RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tensile.search_results AS r (fingerprint, device, bucket_bytes, device_peak_bytes, events, plan_order,
                                             iteration_us, seconds, generations)
        SELECT t.fingerprint, t.device, $2, $3, $4, $5, $6, $7, $8
        FROM tensile.traces t WHERE t.job = $1 AND t.fingerprint IS NOT NULL
        ON CONFLICT ON CONSTRAINT search_results_pkey DO UPDATE SET device_peak_bytes = EXCLUDED.device_peak_bytes,
            events = EXCLUDED.events, plan_order = EXCLUDED.plan_order, iteration_us = EXCLUDED.iteration_us,
            seconds = EXCLUDED.seconds, generations = EXCLUDED.generations, found_at = EXCLUDED.found_at
        WHERE r.seconds <= EXCLUDED.seconds
$$;

-- The result that fits into so much memory best, for the job's graph on its device
CREATE FUNCTION tensile._searched(job bigint, budget_bytes bigint)
    RETURNS TABLE (bucket_bytes bigint, events bytea, plan_order bytea, iteration_us float8, seconds float8,
                   generations int)
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT r.bucket_bytes, r.events, r.plan_order, r.iteration_us, r.seconds, r.generations
    FROM tensile.traces t JOIN tensile.search_results r ON r.fingerprint = t.fingerprint AND r.device = t.device
    WHERE t.job = $1 AND r.device_peak_bytes <= $2
    ORDER BY r.bucket_bytes DESC, r.iteration_us LIMIT 1
$$;

------------------------------------------------------------------------------------------------------------------------
-- What the background workers run
------------------------------------------------------------------------------------------------------------------------

-- One step, and what to wait for before the next one: no time-out after the last. Workers are executed as the role that
-- submitted the job, so everybody may execute it; _process() raises outside our processes, before Python imports anything.
CREATE PROCEDURE tensile._step(bits int, INOUT fd int, INOUT timeout_ms int, INOUT writable bool)
    LANGUAGE plpython3u
AS $$
process = plpy.execute("SELECT tensile._process() AS name")[0]["name"]
from pyworker.supervisors import supervisor
return supervisor.step(plpy, process, bits)
$$;
COMMENT ON PROCEDURE tensile._step(int, int, int, bool) IS
    'private: one step of a controller, scheduler, inference or worker process';

------------------------------------------------------------------------------------------------------------------------
-- The API
------------------------------------------------------------------------------------------------------------------------

CREATE FUNCTION @extschema@.register_model(name text, architecture jsonb, description text DEFAULT NULL,
                                           replace bool DEFAULT false) RETURNS bigint
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.register_model(text, jsonb, text, bool) IS
    'makes a model, e.g. register_model(''late'', ''{"type": "mlp", "hidden": [128, 64]}''); returns its id';
CREATE FUNCTION @extschema@.drop_model(name text) RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.drop_model(text) IS
    'removes a model with its versions and ends its job; for the model''s owner';
CREATE FUNCTION @extschema@.deploy_model(model text, version int) RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.deploy_model(text, int) IS
    'sets the version that predictions use from now on, also an older one; for the model''s owner';
CREATE FUNCTION @extschema@.grant_model(model text, grantee text, privilege text DEFAULT 'predict') RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.grant_model(text, text, text) IS
    'lets a role (or ''public'') ''predict'' with or ''train'' a model; its owner decides: predictions reveal training data';
CREATE FUNCTION @extschema@.revoke_model(model text, grantee text, privilege text DEFAULT 'predict') RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.revoke_model(text, text, text) IS
    'takes back what grant_model gave; for the model''s owner';
CREATE FUNCTION @extschema@.set_model_owner(model text, role text) RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.set_model_owner(text, text) IS
    'gives a model to another role that the caller is a member of; for the model''s owner, and superusers';

CREATE FUNCTION @extschema@.set_model_memory_budget(model text, memory_budget text) RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.set_model_memory_budget(text, text) IS
    'executes a model within so much device memory whenever it predicts, unless a call says otherwise; null: no limit; '
    'for the model''s owner';

CREATE FUNCTION @extschema@.drop_version(model text, version int) RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.drop_version(text, int) IS
    'drops a version of a model that is not deployed, with its weights; for the model''s owner';

CREATE FUNCTION @extschema@.set_model_retention(model text, keep_versions int) RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.set_model_retention(text, int) IS
    'keeps so many versions of a model, the newest ones, and the deployed one: whenever a job adds a version, older ones '
    'are dropped; null: all are kept; for the model''s owner';

CREATE FUNCTION @extschema@.train_model(model text, query text, target text,
        epochs int DEFAULT 10, batch_size int DEFAULT 64, optimizer text DEFAULT 'adamw',
        learning_rate float8 DEFAULT 1e-3, validation float8 DEFAULT 0.2, seed bigint DEFAULT 0,
        policy text DEFAULT NULL, memory_budget text DEFAULT NULL, priority int DEFAULT 0,
        options jsonb DEFAULT '{}') RETURNS bigint
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_train_model';
COMMENT ON FUNCTION @extschema@.train_model(text, text, text, int, int, text, float8, float8, bigint, text, text, int,
                                            jsonb) IS
    'submits a job that trains a model on the rows of a query; returns the job, which starts at commit; '
    'for the model''s owner and those granted ''train''';
CREATE FUNCTION @extschema@.cancel_job(job bigint) RETURNS bool
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.cancel_job(bigint) IS
    'stops a job; false if it had ended already; for the job''s owner and members of pg_signal_backend';
CREATE FUNCTION @extschema@.set_job_priority(job bigint, priority int) RETURNS bool
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_forward';
COMMENT ON FUNCTION @extschema@.set_job_priority(bigint, int) IS
    'a higher priority starts earlier and loses less time to others'' memory; false if the job had ended already; '
    'for those who may cancel it';

CREATE FUNCTION @extschema@.predict(model text, features record, memory_budget text DEFAULT NULL) RETURNS float8
    LANGUAGE C STABLE PARALLEL RESTRICTED COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_record';
CREATE FUNCTION @extschema@.predict(model text, features float8[], memory_budget text DEFAULT NULL) RETURNS float8
    LANGUAGE C STABLE PARALLEL RESTRICTED COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_array';
CREATE FUNCTION @extschema@.predict(model text, features jsonb, memory_budget text DEFAULT NULL) RETURNS float8
    LANGUAGE C STABLE PARALLEL RESTRICTED COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_jsonb';
CREATE FUNCTION @extschema@.predict_class(model text, features record, memory_budget text DEFAULT NULL) RETURNS text
    LANGUAGE C STABLE PARALLEL RESTRICTED COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_class_record';
CREATE FUNCTION @extschema@.predict_class(model text, features float8[], memory_budget text DEFAULT NULL) RETURNS text
    LANGUAGE C STABLE PARALLEL RESTRICTED COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_class_array';
CREATE FUNCTION @extschema@.predict_class(model text, features jsonb, memory_budget text DEFAULT NULL) RETURNS text
    LANGUAGE C STABLE PARALLEL RESTRICTED COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_class_jsonb';
CREATE FUNCTION @extschema@.predict_rows(model text, query text, memory_budget text DEFAULT NULL)
    RETURNS TABLE (row_number bigint, prediction float8, label text, probability float8)
    LANGUAGE C COST 1000 AS 'MODULE_PATHNAME', 'tensile_predict_rows';
COMMENT ON FUNCTION @extschema@.predict(text, record, text) IS
    'predicts for a row, columns matched by name; a number, or the probability of the second of two classes';
COMMENT ON FUNCTION @extschema@.predict(text, float8[], text) IS
    'predicts for the features in the order of the training query';
COMMENT ON FUNCTION @extschema@.predict(text, jsonb, text) IS 'predicts for an object {"feature": value, ...}';
COMMENT ON FUNCTION @extschema@.predict_class(text, record, text) IS
    'the most probable class for a row, columns matched by name';
COMMENT ON FUNCTION @extschema@.predict_class(text, float8[], text) IS
    'the most probable class for the features in the order of the training query';
COMMENT ON FUNCTION @extschema@.predict_class(text, jsonb, text) IS
    'the most probable class for an object {"feature": value, ...}';
COMMENT ON FUNCTION @extschema@.predict_rows(text, text, text) IS 'predicts for every row of a query, in batches';

------------------------------------------------------------------------------------------------------------------------
-- Explaining and calibrating
------------------------------------------------------------------------------------------------------------------------

-- What explain_training's executor gets, after the checks that train_model makes: the job's spec (docs/internals.md) and
-- what its admission depends on. The rows of the query are the caller's to read.
CREATE FUNCTION tensile._explain_training(caller oid, model text, query text, target text, epochs int, batch_size int,
                                          optimizer text, learning_rate float8, validation float8, seed bigint,
                                          policy text, memory_budget text, priority int, options jsonb,
                                          search_path text) RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET extra_float_digits = 1
AS $$
DECLARE
    format text := tensile._explanation_format(options);
    kept jsonb := CASE WHEN jsonb_typeof(options) = 'object' THEN options - 'format' ELSE options END;
    m tensile.models := tensile._check_submission(caller, model, epochs, batch_size, optimizer, learning_rate,
                                                  validation, policy, priority, kept);
    budget bigint := tensile._parse_budget(memory_budget);
    open_job bigint := (SELECT j.id FROM tensile.jobs j WHERE j.model = m.id AND j.ended_at IS NULL);
BEGIN
    RETURN jsonb_build_object(
        'job', 0, 'kind', 'explain', 'attempt', 1, 'resume', NULL, 'format', format, 'model', m.name,
        'architecture', m.architecture, 'target', target, 'epochs', epochs, 'batch_size', batch_size,
        'optimizer', optimizer, 'learning_rate', learning_rate, 'validation', validation, 'seed', seed,
        'policy', coalesce(policy, current_setting('pg_tensile.policy')), 'memory_budget', budget, 'options', kept,
        'profiles', (SELECT coalesce(jsonb_object_agg(p.device, p.profile), '{}') FROM tensile.device_profiles p),
        'open_job', open_job, 'open_job_s', tensile._remaining_s(open_job), 'admission', tensile._admission(priority));
END $$;

CREATE FUNCTION tensile._explanation_format(options jsonb) RETURNS text
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    format text := coalesce(options->>'format', 'text');
BEGIN
    IF format IN ('text', 'json') THEN
        RETURN format;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = format('unknown format "%s"', format),
        HINT = 'Use {"format": "text"} or {"format": "json"}.';
END $$;

-- How long a job goes on, at most (early stopping is not foreseen): by its last epochs, or else by what it does in a
-- second, or else by what its operators should take. Null: not known.
CREATE FUNCTION tensile._remaining_s(job bigint) RETURNS float8
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN r.seconds BETWEEN 0 AND 1e12 THEN r.seconds END
    FROM tensile.jobs j
         CROSS JOIN LATERAL (SELECT coalesce(j.chosen_batch_size, nullif(j.batch_size, 0))::float8 AS batch_size) b
         LEFT JOIN tensile._progress() p ON p.job = j.id AND p.phase IN ('training', 'validating', 'saving')
         LEFT JOIN tensile.latencies l ON l.job = j.id
         CROSS JOIN LATERAL (SELECT sum(x.seconds) / count(DISTINCT x.epoch) AS seconds
                             FROM (SELECT y.epoch, y.seconds FROM tensile.epochs y WHERE y.job = j.id
                                   ORDER BY y.epoch DESC, y.split LIMIT 10) x) e
         CROSS JOIN LATERAL (
             SELECT CASE WHEN p.steps > 0
                 THEN coalesce(e.seconds, p.steps * b.batch_size / nullif(p.samples_per_s, 0))
                      * greatest(p.epochs - p.epoch + 1 - p.step / p.steps::float8, 0)
                 ELSE l.total_us / 1e6 * ceil(j.rows * (1 - j.validation) / b.batch_size) * j.epochs END) r (seconds)
    WHERE j.id = $1
$$;

-- {device: what its jobs could be squeezed into}, of all roles' jobs together; `ahead`: those that a job of that
-- priority would wait for, the waiting ones in the order in which they may begin
CREATE FUNCTION tensile._admission(priority int) RETURNS jsonb
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (SELECT coalesce(jsonb_object_agg(d.name, jsonb_build_object(
                'budget_bytes', d.budget_bytes, 'inference_bytes', coalesce(d.inference_bytes, 0),
                'running', r.running, 'waiting', r.waiting, 'least_bytes', r.least_bytes, 'ahead', r.ahead)), '{}')
            FROM tensile._devices() d CROSS JOIN LATERAL (
                SELECT count(*) FILTER (WHERE j.state = 'running') AS running,
                       count(*) FILTER (WHERE j.state = 'waiting') AS waiting,
                       coalesce(sum(t.least_bytes + t.overhead_bytes) FILTER (WHERE j.state = 'running'), 0)
                           AS least_bytes,
                       coalesce(jsonb_agg(jsonb_build_object('running', j.state = 'running',
                                    'least_bytes', t.least_bytes + t.overhead_bytes,
                                    'remaining_s', tensile._remaining_s(j.id))
                                    ORDER BY j.aged_priority DESC, j.submitted_at, j.id)
                                FILTER (WHERE j.state = 'running'
                                        OR j.state = 'waiting' AND j.aged_priority >= _admission.priority), '[]') AS ahead
                FROM tensile.traces t JOIN tensile._open_jobs j ON j.id = t.job
                WHERE t.device = d.name) r);
END $$;

-- For the supervisor, which reads as the caller, who may have row_security off
CREATE FUNCTION tensile._explain_latency_models() RETURNS TABLE (device text, models bytea)
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT m.device, m.models FROM tensile.latency_models m
$$;

-- The supervisor, called by explain_training alone: as the caller, in the caller's transaction.
CREATE FUNCTION tensile._explain(spec jsonb, folder text, OUT lines text[], OUT sqlstate text, OUT message text,
                                 OUT hint text, OUT detail text, OUT traceback text)
    LANGUAGE plpython3u SET search_path = pg_catalog, pg_temp
AS $$
import sys
if folder not in sys.path:
    sys.path.insert(0, folder)
from pyworker.supervisors import explain
return explain.run(plpy, spec)
$$;
CREATE FUNCTION tensile._explain_feed(fd int) RETURNS bigint
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_explain_feed';
CREATE FUNCTION tensile._explain_wait(fd int, timeout_ms int, writable bool) RETURNS int
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_explain_wait';

CREATE FUNCTION @extschema@.explain_training(model text, query text, target text,
        epochs int DEFAULT 10, batch_size int DEFAULT 64, optimizer text DEFAULT 'adamw',
        learning_rate float8 DEFAULT 1e-3, validation float8 DEFAULT 0.2, seed bigint DEFAULT 0,
        policy text DEFAULT NULL, memory_budget text DEFAULT NULL, priority int DEFAULT 0,
        options jsonb DEFAULT '{}') RETURNS SETOF text
    LANGUAGE C COST 1000 AS 'MODULE_PATHNAME', 'tensile_explain_training';
COMMENT ON FUNCTION @extschema@.explain_training(text, text, text, int, int, text, float8, float8, bigint, text, text,
                                                 int, jsonb) IS
    'what train_model with the same arguments would take, its memory plan, and whether it would start; trains nothing; '
    'for those who may train the model';

-- Calibrating is a job like any other, but for its worker's executor: no model, no query. Its row's options hold the
-- time that it may take.
CREATE FUNCTION tensile._calibrate(caller oid, device_seconds int) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    job bigint;
BEGIN
    PERFORM tensile._not_null('device_seconds', device_seconds::text), tensile._check_can_start(caller);
    IF device_seconds NOT BETWEEN 1 AND 86400 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('device_seconds is out of range: %s', device_seconds), HINT = 'Use 1 to 86400.';
    END IF;
    INSERT INTO tensile.jobs (kind, model_name, owner_name, query, target, epochs, batch_size, optimizer,
                              learning_rate, validation, seed, priority, options, settings)
        VALUES ('calibrate', '(calibration)', pg_get_userbyid(caller), '', '', 1, 1, '', 0, 0, 0, 0,
                jsonb_build_object('seconds', device_seconds), '{}')
        ON CONFLICT DO NOTHING
        RETURNING id INTO job;
    IF job IS NULL THEN
        job := (SELECT j.id FROM tensile.jobs j WHERE j.kind = 'calibrate' AND j.ended_at IS NULL);
        RAISE EXCEPTION USING ERRCODE = 'object_in_use', MESSAGE = 'the device is being calibrated already',
            DETAIL = 'Job ' || job || ' does it.',
            HINT = 'Wait with wait_for_job until that job has ended, or stop it with cancel_job.';
    END IF;
    PERFORM tensile._log_event(job, 'submitted');
    RETURN job;
END $$;
CREATE FUNCTION tensile.calibrate(device_seconds int DEFAULT 240) RETURNS bigint
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_calibrate';
COMMENT ON FUNCTION tensile.calibrate(int) IS
    'measures the operators of models on the device, so that times are predicted well before anything ran; a job';

-- Training steps to measure: of the models that were trained last, as they were trained. For the job's worker.
CREATE FUNCTION tensile._calibration_workloads() RETURNS jsonb
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM tensile._my_job();
    RETURN (SELECT coalesce(jsonb_agg(jsonb_build_object(
                'architecture', v.architecture, 'inputs', tensile._model_inputs(v.preprocessing), 'task', v.task,
                'outputs', CASE v.task WHEN 'multiclass' THEN jsonb_array_length(v.preprocessing->'labels') ELSE 1 END,
                'batch_size', v.batch_size, 'optimizer', v.optimizer, 'options', v.options)
                ORDER BY v.created_at DESC), '[]')
            FROM (SELECT o.*, j.batch_size, j.optimizer, j.options,
                         row_number() OVER (PARTITION BY o.model ORDER BY o.version DESC) AS age
                  FROM tensile.model_versions o JOIN tensile.jobs j ON j.id = o.job
                  WHERE o.weight_bytes IS NOT NULL
                  ORDER BY age, o.created_at DESC LIMIT 20) v
            WHERE v.age = 1);
END $$;

-- Sizes of a model's features, as pg_tensile/execution/data/preprocessing.py derives them from what was fitted: numeric columns, codes
-- of each category (0 included), [length, tokens or 0] of each array
CREATE FUNCTION tensile._model_inputs(preprocessing jsonb) RETURNS jsonb
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_build_object(
        'numeric', coalesce(sum(CASE f->>'kind' WHEN 'numeric' THEN 1 WHEN 'array' THEN 0
                                    WHEN 'timestamp' THEN CASE WHEN (f->>'hour')::bool THEN 7 ELSE 5 END ELSE 0 END
                                + CASE WHEN f->>'kind' <> 'category' AND (f->>'nulls')::bigint > 0 THEN 1 ELSE 0 END), 0),
        'cardinalities', coalesce(jsonb_agg(1 + jsonb_array_length(f->'categories') ORDER BY place)
                                  FILTER (WHERE f->>'kind' = 'category'), '[]'),
        'arrays', coalesce(jsonb_agg(jsonb_build_array((f->>'length')::int,
                                                       coalesce(2 + jsonb_array_length(f->'tokens'), 0)) ORDER BY place)
                           FILTER (WHERE f->>'kind' = 'array'), '[]'))
    FROM jsonb_array_elements($1->'features') WITH ORDINALITY AS e (f, place)
$$;

------------------------------------------------------------------------------------------------------------------------
-- Views
------------------------------------------------------------------------------------------------------------------------

CREATE VIEW tensile.progress WITH (security_invoker = true) AS
    SELECT j.id AS job, j.model_name AS model, j.owner_name AS owner, j.state, j.reason, p.pid, p.phase, p.epoch,
           j.epochs, p.step, p.steps, p.loss, p.samples_per_s, p.device_bytes, p.device_peak_bytes, p.bytes_swapped,
           p.raw_bytes_swapped, p.stall_us, p.passive_swap_ins, p.plan_generation, p.heartbeat,
           coalesce(j.chosen_batch_size, CASE WHEN j.batch_size OPERATOR(pg_catalog.<>) 0 THEN j.batch_size END) AS batch_size
    FROM tensile.jobs j LEFT JOIN tensile._progress() p ON p.job OPERATOR(pg_catalog.=) j.id
    WHERE j.ended_at IS NULL;
COMMENT ON VIEW tensile.progress IS
    'jobs that have not ended, with live numbers from shared memory (not transactional)';
COMMENT ON COLUMN tensile.progress.reason IS 'why the job waits or was interrupted';
COMMENT ON COLUMN tensile.progress.pid IS 'process ID of the worker';
COMMENT ON COLUMN tensile.progress.phase IS
    'starting, loading, preparing, building, choosing (the batch size), capturing, waiting, training, validating, '
    'saving or calibrating';
COMMENT ON COLUMN tensile.progress.epoch IS 'number of the epoch, from 1';
COMMENT ON COLUMN tensile.progress.step IS 'finished steps of this epoch';
COMMENT ON COLUMN tensile.progress.steps IS 'number of steps of this epoch';
COMMENT ON COLUMN tensile.progress.loss IS 'mean over the epoch so far';
COMMENT ON COLUMN tensile.progress.samples_per_s IS 'rows trained on in a second';
COMMENT ON COLUMN tensile.progress.device_bytes IS 'device memory that is kept between two steps';
COMMENT ON COLUMN tensile.progress.device_peak_bytes IS 'the most device memory so far, during a step';
COMMENT ON COLUMN tensile.progress.bytes_swapped IS 'bytes moved to the host and back so far';
COMMENT ON COLUMN tensile.progress.raw_bytes_swapped IS 'the same without compression';
COMMENT ON COLUMN tensile.progress.stall_us IS 'time spent waiting for copies so far';
COMMENT ON COLUMN tensile.progress.batch_size IS 'rows of a step; null: it is not chosen yet';
COMMENT ON COLUMN tensile.progress.passive_swap_ins IS 'copies to the device that no plan foresaw';
COMMENT ON COLUMN tensile.progress.plan_generation IS 'generation of the plan in use';
COMMENT ON COLUMN tensile.progress.heartbeat IS 'when the executor was heard last';

CREATE VIEW tensile.devices WITH (security_invoker = true) AS
    SELECT d.name, d.total_bytes, d.budget_bytes, d.granted_bytes, d.in_use_bytes, d.inference_bytes, d.jobs,
           d.out_bytes_per_s, d.in_bytes_per_s, d.utilisation
    FROM tensile._devices() d;
COMMENT ON VIEW tensile.devices IS
    'devices that executors use: the memory budget, what jobs have been granted of it and use, what the predictor uses';
COMMENT ON COLUMN tensile.devices.total_bytes IS 'memory of the device';
COMMENT ON COLUMN tensile.devices.budget_bytes IS 'what jobs and predictions may use of it together';
COMMENT ON COLUMN tensile.devices.granted_bytes IS 'what jobs may use of it now, their processes'' overheads included';
COMMENT ON COLUMN tensile.devices.in_use_bytes IS 'what jobs keep on it between two steps; during one they may take all that is granted';
COMMENT ON COLUMN tensile.devices.inference_bytes IS 'what models for predictions take of it';
COMMENT ON COLUMN tensile.devices.jobs IS 'number of jobs that use the device now';
COMMENT ON COLUMN tensile.devices.out_bytes_per_s IS 'rate of copies to the host';
COMMENT ON COLUMN tensile.devices.in_bytes_per_s IS 'rate of copies to the device';
COMMENT ON COLUMN tensile.devices.utilisation IS 'how busy others keep it, as jobs see it: 0 to 1';

CREATE VIEW tensile.plan WITH (security_invoker = true) AS
    SELECT p.job, p.generation, p.sequence, p.event, p.tensor, t.name AS tensor_name, t.kind AS tensor_kind, p.bytes,
           p.trigger_operator, o.target AS trigger_name, p.delay_us, p.deadline_operator, p.version, p.codec
    FROM tensile._plan() p
         LEFT JOIN tensile.tensors t
             ON t.job OPERATOR(pg_catalog.=) p.job AND t.tensor OPERATOR(pg_catalog.=) p.tensor
         LEFT JOIN tensile.operators o
             ON o.job OPERATOR(pg_catalog.=) p.job AND o.operator OPERATOR(pg_catalog.=) p.trigger_operator;
COMMENT ON VIEW tensile.plan IS 'the plan each running job follows: swap, recompute and release events';
COMMENT ON COLUMN tensile.plan.generation IS 'generation of the plan';
COMMENT ON COLUMN tensile.plan.sequence IS 'order of the events, as the operators are executed';
COMMENT ON COLUMN tensile.plan.event IS 'swap_out, swap_in, recompute or release';
COMMENT ON COLUMN tensile.plan.tensor IS 'number of the tensor in tensors';
COMMENT ON COLUMN tensile.plan.tensor_name IS 'see tensors';
COMMENT ON COLUMN tensile.plan.tensor_kind IS 'see tensors';
COMMENT ON COLUMN tensile.plan.trigger_operator IS 'operator after which the event begins; its number in operators';
COMMENT ON COLUMN tensile.plan.trigger_name IS 'PyTorch operator of that number';
COMMENT ON COLUMN tensile.plan.delay_us IS 'time after the trigger until which a copy may be put off';
COMMENT ON COLUMN tensile.plan.deadline_operator IS
    'operator before which a swap_in has ended, after which a swap_out has, or which needs what is recomputed';
COMMENT ON COLUMN tensile.plan.version IS 'version of the tensor that is recomputed: number of its changes in place';
COMMENT ON COLUMN tensile.plan.codec IS 'codec of a swap_out: zvc, rle, csr or lz4; null: not compressed';

CREATE VIEW tensile.latency WITH (security_invoker = true) AS
    SELECT o.job, o.operator, o.phase, o.target, l.predicted_us, l.measured_us, l.average_us, l.samples,
           CASE WHEN l.measured_us OPERATOR(pg_catalog.>) 0
                THEN pg_catalog.abs(l.predicted_us::pg_catalog.float8 OPERATOR(pg_catalog.-) l.measured_us)
                     OPERATOR(pg_catalog./) l.measured_us END AS relative_error
    FROM tensile.operators o
         LEFT JOIN (SELECT x.job, x.samples, u.operator,
                           CASE WHEN u.predicted OPERATOR(pg_catalog.<>) 'NaN' THEN u.predicted END AS predicted_us,
                           CASE WHEN u.measured OPERATOR(pg_catalog.<>) 'NaN' THEN u.measured END AS measured_us,
                           CASE WHEN u.average OPERATOR(pg_catalog.<>) 'NaN' THEN u.average END AS average_us
                    FROM tensile.latencies x,
                         ROWS FROM (pg_catalog.unnest(x.predicted), pg_catalog.unnest(x.measured),
                                    pg_catalog.unnest(x.average), -- the planner expects 10 rows of unnest, 1000 of this:
                                    pg_catalog.generate_series(0, pg_catalog.cardinality(x.predicted)
                                                                  OPERATOR(pg_catalog.-) 1))
                             u (predicted, measured, average, operator)) l
             ON l.job OPERATOR(pg_catalog.=) o.job AND l.operator OPERATOR(pg_catalog.=) o.operator;
COMMENT ON VIEW tensile.latency IS
    'latency of each operator of each job in microseconds: predicted, last measured, moving average';
COMMENT ON COLUMN tensile.latency.operator IS 'number of the operator in operators';
COMMENT ON COLUMN tensile.latency.phase IS 'forward, backward or optimizer';
COMMENT ON COLUMN tensile.latency.target IS 'name of the PyTorch operator';
COMMENT ON COLUMN tensile.latency.predicted_us IS 'prediction from before anything ran';
COMMENT ON COLUMN tensile.latency.measured_us IS 'measurement of the last measured iteration; null: it never ran';
COMMENT ON COLUMN tensile.latency.average_us IS 'moving average, see pg_tensile.latency_weight';
COMMENT ON COLUMN tensile.latency.samples IS 'number of measured iterations';
COMMENT ON COLUMN tensile.latency.relative_error IS 'relative error of the prediction: 0.1 is 10 % off';

CREATE VIEW tensile.footprint WITH (security_invoker = true) AS
    SELECT f.job, (u.number OPERATOR(pg_catalog.-) 1)::pg_catalog.int4 AS sequence, u.operator, o.target, u.planned AS planned_bytes,
           u.vanilla AS vanilla_bytes
    FROM tensile.footprints f CROSS JOIN
         ROWS FROM (pg_catalog.unnest(f.operators), pg_catalog.unnest(f.planned), pg_catalog.unnest(f.vanilla))
             WITH ORDINALITY u (operator, planned, vanilla, number)
         LEFT JOIN tensile.operators o ON o.job OPERATOR(pg_catalog.=) f.job
                                      AND o.operator OPERATOR(pg_catalog.=) u.operator;
COMMENT ON VIEW tensile.footprint IS
    'bytes on the device at each step of each job''s iteration, under its plan and without one';
COMMENT ON COLUMN tensile.footprint.sequence IS 'the step; more of them than operators where some are executed again';
COMMENT ON COLUMN tensile.footprint.operator IS 'operator executed in the step; its number in operators';
COMMENT ON COLUMN tensile.footprint.target IS 'name of the PyTorch operator';
COMMENT ON COLUMN tensile.footprint.planned_bytes IS 'bytes under the plan';
COMMENT ON COLUMN tensile.footprint.vanilla_bytes IS 'bytes without a plan';

CREATE VIEW tensile.compression WITH (security_invoker = true) AS
    SELECT s.job, u.tensor, t.name, t.kind, t.bytes, u.zero_share, d.codec, d.coded_bytes, d.coded_us, d.plain_us,
           coalesce(d.compressed, false) AS compressed, u.moved AS moved_bytes
    FROM tensile.sparsities s
         CROSS JOIN ROWS FROM (pg_catalog.unnest(s.tensors), pg_catalog.unnest(s.zero_share), pg_catalog.unnest(s.moved))
             u (tensor, zero_share, moved)
         JOIN tensile.tensors t ON t.job OPERATOR(pg_catalog.=) s.job AND t.tensor OPERATOR(pg_catalog.=) u.tensor
         LEFT JOIN (SELECT c.job, r.tensor, r.codec, r.coded_bytes, r.coded_us, r.plain_us, r.compressed
                    FROM tensile.codings c
                         CROSS JOIN LATERAL pg_catalog.jsonb_to_recordset(c.decisions) r (
                             tensor pg_catalog.int4, codec pg_catalog.text, coded_bytes pg_catalog.int8,
                             coded_us pg_catalog.float8, plain_us pg_catalog.float8, compressed pg_catalog.bool)) d
             ON d.job OPERATOR(pg_catalog.=) s.job AND d.tensor OPERATOR(pg_catalog.=) u.tensor;
COMMENT ON VIEW tensile.compression IS
    'tensors that a job with the option compression swaps: their zeros, and whether compressing them pays';
COMMENT ON COLUMN tensile.compression.tensor IS 'number of the tensor in tensors';
COMMENT ON COLUMN tensile.compression.name IS 'see tensors';
COMMENT ON COLUMN tensile.compression.kind IS 'see tensors';
COMMENT ON COLUMN tensile.compression.zero_share IS
    'share of zeros among the words of the tensor, counted once an epoch: 0 to 1';
COMMENT ON COLUMN tensile.compression.codec IS 'best codec for the tensor: zvc, rle, csr or lz4; null: no decision yet';
COMMENT ON COLUMN tensile.compression.coded_bytes IS 'expected size with that codec';
COMMENT ON COLUMN tensile.compression.coded_us IS
    'what swapping it costs an iteration with that codec: its own time, and of the copies what is not hidden';
COMMENT ON COLUMN tensile.compression.plain_us IS 'what swapping it costs an iteration without a codec';
COMMENT ON COLUMN tensile.compression.compressed IS
    'whether the codec pays: plans use it where that makes the whole iteration faster; see plan.codec';
COMMENT ON COLUMN tensile.compression.moved_bytes IS
    'bytes that the last copy to the host moved; null: none was compressed yet';

CREATE VIEW tensile.search WITH (security_invoker = true) AS
    SELECT s.job,
           CASE WHEN s.ended_at IS NULL AND j.ended_at IS NOT NULL THEN 'stopped' ELSE s.state END AS state,
           coalesce(s.ended_at, j.ended_at, pg_catalog.clock_timestamp()) OPERATOR(pg_catalog.-) s.started_at AS elapsed,
           s.generation, s.evaluations, s.first_us, s.best_us, s.cached, s.budget_bytes, s.seconds
    FROM tensile.searches s JOIN tensile.jobs j ON j.id OPERATOR(pg_catalog.=) s.job;
COMMENT ON VIEW tensile.search IS 'how far the search for a better plan of each job of policy swapadvisor is';
COMMENT ON COLUMN tensile.search.state IS 'queued, searching, finished, stopped (with its job) or failed';
COMMENT ON COLUMN tensile.search.elapsed IS
    'time since the search began; null: it has not, or an earlier result is as good';
COMMENT ON COLUMN tensile.search.generation IS
    'generation of plans bred from each other in which the best one was found';
COMMENT ON COLUMN tensile.search.evaluations IS 'number of plans evaluated until then';
COMMENT ON COLUMN tensile.search.first_us IS
    'expected duration of an iteration under the plan that the search began with';
COMMENT ON COLUMN tensile.search.best_us IS 'expected duration of an iteration under the best plan so far';
COMMENT ON COLUMN tensile.search.cached IS 'whether it had the result of an earlier search for the same graph';
COMMENT ON COLUMN tensile.search.budget_bytes IS 'device memory that a plan may take';
COMMENT ON COLUMN tensile.search.seconds IS 'time allowed for the search: pg_tensile.search_time, or the job''s option';

CREATE VIEW tensile.predictions WITH (security_invoker = true) AS
    SELECT m.name AS model, v.version, p.rows, p.requests, p.unknown_categories
    FROM tensile._predictions() p
         JOIN tensile.model_versions v ON v.id OPERATOR(pg_catalog.=) p.version
         JOIN tensile.models m ON m.id OPERATOR(pg_catalog.=) v.model;
COMMENT ON VIEW tensile.predictions IS 'predictions since the server started, and categories the model has never seen';
COMMENT ON COLUMN tensile.predictions.rows IS 'number of rows that were predicted for';
COMMENT ON COLUMN tensile.predictions.requests IS
    'number of requests to the predictor: a row of predict, a batch of predict_rows';
COMMENT ON COLUMN tensile.predictions.unknown_categories IS 'values of categories that training never saw';

CREATE VIEW tensile.loaded_models WITH (security_invoker = true) AS
    SELECT m.name AS model, v.version, l.memory_budget, l.device_bytes, l.planned_bytes, l.host_bytes
    FROM tensile._loaded_models() l
         JOIN tensile.model_versions v ON v.id OPERATOR(pg_catalog.=) l.version
         JOIN tensile.models m ON m.id OPERATOR(pg_catalog.=) v.model;
COMMENT ON VIEW tensile.loaded_models IS
    'models that the predictor keeps; a version once for each memory budget that it predicts within';
COMMENT ON COLUMN tensile.loaded_models.memory_budget IS 'in bytes; null: it is executed in one piece';
COMMENT ON COLUMN tensile.loaded_models.device_bytes IS
    'device memory counted for the model: its memory budget, or its weights';
COMMENT ON COLUMN tensile.loaded_models.planned_bytes IS
    'the most of the memory budget that a prediction for one row takes';
COMMENT ON COLUMN tensile.loaded_models.host_bytes IS 'bytes of its weights in host memory, beside those on the device';

CREATE VIEW tensile.epoch_metrics WITH (security_invoker = true) AS
    SELECT e.job, e.epoch, e.split, e.samples, m.loss, m.accuracy, m.f1, m.rmse, m.r2, e.seconds, e.at
    FROM tensile.epochs e
         CROSS JOIN LATERAL (
             SELECT pg_catalog.max(x.value) FILTER (WHERE x.metric OPERATOR(pg_catalog.=) 'loss') AS loss,
                    pg_catalog.max(x.value) FILTER (WHERE x.metric OPERATOR(pg_catalog.=) 'accuracy') AS accuracy,
                    pg_catalog.max(x.value) FILTER (WHERE x.metric OPERATOR(pg_catalog.=) 'f1') AS f1,
                    pg_catalog.max(x.value) FILTER (WHERE x.metric OPERATOR(pg_catalog.=) 'rmse') AS rmse,
                    pg_catalog.max(x.value) FILTER (WHERE x.metric OPERATOR(pg_catalog.=) 'r2') AS r2
             FROM tensile.metrics x
             WHERE x.job OPERATOR(pg_catalog.=) e.job AND x.epoch OPERATOR(pg_catalog.=) e.epoch
               AND x.split OPERATOR(pg_catalog.=) e.split) m;
COMMENT ON VIEW tensile.epoch_metrics IS
    'training and validation metrics of every epoch, a column each; those that do not fit the task are null';
COMMENT ON COLUMN tensile.epoch_metrics.epoch IS 'number of the epoch, from 1';
COMMENT ON COLUMN tensile.epoch_metrics.split IS 'training (summed up during the epoch) or validation (after it)';
COMMENT ON COLUMN tensile.epoch_metrics.samples IS 'number of rows behind the metrics';
COMMENT ON COLUMN tensile.epoch_metrics.loss IS
    'mean squared error of the standardised target, or cross-entropy: what training makes smaller';
COMMENT ON COLUMN tensile.epoch_metrics.accuracy IS 'share of rows whose class is right';
COMMENT ON COLUMN tensile.epoch_metrics.f1 IS
    'harmonic mean of precision and recall: of the second of two classes; of more the mean over the classes';
COMMENT ON COLUMN tensile.epoch_metrics.rmse IS 'root of the mean squared error, in the target''s unit';
COMMENT ON COLUMN tensile.epoch_metrics.r2 IS
    'share of the target''s variance that is explained: 1 is perfect, 0 is its mean';
COMMENT ON COLUMN tensile.epoch_metrics.seconds IS 'duration';
COMMENT ON COLUMN tensile.epoch_metrics.at IS 'time of the end';

CREATE VIEW tensile.job_history WITH (security_invoker = true) AS
    SELECT j.id AS job, j.model_name AS model, j.owner_name AS owner, j.state, j.version, j.submitted_at, j.started_at,
           j.ended_at, j.started_at OPERATOR(pg_catalog.-) j.submitted_at AS queued_for,
           j.ended_at OPERATOR(pg_catalog.-) j.started_at AS ran_for, j.attempts, j.rows, t.epoch AS epochs,
           t.loss AS training_loss, v.loss AS validation_loss, v.accuracy, v.f1, v.rmse, v.r2,
           j.sqlstate, j.error, j.hint, coalesce(j.chosen_batch_size, CASE WHEN j.batch_size OPERATOR(pg_catalog.<>) 0 THEN j.batch_size END) AS batch_size,
           coalesce(b.learning_rate, j.learning_rate) AS learning_rate
    FROM tensile.jobs j
         LEFT JOIN LATERAL (SELECT x.epoch, x.loss FROM tensile.epoch_metrics x
                            WHERE x.job OPERATOR(pg_catalog.=) j.id AND x.split OPERATOR(pg_catalog.=) 'training'
                            ORDER BY x.epoch DESC LIMIT 1) t ON true
         LEFT JOIN LATERAL (SELECT x.loss, x.accuracy, x.f1, x.rmse, x.r2 FROM tensile.epoch_metrics x
                            WHERE x.job OPERATOR(pg_catalog.=) j.id AND x.split OPERATOR(pg_catalog.=) 'validation'
                            ORDER BY x.epoch DESC LIMIT 1) v ON true
         LEFT JOIN tensile.batch_sizes b ON b.job OPERATOR(pg_catalog.=) j.id AND b.chosen
    WHERE j.ended_at IS NOT NULL;
COMMENT ON VIEW tensile.job_history IS 'ended jobs: how long they waited and ran, and the metrics of their last epoch';
COMMENT ON COLUMN tensile.job_history.version IS 'version of the model that the job made';
COMMENT ON COLUMN tensile.job_history.queued_for IS 'time from submission to the first start';
COMMENT ON COLUMN tensile.job_history.ran_for IS 'time from the first start to the end, interruptions included';
COMMENT ON COLUMN tensile.job_history.attempts IS 'number of times that a worker was started for it';
COMMENT ON COLUMN tensile.job_history.rows IS 'number of rows that the query returned';
COMMENT ON COLUMN tensile.job_history.batch_size IS 'rows of a step; null: none was chosen before it ended';
COMMENT ON COLUMN tensile.job_history.learning_rate IS 'learning rate of the training';
COMMENT ON COLUMN tensile.job_history.epochs IS 'number of finished epochs';
COMMENT ON COLUMN tensile.job_history.training_loss IS 'training loss of the last epoch';
COMMENT ON COLUMN tensile.job_history.validation_loss IS
    'validation loss of the last epoch, as the metrics that follow';
COMMENT ON COLUMN tensile.job_history.accuracy IS 'share of rows whose class is right';
COMMENT ON COLUMN tensile.job_history.f1 IS 'harmonic mean of precision and recall';
COMMENT ON COLUMN tensile.job_history.rmse IS 'root of the mean squared error, in the target''s unit';
COMMENT ON COLUMN tensile.job_history.r2 IS 'share of the target''s variance that is explained';

GRANT SELECT ON tensile.progress, tensile.devices, tensile.plan, tensile.latency, tensile.footprint,
    tensile.compression, tensile.search, tensile.predictions, tensile.loaded_models, tensile.epoch_metrics, tensile.job_history
    TO PUBLIC;

------------------------------------------------------------------------------------------------------------------------
-- Who may execute what: the public functions are for tensile_user. The private ones are nobody's, except those that the
-- views and the workers need; these check the caller themselves.
------------------------------------------------------------------------------------------------------------------------

REVOKE EXECUTE ON ALL ROUTINES IN SCHEMA tensile FROM PUBLIC;
GRANT EXECUTE ON FUNCTION
    tensile._version(), tensile._owned(oid, name),
    tensile._progress(), tensile._devices(), tensile._plan(), tensile._predictions(), tensile._loaded_models(),
    tensile._submitted_here(bigint), tensile._wait_for_change(int), tensile._job_result(bigint, timestamptz),
    tensile._wait_round(timestamptz), tensile._explain_feed(int), tensile._explain_wait(int, int, bool),
    tensile._explain_latency_models(), tensile._calibration_workloads(),
    tensile._no_such_job(bigint), tensile._raise(text, text, text, text),
    tensile._process(), tensile._my_job(), tensile._feed(int, text, text, jsonb),
    tensile._fetch_plan(bigint),
    tensile._acknowledge_plan(bigint),
    tensile._register_device(text, bigint, float8, float8, bigint),
    tensile._report(text, int, int, bigint, bigint, float8, float8, bigint, bigint, bigint, bigint, bigint, float8,
                    bigint),
    tensile._job_choice(jsonb),
    tensile._job_trace(jsonb, bytea[], jsonb), tensile._job_admitted(), tensile._job_refusal(),
    tensile._job_latency(jsonb, real[], real[], real[]), tensile._job_log(text, text, bigint),
    tensile._job_sparsity(int, int[], real[], real[], real[], bigint[]), tensile._job_codecs(),
    tensile._job_codec_times(text, jsonb, float8),
    tensile._job_profiles(), tensile._job_latency_models(),
    tensile._calibrate_done(text, jsonb, bytea, int, int, float8),
    tensile._job_begin(int), tensile._job_status(), tensile._job_rows(bigint), tensile._job_checkpoint(int, int, bytea),
    tensile._job_checkpoint_done(int, jsonb), tensile._job_checkpoint_read(int), tensile._job_metric(jsonb),
    tensile._job_version(text, jsonb, jsonb, text), tensile._job_weights(bigint, int, bytea),
    tensile._job_end(text, text, text, text, text, text, text[], text), tensile._stop_cause(), tensile._take_interrupt(),
    tensile._job_interrupt(text, bool, text)
    TO PUBLIC;
GRANT EXECUTE ON PROCEDURE tensile._step(int, int, int, bool) TO PUBLIC;

GRANT EXECUTE ON ROUTINE
    @extschema@.register_model, @extschema@.drop_model, @extschema@.deploy_model, @extschema@.grant_model,
    @extschema@.revoke_model, @extschema@.set_model_owner, @extschema@.set_model_memory_budget,
    @extschema@.drop_version, @extschema@.set_model_retention,
    @extschema@.train_model, @extschema@.explain_training, @extschema@.cancel_job, @extschema@.set_job_priority,
    @extschema@.wait_for_job, @extschema@.wait_for_job_procedure,
    @extschema@.predict(text, record, text), @extschema@.predict(text, float8[], text),
    @extschema@.predict(text, jsonb, text), @extschema@.predict_class(text, record, text),
    @extschema@.predict_class(text, float8[], text), @extschema@.predict_class(text, jsonb, text),
    @extschema@.predict_rows
    TO tensile_user;
-- A fresh installation only: an upgrade takes nothing away.
REVOKE EXECUTE ON ROUTINE
    @extschema@.register_model, @extschema@.drop_model, @extschema@.deploy_model, @extschema@.grant_model,
    @extschema@.revoke_model, @extschema@.set_model_owner, @extschema@.set_model_memory_budget,
    @extschema@.drop_version, @extschema@.set_model_retention,
    @extschema@.train_model, @extschema@.explain_training, @extschema@.cancel_job, @extschema@.set_job_priority,
    @extschema@.wait_for_job, @extschema@.wait_for_job_procedure,
    @extschema@.predict(text, record, text), @extschema@.predict(text, float8[], text),
    @extschema@.predict(text, jsonb, text), @extschema@.predict_class(text, record, text),
    @extschema@.predict_class(text, float8[], text), @extschema@.predict_class(text, jsonb, text),
    @extschema@.predict_rows
    FROM PUBLIC;

-- Wakes the launcher when this commits.
SELECT tensile._notify(0);
