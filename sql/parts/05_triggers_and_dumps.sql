------------------------------------------------------------------------------------------------------------------------
-- Triggers of the tables, and their contents in a dump
------------------------------------------------------------------------------------------------------------------------

-- OIDs of roles are looked up by name on insertion, because rows may come from a dump of another cluster.
CREATE FUNCTION tensile._resolve_owner() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    NEW.owner := (SELECT oid FROM pg_roles WHERE rolname = NEW.owner_name);
    RETURN NEW;
END $$;
CREATE FUNCTION tensile._resolve_grant() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    NEW.grantor := (SELECT oid FROM pg_roles WHERE rolname = NEW.grantor_name);
    NEW.grantee := CASE WHEN NEW.grantee_name = 'public' THEN 0
                        ELSE (SELECT oid FROM pg_roles WHERE rolname = NEW.grantee_name) END;
    RETURN NEW;
END $$;
-- So are those of the relations that a version was trained on.
CREATE FUNCTION tensile._resolve_source() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    NEW.relation := (SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                     WHERE n.nspname = NEW.schema_name AND c.relname = NEW.relation_name);
    RETURN NEW;
END $$;
CREATE TRIGGER resolve_source BEFORE INSERT ON tensile._version_sources
    FOR EACH ROW EXECUTE FUNCTION tensile._resolve_source();
CREATE TRIGGER resolve_owner BEFORE INSERT ON tensile.models
    FOR EACH ROW EXECUTE FUNCTION tensile._resolve_owner();
CREATE TRIGGER resolve_owner BEFORE INSERT ON tensile.jobs
    FOR EACH ROW EXECUTE FUNCTION tensile._resolve_owner();
CREATE TRIGGER resolve_owner BEFORE INSERT ON tensile.evaluation_schedules
    FOR EACH ROW EXECUTE FUNCTION tensile._resolve_owner();
CREATE TRIGGER resolve_owner BEFORE INSERT ON tensile.schedules
    FOR EACH ROW EXECUTE FUNCTION tensile._resolve_owner();
CREATE TRIGGER resolve_owner BEFORE INSERT ON tensile.tunings
    FOR EACH ROW EXECUTE FUNCTION tensile._resolve_owner();
CREATE TRIGGER resolve_grant BEFORE INSERT ON tensile.model_grants
    FOR EACH ROW EXECUTE FUNCTION tensile._resolve_grant();

-- Sessions and the predictor cache models; these triggers invalidate the caches.
CREATE TRIGGER models_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON tensile.models
    FOR EACH STATEMENT EXECUTE FUNCTION tensile._models_changed();
CREATE TRIGGER models_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON tensile.model_versions
    FOR EACH STATEMENT EXECUTE FUNCTION tensile._models_changed();
CREATE TRIGGER models_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON tensile.model_grants
    FOR EACH STATEMENT EXECUTE FUNCTION tensile._models_changed();

-- A dump contains complete models, schedules, tunings and ended jobs; it contains no checkpoints.
SELECT pg_catalog.pg_extension_config_dump('tensile.models', '');
SELECT pg_catalog.pg_extension_config_dump('tensile.model_versions', 'WHERE weight_bytes IS NOT NULL');
SELECT pg_catalog.pg_extension_config_dump('tensile.model_weights',
    'WHERE version IN (SELECT id FROM tensile.model_versions WHERE weight_bytes IS NOT NULL)');
SELECT pg_catalog.pg_extension_config_dump('tensile._version_sources',
    'WHERE version IN (SELECT id FROM tensile.model_versions WHERE weight_bytes IS NOT NULL)');
SELECT pg_catalog.pg_extension_config_dump('tensile.deployments', '');
SELECT pg_catalog.pg_extension_config_dump('tensile.drift_counts',
    'WHERE version IN (SELECT id FROM tensile.model_versions WHERE weight_bytes IS NOT NULL)');
SELECT pg_catalog.pg_extension_config_dump('tensile.drift_alarms',
    'WHERE version IN (SELECT id FROM tensile.model_versions WHERE weight_bytes IS NOT NULL)');
SELECT pg_catalog.pg_extension_config_dump('tensile.schedules', '');
SELECT pg_catalog.pg_extension_config_dump('tensile.evaluation_schedules', '');
SELECT pg_catalog.pg_extension_config_dump('tensile.evaluations', '');
SELECT pg_catalog.pg_extension_config_dump('tensile.model_grants', '');
SELECT pg_catalog.pg_extension_config_dump('tensile.jobs', 'WHERE ended_at IS NOT NULL');
SELECT pg_catalog.pg_extension_config_dump('tensile.epochs',
    'WHERE job IN (SELECT id FROM tensile.jobs WHERE ended_at IS NOT NULL)');
SELECT pg_catalog.pg_extension_config_dump('tensile.metrics',
    'WHERE job IN (SELECT id FROM tensile.jobs WHERE ended_at IS NOT NULL)');
SELECT pg_catalog.pg_extension_config_dump('tensile.batch_sizes',
    'WHERE job IN (SELECT id FROM tensile.jobs WHERE ended_at IS NOT NULL)');
SELECT pg_catalog.pg_extension_config_dump('tensile.tunings', '');
SELECT pg_catalog.pg_extension_config_dump('tensile.trials', '');
SELECT pg_catalog.pg_extension_config_dump('tensile.models_id_seq', '');
SELECT pg_catalog.pg_extension_config_dump('tensile.model_versions_id_seq', '');
SELECT pg_catalog.pg_extension_config_dump('tensile.deployments_id_seq', '');
SELECT pg_catalog.pg_extension_config_dump('tensile.schedules_id_seq', '');
SELECT pg_catalog.pg_extension_config_dump('tensile.evaluation_schedules_id_seq', '');
SELECT pg_catalog.pg_extension_config_dump('tensile.evaluations_id_seq', '');
SELECT pg_catalog.pg_extension_config_dump('tensile.jobs_id_seq', '');
SELECT pg_catalog.pg_extension_config_dump('tensile.tunings_id_seq', '');

-- Several processes of pg_restore load these tables in any order, so foreign keys are not checked for what COPY brings
-- (csrc/base/restore.c). All triggers fire meanwhile.
CREATE FUNCTION tensile._restore() RETURNS trigger
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_restore';
DO $$
DECLARE
    dumped pg_catalog.regclass;
    trigger pg_catalog.name;
BEGIN
    FOR dumped IN
        SELECT c.oid FROM pg_catalog.pg_extension e CROSS JOIN LATERAL pg_catalog.unnest(e.extconfig) t (oid)
             JOIN pg_catalog.pg_class c ON c.oid OPERATOR(pg_catalog.=) t.oid
        WHERE e.extname OPERATOR(pg_catalog.=) 'pg_tensile' AND c.relkind OPERATOR(pg_catalog.=) 'r' LOOP
        EXECUTE pg_catalog.format('CREATE OR REPLACE TRIGGER begin_restore BEFORE INSERT ON %s '
                                  'FOR EACH STATEMENT EXECUTE FUNCTION tensile._restore()', dumped);
        EXECUTE pg_catalog.format('CREATE OR REPLACE TRIGGER end_restore AFTER INSERT ON %s '
                                  'FOR EACH STATEMENT EXECUTE FUNCTION tensile._restore()', dumped);
        FOR trigger IN SELECT g.tgname FROM pg_catalog.pg_trigger g
                       WHERE g.tgrelid OPERATOR(pg_catalog.=) dumped AND NOT g.tgisinternal LOOP
            EXECUTE pg_catalog.format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', dumped, trigger);
        END LOOP;
    END LOOP;
END $$;
