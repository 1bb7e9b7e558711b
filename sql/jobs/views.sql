-- Views of jobs

CREATE VIEW tensile.progress WITH (security_invoker = true) AS
    SELECT j.id AS job, j.model, j.owner, j.state, j.reason, p.pid, p.phase, p.epoch,
           CASE WHEN p.epochs OPERATOR(pg_catalog.>) 0 THEN p.epochs ELSE j.epochs END AS epochs,
           p.step, p.steps, p.loss, p.samples_per_s, p.device_bytes, p.device_peak_bytes, p.bytes_swapped,
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
           CASE WHEN t.known THEN pg_catalog.make_interval(secs => p.least_time_left_s) END AS least_time_left,
           CASE WHEN coalesce(j.architecture, b.architecture) OPERATOR(pg_catalog.->>) 'type'
                     OPERATOR(pg_catalog.<>) 'ensemble' THEN NULL
                WHEN j.options OPERATOR(pg_catalog.->>) 'stages' OPERATOR(pg_catalog.=) 'best'
                     OR j.version IS NOT NULL THEN 'best' ELSE 'first' END AS stage
    FROM tensile_internal.jobs j LEFT JOIN tensile_internal.models b ON b.id OPERATOR(pg_catalog.=) j.model_id
         LEFT JOIN tensile_worker._progress() p ON p.job OPERATOR(pg_catalog.=) j.id
         LEFT JOIN tensile_internal.plans f ON f.job OPERATOR(pg_catalog.=) j.id
         CROSS JOIN LATERAL (SELECT p.phase OPERATOR(pg_catalog.=) ANY (
             ARRAY['training', 'validating', 'refitting', 'calibrating'])) t (known)
         LEFT JOIN LATERAL (
             -- of this job or, if it has never been alone, of the last one with the same graph, on the same device
             SELECT l.alone_us
             FROM tensile_internal.traces g JOIN tensile_internal.traces s
                      ON s.fingerprint OPERATOR(pg_catalog.=) g.fingerprint
                         AND s.device OPERATOR(pg_catalog.=) g.device
                  JOIN tensile_internal.operator_latencies l ON l.job OPERATOR(pg_catalog.=) s.job
             WHERE g.job OPERATOR(pg_catalog.=) j.id AND l.alone_us IS NOT NULL
             ORDER BY s.job OPERATOR(pg_catalog.<>) j.id, l.at DESC LIMIT 1) a ON true
    WHERE j.ended_at IS NULL;
COMMENT ON VIEW tensile.progress IS 'open jobs with live numbers from shared memory (not transactional)';
COMMENT ON COLUMN tensile.progress.reason IS 'reason for waiting or interruption';
COMMENT ON COLUMN tensile.progress.pid IS 'process ID of the worker';
COMMENT ON COLUMN tensile.progress.phase IS
    'starting, loading, preparing, fitting (lines), boosting (trees), building, choosing (the batch size), capturing, '
    'waiting, training, validating, cross-validating, refitting (on all rows), saving, comparing (with the deployed '
    'version) or calibrating';
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
COMMENT ON COLUMN tensile.progress.stage IS
    'of an ensemble: first (its first version is being made) or best (the one that replaces it); null: other models';
COMMENT ON COLUMN tensile.progress.heartbeat IS 'time of the trainer''s last report';

CREATE VIEW tensile.ranks WITH (security_invoker = true) AS
    SELECT j.id AS job, r.rank, r.node, r.device, r.state, r.step, r.samples_per_s, r.device_bytes
    FROM tensile_internal.jobs j JOIN tensile_internal.rank_reports p ON p.job OPERATOR(pg_catalog.=) j.id
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

