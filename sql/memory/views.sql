-- Views of devices and plans

CREATE FUNCTION tensile_worker._devices(OUT name text, OUT total_bytes bigint, OUT budget_bytes bigint,
                                        OUT granted_bytes bigint, OUT in_use_bytes bigint, OUT inference_bytes bigint,
                                        OUT jobs int, OUT out_bytes_per_s float8, OUT in_bytes_per_s float8,
                                        OUT utilisation float8, OUT flowing_jobs int, OUT flowing_bytes bigint)
    RETURNS SETOF record
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_devices';
CREATE FUNCTION tensile_worker._plan(OUT job bigint, OUT generation bigint, OUT sequence int, OUT event text,
                                     OUT tensor int, OUT version int, OUT trigger_operator int, OUT delay_us bigint,
                                     OUT deadline_operator int, OUT bytes bigint, OUT codec text) RETURNS SETOF record
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_plan';

CREATE VIEW tensile.devices WITH (security_invoker = true) AS
    SELECT d.name, d.total_bytes, d.budget_bytes, d.granted_bytes, d.in_use_bytes, d.inference_bytes, d.jobs,
           d.out_bytes_per_s, d.in_bytes_per_s, d.utilisation, d.flowing_jobs, d.flowing_bytes
    FROM tensile_worker._devices() d;
COMMENT ON VIEW tensile.devices IS
    'devices in use by trainers: memory budget, parts granted to and used by jobs, part used for predictions';
COMMENT ON COLUMN tensile.devices.name IS
    'name of the device; of a job with ranks "ray:" and its number, which stands for the smallest of their devices';
COMMENT ON COLUMN tensile.devices.total_bytes IS 'memory of the device';
COMMENT ON COLUMN tensile.devices.budget_bytes IS 'memory available to jobs and predictions together';
COMMENT ON COLUMN tensile.devices.granted_bytes IS
    'memory that jobs may use now, overheads of their processes included';
COMMENT ON COLUMN tensile.devices.in_use_bytes IS
    'memory used by jobs between two steps; during a step they may use all that is granted';
COMMENT ON COLUMN tensile.devices.inference_bytes IS 'memory used by models for predictions';
COMMENT ON COLUMN tensile.devices.jobs IS 'number of jobs on the device';
COMMENT ON COLUMN tensile.devices.out_bytes_per_s IS 'rate of copies to the host';
COMMENT ON COLUMN tensile.devices.in_bytes_per_s IS 'rate of copies to the device';
COMMENT ON COLUMN tensile.devices.utilisation IS
    'share of the time that other processes keep the device busy, as measured by jobs: 0 to 1';
COMMENT ON COLUMN tensile.devices.flowing_jobs IS
    'number of jobs that share memory during their iterations (pg_tensile.memory_flow)';
COMMENT ON COLUMN tensile.devices.flowing_bytes IS 'part of granted_bytes that these jobs hold now';

CREATE VIEW tensile.plan_events WITH (security_invoker = true) AS
    SELECT p.job, p.generation, p.sequence, p.event, p.tensor, t.name AS tensor_name, t.kind AS tensor_kind, p.bytes,
           p.trigger_operator, o.target AS trigger_name, p.delay_us, p.deadline_operator, p.version, p.codec
    FROM tensile_worker._plan() p
         LEFT JOIN tensile_internal.tensors t
             ON t.job OPERATOR(pg_catalog.=) p.job AND t.tensor OPERATOR(pg_catalog.=) p.tensor
         LEFT JOIN tensile_internal.operators o
             ON o.job OPERATOR(pg_catalog.=) p.job AND o.operator OPERATOR(pg_catalog.=) p.trigger_operator;
COMMENT ON VIEW tensile.plan_events IS
    'plan of each running job: swap, recompute and release events, and groups if the job shares memory as it goes';
COMMENT ON COLUMN tensile.plan_events.generation IS 'generation of the plan';
COMMENT ON COLUMN tensile.plan_events.sequence IS
    'position of the event, in the order of execution; groups follow all others';
