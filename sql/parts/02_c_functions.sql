------------------------------------------------------------------------------------------------------------------------
-- Private functions in C
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
CREATE FUNCTION tensile._is_released() RETURNS bool
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_is_released';
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
                                raw_bytes_swapped bigint DEFAULT NULL, time_left_s float8 DEFAULT NULL,
                                least_time_left_s float8 DEFAULT NULL) RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_report';
CREATE FUNCTION tensile._register_device(name text, total_bytes bigint, out_bytes_per_s float8, in_bytes_per_s float8,
                                         overhead_bytes bigint) RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_register_device';
CREATE FUNCTION tensile._fetch_plan(after bigint, OUT generation bigint, OUT events bytea, OUT planned_bytes bigint,
                                    OUT granted_bytes bigint, OUT link_share float8, OUT plan_order bytea,
                                    OUT groups bytea)
    RETURNS SETOF record
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_fetch_plan';
CREATE FUNCTION tensile._acknowledge_plan(generation bigint) RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_acknowledge_plan';
CREATE FUNCTION tensile._group_socket(fd int) RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_group_socket';
CREATE FUNCTION tensile._flow_state(OUT waits bool, OUT late bool, OUT fault text) RETURNS record
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_flow_state';
CREATE FUNCTION tensile._feed(fd int, query text, target text, settings jsonb, split_by text DEFAULT NULL,
                              validation_query text DEFAULT NULL) RETURNS bigint
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_feed';
CREATE FUNCTION tensile._training_sources(query text, settings jsonb, validation_query text) RETURNS json
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_training_sources';
CREATE FUNCTION tensile._same_query(query text, other text, settings jsonb) RETURNS bool
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_same_query';
CREATE FUNCTION tensile._check_prediction_query(version bigint, training_query text, query text, settings jsonb)
    RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_check_prediction_query';
CREATE FUNCTION tensile._gate_feed(fd int, previous_fd int, version bigint, previous bigint, query text,
                                   settings jsonb) RETURNS bigint
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_gate_feed';
CREATE FUNCTION tensile._evaluation_feed(fd int, version bigint, query text, settings jsonb) RETURNS bigint
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_evaluation_feed';

-- Scheduler and predictor
CREATE FUNCTION tensile._publish_plan(job bigint, events bytea, planned_bytes bigint, granted_bytes bigint,
                                      link_share float8, plan_order bytea DEFAULT '',
                                      groups bytea DEFAULT '') RETURNS bigint
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_publish_plan';
CREATE FUNCTION tensile._grants(OUT job bigint, OUT device text, OUT granted_bytes bigint, OUT overhead_bytes bigint,
                                OUT generation bigint, OUT acknowledged bigint, OUT planned_bytes bigint,
                                OUT plan_granted_bytes bigint, OUT flows bool) RETURNS SETOF record
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_grants';
CREATE FUNCTION tensile._device_memory(OUT device text, OUT total_bytes bigint, OUT budget_bytes bigint,
                                       OUT inference_bytes bigint, OUT wanted_bytes bigint, OUT claimed_bytes bigint,
                                       OUT claimed_s float8) RETURNS SETOF record
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_budgets';
CREATE FUNCTION tensile._lack_memory(device text, bytes bigint[], slowed_bytes bigint) RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_lack_memory';
CREATE FUNCTION tensile._lacking_memory(OUT device text, OUT number bigint, OUT bytes bigint[],
                                        OUT slowed_bytes bigint) RETURNS SETOF record
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_lacking_memory';
CREATE FUNCTION tensile._inference_memory(device text, total_bytes bigint, least_bytes bigint,
                                          wanted_bytes bigint) RETURNS bigint
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_inference_memory';
CREATE FUNCTION tensile._report_loaded(models bigint[], devices text[]) RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_report_loaded';
CREATE FUNCTION tensile._predictor_socket() RETURNS text
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_predictor_socket';

-- Shared memory; rows are filtered by role in C
CREATE FUNCTION tensile._progress(OUT job bigint, OUT pid int, OUT phase text, OUT epoch int, OUT epochs int,
                                  OUT step bigint, OUT steps bigint, OUT loss float8, OUT samples_per_s float8,
                                  OUT device_bytes bigint, OUT device_peak_bytes bigint, OUT bytes_swapped bigint,
                                  OUT stall_us bigint, OUT passive_swap_ins bigint, OUT utilisation float8,
                                  OUT raw_bytes_swapped bigint, OUT time_left_s float8, OUT least_time_left_s float8,
                                  OUT plan_generation bigint, OUT heartbeat timestamptz)
    RETURNS SETOF record
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_progress';
CREATE FUNCTION tensile._devices(OUT name text, OUT total_bytes bigint, OUT budget_bytes bigint,
                                 OUT granted_bytes bigint, OUT in_use_bytes bigint, OUT inference_bytes bigint,
                                 OUT jobs int, OUT out_bytes_per_s float8, OUT in_bytes_per_s float8,
                                 OUT utilisation float8, OUT flowing_jobs int, OUT flowing_bytes bigint)
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
                                       OUT planned_bytes bigint, OUT host_bytes bigint, OUT device text)
    RETURNS SETOF record
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
