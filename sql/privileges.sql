-- USAGE on the schema and the policies above limit access.
GRANT SELECT ON tensile_internal.models, tensile_internal.model_versions, tensile_internal.model_weights, tensile_internal.model_grants,
    tensile_internal.deployments, tensile_internal.schedules, tensile_internal.drift_counts, tensile_internal.drift_alarms,
    tensile_internal.evaluation_schedules, tensile_internal.evaluations, tensile_internal._version_sources, tensile_internal.tunings, tensile_internal.trials,
    tensile_internal.jobs, tensile_internal.checkpoints, tensile_internal.checkpoint_chunks, tensile_internal.epochs, tensile_internal.metrics,
    tensile_internal.batch_sizes, tensile_internal.traces, tensile_internal.operators,
    tensile_internal.tensors, tensile_internal.latencies, tensile_internal.footprints, tensile_internal.searches, tensile_internal.search_results,
    tensile_internal.device_profiles, tensile_internal.latency_models,
    tensile_internal.sparsities, tensile_internal.codings, tensile_internal.codec_times, tensile_internal.rank_reports, tensile_internal.scheduler_log
    TO PUBLIC;

GRANT SELECT ON tensile.model_sources TO PUBLIC;

GRANT SELECT ON tensile.progress, tensile.ranks, tensile.devices, tensile.plan, tensile.latency, tensile.footprint,
    tensile.compression, tensile.search, tensile.predictions, tensile.loaded_models, tensile.epoch_metrics,
    tensile.job_history, tensile.schedule_status, tensile.tuning_status TO PUBLIC;

GRANT SELECT ON tensile.drift TO PUBLIC;

GRANT SELECT ON tensile.evaluation_status TO PUBLIC;

GRANT SELECT ON tensile.model_status TO PUBLIC;

REVOKE EXECUTE ON ALL ROUTINES IN SCHEMA tensile FROM PUBLIC;
GRANT EXECUTE ON FUNCTION
    tensile_worker._version(), tensile_worker._owned(oid, name), tensile_worker._base_number(bigint, jsonb),
    tensile_worker._inserted_rows(regclass), tensile_worker._drift(bigint, timestamptz), tensile_worker._drift_limits(),
    tensile_worker._drift_begin(), tensile_worker._psi(bigint[], bigint[]), tensile_worker._ks(bigint[], bigint[]), tensile_worker._progress(), tensile_worker._devices(), tensile_worker._plan(), tensile_worker._predictions(), tensile_worker._loaded_models(),
    tensile_worker._submitted_here(bigint), tensile_worker._wait_for_change(int), tensile_worker._job_result(bigint, timestamptz),
    tensile_worker._tell_result(tensile_internal.jobs), tensile_worker._next_step(tensile_internal.jobs), tensile_worker._rounded(float8),
    tensile_worker._check_sees_changes(text, text), tensile_worker._tuning_result(bigint, timestamptz), tensile_worker._no_such_tuning(bigint),
    tensile_worker._wait_round(timestamptz), tensile_worker._session_feed(int), tensile_worker._session_wait(int, int, bool),
    tensile_worker._session_weights(bigint, int),
    tensile_worker._materialize_predictions(text, text, text, text[], text, text), tensile_worker._run_statement(text),
    tensile_worker._check_unique(regclass, text[], text),
    tensile_worker._explain_latency_models(), tensile_worker._explain_running(), tensile_worker._explain_ray(jsonb),
    tensile_worker._calibration_workloads(),
    tensile_worker._no_such_job(bigint), tensile_worker._raise(text, text, text, text),
    tensile_worker._process(), tensile_worker._my_job(), tensile_worker._feed(int, text, text, jsonb, text, text),
    tensile_worker._fetch_plan(bigint),
    tensile_worker._acknowledge_plan(bigint), tensile_worker._group_socket(int), tensile_worker._flow_state(),
    tensile_worker._register_device(text, bigint, float8, float8, bigint),
    tensile_worker._report(text, int, int, bigint, bigint, float8, float8, bigint, bigint, bigint, bigint, bigint, float8,
                    bigint, float8, float8),
    tensile_worker._job_choice(jsonb), tensile_worker._job_settings(jsonb), tensile_worker._job_architecture(jsonb, text),
    tensile_worker._job_trace(jsonb, bytea[], jsonb), tensile_worker._job_admitted(), tensile_worker._job_waits_for(text),
    tensile_worker._job_refusal(), tensile_worker._job_ranks(jsonb), tensile_worker._job_ray(),
    tensile_worker._job_latency(jsonb, real[], real[], real[]), tensile_worker._job_log(text, text, bigint),
    tensile_worker._job_sparsity(int, int[], real[], real[], real[], bigint[]), tensile_worker._job_codecs(),
    tensile_worker._job_codec_times(text, jsonb, float8),
    tensile_worker._job_profiles(), tensile_worker._job_latency_models(),
    tensile_worker._calibrate_done(text, jsonb, bytea, int, int, float8, text[], text),
    tensile_worker._job_begin(int), tensile_worker._job_status(), tensile_worker._job_rows(bigint), tensile_worker._job_checkpoint(int, int, bytea),
    tensile_worker._job_checkpoint_done(int, jsonb), tensile_worker._job_checkpoint_read(int), tensile_worker._job_metric(jsonb),
    tensile_worker._job_version(text, jsonb, jsonb, text, jsonb, jsonb), tensile_worker._job_weights(bigint, int, bytea),
    tensile_worker._training_sources(text, jsonb, text), tensile_worker._job_sources(bigint, jsonb),
    tensile_worker._same_query(text, text, jsonb), tensile_worker._check_prediction_query(bigint, text, text, jsonb),
    tensile_worker._job_prediction_query(bigint, jsonb),
    tensile_worker._job_start_weights(int), tensile_worker._job_gate(), tensile_worker._job_gate_weights(bigint, int), tensile_worker._gate_feed(int, int, bigint, bigint, text, jsonb),
    tensile_worker._job_evaluation(), tensile_worker._job_evaluation_weights(bigint, int), tensile_worker._job_evaluated(bigint, bigint, jsonb),
    tensile_worker._evaluation_feed(int, bigint, text, jsonb),
    tensile_worker._job_decide(bigint, text, float8, float8, text, text),
    tensile_worker._job_end(text, text, text, text, text, text, text[], text), tensile_worker._stop_cause(),
    tensile_worker._take_interrupt(), tensile_worker._job_interrupt(text, bool, text)
    TO PUBLIC;
