------------------------------------------------------------------------------------------------------------------------
-- Privileges on functions
--
-- Members of tensile_user may execute the public functions. Only their owner may execute the private ones, except
-- those that views and workers call; these check the caller themselves.
------------------------------------------------------------------------------------------------------------------------

REVOKE EXECUTE ON ALL ROUTINES IN SCHEMA tensile FROM PUBLIC;
GRANT EXECUTE ON FUNCTION
    tensile._version(), tensile._owned(oid, name), tensile._base_number(bigint, jsonb),
    tensile._inserted_rows(regclass), tensile._drift(bigint, timestamptz), tensile._drift_limits(),
    tensile._drift_begin(), tensile._psi(bigint[], bigint[]), tensile._ks(bigint[], bigint[]), tensile._progress(), tensile._devices(), tensile._plan(), tensile._predictions(), tensile._loaded_models(),
    tensile._submitted_here(bigint), tensile._wait_for_change(int), tensile._job_result(bigint, timestamptz),
    tensile._tell_result(tensile.jobs), tensile._next_step(tensile.jobs), tensile._rounded(float8),
    tensile._check_sees_changes(text, text), tensile._tuning_result(bigint, timestamptz), tensile._no_such_tuning(bigint),
    tensile._wait_round(timestamptz), tensile._session_feed(int), tensile._session_wait(int, int, bool),
    tensile._session_weights(bigint, int),
    tensile._materialize_predictions(text, text, text, text[], text, text), tensile._run_statement(text),
    tensile._check_unique(regclass, text[], text),
    tensile._explain_latency_models(), tensile._explain_running(), tensile._explain_ray(jsonb),
    tensile._calibration_workloads(),
    tensile._no_such_job(bigint), tensile._raise(text, text, text, text),
    tensile._process(), tensile._my_job(), tensile._feed(int, text, text, jsonb, text, text),
    tensile._fetch_plan(bigint),
    tensile._acknowledge_plan(bigint), tensile._group_socket(int), tensile._flow_state(),
    tensile._register_device(text, bigint, float8, float8, bigint),
    tensile._report(text, int, int, bigint, bigint, float8, float8, bigint, bigint, bigint, bigint, bigint, float8,
                    bigint, float8, float8),
    tensile._job_choice(jsonb), tensile._job_settings(jsonb), tensile._job_architecture(jsonb, text),
    tensile._job_trace(jsonb, bytea[], jsonb), tensile._job_admitted(), tensile._job_waits_for(text),
    tensile._job_refusal(), tensile._job_ranks(jsonb), tensile._job_ray(),
    tensile._job_latency(jsonb, real[], real[], real[]), tensile._job_log(text, text, bigint),
    tensile._job_sparsity(int, int[], real[], real[], real[], bigint[]), tensile._job_codecs(),
    tensile._job_codec_times(text, jsonb, float8),
    tensile._job_profiles(), tensile._job_latency_models(),
    tensile._calibrate_done(text, jsonb, bytea, int, int, float8, text[], text),
    tensile._job_begin(int), tensile._job_status(), tensile._job_rows(bigint), tensile._job_checkpoint(int, int, bytea),
    tensile._job_checkpoint_done(int, jsonb), tensile._job_checkpoint_read(int), tensile._job_metric(jsonb),
    tensile._job_version(text, jsonb, jsonb, text, jsonb, jsonb), tensile._job_weights(bigint, int, bytea),
    tensile._training_sources(text, jsonb, text), tensile._job_sources(bigint, jsonb),
    tensile._same_query(text, text, jsonb), tensile._check_prediction_query(bigint, text, text, jsonb),
    tensile._job_prediction_query(bigint, jsonb),
    tensile._job_start_weights(int), tensile._job_gate(), tensile._job_gate_weights(bigint, int), tensile._gate_feed(int, int, bigint, bigint, text, jsonb),
    tensile._job_evaluation(), tensile._job_evaluation_weights(bigint, int), tensile._job_evaluated(bigint, bigint, jsonb),
    tensile._evaluation_feed(int, bigint, text, jsonb),
    tensile._job_decide(bigint, text, float8, float8, text, text),
    tensile._job_end(text, text, text, text, text, text, text[], text), tensile._stop_cause(),
    tensile._take_interrupt(), tensile._job_interrupt(text, bool, text)
    TO PUBLIC;
GRANT EXECUTE ON PROCEDURE tensile._step(int, int, int, bool) TO PUBLIC;

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
SELECT tensile._notify(0);
