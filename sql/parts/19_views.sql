------------------------------------------------------------------------------------------------------------------------
-- Views
------------------------------------------------------------------------------------------------------------------------

CREATE VIEW tensile.progress WITH (security_invoker = true) AS
    SELECT j.id AS job, j.model_name AS model, j.owner_name AS owner, j.state, j.reason, p.pid, p.phase, p.epoch,
           j.epochs, p.step, p.steps, p.loss, p.samples_per_s, p.device_bytes, p.device_peak_bytes, p.bytes_swapped,
           p.raw_bytes_swapped, p.stall_us, p.passive_swap_ins, p.plan_generation, p.heartbeat,
           coalesce(j.chosen_batch_size, CASE WHEN j.batch_size OPERATOR(pg_catalog.<>) 0 THEN j.batch_size END)
               AS batch_size,
           CASE WHEN f.vanilla_us OPERATOR(pg_catalog.>) 0 THEN f.iteration_us OPERATOR(pg_catalog./) f.vanilla_us END
               AS slowdown,
           (j.options OPERATOR(pg_catalog.->>) 'max_slowdown')::pg_catalog.float8 AS max_slowdown,
           CASE WHEN p.samples_per_s OPERATOR(pg_catalog.>) 0 AND a.alone_us OPERATOR(pg_catalog.>) 0
                THEN coalesce(j.chosen_batch_size, j.batch_size) OPERATOR(pg_catalog.*) 1e6::pg_catalog.float8
                     OPERATOR(pg_catalog./) p.samples_per_s OPERATOR(pg_catalog./) a.alone_us END AS measured_slowdown,
           CASE WHEN t.known THEN pg_catalog.make_interval(secs => p.time_left_s) END AS time_left,
           CASE WHEN t.known THEN pg_catalog.make_interval(secs => p.least_time_left_s) END AS least_time_left
    FROM tensile.jobs j LEFT JOIN tensile._progress() p ON p.job OPERATOR(pg_catalog.=) j.id
         LEFT JOIN tensile.footprints f ON f.job OPERATOR(pg_catalog.=) j.id
         CROSS JOIN LATERAL (SELECT p.phase OPERATOR(pg_catalog.=) ANY (
             ARRAY['training', 'validating', 'refitting', 'calibrating'])) t (known)
         LEFT JOIN LATERAL (
             -- of this job or, if it has never been alone, of the last one with the same graph, on the same device
             SELECT l.alone_us
             FROM tensile.traces g JOIN tensile.traces s
                      ON s.fingerprint OPERATOR(pg_catalog.=) g.fingerprint
                         AND s.device OPERATOR(pg_catalog.=) g.device
                  JOIN tensile.latencies l ON l.job OPERATOR(pg_catalog.=) s.job
             WHERE g.job OPERATOR(pg_catalog.=) j.id AND l.alone_us IS NOT NULL
             ORDER BY s.job OPERATOR(pg_catalog.<>) j.id, l.at DESC LIMIT 1) a ON true
    WHERE j.ended_at IS NULL;
COMMENT ON VIEW tensile.progress IS 'open jobs with live numbers from shared memory (not transactional)';
COMMENT ON COLUMN tensile.progress.reason IS 'reason for waiting or interruption';
COMMENT ON COLUMN tensile.progress.pid IS 'process ID of the worker';
COMMENT ON COLUMN tensile.progress.phase IS
    'starting, loading, preparing, building, choosing (the batch size), capturing, waiting, training, validating, '
    'refitting (on all rows), saving, comparing (with the deployed version) or calibrating';
COMMENT ON COLUMN tensile.progress.epoch IS 'number of the epoch, from 1';
COMMENT ON COLUMN tensile.progress.step IS 'number of finished steps of this epoch';
COMMENT ON COLUMN tensile.progress.steps IS 'number of steps of this epoch';
COMMENT ON COLUMN tensile.progress.loss IS 'mean loss of the epoch so far';
COMMENT ON COLUMN tensile.progress.samples_per_s IS 'number of rows trained on per second';
COMMENT ON COLUMN tensile.progress.device_bytes IS 'device memory in use between two steps';
COMMENT ON COLUMN tensile.progress.device_peak_bytes IS 'peak device memory during a step so far';
COMMENT ON COLUMN tensile.progress.bytes_swapped IS 'bytes copied to the host and back so far';
COMMENT ON COLUMN tensile.progress.raw_bytes_swapped IS
    'bytes copied to the host and back so far, before compression';
