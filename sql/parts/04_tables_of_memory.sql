------------------------------------------------------------------------------------------------------------------------
-- Tables: memory
--
-- Findings of executors and the scheduler. A job's rows stay until a later job of its model ends. None of them are dumped:
-- they are valid for one machine only, and the next job collects them anew.
------------------------------------------------------------------------------------------------------------------------

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
