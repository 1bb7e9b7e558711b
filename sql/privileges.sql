-- Privileges, by schema
--
-- USAGE on schemas, row-level security and the functions themselves limit access: members of tensile_user and
-- tensile_predictor have USAGE on tensile and tensile_worker, and nobody but the extension's owner has it on
-- tensile_internal. Views read tables there with the rights of their callers, who therefore may SELECT.

GRANT SELECT ON ALL TABLES IN SCHEMA tensile, tensile_internal TO PUBLIC;
REVOKE EXECUTE ON ALL ROUTINES IN SCHEMA tensile, tensile_internal, tensile_worker FROM PUBLIC;
GRANT EXECUTE ON ALL ROUTINES IN SCHEMA tensile_worker TO PUBLIC;

-- Members of tensile_user may execute the public functions, those of tensile_predictor the ones that predict or evaluate
-- in the caller's session; a function that submits a job, or changes anything, is not for them. The owner of a database
-- may rename, copy and drop it, even without being a member.
DO $$
DECLARE
    routine pg_catalog.regprocedure;
BEGIN
    FOR routine IN
        SELECT p.oid FROM pg_catalog.pg_proc p
             JOIN pg_catalog.pg_depend d ON d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_proc'::pg_catalog.regclass
                 AND d.objid OPERATOR(pg_catalog.=) p.oid AND d.deptype OPERATOR(pg_catalog.=) 'e'
             JOIN pg_catalog.pg_extension e ON e.oid OPERATOR(pg_catalog.=) d.refobjid
        WHERE d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_extension'::pg_catalog.regclass
          AND e.extname OPERATOR(pg_catalog.=) 'pg_tensile'
          AND p.pronamespace OPERATOR(pg_catalog.=) '@extschema@'::pg_catalog.regnamespace
          AND p.proname OPERATOR(pg_catalog.<>) ALL (ARRAY['release_database', 'resume_database',
                                                     'calibrate_device']) LOOP
        EXECUTE pg_catalog.format('GRANT EXECUTE ON ROUTINE %s TO tensile_user', routine);
        IF (SELECT p.proname FROM pg_catalog.pg_proc p WHERE p.oid OPERATOR(pg_catalog.=) routine)
           OPERATOR(pg_catalog.=) ANY (ARRAY['predict', 'predict_all', 'predict_class', 'predict_interval',
                                             'predict_probabilities', 'predict_rows', 'predict_table',
                                             'explain_prediction', 'embed', 'embed_rows', 'evaluate_model',
                                             'feature_importance', 'models_of_table']) THEN
            EXECUTE pg_catalog.format('GRANT EXECUTE ON ROUTINE %s TO tensile_predictor', routine);
        END IF;
    END LOOP;
END $$;
GRANT EXECUTE ON FUNCTION @extschema@.release_database(), @extschema@.resume_database() TO pg_database_owner;

-- A fresh installation only: an upgrade revokes nothing.
DO $$
DECLARE
    routine pg_catalog.regprocedure;
BEGIN
    FOR routine IN
        SELECT p.oid FROM pg_catalog.pg_proc p
             JOIN pg_catalog.pg_depend d ON d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_proc'::pg_catalog.regclass
                 AND d.objid OPERATOR(pg_catalog.=) p.oid AND d.deptype OPERATOR(pg_catalog.=) 'e'
             JOIN pg_catalog.pg_extension e ON e.oid OPERATOR(pg_catalog.=) d.refobjid
        WHERE d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_extension'::pg_catalog.regclass
          AND e.extname OPERATOR(pg_catalog.=) 'pg_tensile'
          AND p.pronamespace OPERATOR(pg_catalog.=) '@extschema@'::pg_catalog.regnamespace LOOP
        EXECUTE pg_catalog.format('REVOKE EXECUTE ON ROUTINE %s FROM PUBLIC', routine);
    END LOOP;
END $$;

-- Wake the launcher when this transaction commits.
SELECT tensile_internal._notify(0);
