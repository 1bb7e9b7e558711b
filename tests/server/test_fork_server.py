"""Jobs start as forks of one process; whatever happens to it, they reach their end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.explaining import backend, explaining
from tests.server.stage import processes, terminate
from tests.server.support import (
    ENDLESS_ROWS,
    FOREVER,
    MLP,
    TERMINATED,
    Connection,
    Row,
    Wait,
    alive,
    children,
    ended,
    phase,
    python_model,
    reason,
    register,
    settle,
    state,
    submit,
    trainer_pid,
    value,
    worker_pid,
)

CONTROLLER = "pg_tensile controller"
# Trains until it is cancelled, and takes no time of other processes
LASTING: dict[str, Any] = {"architecture": python_model(on_forward="time.sleep(0.02)"), "epochs": FOREVER}


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def fork_server(conn: Connection) -> int:
    """Return the process ID of the fork server that takes requests."""
    (pid,) = (
        pid
        for pid in children(processes(conn)[CONTROLLER][0])
        if b"pyworker.fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return pid


def training(conn: Connection, wait_until: Wait, *jobs: int) -> list[int]:
    """Wait until the jobs train, and return their trainers."""
    wait_until(lambda: all(phase(conn, job) == "training" for job in jobs), what="training")
    pids = [trainer_pid(conn, job) for job in jobs]
    assert None not in pids
    return [pid for pid in pids if pid is not None]


def cancel(conn: Connection, *jobs: int) -> None:
    for job in jobs:
        conn.execute("SELECT cancel_job(%s)", (job,))
    for job in jobs:
        assert value(conn, "SELECT wait_for_job(%s, '60 s')", job) == "cancelled"


def test_jobs_and_sessions_fork_as_long_as_the_setting_says_so(
    db: Connection, connect: Callable[..., Connection], alter: Callable[..., None], wait_until: Wait
) -> None:
    session = connect()
    jobs = [submit(db, f"m{k}", **LASTING) for k in range(2)]
    trainers = training(db, wait_until, *jobs)
    server = fork_server(db)
    assert [parent(pid) for pid in trainers] == [server, server]
    register(db, "slow", python_model(on_build="time.sleep(1000)"))
    pid = backend(session)
    with explaining(session, model="slow") as errors:
        trainer = wait_until(lambda: next(iter(children(pid)), None))
        assert parent(trainer) == server
        db.execute("SELECT pg_cancel_backend(%s)", (pid,))
    assert len(errors) == 1
    alter({"pg_tensile.fork_server": "off"})
    jobs.append(submit(db, "m2", **LASTING))
    (trainer,) = training(db, wait_until, jobs[2])
    assert parent(trainer) == worker_pid(db, jobs[2])
    assert alive(server) and all(map(alive, trainers))
    cancel(db, *jobs)
    wait_until(lambda: not alive(server), what="the end of the fork server with its last child")


def test_another_interpreter_is_tried_at_once_after_one_that_failed(
    db: Connection, alter: Callable[..., None], wait_until: Wait
) -> None:
    alter({"pg_tensile.python": "/bin/false"})
    failed = submit(db, "m", **LASTING)
    settle(db, wait_until, failed)
    alter({"pg_tensile.python": None})
    job = submit(db, "m2", **LASTING)
    (trainer,) = training(db, wait_until, job)
    assert parent(trainer) == fork_server(db)
    cancel(db, job)


def test_jobs_are_retried_when_the_fork_server_is_killed(db: Connection, wait_until: Wait, job_row: Row) -> None:
    """Their processes die with it; another one is started for them."""
    job = submit(db, "m", **LASTING)
    (trainer,) = training(db, wait_until, job)
    server = fork_server(db)
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: not alive(trainer))
    wait_until(lambda: job_row(db, job)["attempts"] == 2)
    (trainer,) = training(db, wait_until, job)
    assert parent(trainer) == fork_server(db) != server
    cancel(db, job)


def test_a_job_that_is_stopped_before_it_has_its_trainer_runs_no_query(db: Connection, wait_until: Wait) -> None:
    """Its worker has seen the signal by then, so nothing would end the query."""
    other = submit(db, "m", **LASTING)
    training(db, wait_until, other)
    server = fork_server(db)
    os.kill(server, signal.SIGSTOP)
    try:
        job = submit(db, "m2", MLP, query=ENDLESS_ROWS)
        wait_until(lambda: phase(db, job) == "starting")
        worker = worker_pid(db, job)
        assert worker is not None
        db.execute("SELECT pg_terminate_backend(%s)", (worker,))
        wait_until(lambda: not alive(worker), what="the end of the worker")
    finally:
        os.kill(server, signal.SIGCONT)
    wait_until(lambda: ended(db, job))
    assert (state(db, job), reason(db, job)) == ("cancelled", TERMINATED)
    cancel(db, other)


@pytest.mark.long
def test_a_new_controller_has_a_fork_server_of_its_own(db: Connection, wait_until: Wait) -> None:
    """A job that runs is not disturbed. Long: the launcher takes its time to start another controller."""
    old = submit(db, "m", **LASTING)
    (trainer,) = training(db, wait_until, old)
    server, controller = fork_server(db), terminate(db, CONTROLLER)
    wait_until(lambda: processes(db).get(CONTROLLER, (controller,))[0] != controller, what="a controller")
    new = submit(db, "m2", **LASTING)
    training(db, wait_until, new)
    assert fork_server(db) != server and trainer_pid(db, old) == trainer and parent(trainer) == server
    cancel(db, old)
    wait_until(lambda: not alive(server), what="the end of the first fork server")
    cancel(db, new)


def test_a_hanging_fork_server_outlives_neither_its_children_nor_the_server(db: Connection, wait_until: Wait) -> None:
    """The supervisor kills its child itself; the leftovers that a test's cluster looks for are none."""
    job = submit(db, "m", **LASTING)
    (trainer,) = training(db, wait_until, job)
    server = fork_server(db)
    os.kill(server, signal.SIGSTOP)
    db.execute("SELECT cancel_job(%s)", (job,))
    wait_until(lambda: not alive(trainer))
    os.kill(server, signal.SIGCONT)
    assert value(db, "SELECT wait_for_job(%s, '60 s')", job) == "cancelled"
