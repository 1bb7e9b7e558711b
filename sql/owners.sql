-- Roles as owners of rows, in this cluster and in one that a dump is restored into

-- OIDs of roles are looked up by name on insertion, because rows may come from a dump of another cluster.
CREATE FUNCTION tensile_internal._resolve_owner() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    NEW.owner_id := (SELECT oid FROM pg_roles WHERE rolname = NEW.owner);
    RETURN NEW;
END $$;

-- True if the caller may act for this owner; superusers may act for an owner that no longer exists as well.
CREATE FUNCTION tensile_internal._acts_for(caller oid, owner_id oid, owner name) RETURNS bool
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(c.rolsuper OR pg_has_role(c.oid, o.oid, 'USAGE'), false)
    FROM pg_roles c LEFT JOIN pg_roles o ON o.oid = $2 AND o.rolname = $3
    WHERE c.oid = $1
$$;

-- The role's name as stored in model_grants; raises an error if the role does not exist.
CREATE FUNCTION tensile_internal._role_name(role text) RETURNS name
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF role = 'public' OR EXISTS (SELECT FROM pg_roles WHERE rolname = role) THEN
        RETURN role;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'undefined_object', MESSAGE = format('role "%s" does not exist', role),
        HINT = 'Role names are case-sensitive here; see pg_roles.';
END $$;

CREATE FUNCTION tensile_internal._setting_number(name text, value text) RETURNS bigint
    LANGUAGE C STABLE STRICT AS 'MODULE_PATHNAME', 'tensile_setting_number';

-- A limit of a role: what the setting would be in a session that the role began in this database, in the setting's unit;
-- null: no limit. Where a setting of a role or database hides the server's from this session, that is read from the files.
CREATE FUNCTION tensile_internal._role_limit(role oid, name text) RETURNS bigint
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT nullif(tensile_internal._setting_number(s.name, coalesce(
        (SELECT o.option_value
         FROM pg_db_role_setting r CROSS JOIN LATERAL pg_options_to_table(r.setconfig) o
         WHERE o.option_name = s.name AND r.setrole IN ($1, 0)
           AND r.setdatabase IN ((SELECT d.oid FROM pg_database d WHERE d.datname = current_database()), 0)
         ORDER BY r.setrole = 0, r.setdatabase = 0 LIMIT 1),
        CASE WHEN s.source IN ('default', 'configuration file', 'command line') THEN s.reset_val END,
        (SELECT f.setting FROM pg_file_settings f WHERE f.name = s.name AND f.applied ORDER BY f.seqno DESC LIMIT 1),
        s.boot_val)), 0)
    FROM pg_settings s WHERE s.name = $2
$$;

-- True if the role may execute the public function of that name
CREATE FUNCTION tensile_internal._may_execute(role oid, function name) RETURNS bool
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM pg_proc p JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid
                       JOIN pg_extension e ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
                   WHERE p.proname = $2 AND e.extname = 'pg_tensile' AND has_function_privilege($1, p.oid, 'EXECUTE'))
$$;
