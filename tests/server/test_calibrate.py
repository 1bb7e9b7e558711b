"""calibrate_device(): a job that measures the latencies of the device's operators."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from pg_tensile.execution.data.preprocessing import Preprocessing
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.latency import model_bytes
from tests.server.refusals import refused
from tests.server.support import Connection, Wait, finish, python_model, register, state, submit, trainer_pid, value

MIXED = """
    SELECT i AS number, nullif(i, 3) AS sometimes, i % 2 = 0 AS flag, 'c' || i % 7 AS category, 'd' || i AS wide,
           date '2020-01-01' + i AS day, timestamp '2020-01-01' + i * interval '1 hour' AS hour,
           CASE WHEN i % 5 > 0 THEN array[i, 1.5, 2] END::float8[] AS measured, (i % 3)::text AS y
    FROM generate_series(1, 60) i
"""
TOKENS = """
    SELECT i AS number, (SELECT array_agg(mod(i * g, 50)) FROM generate_series(1, 5 + mod(i, 9)) g) AS tokens,
           i % 2 = 0 AS y
    FROM generate_series(1, 60) i
"""


def calibrate(conn: Connection, seconds: int = 3) -> int:
    return int(value(conn, "SELECT calibrate_device(%s)", seconds))


@pytest.fixture(autouse=True)
def uncalibrated(db: Connection) -> None:
    db.execute("DELETE FROM tensile_internal.latency_models")
    db.execute("DELETE FROM tensile_internal.device_profiles")


@pytest.mark.long
def test_a_fresh_database_is_calibrated(db: Connection, wait_until: Wait) -> None:
    """Takes seconds: it measures for six."""
    job = calibrate(db, 6)
    progress = "SELECT phase, step, steps FROM tensile.progress WHERE job = %s AND step > 0"
    phase, step, steps = wait_until(lambda: db.execute(progress, (job,)).fetchone(), 120)
    assert phase == "calibrating"
    assert 0 < step <= steps
    finish(db, job, "5 min")
    row = db.execute("SELECT device, models, kinds, samples, error, job FROM tensile.latency_models").fetchone()
    assert row is not None
    device, models, kinds, samples, error, by = row
    assert (device, by) == ("cpu", job)
    decoded = model_bytes.decode(models)
    assert len(decoded.kinds) == kinds > 5
    assert samples >= kinds
    assert 0 < error < 10
    (measured,) = db.execute("SELECT profile FROM tensile.device_profiles WHERE device = 'cpu'").fetchone() or ()
    profile = DeviceProfile.from_json(measured)
    assert (profile.flops_per_s, profile.bytes_per_s) == (decoded.flops_per_s, decoded.bytes_per_s)


@pytest.mark.long
def test_calibration_takes_its_memory_from_the_ledger(db: Connection, wait_until: Wait) -> None:
    """Takes seconds: the workloads are prepared before memory is taken."""
    granted = "SELECT granted_bytes, budget_bytes FROM tensile.devices WHERE name = 'cpu'"
    job = calibrate(db, 600)
    held, budget = wait_until(lambda: db.execute(granted + " AND granted_bytes > 0").fetchone(), 120)
    assert 0 < held <= budget
    db.execute("SELECT cancel_job(%s)", (job,))
    assert value(db, "SELECT wait_for_job(%s, '30 s')", job) == "cancelled"
    wait_until(lambda: db.execute(granted + " AND granted_bytes = 0").fetchone())


@pytest.mark.long
def test_a_calibration_fits_into_a_small_device(db: Connection, alter: Callable[..., None], wait_until: Wait) -> None:
    """Long: it measures for seconds."""
    alter({"pg_tensile.device_memory": "16MB"})
    job = calibrate(db, 3)
    row = "SELECT granted_bytes FROM tensile.devices WHERE name = 'cpu' AND granted_bytes > 0"
    assert wait_until(lambda: db.execute(row).fetchone(), 120) == (16 << 20,)
    finish(db, job, "5 min")


@pytest.mark.long
def test_jobs_and_explanations_use_the_result_of_calibration(db: Connection) -> None:
    """Takes seconds: it measures for three, then trains."""
    finish(db, calibrate(db), "5 min")
    register(db, "m")
    query = "SELECT 1.5 * i AS a, i % 3 AS y FROM generate_series(1, 200) i"
    lines = db.execute("SELECT explain_training('m', %s, 'y')", (query,)).fetchall()
    assert any("predicted by calibrated models" in line for (line,) in lines)
    job = submit(db, "m", query=query, policy="joint")
    assert value(db, "SELECT wait_for_job(%s)", job) == "finished"
    assert value(
        db, "SELECT min(p) > 0 FROM tensile_internal.operator_latencies, unnest(predicted) p WHERE job = %s", job
    )
    loads = (
        "SELECT t.load, l.average_load FROM tensile.traces t JOIN tensile_internal.operator_latencies l USING (job)"
        " WHERE job = %s"
    )
    for load in db.execute(loads, (job,)).fetchone() or (None, None):
        assert load is not None and 0 <= load <= 1


@pytest.mark.long
def test_calibration_measures_trained_models(db: Connection, cluster: Any) -> None:
    """Sizes are those of the library; models that can no longer be built are omitted.

    Long: it measures for 16 seconds.
    """
    marker = cluster.data / f"built_{time.monotonic_ns()}"
    once = python_model(on_build=f"if not once('{marker}'): raise ValueError('gone')")
    options: Any = {"query": MIXED, "batch_size": 10}
    trained = [
        submit(db, "mixed", {"type": "mlp"}, **options, optimizer="sgd"),
        submit(db, "table", {"type": "tabular"}, **options),
        submit(db, "tokens", {"type": "transformer", "dim": 8}, **options | {"query": TOKENS}, options={"clip": 1.0}),
    ]
    assert all(value(db, "SELECT wait_for_job(%s)", job) == "finished" for job in trained)
    finish(db, submit(db, "once", once))  # last, to be measured first, however little time there is
    rows = db.execute(
        "SELECT preprocessing, tensile_internal._model_inputs(preprocessing) FROM tensile.model_versions"
    ).fetchall()
    assert len(rows) == 4
    for preprocessing, inputs in rows:
        preprocessing.pop("rows")
        expected = Preprocessing.from_json(preprocessing).model_inputs
        sizes = (inputs["numeric"], tuple(inputs["cardinalities"]), tuple(map(tuple, inputs["arrays"])))
        assert sizes == expected[:3]
        assert inputs["edges"] == [len(edges) for edges in expected.bins]
    job = calibrate(db, 16)
    finish(db, job, "5 min")
    warnings = value(db, "SELECT warnings FROM tensile.jobs WHERE job = %s", job)
    assert len(warnings) == 1
    assert "type python was not measured" in warnings[0]
    assert "ValueError" in warnings[0]


def test_only_one_calibration_runs_at_a_time(db: Connection) -> None:
    job = calibrate(db, 600)
    error = refused("55006", "being calibrated", "wait_for_job", lambda: calibrate(db))
    assert f"Job {job}" in (error.diag.message_detail or "")


def test_cancel_ends_a_calibration(db: Connection, wait_until: Wait) -> None:
    job = calibrate(db, 600)
    trainer = wait_until(lambda: trainer_pid(db, job))
    assert trainer
    db.execute("SELECT cancel_job(%s)", (job,))
    assert value(db, "SELECT wait_for_job(%s, '30 s')", job) == "cancelled"
    assert value(db, "SELECT count(*) FROM tensile.latency_models") == 0
    calibrate(db, 600)


@pytest.mark.long
def test_a_stop_of_the_server_interrupts_it_and_it_starts_over(
    fresh_cluster: Callable[..., Any], wait_until: Wait
) -> None:
    """Long: it calibrates twice."""
    cluster = fresh_cluster()
    with cluster.connect() as conn:
        job = calibrate(conn, 4)
        wait_until(lambda: value(conn, "SELECT phase = 'calibrating' FROM tensile.progress WHERE job = %s", job))
    cluster.stop("fast")
    cluster.start()
    with cluster.connect() as conn:
        finish(conn, job, "5 min")
        assert value(conn, "SELECT attempts FROM tensile.jobs WHERE job = %s", job) == 2
        assert state(conn, job) == "finished"


@pytest.mark.parametrize("seconds", [0, -5, 86401])
def test_an_invalid_time_is_refused(db: Connection, seconds: int) -> None:
    refused("22023", f"out of range: {seconds}", "86400", lambda: calibrate(db, seconds))


def test_a_null_time_is_refused(db: Connection) -> None:
    refused("22004", "seconds", "value", lambda: db.execute("SELECT calibrate_device(NULL)"))


def test_waiting_in_the_same_transaction_is_refused(db: Connection) -> None:
    waits = pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="submitted by this transaction")
    with waits, db.transaction():
        db.execute("SELECT wait_for_job(calibrate_device(1))")
    assert value(db, "SELECT count(*) FROM tensile.jobs") == 0


@pytest.mark.long
def test_calibration_needs_a_privilege(
    db: Connection, roles: Callable[..., str], connect: Callable[..., Connection]
) -> None:
    """Takes seconds: it measures for three."""
    role = roles("user")
    conn = connect(role)
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied for function calibrate"):
        calibrate(conn)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        conn.execute("SELECT tensile_internal._calibrate_device(10, 1)")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        conn.execute("SELECT tensile_worker._calibration_workloads()")
    db.execute(f"GRANT EXECUTE ON FUNCTION calibrate_device(int) TO {role}")
    finish(conn, calibrate(conn), "5 min")
    assert value(conn, "SELECT count(*) FROM tensile.latency_models") == 1
