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

-- True if the role may execute the public function of that name
CREATE FUNCTION tensile_internal._may_execute(role oid, function name) RETURNS bool
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM pg_proc p JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid
                       JOIN pg_extension e ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
                   WHERE p.proname = $2 AND e.extname = 'pg_tensile' AND has_function_privilege($1, p.oid, 'EXECUTE'))
$$;
