-- Restoring a dump: triggers of all tables that it contains

-- Several processes of pg_restore load these tables in any order, so foreign keys are not checked for what COPY brings
-- (csrc/base/restore.c). All triggers fire meanwhile.
CREATE FUNCTION tensile_internal._restore() RETURNS trigger
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
                                  'FOR EACH STATEMENT EXECUTE FUNCTION tensile_internal._restore()', dumped);
        EXECUTE pg_catalog.format('CREATE OR REPLACE TRIGGER end_restore AFTER INSERT ON %s '
                                  'FOR EACH STATEMENT EXECUTE FUNCTION tensile_internal._restore()', dumped);
        FOR trigger IN SELECT g.tgname FROM pg_catalog.pg_trigger g
                       WHERE g.tgrelid OPERATOR(pg_catalog.=) dumped AND NOT g.tgisinternal LOOP
            EXECUTE pg_catalog.format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', dumped, trigger);
        END LOOP;
    END LOOP;
END $$;