COMMENT ON COLUMN tensile.plan_events.event IS 'swap_out, swap_in, recompute, release, begin_group or end_group';
COMMENT ON COLUMN tensile.plan_events.tensor IS 'number of the tensor in tensors; null: a group';
COMMENT ON COLUMN tensile.plan_events.bytes IS
    'size of the tensor; of a begin_group the most that the job takes during the group, of an end_group what it keeps';
COMMENT ON COLUMN tensile.plan_events.tensor_name IS 'name of the tensor; see tensors';
COMMENT ON COLUMN tensile.plan_events.tensor_kind IS 'kind of the tensor; see tensors';
COMMENT ON COLUMN tensile.plan_events.trigger_operator IS
    'operator after which the event begins, or the first one of a group: its number in operators';
COMMENT ON COLUMN tensile.plan_events.trigger_name IS 'name of the PyTorch operator of that number';
COMMENT ON COLUMN tensile.plan_events.delay_us IS 'time after the trigger by which a copy may be delayed';
COMMENT ON COLUMN tensile.plan_events.deadline_operator IS
    'operator before which a swap_in ends, after which a swap_out ends, which uses the recomputed tensor, or the last '
    'one of a group';
COMMENT ON COLUMN tensile.plan_events.version IS
    'version of the tensor that is recomputed: number of its in-place changes';
COMMENT ON COLUMN tensile.plan_events.codec IS 'codec of a swap_out: zvc, rle, csr or lz4; null: not compressed';

CREATE VIEW tensile.latency WITH (security_invoker = true) AS
    SELECT o.job, o.operator, o.phase, o.target, l.predicted_us, l.measured_us, l.average_us, l.samples,
           CASE WHEN l.measured_us OPERATOR(pg_catalog.>) 0
                THEN pg_catalog.abs(l.predicted_us::pg_catalog.float8 OPERATOR(pg_catalog.-) l.measured_us)
                     OPERATOR(pg_catalog./) l.measured_us END AS relative_error
    FROM tensile_internal.operators o
         LEFT JOIN (SELECT x.job, x.samples, u.operator,
                           CASE WHEN u.predicted OPERATOR(pg_catalog.<>) 'NaN' THEN u.predicted END AS predicted_us,
                           CASE WHEN u.measured OPERATOR(pg_catalog.<>) 'NaN' THEN u.measured END AS measured_us,
                           CASE WHEN u.average OPERATOR(pg_catalog.<>) 'NaN' THEN u.average END AS average_us
                    FROM tensile_internal.operator_latencies x,
                         ROWS FROM (pg_catalog.unnest(x.predicted), pg_catalog.unnest(x.measured),
                                    pg_catalog.unnest(x.average),
                                    -- the planner expects 10 rows of unnest, 1000 of this:
                                    pg_catalog.generate_series(0, pg_catalog.cardinality(x.predicted)
                                                                  OPERATOR(pg_catalog.-) 1))
                             u (predicted, measured, average, operator)) l
             ON l.job OPERATOR(pg_catalog.=) o.job AND l.operator OPERATOR(pg_catalog.=) o.operator;
COMMENT ON VIEW tensile.latency IS
    'latency of each operator of each job in microseconds: predicted, last measured, moving average';
COMMENT ON COLUMN tensile.latency.operator IS 'number of the operator in operators';
COMMENT ON COLUMN tensile.latency.phase IS 'forward, backward or optimizer';
COMMENT ON COLUMN tensile.latency.target IS 'name of the PyTorch operator';
COMMENT ON COLUMN tensile.latency.predicted_us IS 'prediction made before anything ran';
COMMENT ON COLUMN tensile.latency.measured_us IS
    'measurement of the latest measured iteration; null: never measured';
COMMENT ON COLUMN tensile.latency.average_us IS 'moving average; see pg_tensile.latency_weight';
COMMENT ON COLUMN tensile.latency.samples IS 'number of measured iterations';
COMMENT ON COLUMN tensile.latency.relative_error IS 'relative error of the prediction: 0.1 for 10 %';

