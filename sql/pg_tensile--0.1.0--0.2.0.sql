\echo Use "ALTER EXTENSION pg_tensile UPDATE" to load this file. \quit

-- rules
-- They are PL/pgSQL now, and called by the owner's functions only.
REVOKE EXECUTE ON FUNCTION tensile._check_architecture(jsonb), tensile._check_options(jsonb) FROM PUBLIC;
