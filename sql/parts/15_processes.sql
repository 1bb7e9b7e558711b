------------------------------------------------------------------------------------------------------------------------
-- The procedure that all background workers run
------------------------------------------------------------------------------------------------------------------------

-- One step, and what to wait for before the next one: no time-out after the last. Workers are executed as the role that
-- submitted the job, so everybody may execute it; _process() raises outside our processes, before Python imports anything.
CREATE PROCEDURE tensile._step(bits int, INOUT fd int, INOUT timeout_ms int, INOUT writable bool)
    LANGUAGE plpython3u
AS $$
process = plpy.execute("SELECT tensile._process() AS name")[0]["name"]
from pyworker.supervisors import supervisor
return supervisor.step(plpy, process, bits)
$$;
COMMENT ON PROCEDURE tensile._step(int, int, int, bool) IS
    'private: one step of a controller, scheduler, inference or worker process';