COMMENT ON COLUMN tensile.progress.stall_us IS 'time spent waiting for copies so far';
COMMENT ON COLUMN tensile.progress.batch_size IS 'rows per step; null: not chosen yet';
COMMENT ON COLUMN tensile.progress.passive_swap_ins IS 'number of copies to the device that no plan foresaw';
COMMENT ON COLUMN tensile.progress.plan_generation IS 'generation of the plan in use';
COMMENT ON COLUMN tensile.progress.slowdown IS
    'expected duration of a step under the plan as a multiple of that without a plan, for a job that computes alone; '
    'null: no plan';
COMMENT ON COLUMN tensile.progress.max_slowdown IS
    'largest slowdown by its plan that the scheduler accepts: the job''s option; null: any';
COMMENT ON COLUMN tensile.progress.measured_slowdown IS
    'duration of a step now as a multiple of that while nothing else used the device, in this job or in an earlier one '
    'with the same graph: whatever slows it down counts; null: not known';
COMMENT ON COLUMN tensile.progress.time_left IS
    'estimated time until the job ends, as fast as it was recently, if nothing ends it early; null: not known yet';
COMMENT ON COLUMN tensile.progress.least_time_left IS
    'the same if nothing improves any more: less than time_left if early stopping can end the job early';
COMMENT ON COLUMN tensile.progress.heartbeat IS 'time of the executor''s last report';

CREATE VIEW tensile.ranks WITH (security_invoker = true) AS
    SELECT j.id AS job, r.rank, r.node, r.device, r.state, r.step, r.samples_per_s, r.device_bytes
    FROM tensile.jobs j JOIN tensile.rank_reports p ON p.job OPERATOR(pg_catalog.=) j.id
         CROSS JOIN LATERAL pg_catalog.jsonb_to_recordset(p.ranks) r (
             rank pg_catalog.int4, node pg_catalog.text, device pg_catalog.text, state pg_catalog.text,
             step pg_catalog.int8, samples_per_s pg_catalog.float8, device_bytes pg_catalog.int8)
    WHERE j.ended_at IS NULL;
COMMENT ON VIEW tensile.ranks IS
    'ranks of each open job with the option ranks: processes of the Ray cluster that train it together';
COMMENT ON COLUMN tensile.ranks.rank IS 'number of the rank, from 0';
COMMENT ON COLUMN tensile.ranks.node IS 'address of the machine that the rank is on';
COMMENT ON COLUMN tensile.ranks.device IS 'device of that machine; null: not known yet';
COMMENT ON COLUMN tensile.ranks.state IS 'starting, or what the rank does, as column phase of progress';
COMMENT ON COLUMN tensile.ranks.step IS 'number of finished steps of this epoch';
COMMENT ON COLUMN tensile.ranks.samples_per_s IS 'number of rows that the rank trains on per second';
COMMENT ON COLUMN tensile.ranks.device_bytes IS 'device memory of the rank in use between two steps';

CREATE VIEW tensile.devices WITH (security_invoker = true) AS
    SELECT d.name, d.total_bytes, d.budget_bytes, d.granted_bytes, d.in_use_bytes, d.inference_bytes, d.jobs,
           d.out_bytes_per_s, d.in_bytes_per_s, d.utilisation, d.flowing_jobs, d.flowing_bytes
    FROM tensile._devices() d;
COMMENT ON VIEW tensile.devices IS
    'devices in use by executors: memory budget, parts granted to and used by jobs, part used for predictions';
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

CREATE VIEW tensile.plan WITH (security_invoker = true) AS
    SELECT p.job, p.generation, p.sequence, p.event, p.tensor, t.name AS tensor_name, t.kind AS tensor_kind, p.bytes,
           p.trigger_operator, o.target AS trigger_name, p.delay_us, p.deadline_operator, p.version, p.codec
    FROM tensile._plan() p
         LEFT JOIN tensile.tensors t
             ON t.job OPERATOR(pg_catalog.=) p.job AND t.tensor OPERATOR(pg_catalog.=) p.tensor
         LEFT JOIN tensile.operators o
             ON o.job OPERATOR(pg_catalog.=) p.job AND o.operator OPERATOR(pg_catalog.=) p.trigger_operator;
