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
    codec_times      jsonb,
    overhead_measured bool NOT NULL DEFAULT false,
    limited_by       text
);
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
ALTER TABLE tensile_internal.tensors ENABLE ROW LEVEL SECURITY;

CREATE TABLE tensile_internal.operator_latencies (
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
COMMENT ON TABLE tensile_internal.operator_latencies IS
    'operator latencies of each job in microseconds, as arrays by operator; see view latency';
COMMENT ON COLUMN tensile_internal.operator_latencies.predicted IS 'predictions made before anything ran';
COMMENT ON COLUMN tensile_internal.operator_latencies.measured IS 'measurements of the latest measured iteration';
COMMENT ON COLUMN tensile_internal.operator_latencies.average IS 'moving averages; see pg_tensile.latency_weight';
COMMENT ON COLUMN tensile_internal.operator_latencies.samples IS 'number of measured iterations';
COMMENT ON COLUMN tensile_internal.operator_latencies.total_us IS 'duration of an iteration: the sum of the averages';
COMMENT ON COLUMN tensile_internal.operator_latencies.load IS
    'share of the time that other processes kept the device busy, 0 to 1';
COMMENT ON COLUMN tensile_internal.operator_latencies.average_load IS 'load that the moving averages stand for, 0 to 1';
COMMENT ON COLUMN tensile_internal.operator_latencies.alone_us IS
    'duration of a step while nothing else used the device, everything included; null: it has never been so';
ALTER TABLE tensile_internal.operator_latencies ENABLE ROW LEVEL SECURITY;

-- The plan table in shared memory has the same events, but only while the job has a worker. Reports on ended jobs
-- and the client's plan() read them here, together with the figures of the same generation.
CREATE TABLE tensile_internal.plans (
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
ALTER TABLE tensile_internal.plans ENABLE ROW LEVEL SECURITY;

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
COMMENT ON COLUMN tensile_internal.sparsities.tensors IS 'numbers of the tensors in tensors';
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

CREATE TABLE tensile_internal.plan_searches (
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
COMMENT ON TABLE tensile_internal.plan_searches IS
    'searches for better plans by jobs; see view plan_searches';
COMMENT ON COLUMN tensile_internal.plan_searches.state IS 'queued, searching, finished, stopped or failed';
COMMENT ON COLUMN tensile_internal.plan_searches.budget_bytes IS 'device memory that a plan may use';
COMMENT ON COLUMN tensile_internal.plan_searches.seconds IS 'time allowed for the search, in seconds';
COMMENT ON COLUMN tensile_internal.plan_searches.cached IS 'true if the result of an earlier search was used';
COMMENT ON COLUMN tensile_internal.plan_searches.first_us IS
    'expected duration of an iteration under the first plan of the search';
COMMENT ON COLUMN tensile_internal.plan_searches.best_us IS
    'expected duration of an iteration under the best plan so far';
COMMENT ON COLUMN tensile_internal.plan_searches.generation IS
    'generation of the genetic search in which the best plan was found';
COMMENT ON COLUMN tensile_internal.plan_searches.evaluations IS
    'number of plans evaluated until the best one was found';
ALTER TABLE tensile_internal.plan_searches ENABLE ROW LEVEL SECURITY;

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
ALTER TABLE tensile_internal.scheduler_log ENABLE ROW LEVEL SECURITY;

CREATE POLICY visible ON tensile_internal.traces FOR SELECT USING (
    EXISTS (SELECT FROM tensile_internal.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile_internal.operators FOR SELECT USING (
    EXISTS (SELECT FROM tensile_internal.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile_internal.tensors FOR SELECT USING (
    EXISTS (SELECT FROM tensile_internal.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile_internal.operator_latencies FOR SELECT USING (
    EXISTS (SELECT FROM tensile_internal.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile_internal.plans FOR SELECT USING (
    EXISTS (SELECT FROM tensile_internal.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile_internal.sparsities FOR SELECT USING (
    EXISTS (SELECT FROM tensile_internal.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile_internal.codings FOR SELECT USING (
    EXISTS (SELECT FROM tensile_internal.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
CREATE POLICY visible ON tensile_internal.codec_times FOR SELECT USING (true);
CREATE POLICY visible ON tensile_internal.plan_searches FOR SELECT USING (
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
