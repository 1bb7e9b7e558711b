"""pg_tensile.auto_calibrate: the server calibrates a device by itself while it is idle, and yields to jobs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pyworker.children.calibrate import operator_kinds
from pyworker.children.calibration_workloads import capture_workload, standard_workloads
from tests.server.support import (
    MLP,
    SMALL_MLP,
    Connection,
    Wait,
    alive,
    finish,
    no_workers,
    phase,
    reason,
    settle,
    state,
    submit,
    trainer_pid,
    value,
    worker_pid,
)

PROFILE = (
    '{"name": "host", "kind": "host", "memory_bytes": 1e9, "out_bytes_per_s": 1e9, "in_bytes_per_s": 1e9,'
    ' "duplex_factor": 1, "flops_per_s": 1e9, "bytes_per_s": 1e9, "transfer_latency_us": 1, "launch_us": 1}'
)
AUTOMATIC = "SELECT max(job) FROM tensile.jobs WHERE automatic"
DUE = "SELECT device, cause FROM tensile_internal._uncalibrated()"


def hurry(
    conn: Connection,
    device_seconds: int,
    idle_s: float = 0.2,
    pause_s: float = 0.1,
    most_s: float = 3600,
    most_load: float = 2,
) -> None:
    """Let automatic calibrations begin at once, also on a busy machine, and again soon, and measure for
    `device_seconds`."""
    conn.execute(
        "CREATE OR REPLACE FUNCTION tensile_internal._automatic_calibration_times(OUT idle_s float8, OUT pause_s"
        " float8, OUT device_seconds int, OUT most_s float8, OUT most_load float8) LANGUAGE sql IMMUTABLE"
        f" AS 'SELECT {idle_s}, {pause_s}, {device_seconds}, {most_s}, {most_load}'"
    )


def switch(conn: Connection, setting: str, value: str) -> None:
    conn.execute(f"ALTER SYSTEM SET pg_tensile.{setting} = '{value}'")
    conn.execute("SELECT pg_reload_conf()")


def nice(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[16])


def measuring(conn: Connection, wait_until: Wait, after: int = 0) -> int:
    """Wait until an automatic calibration later than job `after` has sent its first progress; return its number."""

    def current() -> int | None:
        job = value(conn, AUTOMATIC + " AND job > %s", after)
        return job if job is not None and phase(conn, job) == "calibrating" else None

    return int(wait_until(current, 120, "an automatic calibration"))


def await_turn(conn: Connection, wait_until: Wait, job: int) -> None:
    """Wake the controller as a change of the job does, and wait until it has had a turn since."""
    before = value(conn, "SELECT clock_timestamp()")
    conn.execute("SELECT tensile_internal._notify(%s)", (job,))
    turn = (
        "SELECT state = 'idle' AND state_change > %s FROM pg_stat_activity WHERE backend_type = 'pg_tensile controller'"
    )
    wait_until(lambda: value(conn, turn, before))


@pytest.fixture(scope="module")
def idle(new_cluster: Callable[..., Any]) -> Iterator[Any]:
    """A cluster with one slot for jobs, in which an automatic calibration would begin at once, and measure for long."""
    cluster = new_cluster({"pg_tensile.max_jobs": 1})
    with cluster.connect() as conn:
        hurry(conn, 600)
    yield cluster
    cluster.end()


@pytest.fixture
def off(idle: Any, wait_until: Wait) -> Iterator[Connection]:
    """A connection to `idle`, in which automatic calibrations are off and may be switched on."""
    with idle.connect() as conn:
        yield conn
        switch(conn, "auto_calibrate", "off")
        wait_until(lambda: value(conn, "SELECT count(*) FROM tensile.jobs WHERE ended_at IS NULL") == 0)
        wait_until(lambda: no_workers(conn))
        conn.execute("DELETE FROM tensile_internal.jobs; DELETE FROM tensile_internal.models")


@pytest.fixture
def conn(off: Connection) -> Connection:
    """A connection to `idle` with automatic calibrations, for this test."""
    switch(off, "auto_calibrate", "on")
    return off


@pytest.mark.long
def test_a_new_server_calibrates_itself(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    """Long: it measures for seconds."""
    cluster = fresh_cluster({"pg_tensile.auto_calibrate": "on"}, extension=False)
    with cluster.connect() as conn:
        with conn.transaction():
            conn.execute("CREATE EXTENSION pg_tensile CASCADE")
            hurry(conn, 1)
        job = measuring(conn, wait_until)
        trainer, worker = trainer_pid(conn, job), worker_pid(conn, job)
        assert trainer is not None and worker is not None
        assert nice(trainer) == 19
        assert value(conn, "SELECT xact_start IS NULL FROM pg_stat_activity WHERE pid = %s", worker)
        finish(conn, job, "5 min")
        device, by, version, kinds = (
            conn.execute("SELECT device, job, torch, known_kinds FROM tensile.latency_models").fetchone() or (None,) * 4
        )
        assert (device, by) == ("cpu", job)
        assert re.match(r"\d+\.\d+", version or "")
        assert "aten.addmm.default f32" in (kinds or ())
        events = "SELECT reason, (details->>'kinds')::int FROM tensile.scheduler_log WHERE event = 'calibration'"
        models = value(conn, "SELECT kinds FROM tensile.latency_models")
        assert conn.execute(events).fetchall() == [("finished", models)]
        finish(conn, submit(conn, "m", MLP, policy="joint"))
        assert value(conn, "SELECT torch FROM tensile.traces WHERE job <> %s", job) == version
        assert not any("PyTorch" in cause for _, cause in conn.execute(DUE).fetchall())


@pytest.mark.long
def test_a_job_stops_it_and_it_begins_again(conn: Connection, wait_until: Wait) -> None:
    """The job takes the only slot. Long: two calibrations start."""
    calibration = measuring(conn, wait_until)
    trainer = trainer_pid(conn, calibration)
    assert trainer is not None
    job = submit(conn, "m", SMALL_MLP.obj)
    finish(conn, job)
    assert not alive(trainer)
    again = measuring(conn, wait_until, after=job)
    assert value(conn, "SELECT count(*) FROM tensile.jobs WHERE job = %s", calibration) == 0, "it had no result"
    manual = int(value(conn, "SELECT calibrate_device(600)"))
    wait_until(lambda: phase(conn, manual) == "calibrating")
    assert (state(conn, again), reason(conn, again)) == ("cancelled", f"job {manual} was submitted")
    conn.execute("SELECT cancel_job(%s)", (manual,))


@pytest.mark.long
def test_whoever_ends_it_nothing_is_left(conn: Connection, wait_until: Wait) -> None:
    """Long: three calibrations start."""
    first = measuring(conn, wait_until)
    conn.execute("SELECT pg_terminate_backend(%s)", (worker_pid(conn, first),))
    second = measuring(conn, wait_until, after=first)
    conn.execute("SELECT cancel_job(%s)", (second,))
    third = measuring(conn, wait_until, after=second)
    trainer = trainer_pid(conn, third)
    assert trainer is not None
    switch(conn, "auto_calibrate", "off")
    settle(conn, wait_until, third)
    assert (state(conn, third), reason(conn, third)) == ("cancelled", "pg_tensile.auto_calibrate was switched off")
    assert not alive(trainer)
    for _ in range(2):  # the first turn may have begun before
        await_turn(conn, wait_until, third)
    assert value(conn, AUTOMATIC) == third
    assert value(conn, "SELECT count(*) FROM tensile.latency_models") == 0
    assert conn.execute(DUE).fetchall() == [("cpu", "it has not been calibrated")]


@pytest.mark.long
def test_failures_are_logged_once_and_end_the_attempts(idle: Any, off: Connection, wait_until: Wait) -> None:
    """Until a setting changes. Long: an interpreter is started four times."""
    hurry(off, 600, idle_s=0, pause_s=0)
    python = value(off, "SHOW pg_tensile.python")
    failures = "SELECT array_agg(reason ORDER BY id) FROM tensile.scheduler_log WHERE event = 'calibration'"
    off.execute("DELETE FROM tensile_internal.scheduler_log")
    off.execute("ALTER SYSTEM SET pg_tensile.python = '/nonexistent'")
    switch(off, "auto_calibrate", "on")
    try:
        wait_until(lambda: "not tried again" in "".join(value(off, failures) or ()))
        once, last = value(off, failures)
        assert once.startswith('cannot start "/nonexistent"')
        assert last.startswith(once + "; it is not tried again")
        lines = [line for line in idle.log().splitlines() if "automatic calibration" in line]
        assert len(lines) == 2
        assert 'device "cpu" failed' in lines[0]
        given_up = value(off, AUTOMATIC)
        assert state(off, given_up) == "failed"
        settle(off, wait_until, given_up)
        for _ in range(2):  # the first turn may have begun before
            await_turn(off, wait_until, given_up)
        assert value(off, AUTOMATIC) == given_up
    finally:
        hurry(off, 600)
        switch(off, "python", python)
    measuring(off, wait_until, after=given_up)


@pytest.mark.long
def test_the_extension_can_be_dropped_and_the_server_stopped(
    fresh_cluster: Callable[..., Any], wait_until: Wait
) -> None:
    """Long: calibrations start in a server that is started twice."""
    cluster = fresh_cluster()
    with cluster.connect() as conn:
        hurry(conn, 600)
        switch(conn, "auto_calibrate", "on")
        job = measuring(conn, wait_until)
    cluster.stop("fast")
    wait_until(lambda: not cluster.processes())
    cluster.start()
    with cluster.connect() as conn:
        again = measuring(conn, wait_until, after=job)
        trainer = trainer_pid(conn, again)
        assert trainer is not None
        conn.execute("DROP EXTENSION pg_tensile")
        wait_until(lambda: not alive(trainer))


@pytest.mark.long
def test_settings_that_changed_while_a_process_started(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    """Long: it starts a server. The postmaster is not told to reload, as if the signal had come during the start."""
    cluster = fresh_cluster(extension=False)
    with cluster.connect() as conn:
        conn.execute("ALTER SYSTEM SET pg_tensile.auto_calibrate = 'on'")
        with conn.transaction():
            conn.execute("CREATE EXTENSION pg_tensile CASCADE")
            hurry(conn, 600)
        assert value(conn, "SHOW pg_tensile.auto_calibrate") == "off"
        measuring(conn, wait_until)


# ---- what is to be calibrated ----------------------------------------------------------------------------------------


@pytest.fixture
def trained(db: Connection) -> Iterator[int]:
    """A job with a version, and a trace that is newer than the calibration of the device."""
    db.execute("DELETE FROM tensile_internal.latency_models; DELETE FROM tensile_internal.device_profiles")
    model = value(db, "SELECT register_model('m', %s)", SMALL_MLP)
    job = value(
        db,
        "INSERT INTO tensile_internal.jobs (model_id, model, owner, query, target, epochs, optimizer, validation, seed,"
        " priority, options, settings, state, ended_at)"
        " VALUES (%s, 'm', current_user, '', 'y', 1, 'sgd', 0, 0, 0, '{}', '{}', 'finished', now()) RETURNING id",
        model,
    )
    for insert in (
        "model_versions (model_id, version, job, task, preprocessing, architecture, weight_bytes)"
        " SELECT model_id, 1, job, 'binary', '{}', '{}', 1 FROM tensile.jobs WHERE job = %s",
        "traces (job, device, revision, policy, overhead_bytes, least_bytes, graphs, traces, torch)"
        " VALUES (%s, 'cpu', 1, 'joint', 0, 1, '[]', '{}', '2.1')",
        "operators (job, operator, target, signature) VALUES (%s, 0, 'aten.relu.default', 'f32[2,3]')",
    ):
        db.execute("INSERT INTO tensile_internal." + insert, (job,))
    db.execute("INSERT INTO tensile_internal.device_profiles VALUES ('cpu', %s)", (PROFILE,))
    db.execute(
        "INSERT INTO tensile_internal.latency_models (device, models, kinds, samples, calibrated_at, torch,"
        " known_kinds) VALUES ('cpu', '', 1, 1, now() - interval '1 hour', '2.1', '{aten.relu.default f32}')"
    )
    yield int(job)
    db.execute("DELETE FROM tensile_internal.latency_models; DELETE FROM tensile_internal.device_profiles")


@pytest.mark.parametrize(
    ("change", "due"),
    [
        ("SELECT 1", []),
        ("DELETE FROM tensile_internal.latency_models", [("cpu", "it has not been calibrated")]),
        (
            "INSERT INTO tensile_internal.device_profiles VALUES ('cuda:1', '{}')",
            [("cuda:1", "it has not been calibrated")],
        ),
        (
            "UPDATE tensile_internal.traces SET torch = '2.2'",
            [("cpu", "it was calibrated with PyTorch 2.1, and jobs use 2.2")],
        ),
        (
            "UPDATE tensile_internal.operators SET target = 'aten.erfc.default'",
            [("cpu", "jobs have new kinds of operators: aten.erfc.default f32")],
        ),
        (
            "UPDATE tensile_internal.operators SET signature = 'bf16[2,3]'",
            [("cpu", "jobs have new kinds of operators: aten.relu.default bf16")],
        ),
        (
            "UPDATE tensile_internal.operators SET target = 'aten.erfc.default';"
            " UPDATE tensile_internal.latency_models SET calibrated_at = now()",
            [],
        ),
        (
            "UPDATE tensile_internal.operators SET target = 'aten.erfc.default';"
            " UPDATE tensile_internal.model_versions SET weight_bytes = NULL",
            [],
        ),
        ("UPDATE tensile_internal.latency_models SET torch = NULL, known_kinds = NULL", []),
    ],
)
def test_which_devices_are_to_be_calibrated(
    db: Connection, trained: int, change: str, due: list[tuple[str, str]]
) -> None:
    db.execute(change)
    assert db.execute(DUE).fetchall() == due


@pytest.mark.parametrize(
    ("setting", "due"), [("auto", []), ("cuda", [("cuda:0", "it has not been calibrated")]), ("cpu", [])]
)
def test_the_default_device_is_to_be_calibrated(
    db: Connection, trained: int, wait_until: Wait, setting: str, due: list[tuple[str, str]]
) -> None:
    try:
        switch(db, "device", setting)
        wait_until(lambda: value(db, "SHOW pg_tensile.device") == setting)
        assert db.execute(DUE).fetchall() == due
    finally:
        db.execute("ALTER SYSTEM RESET pg_tensile.device")
        db.execute("SELECT pg_reload_conf()")
        wait_until(lambda: value(db, "SHOW pg_tensile.device") == "cpu")


def test_server_and_trainer_agree_on_the_kinds_of_operators(db: Connection) -> None:
    for workload in list(standard_workloads())[:8:2]:
        trace = capture_workload(workload, torch.device("cpu")).trace
        columns = [
            [operator.target for operator in trace.operators],
            [operator.signature for operator in trace.operators],
        ]
        sql = "SELECT DISTINCT tensile_internal._operator_kind(t, s) FROM unnest(%s::text[], %s::text[]) o (t, s)"
        kinds = operator_kinds(trace)
        assert {kind for (kind,) in db.execute(sql, columns).fetchall()} == kinds
        assert "aten.addmm.default f32" in kinds
