-- Functions that all subjects use: versions, the extension's processes, notification, errors

CREATE FUNCTION tensile_worker._version() RETURNS text
    LANGUAGE C STABLE AS 'MODULE_PATHNAME', 'tensile_version';

-- Waiting and notifying
CREATE FUNCTION tensile_worker._wait_for_change(timeout_ms int) RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_wait_for_change';
CREATE FUNCTION tensile_internal._notify(job bigint) RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_notify';

-- Workers
CREATE FUNCTION tensile_worker._process() RETURNS text
    LANGUAGE C STABLE AS 'MODULE_PATHNAME', 'tensile_my_process';
CREATE FUNCTION tensile_worker._python_folder() RETURNS text
    LANGUAGE C STABLE AS 'MODULE_PATHNAME', 'tensile_my_python_folder';
CREATE FUNCTION tensile_worker._my_job() RETURNS bigint
    LANGUAGE C STABLE AS 'MODULE_PATHNAME', 'tensile_my_job';
CREATE FUNCTION tensile_worker._stop_cause() RETURNS text
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_stop_cause';
CREATE FUNCTION tensile_internal._is_released() RETURNS bool
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_is_released';
CREATE FUNCTION tensile_worker._take_interrupt() RETURNS bool
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_take_interrupt';

-- Roles, checks, errors
CREATE FUNCTION tensile_worker._owned(owner oid, name name) RETURNS bool
    LANGUAGE C STABLE STRICT AS 'MODULE_PATHNAME', 'tensile_owned';
CREATE FUNCTION tensile_internal._nearest(name text, names text[]) RETURNS text
    LANGUAGE C IMMUTABLE STRICT AS 'MODULE_PATHNAME', 'tensile_nearest';
CREATE FUNCTION tensile_worker._raise(sqlstate text, message text, hint text, detail text) RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_raise';

-- A duration in words: about 4 minutes
CREATE FUNCTION tensile_internal._about(seconds float8) RETURNS text
    LANGUAGE sql IMMUTABLE STRICT SET search_path = pg_catalog, pg_temp
AS $$
    SELECT format('about %s %s%s', n.number, u.name, CASE WHEN n.number > 1 THEN 's' END)
    FROM (VALUES (1, 90, 'second'), (60, 5400, 'minute'), (3600, 129600, 'hour'), (86400, 'Infinity'::float8, 'day'))
             u (length, until, name)
         CROSS JOIN LATERAL (SELECT greatest(round($1 / u.length), 1) AS number) n
    WHERE $1 < u.until
    ORDER BY u.length LIMIT 1
$$;

-- Perform one step, and return what to wait for before the next one; after the last step, the time-out is null.
-- Workers run as the role that submitted the job, so all roles may execute this; outside the extension's own
-- processes, _process() raises an error before Python imports anything.
CREATE PROCEDURE tensile_worker._step(bits int, INOUT fd int, INOUT timeout_ms int, INOUT writable bool)
    LANGUAGE plpython3u
AS $$
this = plpy.execute("SELECT tensile_worker._process() AS process, tensile_worker._python_folder() AS folder")[0]
import sys
if sys.path[0] != this["folder"]:
    sys.path.insert(0, this["folder"])
from pyworker.supervisors import supervisor
return supervisor.step(plpy, this["process"], bits)
$$;
COMMENT ON PROCEDURE tensile_worker._step(int, int, int, bool) IS
    'private: one step of a controller, scheduler, inference or worker process';