CREATE VIEW tensile.footprint WITH (security_invoker = true) AS
    SELECT f.job, (u.number OPERATOR(pg_catalog.-) 1)::pg_catalog.int4 AS sequence, u.operator, o.target,
           u.planned AS planned_bytes, u.vanilla AS vanilla_bytes
    FROM tensile_internal.plans f CROSS JOIN
         ROWS FROM (pg_catalog.unnest(f.operators), pg_catalog.unnest(f.planned), pg_catalog.unnest(f.vanilla))
             WITH ORDINALITY u (operator, planned, vanilla, number)
         LEFT JOIN tensile_internal.operators o ON o.job OPERATOR(pg_catalog.=) f.job
                                      AND o.operator OPERATOR(pg_catalog.=) u.operator;
COMMENT ON VIEW tensile.footprint IS
    'bytes on the device in each step of each job''s iteration, under its plan and without one';
COMMENT ON COLUMN tensile.footprint.sequence IS
    'number of the step, from 0; there are more steps than operators if some are recomputed';
COMMENT ON COLUMN tensile.footprint.operator IS 'operator executed in the step: its number in operators';
COMMENT ON COLUMN tensile.footprint.target IS 'name of the PyTorch operator';
COMMENT ON COLUMN tensile.footprint.planned_bytes IS 'bytes on the device under the plan';
COMMENT ON COLUMN tensile.footprint.vanilla_bytes IS 'bytes on the device without a plan';

CREATE VIEW tensile.compression WITH (security_invoker = true) AS
    SELECT s.job, u.tensor, t.name, t.kind, t.bytes, u.zero_share, d.codec, d.coded_bytes, d.coded_us, d.plain_us,
           coalesce(d.compressed, false) AS compressed, u.moved AS moved_bytes
    FROM tensile_internal.sparsities s
         CROSS JOIN ROWS FROM (pg_catalog.unnest(s.tensors), pg_catalog.unnest(s.zero_share),
                               pg_catalog.unnest(s.moved)) u (tensor, zero_share, moved)
         JOIN tensile_internal.tensors t ON t.job OPERATOR(pg_catalog.=) s.job
             AND t.tensor OPERATOR(pg_catalog.=) u.tensor
         LEFT JOIN (SELECT c.job, r.tensor, r.codec, r.coded_bytes, r.coded_us, r.plain_us, r.compressed
                    FROM tensile_internal.codings c
                         CROSS JOIN LATERAL pg_catalog.jsonb_to_recordset(c.decisions) r (
                             tensor pg_catalog.int4, codec pg_catalog.text, coded_bytes pg_catalog.int8,
                             coded_us pg_catalog.float8, plain_us pg_catalog.float8, compressed pg_catalog.bool)) d
             ON d.job OPERATOR(pg_catalog.=) s.job AND d.tensor OPERATOR(pg_catalog.=) u.tensor;
COMMENT ON VIEW tensile.compression IS
    'tensors swapped by jobs with the option compression: their zeros, and the benefit of compressing them';
COMMENT ON COLUMN tensile.compression.tensor IS 'number of the tensor in tensors';
COMMENT ON COLUMN tensile.compression.name IS 'name of the tensor; see tensors';
COMMENT ON COLUMN tensile.compression.kind IS 'kind of the tensor; see tensors';
COMMENT ON COLUMN tensile.compression.zero_share IS
    'share of zeros among the words of the tensor, counted once per epoch: 0 to 1';
COMMENT ON COLUMN tensile.compression.codec IS 'best codec for the tensor: zvc, rle, csr or lz4; null: no decision yet';
COMMENT ON COLUMN tensile.compression.coded_bytes IS 'expected size of the tensor with that codec';
COMMENT ON COLUMN tensile.compression.coded_us IS
    'time per iteration for swapping the tensor with that codec: coding, and the part of the copies that is '
    'not hidden';
COMMENT ON COLUMN tensile.compression.plain_us IS
    'time per iteration for swapping the tensor without a codec';
COMMENT ON COLUMN tensile.compression.compressed IS
    'true if the codec saves time; plans use it where the whole iteration becomes faster, see plan.codec';
