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
    FOREVER,
    MLP,
    Connection,
    Row,
    Wait,
    alive,
    children,
    executor_pid,
    phase,
    python_model,
    register,
    submit,
    value,
    worker_pid,
)

CONTROLLER = "pg_tensile controller"


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
    """Wait until the jobs train, and return their executors."""
    wait_until(lambda: all(phase(conn, job) == "training" for job in jobs), what="training")
    pids = [executor_pid(conn, job) for job in jobs]
    assert None not in pids
    return [pid for pid in pids if pid is not None]


def cancel(conn: Connection, *jobs: int) -> None:
    for job in jobs:
        conn.execute("SELECT cancel_job(%s)", (job,))
    for job in jobs:
        assert value(conn, "SELECT wait_for_job(%s, '60 s')", job) == "cancelled"


def test_jobs_and_sessions_fork_as_long_as_the_setting_says_so(
    fresh_cluster: Callable[..., Any], wait_until: Wait
) -> None:
    cluster = fresh_cluster()
    with cluster.connect() as conn, cluster.connect() as session:
        jobs = [submit(conn, f"m{k}", MLP, epochs=FOREVER) for k in range(2)]
        executors = training(conn, wait_until, *jobs)
        server = fork_server(conn)
        assert [parent(pid) for pid in executors] == [server, server]
        register(conn, "slow", python_model(on_build="time.sleep(1000)"))
        pid = backend(session)
        with explaining(session, model="slow") as errors:
            executor = wait_until(lambda: next(iter(children(pid)), None))
            assert parent(executor) == server
            conn.execute("SELECT pg_cancel_backend(%s)", (pid,))
        assert len(errors) == 1
        cluster.configure({"pg_tensile.fork_server": "off"})
        cluster.reload()
        wait_until(lambda: value(conn, "SHOW pg_tensile.fork_server") == "off")
        jobs.append(submit(conn, "m2", MLP, epochs=FOREVER))
        (executor,) = training(conn, wait_until, jobs[2])
        assert parent(executor) == worker_pid(conn, jobs[2])
        assert alive(server) and all(map(alive, executors))
        cancel(conn, *jobs)
        wait_until(lambda: not alive(server), what="the end of the fork server with its last child")


def test_jobs_are_retried_when_the_fork_server_is_killed(
    fresh_cluster: Callable[..., Any], wait_until: Wait, job_row: Row
) -> None:
    """Their processes die with it; another one is started for them."""
    cluster = fresh_cluster({"pg_tensile.max_retries": 1})
    with cluster.connect() as conn:
        job = submit(conn, "m", MLP, epochs=FOREVER)
        (executor,) = training(conn, wait_until, job)
        server = fork_server(conn)
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: not alive(executor))
        wait_until(lambda: job_row(conn, job)["attempts"] == 2)
        (executor,) = training(conn, wait_until, job)
        assert parent(executor) == fork_server(conn) != server
        cancel(conn, job)


@pytest.mark.long
def test_a_new_controller_has_a_fork_server_of_its_own(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    """A job that runs is not disturbed. Long: the launcher takes its time to start another controller."""
    cluster = fresh_cluster()
    with cluster.connect() as conn:
        old = submit(conn, "m", MLP, epochs=FOREVER)
        (executor,) = training(conn, wait_until, old)
        server, controller = fork_server(conn), terminate(conn, CONTROLLER)
        wait_until(lambda: processes(conn).get(CONTROLLER, (controller,))[0] != controller, what="a controller")
        new = submit(conn, "m2", MLP, epochs=FOREVER)
        training(conn, wait_until, new)
        assert fork_server(conn) != server and executor_pid(conn, old) == executor and parent(executor) == server
        cancel(conn, old)
        wait_until(lambda: not alive(server), what="the end of the first fork server")
        cancel(conn, new)


def test_a_hanging_fork_server_outlives_neither_its_children_nor_the_server(
    fresh_cluster: Callable[..., Any], wait_until: Wait
) -> None:
    """The supervisor kills its child itself; the leftovers that a test's cluster looks for are none."""
    cluster = fresh_cluster()
    with cluster.connect() as conn:
        job = submit(conn, "m", MLP, epochs=FOREVER)
        (executor,) = training(conn, wait_until, job)
        server = fork_server(conn)
        os.kill(server, signal.SIGSTOP)
        conn.execute("SELECT cancel_job(%s)", (job,))
        wait_until(lambda: not alive(executor))
        os.kill(server, signal.SIGCONT)
        assert value(conn, "SELECT wait_for_job(%s, '60 s')", job) == "cancelled"