GRANT EXECUTE ON PROCEDURE tensile_worker._step(int, int, int, bool) TO PUBLIC;

GRANT EXECUTE ON ROUTINE
    @extschema@.register_model, @extschema@.drop_model, @extschema@.deploy_model, @extschema@.rollback_model,
    @extschema@.grant_model,
    @extschema@.revoke_model, @extschema@.set_model_owner, @extschema@.set_model_memory_budget,
    @extschema@.drop_version, @extschema@.set_model_retention, @extschema@.export_model, @extschema@.import_model,
    @extschema@.train_model, @extschema@.schedule_training, @extschema@.unschedule_training,
    @extschema@.schedule_evaluation, @extschema@.unschedule_evaluation,
    @extschema@.tune_model, @extschema@.cancel_tuning, @extschema@.wait_for_tuning,
    @extschema@.explain_training, @extschema@.cancel_job, @extschema@.set_job_priority,
    @extschema@.wait_for_job, @extschema@.wait_for_job_procedure,
    @extschema@.predict(text, record, text), @extschema@.predict(text, float8[], text),
    @extschema@.predict(text, jsonb, text), @extschema@.predict_class(text, record, text),
    @extschema@.predict_class(text, float8[], text), @extschema@.predict_class(text, jsonb, text),
    @extschema@.predict_rows(text, text, text), @extschema@.predict_rows(text, regclass, text),
    @extschema@.materialize_predictions, @extschema@.embed, @extschema@.embed_rows,
    @extschema@.evaluate_model, @extschema@.feature_importance, @extschema@.models_of_table,
    @extschema@.predict_interval(text, record, float8, text), @extschema@.predict_interval(text, float8[], float8, text),
    @extschema@.predict_interval(text, jsonb, float8, text),
    @extschema@.explain_prediction(text, record, text), @extschema@.explain_prediction(text, jsonb, text)
    TO tensile_user;
-- The owner of a database may rename, copy and drop it, even without being a member of tensile_user.
GRANT EXECUTE ON FUNCTION @extschema@.release_database(), @extschema@.resume_database() TO pg_database_owner;
-- A fresh installation only: an upgrade revokes nothing.
REVOKE EXECUTE ON ROUTINE
    @extschema@.register_model, @extschema@.drop_model, @extschema@.deploy_model, @extschema@.rollback_model,
    @extschema@.grant_model,
    @extschema@.revoke_model, @extschema@.set_model_owner, @extschema@.set_model_memory_budget,
    @extschema@.drop_version, @extschema@.set_model_retention, @extschema@.export_model, @extschema@.import_model,
    @extschema@.train_model, @extschema@.schedule_training, @extschema@.unschedule_training,
    @extschema@.schedule_evaluation, @extschema@.unschedule_evaluation,
    @extschema@.tune_model, @extschema@.cancel_tuning, @extschema@.wait_for_tuning,
    @extschema@.explain_training, @extschema@.cancel_job, @extschema@.set_job_priority,
    @extschema@.wait_for_job, @extschema@.wait_for_job_procedure,
    @extschema@.predict(text, record, text), @extschema@.predict(text, float8[], text),
    @extschema@.predict(text, jsonb, text), @extschema@.predict_class(text, record, text),
    @extschema@.predict_class(text, float8[], text), @extschema@.predict_class(text, jsonb, text),
    @extschema@.predict_rows(text, text, text), @extschema@.predict_rows(text, regclass, text),
    @extschema@.materialize_predictions, @extschema@.embed, @extschema@.embed_rows,
    @extschema@.evaluate_model, @extschema@.feature_importance, @extschema@.models_of_table,
    @extschema@.predict_interval(text, record, float8, text), @extschema@.predict_interval(text, float8[], float8, text),
    @extschema@.predict_interval(text, jsonb, float8, text),
    @extschema@.explain_prediction(text, record, text), @extschema@.explain_prediction(text, jsonb, text),
    @extschema@.release_database, @extschema@.resume_database
    FROM PUBLIC;

-- Wake the launcher when this transaction commits.
SELECT tensile_internal._notify(0);