COMMENT ON COLUMN tensile.compression.moved_bytes IS
    'bytes moved by the last copy to the host; null: none was compressed yet';

CREATE VIEW tensile.plan_searches WITH (security_invoker = true) AS
    SELECT s.job,
           CASE WHEN s.ended_at IS NULL AND j.ended_at IS NOT NULL THEN 'stopped' ELSE s.state END AS state,
           coalesce(s.ended_at, j.ended_at, pg_catalog.clock_timestamp())
               OPERATOR(pg_catalog.-) s.started_at AS elapsed,
           s.generation, s.evaluations, s.first_us, s.best_us, s.cached, s.budget_bytes, s.seconds
    FROM tensile_internal.plan_searches s JOIN tensile_internal.jobs j ON j.id OPERATOR(pg_catalog.=) s.job;
COMMENT ON VIEW tensile.plan_searches IS
    'progress of the search for a better plan, of each job that has one: policies swapadvisor and joint';
COMMENT ON COLUMN tensile.plan_searches.state IS 'queued, searching, finished, stopped (with its job) or failed';
COMMENT ON COLUMN tensile.plan_searches.elapsed IS
    'time since the search began; null: not begun, or an earlier result is as good';
COMMENT ON COLUMN tensile.plan_searches.generation IS
    'generation of the genetic search in which the best plan was found';
COMMENT ON COLUMN tensile.plan_searches.evaluations IS 'number of plans evaluated until the best one was found';
COMMENT ON COLUMN tensile.plan_searches.first_us IS
    'expected duration of an iteration under the first plan of the search';
COMMENT ON COLUMN tensile.plan_searches.best_us IS 'expected duration of an iteration under the best plan so far';
COMMENT ON COLUMN tensile.plan_searches.cached IS
    'true if the result of an earlier search for the same graph was used';
COMMENT ON COLUMN tensile.plan_searches.budget_bytes IS 'device memory that a plan may use';
COMMENT ON COLUMN tensile.plan_searches.seconds IS
    'time allowed for the search, in seconds: pg_tensile.search_time, or the job''s option';

CREATE VIEW tensile.traces WITH (security_invoker = true) AS
    SELECT t.job, t.device, t.revision, t.policy, t.fingerprint, t.overhead_bytes, t.persistent_bytes, t.parameters,
           t.vanilla_bytes, t.least_bytes, t.largest_operator, t.graphs, t.traces, t.rejected, t.refusal,
           t.captured_at, t.load, t.torch, t.profile, t.codec_times, l.alone_us, t.overhead_measured,
           t.limited_by
    FROM tensile_internal.traces t
         LEFT JOIN tensile_internal.operator_latencies l ON l.job OPERATOR(pg_catalog.=) t.job;
COMMENT ON VIEW tensile.traces IS
    'captured graphs of each job''s training iteration, with their memory requirements';
COMMENT ON COLUMN tensile.traces.revision IS
    'number of the trace, from 1; the trainer sends another one when its workspaces change';
COMMENT ON COLUMN tensile.traces.fingerprint IS
    'fingerprint of the graph: the same for equal graphs; null: not captured';
COMMENT ON COLUMN tensile.traces.overhead_bytes IS 'device memory of the trainer besides its tensors';
COMMENT ON COLUMN tensile.traces.overhead_measured IS
    'true if the trainer has measured overhead_bytes; false: what it is expected to take';
COMMENT ON COLUMN tensile.traces.limited_by IS
    'what keeps the trainer within its device memory: the allocator, and the driver or the kernel where they can; '
    'null: nothing';
