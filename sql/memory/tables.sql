-- What the memory scheduler knows: traces, latencies, footprints, plan searches, devices, and its log

CREATE TABLE tensile_internal.traces (
    job              bigint PRIMARY KEY REFERENCES tensile_internal.jobs ON DELETE CASCADE,
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
    captured_at      timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    load             float8,
    torch            text,
    profile          jsonb,
    codec_times      jsonb
);
COMMENT ON TABLE tensile_internal.traces IS
    'captured graphs of each job''s training iteration, with their memory requirements';
COMMENT ON COLUMN tensile_internal.traces.fingerprint IS
    'fingerprint of the graph: the same for equal graphs; null: not captured';
COMMENT ON COLUMN tensile_internal.traces.persistent_bytes IS 'bytes of parameters, optimizer state and buffers';
COMMENT ON COLUMN tensile_internal.traces.torch IS 'version of PyTorch that has captured the graphs';
COMMENT ON COLUMN tensile_internal.traces.parameters IS 'number of trainable parameters';
COMMENT ON COLUMN tensile_internal.traces.traces IS 'graphs in the library''s binary format';
COMMENT ON COLUMN tensile_internal.traces.revision IS
    'number of the trace, from 1; the executor sends another one when its workspaces change';
COMMENT ON COLUMN tensile_internal.traces.overhead_bytes IS 'device memory of the executor besides its tensors';
COMMENT ON COLUMN tensile_internal.traces.vanilla_bytes IS 'device memory required without a plan; null: not captured';
COMMENT ON COLUMN tensile_internal.traces.least_bytes IS 'device memory that every plan requires at least';
COMMENT ON COLUMN tensile_internal.traces.largest_operator IS 'operator that requires the most memory';
COMMENT ON COLUMN tensile_internal.traces.graphs IS 'names and row counts of the graphs in column traces';
COMMENT ON COLUMN tensile_internal.traces.rejected IS 'generation of the last plan that the executor could not use';
COMMENT ON COLUMN tensile_internal.traces.refusal IS 'error for a job that cannot be given memory; null: none';
COMMENT ON COLUMN tensile_internal.traces.profile IS
    'profile of the device, as in device_profiles, if it is one of a Ray cluster; else null';
COMMENT ON COLUMN tensile_internal.traces.codec_times IS
    'coefficients as in table codec_times, if the device is one of a Ray cluster and they were measured; else null';
COMMENT ON COLUMN tensile_internal.traces.load IS
    'share of the time, 0 to 1, that other processes kept the device busy, for which its latencies were predicted';
ALTER TABLE tensile_internal.traces ENABLE ROW LEVEL SECURITY;

