-- Objects of the extension: a change here is a change of the interface.
\set VERBOSITY terse
SET client_min_messages = warning;
CREATE EXTENSION pg_tensile CASCADE;
RESET client_min_messages;

-- The API
SELECT p.proname, pg_get_function_identity_arguments(p.oid) AS arguments, pg_get_function_result(p.oid) AS result,
       p.provolatile AS volatility, p.proparallel AS parallel, p.proisstrict AS strict
FROM pg_proc p JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
     JOIN pg_extension e ON e.oid = d.refobjid AND e.extname = 'pg_tensile'
WHERE p.pronamespace = 'public'::regnamespace
ORDER BY 1, 2;
SELECT a AS defaults_of_train_model FROM unnest(string_to_array((SELECT pg_get_function_arguments(oid) FROM pg_proc WHERE proname = 'train_model'), ', ')) a;

-- The views and the catalogue, their columns, constraints, indexes, policies and triggers
SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod) AS type
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.relnamespace = 'tensile'::regnamespace ORDER BY c.relname, a.attnum;
SELECT c.relname, c.relkind, a.attname, format_type(a.atttypid, a.atttypmod) AS type, a.attnotnull AS not_null
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.relnamespace = 'tensile_internal'::regnamespace AND c.relkind IN ('r', 'v')
ORDER BY c.relkind, c.relname, a.attnum;
SELECT conrelid::regclass AS "table", conname, pg_get_constraintdef(oid) AS definition
FROM pg_constraint WHERE connamespace = 'tensile_internal'::regnamespace AND contype <> 'n' ORDER BY 1::text, 2;
SELECT tablename, indexname FROM pg_indexes WHERE schemaname = 'tensile_internal' ORDER BY 1, 2;
SELECT tablename, policyname, cmd, roles FROM pg_policies WHERE schemaname = 'tensile_internal' ORDER BY 1, 2;
SELECT tgrelid::regclass AS "table", tgname FROM pg_trigger
WHERE tgrelid::regclass::text LIKE 'tensile_internal.%' AND NOT tgisinternal ORDER BY tgrelid::regclass::text COLLATE "C", 2;

-- Privileges: members of tensile_user may use the extension, PUBLIC may not
SELECT p.oid::regprocedure AS "for PUBLIC, or not for tensile_user"
FROM pg_proc p JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
     JOIN pg_extension e ON e.oid = d.refobjid AND e.extname = 'pg_tensile'
WHERE p.pronamespace = 'public'::regnamespace
  AND (has_function_privilege('public', p.oid, 'EXECUTE') OR NOT has_function_privilege('tensile_user', p.oid, 'EXECUTE'));
SELECT nspname, has_schema_privilege('public', oid, 'USAGE') AS "for PUBLIC",
       has_schema_privilege('tensile_user', oid, 'USAGE') AS "for tensile_user"
FROM pg_namespace WHERE nspname ~ '^tensile' ORDER BY 1;

-- All public objects have comments, and names of private functions begin with an underscore
SELECT p.oid::regprocedure FROM pg_proc p JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
     JOIN pg_extension e ON e.oid = d.refobjid AND e.extname = 'pg_tensile'
WHERE obj_description(p.oid, 'pg_proc') IS NULL AND p.proname !~ '^_';
SELECT relname FROM pg_class WHERE relnamespace = 'tensile'::regnamespace AND obj_description(oid, 'pg_class') IS NULL;

-- Contents of a dump
SELECT c.config::regclass AS "table", c.condition
FROM pg_extension, unnest(extconfig, extcondition) AS c (config, condition) WHERE extname = 'pg_tensile';

-- Settings: names, units, and contexts in which they may be set
SELECT name, vartype, unit, context, min_val, max_val, enumvals
FROM pg_settings WHERE name LIKE 'pg\_tensile.%' AND name <> 'pg_tensile.python' ORDER BY 1;
SET pg_tensile.no_such_setting = 1;