COMMENT ON VIEW tensile.plan IS
    'plan of each running job: swap, recompute and release events, and groups if the job shares memory as it goes';
COMMENT ON COLUMN tensile.plan.generation IS 'generation of the plan';
COMMENT ON COLUMN tensile.plan.sequence IS 'position of the event, in the order of execution; groups follow all others';
COMMENT ON COLUMN tensile.plan.event IS 'swap_out, swap_in, recompute, release, begin_group or end_group';
COMMENT ON COLUMN tensile.plan.tensor IS 'number of the tensor in tensors; null: a group';
COMMENT ON COLUMN tensile.plan.bytes IS
    'size of the tensor; of a begin_group the most that the job takes during the group, of an end_group what it keeps';
COMMENT ON COLUMN tensile.plan.tensor_name IS 'name of the tensor; see tensors';
COMMENT ON COLUMN tensile.plan.tensor_kind IS 'kind of the tensor; see tensors';
COMMENT ON COLUMN tensile.plan.trigger_operator IS
    'operator after which the event begins, or the first one of a group: its number in operators';
COMMENT ON COLUMN tensile.plan.trigger_name IS 'name of the PyTorch operator of that number';
COMMENT ON COLUMN tensile.plan.delay_us IS 'time after the trigger by which a copy may be delayed';
COMMENT ON COLUMN tensile.plan.deadline_operator IS
    'operator before which a swap_in ends, after which a swap_out ends, which uses the recomputed tensor, or the last '
    'one of a group';
