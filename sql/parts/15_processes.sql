------------------------------------------------------------------------------------------------------------------------
-- The procedure that all background workers run
------------------------------------------------------------------------------------------------------------------------

-- Perform one step, and return what to wait for before the next one; after the last step, the time-out is null.
-- Workers run as the role that submitted the job, so all roles may execute this; outside the extension's own
-- processes, _process() raises an error before Python imports anything.
CREATE PROCEDURE tensile._step(bits int, INOUT fd int, INOUT timeout_ms int, INOUT writable bool)
    LANGUAGE plpython3u
AS $$
process = plpy.execute("SELECT tensile._process() AS name")[0]["name"]
from pyworker.supervisors import supervisor
return supervisor.step(plpy, process, bits)
$$;
COMMENT ON PROCEDURE tensile._step(int, int, int, bool) IS
    'private: one step of a controller, scheduler, inference or worker process';