COMMENT ON COLUMN tensile.traces.persistent_bytes IS 'bytes of parameters, optimizer state and buffers';
COMMENT ON COLUMN tensile.traces.parameters IS 'number of trainable parameters';
COMMENT ON COLUMN tensile.traces.vanilla_bytes IS 'device memory required without a plan; null: not captured';
COMMENT ON COLUMN tensile.traces.least_bytes IS 'device memory that every plan requires at least';
COMMENT ON COLUMN tensile.traces.largest_operator IS 'operator that requires the most memory';
COMMENT ON COLUMN tensile.traces.graphs IS 'names and row counts of the graphs in column traces';
COMMENT ON COLUMN tensile.traces.traces IS 'graphs in the library''s binary format';
COMMENT ON COLUMN tensile.traces.rejected IS 'generation of the last plan that the trainer could not use';
COMMENT ON COLUMN tensile.traces.refusal IS 'error for a job that cannot be given memory; null: none';
COMMENT ON COLUMN tensile.traces.load IS
    'share of the time, 0 to 1, that other processes kept the device busy, for which its latencies were predicted';
COMMENT ON COLUMN tensile.traces.torch IS 'version of PyTorch that has captured the graphs';
COMMENT ON COLUMN tensile.traces.profile IS
    'profile of the device, as in device_profiles, if it is one of a Ray cluster; else null';
COMMENT ON COLUMN tensile.traces.codec_times IS
    'coefficients as in table codec_times, if the device is one of a Ray cluster and they were measured; else null';
COMMENT ON COLUMN tensile.traces.alone_us IS
    'duration of a step while nothing else used the device, everything included; null: it has never been so';

CREATE VIEW tensile.plans WITH (security_invoker = true) AS
    SELECT p.job, p.generation, p.planned_bytes, p.granted_bytes, p.host_bytes, p.out_bytes, p.in_bytes,
           p.iteration_us, p.vanilla_us, p.stall_us, p.recomputes, p.events, p.operators, p.planned, p.vanilla,
           p.plan_order, p.groups
    FROM tensile_internal.plans p;
COMMENT ON VIEW tensile.plans IS
    'expected memory use under each job''s newest plan; see view footprint';
COMMENT ON COLUMN tensile.plans.generation IS 'generation of the plan';
COMMENT ON COLUMN tensile.plans.planned_bytes IS 'peak device memory under the plan';
COMMENT ON COLUMN tensile.plans.granted_bytes IS 'device memory that the trainer may use';
COMMENT ON COLUMN tensile.plans.host_bytes IS 'host memory for copies of tensors';
COMMENT ON COLUMN tensile.plans.out_bytes IS 'bytes copied to the host in an iteration';
COMMENT ON COLUMN tensile.plans.in_bytes IS 'bytes copied to the device in an iteration';
COMMENT ON COLUMN tensile.plans.iteration_us IS 'expected duration of an iteration under the plan';
COMMENT ON COLUMN tensile.plans.vanilla_us IS 'expected duration of an iteration without a plan';
COMMENT ON COLUMN tensile.plans.stall_us IS 'time of an iteration spent waiting for copies';
COMMENT ON COLUMN tensile.plans.recomputes IS 'number of operators recomputed in an iteration';
COMMENT ON COLUMN tensile.plans.events IS 'events of the plan, as in the plan table';
COMMENT ON COLUMN tensile.plans.operators IS 'operator executed in each step of an iteration under the plan';
COMMENT ON COLUMN tensile.plans.planned IS 'bytes on the device in each step under the plan';
COMMENT ON COLUMN tensile.plans.vanilla IS 'bytes on the device in each step without a plan';
COMMENT ON COLUMN tensile.plans.plan_order IS
    'execution order of the operators under the plan, int32 each; empty: as captured';
COMMENT ON COLUMN tensile.plans.groups IS
    'groups of steps before which the job takes memory, as in the plan table; empty: its grant is constant';

CREATE VIEW tensile.operators WITH (security_invoker = true) AS
    SELECT o.job, o.operator, o.target, o.phase, o.module, o.source, o.signature, o.flops, o.bytes, o.random,
           o.tensors
    FROM tensile_internal.operators o;
COMMENT ON VIEW tensile.operators IS
    'operators of a training iteration of each job, in execution order';