CREATE TABLE tensile_internal.operators (
    job       bigint REFERENCES tensile_internal.traces ON DELETE CASCADE,
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
COMMENT ON TABLE tensile_internal.operators IS 'operators of a training iteration of each job, in execution order';
COMMENT ON COLUMN tensile_internal.operators.operator IS 'number of the operator, in execution order';
COMMENT ON COLUMN tensile_internal.operators.phase IS 'forward, backward or optimizer';
COMMENT ON COLUMN tensile_internal.operators.flops IS 'number of floating-point operations; 0 if unknown';
COMMENT ON COLUMN tensile_internal.operators.random IS 'true if the operator draws random numbers';
COMMENT ON COLUMN tensile_internal.operators.target IS 'name of the PyTorch operator';
COMMENT ON COLUMN tensile_internal.operators.module IS 'module of the model that the operator comes from';
COMMENT ON COLUMN tensile_internal.operators.source IS 'line of the model''s code that the operator comes from';
COMMENT ON COLUMN tensile_internal.operators.signature IS
    'operand types and scalar arguments: the same for operators with equal work';
COMMENT ON COLUMN tensile_internal.operators.bytes IS 'bytes read and written';
COMMENT ON COLUMN tensile_internal.operators.tensors IS 'numbers of the tensors that the operator accesses';
ALTER TABLE tensile_internal.operators ENABLE ROW LEVEL SECURITY;

CREATE TABLE tensile_internal.tensors (
    job            bigint REFERENCES tensile_internal.traces ON DELETE CASCADE,
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
COMMENT ON TABLE tensile_internal.tensors IS
    'tensors of a training iteration of each job; all views of a storage are one tensor';
COMMENT ON COLUMN tensile_internal.tensors.tensor IS 'number of the tensor';
COMMENT ON COLUMN tensile_internal.tensors.kind IS
    'parameter, optimizer_state, buffer, constant, input, activation, gradient or temporary';
COMMENT ON COLUMN tensile_internal.tensors.first_operator IS 'first operator that accesses the tensor';
COMMENT ON COLUMN tensile_internal.tensors.last_operator IS 'last operator that accesses the tensor';
ALTER TABLE tensile_internal.tensors ENABLE ROW LEVEL SECURITY;

CREATE TABLE tensile_internal.latencies (
    job          bigint PRIMARY KEY REFERENCES tensile_internal.traces ON DELETE CASCADE,
    predicted    real[] NOT NULL,
    measured     real[] NOT NULL,
    average      real[] NOT NULL,
    samples      int NOT NULL,
    total_us     float8 NOT NULL,
    load         float8,
    at           timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    average_load float8,
    alone_us     float8
);
COMMENT ON TABLE tensile_internal.latencies IS
    'operator latencies of each job in microseconds, as arrays by operator; see view latency';
COMMENT ON COLUMN tensile_internal.latencies.predicted IS 'predictions made before anything ran';
COMMENT ON COLUMN tensile_internal.latencies.measured IS 'measurements of the latest measured iteration';
COMMENT ON COLUMN tensile_internal.latencies.average IS 'moving averages; see pg_tensile.latency_weight';
COMMENT ON COLUMN tensile_internal.latencies.samples IS 'number of measured iterations';
COMMENT ON COLUMN tensile_internal.latencies.total_us IS 'duration of an iteration: the sum of the averages';
COMMENT ON COLUMN tensile_internal.latencies.load IS
    'share of the time that other processes kept the device busy, 0 to 1';
COMMENT ON COLUMN tensile_internal.latencies.average_load IS 'load that the moving averages stand for, 0 to 1';
COMMENT ON COLUMN tensile_internal.latencies.alone_us IS
    'duration of a step while nothing else used the device, everything included; null: it has never been so';
ALTER TABLE tensile_internal.latencies ENABLE ROW LEVEL SECURITY;

-- The plan table in shared memory has the same events, but only while the job has a worker. Reports on ended jobs
-- and the client's plan() read them here, together with the figures of the same generation.
CREATE TABLE tensile_internal.footprints (
    job           bigint PRIMARY KEY REFERENCES tensile_internal.traces ON DELETE CASCADE,
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
    plan_order    bytea NOT NULL DEFAULT '',
    groups        bytea NOT NULL DEFAULT ''
);
COMMENT ON TABLE tensile_internal.footprints IS
    'expected memory use under each job''s newest plan; see view footprint';
COMMENT ON COLUMN tensile_internal.footprints.events IS 'events of the plan, as in the plan table';
COMMENT ON COLUMN tensile_internal.footprints.operators IS 'operator executed in each step of an iteration under the plan';
COMMENT ON COLUMN tensile_internal.footprints.planned IS 'bytes on the device in each step under the plan';
COMMENT ON COLUMN tensile_internal.footprints.vanilla IS 'bytes on the device in each step without a plan';
COMMENT ON COLUMN tensile_internal.footprints.generation IS 'generation of the plan';
COMMENT ON COLUMN tensile_internal.footprints.iteration_us IS 'expected duration of an iteration under the plan';
COMMENT ON COLUMN tensile_internal.footprints.vanilla_us IS 'expected duration of an iteration without a plan';
COMMENT ON COLUMN tensile_internal.footprints.planned_bytes IS 'peak device memory under the plan';
COMMENT ON COLUMN tensile_internal.footprints.granted_bytes IS 'device memory that the executor may use';
COMMENT ON COLUMN tensile_internal.footprints.host_bytes IS 'host memory for copies of tensors';
COMMENT ON COLUMN tensile_internal.footprints.out_bytes IS 'bytes copied to the host in an iteration';
COMMENT ON COLUMN tensile_internal.footprints.in_bytes IS 'bytes copied to the device in an iteration';
COMMENT ON COLUMN tensile_internal.footprints.stall_us IS 'time of an iteration spent waiting for copies';
COMMENT ON COLUMN tensile_internal.footprints.recomputes IS 'number of operators recomputed in an iteration';
COMMENT ON COLUMN tensile_internal.footprints.groups IS
    'groups of steps before which the job takes memory, as in the plan table; empty: its grant is constant';
COMMENT ON COLUMN tensile_internal.footprints.plan_order IS
    'execution order of the operators under the plan, int32 each; empty: as captured';
ALTER TABLE tensile_internal.footprints ENABLE ROW LEVEL SECURITY;

CREATE TABLE tensile_internal.sparsities (
    job        bigint PRIMARY KEY REFERENCES tensile_internal.traces ON DELETE CASCADE,
    revision   int NOT NULL,
    tensors    int[] NOT NULL,
    zero_share real[] NOT NULL,
    run_share  real[] NOT NULL,
    lz4_share  real[] NOT NULL,
    moved      bigint[] NOT NULL,
    at         timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);
COMMENT ON TABLE tensile_internal.sparsities IS
    'zeros in the tensors that jobs with compression swap, counted once per epoch; see view compression';
COMMENT ON COLUMN tensile_internal.sparsities.revision IS 'number of changes large enough for new plans';
COMMENT ON COLUMN tensile_internal.sparsities.tensors IS 'numbers of the tensors in tensile_internal.tensors';
COMMENT ON COLUMN tensile_internal.sparsities.zero_share IS 'share of zeros among the words of each tensor, 0 to 1';
COMMENT ON COLUMN tensile_internal.sparsities.run_share IS
    'number of runs of zeros in each tensor, as a share of its words';
COMMENT ON COLUMN tensile_internal.sparsities.lz4_share IS
    'size of each tensor with LZ4, as a share of its bytes, estimated from samples';
COMMENT ON COLUMN tensile_internal.sparsities.moved IS
    'bytes moved by each tensor''s last copy to the host; null: not compressed yet';
ALTER TABLE tensile_internal.sparsities ENABLE ROW LEVEL SECURITY;

CREATE TABLE tensile_internal.codings (
    job       bigint PRIMARY KEY REFERENCES tensile_internal.traces ON DELETE CASCADE,
    decisions jsonb NOT NULL,
    at        timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);
COMMENT ON TABLE tensile_internal.codings IS
    'latest decisions about compressing the tensors of each job; see view compression';
COMMENT ON COLUMN tensile_internal.codings.decisions IS
    'for each tensor: codec, expected bytes, and times with and without the codec';
ALTER TABLE tensile_internal.codings ENABLE ROW LEVEL SECURITY;

CREATE TABLE tensile_internal.searches (
    job          bigint PRIMARY KEY REFERENCES tensile_internal.traces ON DELETE CASCADE,
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
COMMENT ON TABLE tensile_internal.searches IS
    'searches for better plans by jobs; see view search';
COMMENT ON COLUMN tensile_internal.searches.state IS 'queued, searching, finished, stopped or failed';
COMMENT ON COLUMN tensile_internal.searches.budget_bytes IS 'device memory that a plan may use';
COMMENT ON COLUMN tensile_internal.searches.seconds IS 'time allowed for the search, in seconds';
COMMENT ON COLUMN tensile_internal.searches.cached IS 'true if the result of an earlier search was used';
COMMENT ON COLUMN tensile_internal.searches.first_us IS
    'expected duration of an iteration under the first plan of the search';
COMMENT ON COLUMN tensile_internal.searches.best_us IS 'expected duration of an iteration under the best plan so far';
COMMENT ON COLUMN tensile_internal.searches.generation IS
    'generation of the genetic search in which the best plan was found';
COMMENT ON COLUMN tensile_internal.searches.evaluations IS 'number of plans evaluated until the best one was found';
ALTER TABLE tensile_internal.searches ENABLE ROW LEVEL SECURITY;

CREATE TABLE tensile_internal.search_results (
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
COMMENT ON TABLE tensile_internal.search_results IS 'best plans found by searches, for later jobs with the same graph';
COMMENT ON COLUMN tensile_internal.search_results.fingerprint IS 'fingerprint of the graph, as in traces';
COMMENT ON COLUMN tensile_internal.search_results.bucket_bytes IS
    'device memory available to plans, rounded down to one of 32 steps between powers of two';
COMMENT ON COLUMN tensile_internal.search_results.device_peak_bytes IS 'peak device memory under the plan';
COMMENT ON COLUMN tensile_internal.search_results.events IS 'events of the plan, as in the plan table';
COMMENT ON COLUMN tensile_internal.search_results.plan_order IS
    'execution order of the operators under the plan, int32 each; empty: as captured';
COMMENT ON COLUMN tensile_internal.search_results.iteration_us IS 'expected duration of an iteration under the plan';
COMMENT ON COLUMN tensile_internal.search_results.seconds IS 'time allowed for the search, in seconds';
COMMENT ON COLUMN tensile_internal.search_results.generations IS 'number of generations until the plan was found';
COMMENT ON COLUMN tensile_internal.search_results.found_at IS 'end time of the search';
ALTER TABLE tensile_internal.search_results ENABLE ROW LEVEL SECURITY;

CREATE TABLE tensile_internal.device_profiles (
    device      text PRIMARY KEY,
    profile     jsonb NOT NULL,
    measured_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);
COMMENT ON TABLE tensile_internal.device_profiles IS 'measured rates of this machine''s devices';
COMMENT ON COLUMN tensile_internal.device_profiles.profile IS
    'memory size, rates of the link to the host in both directions, arithmetic rate, memory bandwidth, overheads';
ALTER TABLE tensile_internal.device_profiles ENABLE ROW LEVEL SECURITY;

CREATE TABLE tensile_internal.latency_models (
    device        text PRIMARY KEY,
    models        bytea NOT NULL,
    kinds         int NOT NULL,
    samples       int NOT NULL,
    error         float8,
    job           bigint REFERENCES tensile_internal.jobs ON DELETE SET NULL,
    calibrated_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    torch         text,
    known_kinds   text[]
);
COMMENT ON TABLE tensile_internal.latency_models IS 'models that predict the latency of operators on this machine''s devices';
COMMENT ON COLUMN tensile_internal.latency_models.models IS 'small neural networks in a binary format without code';
COMMENT ON COLUMN tensile_internal.latency_models.samples IS 'number of measurements for training and testing the models';
COMMENT ON COLUMN tensile_internal.latency_models.kinds IS 'number of kinds of operators with their own model';
COMMENT ON COLUMN tensile_internal.latency_models.error IS 'median relative error on held-out operators';
COMMENT ON COLUMN tensile_internal.latency_models.job IS 'calibration job that measured the operators';
COMMENT ON COLUMN tensile_internal.latency_models.torch IS 'version of PyTorch that has executed the operators';
COMMENT ON COLUMN tensile_internal.latency_models.known_kinds IS
    'operators and the types of their first operands: those to be measured, and those of jobs until then';
ALTER TABLE tensile_internal.latency_models ENABLE ROW LEVEL SECURITY;

CREATE TABLE tensile_internal.codec_times (
    device         text PRIMARY KEY,
    times          jsonb NOT NULL,
    relative_error float8,
    measured_at    timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);
COMMENT ON TABLE tensile_internal.codec_times IS
    'times for compressing and decompressing on this machine''s devices, by codec, size and sparsity';
COMMENT ON COLUMN tensile_internal.codec_times.times IS
    'coefficients of linear models, one for each codec and range of sparsity, and waking_us, added by every '
    'coded transfer';
COMMENT ON COLUMN tensile_internal.codec_times.relative_error IS
    'relative error of the models: sum of absolute errors, divided by that of the mean of all times';
ALTER TABLE tensile_internal.codec_times ENABLE ROW LEVEL SECURITY;

CREATE TABLE tensile_internal.scheduler_log (
    id         bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    at         timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    event      text NOT NULL,
    job        bigint,
    generation bigint,
    device     text,
    reason     text,
    details    jsonb
);
COMMENT ON TABLE tensile_internal.scheduler_log IS
    'decisions of the memory scheduler and their reasons; the last 10,000 lines';
COMMENT ON COLUMN tensile_internal.scheduler_log.event IS
    'scheduled, planned, waits, refused, failed, note, planner (it died), search, rejected (a plan), batch '
    'size (chosen), calibration (finished, or an automatic one has failed)';
COMMENT ON COLUMN tensile_internal.scheduler_log.job IS
    'number of the job; null: a whole device, visible to members of pg_read_all_stats only';
COMMENT ON COLUMN tensile_internal.scheduler_log.generation IS 'generation of the plan';
COMMENT ON COLUMN tensile_internal.scheduler_log.details IS 'figures of a plan or of a round of planning';
ALTER TABLE tensile_internal.scheduler_log ENABLE ROW LEVEL SECURITY;

CREATE POLICY visible ON tensile_internal.traces FOR SELECT USING (
    EXISTS (SELECT FROM tensile_internal.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile_internal.operators FOR SELECT USING (
    EXISTS (SELECT FROM tensile_internal.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile_internal.tensors FOR SELECT USING (
    EXISTS (SELECT FROM tensile_internal.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile_internal.latencies FOR SELECT USING (
    EXISTS (SELECT FROM tensile_internal.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile_internal.footprints FOR SELECT USING (
    EXISTS (SELECT FROM tensile_internal.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile_internal.sparsities FOR SELECT USING (
    EXISTS (SELECT FROM tensile_internal.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile_internal.codings FOR SELECT USING (
    EXISTS (SELECT FROM tensile_internal.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile_internal.codec_times FOR SELECT USING (true);
CREATE POLICY visible ON tensile_internal.searches FOR SELECT USING (
    EXISTS (SELECT FROM tensile_internal.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile_internal.search_results FOR SELECT USING (
    EXISTS (SELECT FROM tensile_internal.traces t
            WHERE t.fingerprint OPERATOR(pg_catalog.=) search_results.fingerprint)
    OR (SELECT pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE')));
CREATE POLICY visible ON tensile_internal.device_profiles FOR SELECT USING (true);
CREATE POLICY visible ON tensile_internal.latency_models FOR SELECT USING (true);
CREATE POLICY visible ON tensile_internal.scheduler_log FOR SELECT USING (
    CASE WHEN job IS NULL THEN (SELECT pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE'))
         ELSE EXISTS (SELECT FROM tensile_internal.jobs j WHERE j.id OPERATOR(pg_catalog.=) job) END);
