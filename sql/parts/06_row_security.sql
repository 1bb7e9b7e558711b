------------------------------------------------------------------------------------------------------------------------
-- Row-level security
------------------------------------------------------------------------------------------------------------------------

ALTER TABLE tensile.models ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.model_versions ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.model_weights ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile._version_sources ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.deployments ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.schedules ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.drift_counts ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.drift_alarms ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.evaluation_schedules ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.evaluations ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.tunings ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.trials ENABLE ROW LEVEL SECURITY;
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
ALTER TABLE tensile.rank_reports ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.searches ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.search_results ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.device_profiles ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.latency_models ENABLE ROW LEVEL SECURITY;
ALTER TABLE tensile.scheduler_log ENABLE ROW LEVEL SECURITY;

-- A grant stores its grantor so that this policy need not query models, whose own policy queries model_grants.
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
CREATE POLICY visible ON tensile.deployments FOR SELECT USING (
    EXISTS (SELECT FROM tensile.models m WHERE m.id OPERATOR(pg_catalog.=) model));
CREATE POLICY visible ON tensile._version_sources FOR SELECT USING (
    EXISTS (SELECT FROM tensile.model_versions v WHERE v.id OPERATOR(pg_catalog.=) _version_sources.version));
CREATE POLICY owner ON tensile.model_weights FOR SELECT USING (
    EXISTS (SELECT FROM tensile.model_versions v JOIN tensile.models m ON m.id OPERATOR(pg_catalog.=) v.model
            WHERE v.id OPERATOR(pg_catalog.=) model_weights.version AND tensile._owned(m.owner, m.owner_name)));
CREATE POLICY visible ON tensile.jobs FOR SELECT USING (
    tensile._owned(owner, owner_name) OR (SELECT pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE')));
CREATE POLICY visible ON tensile.schedules FOR SELECT USING (
    tensile._owned(owner, owner_name) OR (SELECT pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE')));
CREATE POLICY visible ON tensile.drift_counts FOR SELECT USING (
    EXISTS (SELECT FROM tensile.model_versions v JOIN tensile.models m ON m.id OPERATOR(pg_catalog.=) v.model
            WHERE v.id OPERATOR(pg_catalog.=) drift_counts.version
              AND (tensile._owned(m.owner, m.owner_name)
                   OR (SELECT pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE')))));
CREATE POLICY visible ON tensile.drift_alarms FOR SELECT USING (
    EXISTS (SELECT FROM tensile.model_versions v JOIN tensile.models m ON m.id OPERATOR(pg_catalog.=) v.model
            WHERE v.id OPERATOR(pg_catalog.=) drift_alarms.version
              AND (tensile._owned(m.owner, m.owner_name)
                   OR (SELECT pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE')))));
CREATE POLICY visible ON tensile.evaluation_schedules FOR SELECT USING (
    tensile._owned(owner, owner_name) OR (SELECT pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE')));
CREATE POLICY visible ON tensile.evaluations FOR SELECT USING (
    EXISTS (SELECT FROM tensile.models m WHERE m.id OPERATOR(pg_catalog.=) model));
CREATE POLICY visible ON tensile.tunings FOR SELECT USING (
    tensile._owned(owner, owner_name) OR (SELECT pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE')));
CREATE POLICY visible ON tensile.trials FOR SELECT USING (
    EXISTS (SELECT FROM tensile.tunings t WHERE t.id OPERATOR(pg_catalog.=) tuning));
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
CREATE POLICY visible ON tensile.rank_reports FOR SELECT USING (
    EXISTS (SELECT FROM tensile.jobs j WHERE j.id OPERATOR(pg_catalog.=) job));
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

-- USAGE on the schema and the policies above limit access.
GRANT SELECT ON tensile.models, tensile.model_versions, tensile.model_weights, tensile.model_grants,
    tensile.deployments, tensile.schedules, tensile.drift_counts, tensile.drift_alarms,
    tensile.evaluation_schedules, tensile.evaluations, tensile._version_sources, tensile.tunings, tensile.trials,
    tensile.jobs, tensile.checkpoints, tensile.checkpoint_chunks, tensile.epochs, tensile.metrics,
    tensile.batch_sizes, tensile.traces, tensile.operators,
    tensile.tensors, tensile.latencies, tensile.footprints, tensile.searches, tensile.search_results,
    tensile.device_profiles, tensile.latency_models,
    tensile.sparsities, tensile.codings, tensile.codec_times, tensile.rank_reports, tensile.scheduler_log
    TO PUBLIC;