COMMENT ON COLUMN tensile.operators.operator IS 'number of the operator, in execution order';
COMMENT ON COLUMN tensile.operators.target IS 'name of the PyTorch operator';
COMMENT ON COLUMN tensile.operators.phase IS 'forward, backward or optimizer';
COMMENT ON COLUMN tensile.operators.module IS 'module of the model that the operator comes from';
COMMENT ON COLUMN tensile.operators.source IS 'line of the model''s code that the operator comes from';
COMMENT ON COLUMN tensile.operators.signature IS
    'operand types and scalar arguments: the same for operators with equal work';
COMMENT ON COLUMN tensile.operators.flops IS 'number of floating-point operations; 0 if unknown';
COMMENT ON COLUMN tensile.operators.bytes IS 'bytes read and written';
COMMENT ON COLUMN tensile.operators.random IS 'true if the operator draws random numbers';
COMMENT ON COLUMN tensile.operators.tensors IS 'numbers of the tensors that the operator accesses';

CREATE VIEW tensile.tensors WITH (security_invoker = true) AS
    SELECT t.job, t.tensor, t.name, t.kind, t.dtype, t.shape, t.bytes, t.first_operator, t.last_operator
    FROM tensile_internal.tensors t;
COMMENT ON VIEW tensile.tensors IS
    'tensors of a training iteration of each job; all views of a storage are one tensor';
COMMENT ON COLUMN tensile.tensors.tensor IS 'number of the tensor';
COMMENT ON COLUMN tensile.tensors.kind IS
    'parameter, optimizer_state, buffer, constant, input, activation, gradient or temporary';
COMMENT ON COLUMN tensile.tensors.first_operator IS 'first operator that accesses the tensor';
COMMENT ON COLUMN tensile.tensors.last_operator IS 'last operator that accesses the tensor';

CREATE VIEW tensile.device_profiles WITH (security_invoker = true) AS
    SELECT p.device, p.profile, p.measured_at
    FROM tensile_internal.device_profiles p;
COMMENT ON VIEW tensile.device_profiles IS
    'measured rates of this machine''s devices';
COMMENT ON COLUMN tensile.device_profiles.profile IS
    'memory size, rates of the link to the host in both directions, arithmetic rate, memory bandwidth, overheads';

CREATE VIEW tensile.latency_models WITH (security_invoker = true) AS
    SELECT l.device, l.models, l.kinds, l.samples, l.error, l.job, l.calibrated_at, l.torch, l.known_kinds
    FROM tensile_internal.latency_models l;
COMMENT ON VIEW tensile.latency_models IS
    'models that predict the latency of operators on this machine''s devices';
COMMENT ON COLUMN tensile.latency_models.models IS 'small neural networks in a binary format without code';
COMMENT ON COLUMN tensile.latency_models.kinds IS 'number of kinds of operators with their own model';
COMMENT ON COLUMN tensile.latency_models.samples IS 'number of measurements for training and testing the models';
COMMENT ON COLUMN tensile.latency_models.error IS 'median relative error on held-out operators';
COMMENT ON COLUMN tensile.latency_models.job IS 'calibration job that measured the operators';
COMMENT ON COLUMN tensile.latency_models.torch IS 'version of PyTorch that has executed the operators';
COMMENT ON COLUMN tensile.latency_models.known_kinds IS
    'operators and the types of their first operands: those to be measured, and those of jobs until then';

CREATE VIEW tensile.scheduler_log WITH (security_invoker = true) AS
    SELECT l.id, l.at, l.event, l.job, l.generation, l.device, l.reason, l.details
    FROM tensile_internal.scheduler_log l;
COMMENT ON VIEW tensile.scheduler_log IS
    'decisions of the memory scheduler and their reasons; the last 10,000 lines';
COMMENT ON COLUMN tensile.scheduler_log.event IS
    'scheduled, planned, waits, refused, failed, note, planner (it died), search, rejected (a plan), batch '
    'size (chosen), calibration (finished, or an automatic one has failed)';
COMMENT ON COLUMN tensile.scheduler_log.job IS
    'number of the job; null: a whole device, visible to members of pg_read_all_stats only';
COMMENT ON COLUMN tensile.scheduler_log.generation IS 'generation of the plan';
COMMENT ON COLUMN tensile.scheduler_log.details IS 'figures of a plan or of a round of planning';