COMMENT ON COLUMN tensile.plan.version IS
    'version of the tensor that is recomputed: number of its in-place changes';
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
    FROM tensile.footprints f CROSS JOIN
         ROWS FROM (pg_catalog.unnest(f.operators), pg_catalog.unnest(f.planned), pg_catalog.unnest(f.vanilla))
             WITH ORDINALITY u (operator, planned, vanilla, number)
         LEFT JOIN tensile.operators o ON o.job OPERATOR(pg_catalog.=) f.job
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
    FROM tensile.sparsities s
         CROSS JOIN ROWS FROM (pg_catalog.unnest(s.tensors), pg_catalog.unnest(s.zero_share),
                               pg_catalog.unnest(s.moved)) u (tensor, zero_share, moved)
         JOIN tensile.tensors t ON t.job OPERATOR(pg_catalog.=) s.job AND t.tensor OPERATOR(pg_catalog.=) u.tensor
         LEFT JOIN (SELECT c.job, r.tensor, r.codec, r.coded_bytes, r.coded_us, r.plain_us, r.compressed
                    FROM tensile.codings c
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

CREATE VIEW tensile.search WITH (security_invoker = true) AS
    SELECT s.job,
           CASE WHEN s.ended_at IS NULL AND j.ended_at IS NOT NULL THEN 'stopped' ELSE s.state END AS state,
           coalesce(s.ended_at, j.ended_at, pg_catalog.clock_timestamp())
               OPERATOR(pg_catalog.-) s.started_at AS elapsed,
           s.generation, s.evaluations, s.first_us, s.best_us, s.cached, s.budget_bytes, s.seconds
    FROM tensile.searches s JOIN tensile.jobs j ON j.id OPERATOR(pg_catalog.=) s.job;
COMMENT ON VIEW tensile.search IS
    'progress of the search for a better plan, of each job that has one: policies swapadvisor and joint';
COMMENT ON COLUMN tensile.search.state IS 'queued, searching, finished, stopped (with its job) or failed';
COMMENT ON COLUMN tensile.search.elapsed IS
    'time since the search began; null: not begun, or an earlier result is as good';
COMMENT ON COLUMN tensile.search.generation IS
    'generation of the genetic search in which the best plan was found';
COMMENT ON COLUMN tensile.search.evaluations IS 'number of plans evaluated until the best one was found';
COMMENT ON COLUMN tensile.search.first_us IS
    'expected duration of an iteration under the first plan of the search';
COMMENT ON COLUMN tensile.search.best_us IS 'expected duration of an iteration under the best plan so far';
COMMENT ON COLUMN tensile.search.cached IS
    'true if the result of an earlier search for the same graph was used';
COMMENT ON COLUMN tensile.search.budget_bytes IS 'device memory that a plan may use';
COMMENT ON COLUMN tensile.search.seconds IS
    'time allowed for the search, in seconds: pg_tensile.search_time, or the job''s option';

CREATE VIEW tensile.schedule_status WITH (security_invoker = true) AS
    SELECT s.id, m.name AS model, s.owner_name AS owner, s.every, s.rows, s.source, s.next_run,
           CASE WHEN i.inserted OPERATOR(pg_catalog.<) s.counted_rows THEN i.inserted
                ELSE i.inserted OPERATOR(pg_catalog.-) s.counted_rows END AS new_rows,
           s.last_run, s.last_job,
           CASE WHEN s.error IS NOT NULL THEN 'refused' ELSE j.state END AS last_state, j.version AS last_version,
           d.decision, coalesce(s.sqlstate, j.sqlstate) AS last_sqlstate, coalesce(s.error, j.error) AS last_error,
           coalesce(s.hint, j.hint) AS last_hint, s.drift, s.last_reason
    FROM tensile.schedules s LEFT JOIN tensile.models m ON m.id OPERATOR(pg_catalog.=) s.model
         LEFT JOIN tensile.jobs j ON j.id OPERATOR(pg_catalog.=) s.last_job
         LEFT JOIN tensile.deployments d ON d.job OPERATOR(pg_catalog.=) j.id
         CROSS JOIN LATERAL tensile._inserted_rows(s.source) i (inserted);
COMMENT ON VIEW tensile.schedule_status IS 'schedules of trainings, their next runs, and the outcomes of their last ones';
COMMENT ON COLUMN tensile.schedule_status.id IS 'id of the schedule';
COMMENT ON COLUMN tensile.schedule_status.model IS 'name of the model; null: the owner of the schedule may not use it any more';
COMMENT ON COLUMN tensile.schedule_status.owner IS 'role that submits the jobs';
COMMENT ON COLUMN tensile.schedule_status.every IS 'time between two trainings; null: not by time';
COMMENT ON COLUMN tensile.schedule_status.rows IS 'number of new rows that cause a training; null: not by rows';
COMMENT ON COLUMN tensile.schedule_status.source IS 'table whose new rows count';
COMMENT ON COLUMN tensile.schedule_status.next_run IS
    'time of the next training; one in the past waits for the model''s job to end; null: not by time';
COMMENT ON COLUMN tensile.schedule_status.new_rows IS 'number of rows inserted into the source since the last training';
COMMENT ON COLUMN tensile.schedule_status.last_run IS 'time at which a training was last due';
COMMENT ON COLUMN tensile.schedule_status.last_job IS 'job of the last training; null: none yet, or it was refused';
COMMENT ON COLUMN tensile.schedule_status.last_state IS
    'refused, or the state of that job; null: none yet, or the job was deleted';
COMMENT ON COLUMN tensile.schedule_status.last_version IS 'version that the job has trained';
COMMENT ON COLUMN tensile.schedule_status.decision IS 'deployed or kept, as in deployments; null: not decided';
COMMENT ON COLUMN tensile.schedule_status.last_sqlstate IS 'SQLSTATE of the refusal, or of the job''s failure';
COMMENT ON COLUMN tensile.schedule_status.last_error IS 'message of the refusal, or of the job''s failure';
COMMENT ON COLUMN tensile.schedule_status.last_hint IS 'hint of the refusal, or of the job''s failure';
COMMENT ON COLUMN tensile.schedule_status.drift IS
    'drift of the deployed version above which it is trained again; null: not by drift';
COMMENT ON COLUMN tensile.schedule_status.last_reason IS
    'reason for which the last training was due: time, a number of new rows, or a drift';

CREATE VIEW tensile.tuning_status WITH (security_invoker = true) AS
    SELECT t.id, t.model_name AS model, t.owner_name AS owner, t.state, t.trials, k.ended, k.running, k.pruned, k.infeasible,
           k.failed, t.metric, t.best_trial, b.value AS best_value, b.params AS best_params, b.version AS best_version,
           d.decision, t.rows, t.submitted_at, t.started_at, t.ended_at,
           coalesce(t.ended_at, pg_catalog.clock_timestamp()) OPERATOR(pg_catalog.-) t.started_at AS elapsed, t.error
    FROM tensile.tunings t
         CROSS JOIN LATERAL (
             SELECT pg_catalog.count(*) FILTER (WHERE o.ended_at IS NOT NULL) AS ended,
                    pg_catalog.count(*) FILTER (WHERE o.state OPERATOR(pg_catalog.=) 'running') AS running,
                    pg_catalog.count(*) FILTER (WHERE o.state OPERATOR(pg_catalog.=) 'pruned') AS pruned,
                    pg_catalog.count(*) FILTER (WHERE o.state OPERATOR(pg_catalog.=) 'infeasible') AS infeasible,
                    pg_catalog.count(*) FILTER (WHERE o.state OPERATOR(pg_catalog.=) 'failed') AS failed
             FROM tensile.trials o WHERE o.tuning OPERATOR(pg_catalog.=) t.id) k
         LEFT JOIN tensile.trials b ON b.tuning OPERATOR(pg_catalog.=) t.id AND b.number OPERATOR(pg_catalog.=) t.best_trial
         LEFT JOIN LATERAL (
             SELECT x.decision FROM tensile.deployments x
             WHERE x.job OPERATOR(pg_catalog.=) coalesce(t.comparison, b.job) ORDER BY x.id LIMIT 1) d ON true;
COMMENT ON VIEW tensile.tuning_status IS 'tunings with the progress of their trials, and the best one';
COMMENT ON COLUMN tensile.tuning_status.state IS 'state as in tunings';
COMMENT ON COLUMN tensile.tuning_status.trials IS 'number of trials that are to be made';
COMMENT ON COLUMN tensile.tuning_status.ended IS 'number of trials that have ended, in any way';
COMMENT ON COLUMN tensile.tuning_status.running IS 'number of trials whose jobs are open';
COMMENT ON COLUMN tensile.tuning_status.pruned IS 'number of trials that were stopped because others were better';
COMMENT ON COLUMN tensile.tuning_status.infeasible IS 'number of trials that did not fit into the memory, or could not be made';
COMMENT ON COLUMN tensile.tuning_status.failed IS 'number of trials whose jobs have failed';
COMMENT ON COLUMN tensile.tuning_status.metric IS 'metric by which trials are compared';
COMMENT ON COLUMN tensile.tuning_status.best_trial IS 'number of the best trial so far';
COMMENT ON COLUMN tensile.tuning_status.best_value IS 'its value of the metric, on the validation rows';
COMMENT ON COLUMN tensile.tuning_status.best_params IS 'the values that were chosen for it';
COMMENT ON COLUMN tensile.tuning_status.best_version IS 'version of the model that its job has trained';
COMMENT ON COLUMN tensile.tuning_status.decision IS 'deployed or kept, as in deployments; null: not decided';
COMMENT ON COLUMN tensile.tuning_status.rows IS 'number of rows returned by the query';
COMMENT ON COLUMN tensile.tuning_status.elapsed IS 'time from the first trial to the end, or until now';

CREATE VIEW tensile.predictions WITH (security_invoker = true) AS
    SELECT m.name AS model, v.version, p.rows, p.requests, p.unknown_categories
    FROM tensile._predictions() p
         JOIN tensile.model_versions v ON v.id OPERATOR(pg_catalog.=) p.version
         JOIN tensile.models m ON m.id OPERATOR(pg_catalog.=) v.model;
COMMENT ON VIEW tensile.predictions IS
    'predictions since the server started, with the number of categories unknown to the model';
COMMENT ON COLUMN tensile.predictions.rows IS 'number of rows predicted for';
COMMENT ON COLUMN tensile.predictions.requests IS
    'number of requests to the predictor: one per row of predict, one per batch of predict_rows';
COMMENT ON COLUMN tensile.predictions.unknown_categories IS
    'number of values that are not among the categories of the training rows';

CREATE VIEW tensile.loaded_models WITH (security_invoker = true) AS
    SELECT m.name AS model, v.version, l.device, l.memory_budget, l.device_bytes, l.planned_bytes, l.host_bytes
    FROM tensile._loaded_models() l
         LEFT JOIN tensile.model_versions v ON v.id OPERATOR(pg_catalog.=) l.version
         JOIN tensile.models m ON m.id OPERATOR(pg_catalog.=) v.model
              OR tensile._base_number(m.id, m.architecture) OPERATOR(pg_catalog.=) l.version;
COMMENT ON VIEW tensile.loaded_models IS
    'models loaded by the predictor, a version once for each memory budget; version null: a pretrained model '
    'without a version';
COMMENT ON COLUMN tensile.loaded_models.device IS
    'device that the model predicts on: pg_tensile.device within a memory budget, else the CPU';
COMMENT ON COLUMN tensile.loaded_models.memory_budget IS
    'memory budget in bytes; null: the model is executed as a whole';
COMMENT ON COLUMN tensile.loaded_models.device_bytes IS
    'device memory accounted for the model: its memory budget, or its weights';
COMMENT ON COLUMN tensile.loaded_models.planned_bytes IS
    'peak device memory of a prediction for one row within the memory budget';
COMMENT ON COLUMN tensile.loaded_models.host_bytes IS
    'bytes of the weights in host memory, besides those on the device';

CREATE VIEW tensile.epoch_metrics WITH (security_invoker = true) AS
    SELECT e.job, e.epoch, e.split, e.samples, m.loss, m.accuracy, m.f1, m.rmse, m.r2, e.seconds, e.at,
           m.roc_auc, m.log_loss, m.mae
    FROM tensile.epochs e
         CROSS JOIN LATERAL (
             SELECT pg_catalog.max(x.value) FILTER (WHERE x.metric OPERATOR(pg_catalog.=) 'loss') AS loss,
                    pg_catalog.max(x.value) FILTER (WHERE x.metric OPERATOR(pg_catalog.=) 'accuracy') AS accuracy,
                    pg_catalog.max(x.value) FILTER (WHERE x.metric OPERATOR(pg_catalog.=) 'f1') AS f1,
                    pg_catalog.max(x.value) FILTER (WHERE x.metric OPERATOR(pg_catalog.=) 'rmse') AS rmse,
                    pg_catalog.max(x.value) FILTER (WHERE x.metric OPERATOR(pg_catalog.=) 'r2') AS r2,
                    pg_catalog.max(x.value) FILTER (WHERE x.metric OPERATOR(pg_catalog.=) 'roc_auc') AS roc_auc,
                    pg_catalog.max(x.value) FILTER (WHERE x.metric OPERATOR(pg_catalog.=) 'log_loss') AS log_loss,
                    pg_catalog.max(x.value) FILTER (WHERE x.metric OPERATOR(pg_catalog.=) 'mae') AS mae
             FROM tensile.metrics x
             WHERE x.job OPERATOR(pg_catalog.=) e.job AND x.epoch OPERATOR(pg_catalog.=) e.epoch
               AND x.split OPERATOR(pg_catalog.=) e.split) m;
COMMENT ON VIEW tensile.epoch_metrics IS
    'training and validation metrics of every epoch, one column each; null if not applicable to the task; metrics has '
    'others';
COMMENT ON COLUMN tensile.epoch_metrics.epoch IS 'number of the epoch, from 1';
COMMENT ON COLUMN tensile.epoch_metrics.split IS 'training (summed up during the epoch) or validation (after it)';
COMMENT ON COLUMN tensile.epoch_metrics.samples IS 'number of rows behind the metrics';
COMMENT ON COLUMN tensile.epoch_metrics.loss IS
    'mean squared error of the standardised target, or cross-entropy: the quantity that training minimises';
COMMENT ON COLUMN tensile.epoch_metrics.accuracy IS 'share of rows with the right class';
COMMENT ON COLUMN tensile.epoch_metrics.f1 IS
    'harmonic mean of precision and recall: for the second of two classes, or averaged over more classes';
COMMENT ON COLUMN tensile.epoch_metrics.rmse IS 'root mean squared error, in the target''s unit';
COMMENT ON COLUMN tensile.epoch_metrics.r2 IS
    'share of the target''s variance that is explained: 1 is perfect, 0 as good as the mean';
COMMENT ON COLUMN tensile.epoch_metrics.seconds IS 'duration in seconds';
COMMENT ON COLUMN tensile.epoch_metrics.at IS 'end time';
COMMENT ON COLUMN tensile.epoch_metrics.roc_auc IS
    'probability that a row of a class gets a higher probability of it than a row of another class; validation only';
COMMENT ON COLUMN tensile.epoch_metrics.log_loss IS 'cross-entropy of the probabilities';
COMMENT ON COLUMN tensile.epoch_metrics.mae IS 'mean absolute error, in the target''s unit';

CREATE VIEW tensile.job_history WITH (security_invoker = true) AS
    SELECT j.id AS job, j.model_name AS model, j.owner_name AS owner, j.state, j.version, j.submitted_at, j.started_at,
           j.ended_at, j.started_at OPERATOR(pg_catalog.-) j.submitted_at AS queued_for,
           j.ended_at OPERATOR(pg_catalog.-) j.started_at AS ran_for, j.attempts, j.rows, e.epoch AS epochs,
           t.loss AS training_loss, v.loss AS validation_loss, v.accuracy, v.f1, v.rmse, v.r2,
           j.sqlstate, j.error, j.hint,
           coalesce(j.chosen_batch_size, CASE WHEN j.batch_size OPERATOR(pg_catalog.<>) 0 THEN j.batch_size END)
               AS batch_size,
           coalesce(j.chosen_learning_rate, j.learning_rate) AS learning_rate, k.epoch AS kept_epoch, j.stopped
    FROM tensile.jobs j
         LEFT JOIN LATERAL (SELECT pg_catalog.max(x.epoch) AS epoch FROM tensile.epochs x
                            WHERE x.job OPERATOR(pg_catalog.=) j.id AND x.split OPERATOR(pg_catalog.=) 'training'
                           ) e ON true
         LEFT JOIN LATERAL (SELECT coalesce(j.kept_epoch, e.epoch) AS epoch) k ON true
         LEFT JOIN tensile.epoch_metrics t ON t.job OPERATOR(pg_catalog.=) j.id
             AND t.epoch OPERATOR(pg_catalog.=) k.epoch AND t.split OPERATOR(pg_catalog.=) 'training'
         LEFT JOIN tensile.epoch_metrics v ON v.job OPERATOR(pg_catalog.=) j.id
             AND v.epoch OPERATOR(pg_catalog.=) k.epoch AND v.split OPERATOR(pg_catalog.=) 'validation'
    WHERE j.ended_at IS NOT NULL;
COMMENT ON VIEW tensile.job_history IS
    'ended jobs with their waiting and running times, and the metrics of the epoch whose weights were kept';
COMMENT ON COLUMN tensile.job_history.version IS 'version of the model that the job trained';
COMMENT ON COLUMN tensile.job_history.queued_for IS 'time from submission to the first start';
COMMENT ON COLUMN tensile.job_history.ran_for IS 'time from the first start to the end, interruptions included';
COMMENT ON COLUMN tensile.job_history.attempts IS 'number of attempts: workers started for the job';
COMMENT ON COLUMN tensile.job_history.rows IS 'number of rows returned by the query';
COMMENT ON COLUMN tensile.job_history.batch_size IS
    'rows per step; null: none was chosen before the job ended';
COMMENT ON COLUMN tensile.job_history.learning_rate IS
    'learning rate of the training; null: none was chosen before the job ended';
COMMENT ON COLUMN tensile.job_history.epochs IS 'number of finished epochs';
COMMENT ON COLUMN tensile.job_history.training_loss IS 'training loss of the kept epoch';
COMMENT ON COLUMN tensile.job_history.validation_loss IS
    'validation loss of the kept epoch, as for the metrics that follow';
COMMENT ON COLUMN tensile.job_history.kept_epoch IS
    'epoch whose weights the version has: the best one or, with the option keep = last or if the job did not finish, the last';
COMMENT ON COLUMN tensile.job_history.stopped IS 'why the training ended: epochs, early_stopping or max_time';
COMMENT ON COLUMN tensile.job_history.accuracy IS 'share of rows with the right class';
COMMENT ON COLUMN tensile.job_history.f1 IS 'harmonic mean of precision and recall';
COMMENT ON COLUMN tensile.job_history.rmse IS 'root mean squared error, in the target''s unit';
COMMENT ON COLUMN tensile.job_history.r2 IS 'share of the target''s variance that is explained';

GRANT SELECT ON tensile.progress, tensile.ranks, tensile.devices, tensile.plan, tensile.latency, tensile.footprint,
    tensile.compression, tensile.search, tensile.predictions, tensile.loaded_models, tensile.epoch_metrics,
    tensile.job_history, tensile.schedule_status, tensile.tuning_status TO PUBLIC;
