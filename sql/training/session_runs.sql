-- Child processes in the caller's session: explaining a training, evaluating a model

-- The supervisor, called only by public functions (csrc/processes/session_run.c), as the caller and in the caller's
-- transaction. `result` has the values of all columns of each row.
CREATE FUNCTION tensile_internal._session_run(spec jsonb, folder text, OUT result text[], OUT sqlstate text,
                                              OUT message text, OUT hint text, OUT detail text, OUT traceback text)
    LANGUAGE plpython3u SET search_path = pg_catalog, pg_temp
AS $$
import sys
# Another function of this session may have imported the packages that pip has installed for the server's Python.
for name in [*sys.modules]:
    file = getattr(sys.modules[name], "__file__", None) or ""
    if name.partition(".")[0] == "pyworker" and not file.startswith(folder + "/"):
        del sys.modules[name]
if sys.path[0] != folder:
    sys.path.insert(0, folder)
from pyworker.supervisors import session_run
return session_run.run(plpy, spec)
$$;
CREATE FUNCTION tensile_worker._session_feed(fd int) RETURNS bigint
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_session_feed';
CREATE FUNCTION tensile_worker._session_wait(fd int, timeout_ms int, writable bool) RETURNS int
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_session_wait';
CREATE FUNCTION tensile_internal._session_check(function text) RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_session_check';

-- For the supervisor, which reads as the caller; null past the end
CREATE FUNCTION tensile_worker._session_weights(version bigint, seq int) RETURNS bytea
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM tensile_internal._session_check('tensile_worker._session_weights');
    RETURN (SELECT w.data FROM tensile_internal.model_weights w
            WHERE w.version = _session_weights.version AND w.seq = _session_weights.seq);
END $$;