CREATE VIEW tensile.epoch_metrics WITH (security_invoker = true) AS
    SELECT e.job, e.epoch, e.split, e.samples, m.loss, m.accuracy, m.f1, m.rmse, m.r2, e.seconds, e.at,
           m.roc_auc, m.log_loss, m.mae
    FROM tensile_internal.epochs e
         CROSS JOIN LATERAL (
             SELECT pg_catalog.max(x.value) FILTER (WHERE x.metric OPERATOR(pg_catalog.=) 'loss') AS loss,
                    pg_catalog.max(x.value) FILTER (WHERE x.metric OPERATOR(pg_catalog.=) 'accuracy') AS accuracy,
                    pg_catalog.max(x.value) FILTER (WHERE x.metric OPERATOR(pg_catalog.=) 'f1') AS f1,
                    pg_catalog.max(x.value) FILTER (WHERE x.metric OPERATOR(pg_catalog.=) 'rmse') AS rmse,
                    pg_catalog.max(x.value) FILTER (WHERE x.metric OPERATOR(pg_catalog.=) 'r2') AS r2,
                    pg_catalog.max(x.value) FILTER (WHERE x.metric OPERATOR(pg_catalog.=) 'roc_auc') AS roc_auc,
                    pg_catalog.max(x.value) FILTER (WHERE x.metric OPERATOR(pg_catalog.=) 'log_loss') AS log_loss,
                    pg_catalog.max(x.value) FILTER (WHERE x.metric OPERATOR(pg_catalog.=) 'mae') AS mae
             FROM tensile_internal.metrics x
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
    SELECT j.id AS job, j.model, j.owner, j.state, j.version, j.submitted_at, j.started_at,
           j.ended_at, j.started_at OPERATOR(pg_catalog.-) j.submitted_at AS queued_for,
           j.ended_at OPERATOR(pg_catalog.-) j.started_at AS ran_for, j.attempts, j.rows, e.epoch AS epochs,
           t.loss AS training_loss, v.loss AS validation_loss, v.accuracy, v.f1, v.rmse, v.r2,
           j.sqlstate, j.error, j.hint,
           coalesce(j.chosen_batch_size, CASE WHEN j.batch_size OPERATOR(pg_catalog.<>) 0 THEN j.batch_size END)
               AS batch_size,
           coalesce(j.chosen_learning_rate, j.learning_rate) AS learning_rate, k.epoch AS kept_epoch, j.stopped,
           (b.metrics OPERATOR(pg_catalog.->>) 'accuracy')::pg_catalog.float8 AS baseline_accuracy,
           (b.metrics OPERATOR(pg_catalog.->>) 'f1')::pg_catalog.float8 AS baseline_f1,
           (b.metrics OPERATOR(pg_catalog.->>) 'rmse')::pg_catalog.float8 AS baseline_rmse,
           (b.metrics OPERATOR(pg_catalog.->>) 'r2')::pg_catalog.float8 AS baseline_r2
    FROM tensile_internal.jobs j
         LEFT JOIN LATERAL (SELECT pg_catalog.max(x.epoch) AS epoch FROM tensile_internal.epochs x
                            WHERE x.job OPERATOR(pg_catalog.=) j.id AND x.split OPERATOR(pg_catalog.=) 'training'
                           ) e ON true
         LEFT JOIN LATERAL (SELECT coalesce(j.kept_epoch, e.epoch) AS epoch) k ON true
         LEFT JOIN tensile.epoch_metrics t ON t.job OPERATOR(pg_catalog.=) j.id
             AND t.epoch OPERATOR(pg_catalog.=) k.epoch AND t.split OPERATOR(pg_catalog.=) 'training'
         LEFT JOIN tensile.epoch_metrics v ON v.job OPERATOR(pg_catalog.=) j.id
             AND v.epoch OPERATOR(pg_catalog.=) k.epoch AND v.split OPERATOR(pg_catalog.=)
                 CASE WHEN EXISTS (SELECT FROM tensile_internal.epochs x WHERE x.job OPERATOR(pg_catalog.=) j.id
                                   AND x.epoch OPERATOR(pg_catalog.=) k.epoch
                                   AND x.split OPERATOR(pg_catalog.=) 'version') THEN 'version' ELSE 'validation' END
         CROSS JOIN LATERAL (
             SELECT CASE WHEN j.baseline OPERATOR(pg_catalog.->>) 'split' OPERATOR(pg_catalog.=) 'validation'
                         THEN j.baseline END) b (metrics)
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
COMMENT ON COLUMN tensile.job_history.baseline_accuracy IS
    'accuracy of the most frequent class, without a model; null: not a classification, or trained by version 0.1.0, as '
    'for the columns that follow';
COMMENT ON COLUMN tensile.job_history.baseline_f1 IS 'f1 of the most frequent class';
COMMENT ON COLUMN tensile.job_history.baseline_rmse IS
    'rmse of the mean of the training rows or, with a split by time, of the last value before the validation rows if it '
    'is less';
COMMENT ON COLUMN tensile.job_history.baseline_r2 IS 'r2 of the same value';

CREATE VIEW tensile.jobs WITH (security_invoker = true) AS
    SELECT j.id AS job, j.kind, j.model, j.model_id, j.owner, j.owner_id,
           j.state, j.reason, j.query, j.target, j.epochs, j.batch_size, j.chosen_batch_size, j.optimizer,
           j.learning_rate, j.chosen_learning_rate, j.validation, j.split_by, j.validation_query, j.max_time, j.seed,
           j.policy, j.memory_budget, j.priority, j.options, j.settings, j.architecture, j.architecture_reason,
           j.tuning, j.automatic, j.start_version, j.cancel_requested, j.attempts, j.retries, j.not_before,
           j.submitted_at, j.started_at, j.ended_at, j.rows, j.fingerprint, j.version, j.kept_epoch, j.stopped,
           j.sqlstate, j.error, j.hint, j.detail, j.traceback, j.warnings, j.baseline, j.role_memory, j.role_time
    FROM tensile_internal.jobs j;
COMMENT ON VIEW tensile.jobs IS
    'training and calibration jobs; visible to their owners and to members of pg_read_all_stats';
COMMENT ON COLUMN tensile.jobs.kind IS
    'train; calibrate: a measurement of operators for the latency models of a device; compare: a comparison of a tuning''s '
    'best version with the deployed one; or evaluate, for a schedule';
COMMENT ON COLUMN tensile.jobs.model IS 'name of the model, kept after drop_model';
COMMENT ON COLUMN tensile.jobs.model_id IS 'number of the model; null after drop_model';
COMMENT ON COLUMN tensile.jobs.owner IS 'name of the role that has submitted the job';
COMMENT ON COLUMN tensile.jobs.owner_id IS 'OID of the owning role; null while no role has that name';
COMMENT ON COLUMN tensile.jobs.state IS
    'queued, starting, running, waiting (for device memory, or for processors of a Ray cluster), finished, failed, '
    'cancelled, or interrupted (to be continued)';
COMMENT ON COLUMN tensile.jobs.reason IS 'reason for waiting, interruption or cancellation';
COMMENT ON COLUMN tensile.jobs.batch_size IS
    'requested batch size; null: chosen by the number of rows, 0: chosen by plans; see chosen_batch_size';
COMMENT ON COLUMN tensile.jobs.chosen_batch_size IS 'batch size chosen automatically; null: none was chosen (yet)';
COMMENT ON COLUMN tensile.jobs.learning_rate IS
    'requested learning rate; for batches of 64 rows if the batch size is chosen by plans; null: chosen '
    'automatically, see chosen_learning_rate';
COMMENT ON COLUMN tensile.jobs.chosen_learning_rate IS
    'learning rate chosen automatically, or for the chosen batch size; null: none was chosen (yet)';
COMMENT ON COLUMN tensile.jobs.split_by IS
    'column of the query by which rows are divided into training and validation; null: by their content';
COMMENT ON COLUMN tensile.jobs.validation_query IS
    'query of the rows for validation; null: a share of the rows of the training query';
COMMENT ON COLUMN tensile.jobs.max_time IS 'longest time of training; null: no limit';
COMMENT ON COLUMN tensile.jobs.memory_budget IS
    'device memory available to the job, in bytes; null: no limit but the device''s';
COMMENT ON COLUMN tensile.jobs.settings IS
    'search_path, TimeZone, DateStyle and IntervalStyle of the submitting session';
COMMENT ON COLUMN tensile.jobs.architecture IS
    'architecture of a trial, or that the job has chosen by the values of its arrays; null: the model''s';
COMMENT ON COLUMN tensile.jobs.architecture_reason IS
    'reason for the architecture if the job has chosen it; null: it has not';
COMMENT ON COLUMN tensile.jobs.tuning IS 'tuning that the job belongs to; null: none';
COMMENT ON COLUMN tensile.jobs.automatic IS
    'true for a calibration that the server has begun by itself; another job interrupts it';
COMMENT ON COLUMN tensile.jobs.start_version IS
    'id in model_versions of the version whose weights training began with (option start), or which a job of kind compare '
    'compares; null: none';
COMMENT ON COLUMN tensile.jobs.cancel_requested IS 'true if cancel_job was called: the worker stops the job';
COMMENT ON COLUMN tensile.jobs.attempts IS 'number of attempts: workers started for the job';
COMMENT ON COLUMN tensile.jobs.retries IS
    'number of faults since the last checkpoint; more than pg_tensile.max_retries fail the job';
COMMENT ON COLUMN tensile.jobs.not_before IS
    'earliest time of an interrupted job''s next attempt; null: as soon as possible';
COMMENT ON COLUMN tensile.jobs.rows IS 'number of rows returned by the query';
COMMENT ON COLUMN tensile.jobs.fingerprint IS 'fingerprint of the data: number of rows and sum of the row hashes';
COMMENT ON COLUMN tensile.jobs.version IS 'version of the model that the job trained';
COMMENT ON COLUMN tensile.jobs.kept_epoch IS
    'epoch whose weights and metrics the version has; null: none yet, or trained by version 0.1.0, which kept the last one';
COMMENT ON COLUMN tensile.jobs.stopped IS 'why the training ended: epochs, early_stopping or max_time';
COMMENT ON COLUMN tensile.jobs.traceback IS 'traceback of the child process, if the job failed there';
COMMENT ON COLUMN tensile.jobs.warnings IS 'problems that did not stop the job, such as skipped rows';
COMMENT ON COLUMN tensile.jobs.baseline IS
    'metrics without a model: {"kind", "split"} and a value for each metric; "kind" is mean (the mean of the training '
    'rows, for mae their median), last (the last value before the validation rows) or frequencies (those of the classes)';
COMMENT ON COLUMN tensile.jobs.role_memory IS
    'most device memory, in bytes, that a job of the owner might have when this one last started '
    '(pg_tensile.role_job_memory); null: no limit, or not started yet';
COMMENT ON COLUMN tensile.jobs.role_time IS
    'longest time of training that a job of the owner might have when this one last started '
    '(pg_tensile.role_job_time); null: no limit, or not started yet';

CREATE VIEW tensile.metrics WITH (security_invoker = true) AS
    SELECT x.job, x.epoch, x.split, x.metric, x.value,
           CASE WHEN j.baseline OPERATOR(pg_catalog.->>) 'split' OPERATOR(pg_catalog.=)
                     CASE WHEN x.split OPERATOR(pg_catalog.=) 'version' THEN 'validation' ELSE x.split END
                THEN j.baseline OPERATOR(pg_catalog.->>) x.metric END::pg_catalog.float8 AS baseline
    FROM tensile_internal.metrics x JOIN tensile_internal.jobs j ON j.id OPERATOR(pg_catalog.=) x.job;
COMMENT ON VIEW tensile.metrics IS
    'metrics of every epoch by name, as far as they apply to the task; epoch_metrics has a column for each';
COMMENT ON COLUMN tensile.metrics.epoch IS 'number of the epoch, from 1';
COMMENT ON COLUMN tensile.metrics.split IS 'training or validation, as in epochs';
COMMENT ON COLUMN tensile.metrics.metric IS
    'loss; accuracy, balanced_accuracy, f1, precision, recall, mcc, log_loss, calibrated_log_loss, brier, roc_auc and '
    'pr_auc of labels; '
    'rmse, mae and r2 of numbers; epoch_metrics has columns for the most used';
COMMENT ON COLUMN tensile.metrics.value IS 'value of the metric over all rows of the split';
COMMENT ON COLUMN tensile.metrics.baseline IS
    'its value without a model, from the targets of the training rows (jobs.baseline); of the validation rows or, without '
    'such rows, the training rows; null until the job has finished';

CREATE VIEW tensile.batch_sizes WITH (security_invoker = true) AS
    SELECT b.job, b.batch_size, b.chosen, b.feasible, b.learning_rate, b.samples_per_s, b.iteration_us, b.stall_us,
           b.device_bytes, b.measured_us, b.reason
    FROM tensile_internal.batch_sizes b;
COMMENT ON VIEW tensile.batch_sizes IS
    'batch sizes compared for each job submitted with batch_size => 0';
COMMENT ON COLUMN tensile.batch_sizes.chosen IS 'true for the batch size that the job trains with';
COMMENT ON COLUMN tensile.batch_sizes.feasible IS 'true if the batch size fits into the memory available to the job';
COMMENT ON COLUMN tensile.batch_sizes.learning_rate IS
    'learning rate for this batch size, from the option learning_rate_scaling';
COMMENT ON COLUMN tensile.batch_sizes.samples_per_s IS
    'predicted number of rows trained on per second; null: no plan';
COMMENT ON COLUMN tensile.batch_sizes.iteration_us IS
    'expected duration of a step under its plan, from measurements where available';
COMMENT ON COLUMN tensile.batch_sizes.stall_us IS 'expected time per step spent waiting for copies';
COMMENT ON COLUMN tensile.batch_sizes.device_bytes IS 'device memory required by the step''s plan';
COMMENT ON COLUMN tensile.batch_sizes.measured_us IS
    'measured duration of one of the job''s first steps; null: none had this size';
COMMENT ON COLUMN tensile.batch_sizes.reason IS 'reason for not being feasible, or summary of the plan';
