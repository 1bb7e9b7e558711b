"""Processes die at any moment, in any way: the job names the cause, other sessions are undisturbed, nothing is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.server.support import (
    FOREVER,
    MLP,
    ROWS,
    Connection,
    Row,
    Wait,
    after_restart,
    alive,
    children,
    ended,
    finish,
    inference_pid,
    phase,
    python_model,
    settle,
    state,
    steps,
    submit,
    trainer_pid,
    undisturbed,
    value,
    worker_pid,
)

Alter = Callable[[dict[str, object]], None]  # fixture alter

# -- deaths of the trainer by its own code ---------------------------------------------------------------------------


DEATHS = {
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "trainer was killed by signal 9 (SIGKILL)"),
    "SIGSEGV": ("os.kill(os.getpid(), signal.SIGSEGV)", "trainer was killed by signal 11 (SIGSEGV)"),
    "SIGABRT": ("os.abort()", "trainer was killed by signal 6 (SIGABRT)"),
    "sys.exit": ("sys.exit(3)", "trainer exited with status 3"),
    "os._exit": ("os._exit(0)", "trainer exited with status 0"),
}


# Each death in training, and one in each other phase. sys.exit while the model is built is an error of the
# architecture, like any exception there.
@pytest.mark.parametrize(
    ("death", "moment"),
    [*product(DEATHS, ["training"]), ("SIGKILL", "building"), ("SIGKILL", "validating"), ("sys.exit", "validating")],
)
def test_the_trainer_dies(
    impatient_db: Connection, bystander: Connection, wait_until: Wait, job_row: Row, death: str, moment: str
) -> None:
    code, message = DEATHS[death]
    model = {
        "building": python_model(on_build=code),
        "training": python_model(on_forward=f"if self.training and step == 3: {code}"),
        "validating": python_model(on_forward=f"if not self.training: {code}"),
    }[moment]
    with undisturbed(impatient_db, bystander):
        job = submit(impatient_db, "m", model)
        settle(impatient_db, wait_until, job)
    row = job_row(impatient_db, job)
    assert (row["state"], row["attempts"], row["sqlstate"], row["error"]) == ("failed", 1, "58000", message)
    assert "pg_tensile.max_retries" in row["hint"]
    if death in ("SIGSEGV", "SIGABRT"):
        assert "Fatal Python error" in row["traceback"]


@pytest.mark.long
def test_a_slow_exit_is_reported_as_an_exit(impatient_db: Connection, wait_until: Wait, job_row: Row) -> None:
    """The connection stays open while the process lives, as with libraries that are slow to tear down."""
    slowly = "import atexit\natexit.register(time.sleep, 4)\nsys.exit(3)"
    job = submit(impatient_db, "m", python_model(on_forward=f"if not self.training: exec({slowly!r})"))
    settle(impatient_db, wait_until, job)
    row = job_row(impatient_db, job)
    assert (row["state"], row["error"]) == ("failed", "trainer exited with status 3")


# -- deaths of the trainer by signals --------------------------------------------------------------------------------


MOMENTS: dict[str, tuple[dict[str, Any], Callable[[Connection, int], Any]]] = {
    "starting": ({}, lambda db, job: trainer_pid(db, job) is not None),
    "loading": (
        {"query": f"SELECT r.* FROM ({ROWS}) r, pg_advisory_xact_lock_shared(7)"},
        lambda db, job: phase(db, job) == "loading",
    ),
    "training": ({"epochs": FOREVER}, lambda db, job: steps(db, job) > 3),
    "validating": ({"epochs": FOREVER}, lambda db, job: phase(db, job) == "validating"),
    "with checkpoints": (
        {"epochs": FOREVER, "batch_size": 100, "options": {"checkpoint_interval": 0}},
        lambda db, job: value(
            db, "SELECT count(*) FROM tensile_internal.checkpoints WHERE job = %s AND meta IS NOT NULL", job
        ),
    ),
}


# SIGKILL at each moment, and what Python would make an exception, where that would have different ends.
@pytest.mark.parametrize(
    ("number", "moment", "fork_server"),
    [
        *product([signal.SIGKILL], MOMENTS, ["on"]),
        *product([signal.SIGINT], ["starting", "training"], ["on"]),
        (signal.SIGINT, "starting", "off"),
    ],
)
def test_the_trainer_is_killed(
    impatient_db: Connection,
    bystander: Connection,
    alter: Alter,
    wait_until: Wait,
    job_row: Row,
    number: signal.Signals,
    moment: str,
    fork_server: str,
) -> None:
    """A death in loading is noticed when there are rows to send: its query waits for a lock until then."""
    alter({"pg_tensile.fork_server": fork_server})
    arguments, when = MOMENTS[moment]
    with undisturbed(impatient_db, bystander):
        impatient_db.execute("SELECT pg_advisory_lock(7)")
        job = submit(impatient_db, "m", python_model(on_forward="if not self.training: time.sleep(0.2)"), **arguments)
        wait_until(lambda: when(impatient_db, job))
        pid = wait_until(lambda: trainer_pid(impatient_db, job))
        os.kill(pid, number)
        impatient_db.execute("SELECT pg_advisory_unlock(7)")
        settle(impatient_db, wait_until, job)
    row = job_row(impatient_db, job)
    died = f"trainer was killed by signal {number:d} ({number.name})"
    assert (row["state"], row["sqlstate"], row["error"]) == ("failed", "58000", died)
    assert not alive(pid)


def test_children_of_the_trainer_die_with_it(impatient_db: Connection, wait_until: Wait, job_row: Row) -> None:
    """The grandchild also keeps the connection open."""
    model = python_model(on_build="if os.fork() == 0: time.sleep(600)\nos.kill(os.getpid(), signal.SIGKILL)")
    job = submit(impatient_db, "m", model)
    settle(impatient_db, wait_until, job)
    assert job_row(impatient_db, job)["error"] == DEATHS["SIGKILL"][1]


@pytest.mark.long
def test_a_hanging_trainer_is_killed(impatient_db: Connection, alter: Alter, wait_until: Wait, job_row: Row) -> None:
    """Takes seconds: the time-out of the trainer passes."""
    alter({"pg_tensile.executor_timeout": "6s"})
    job = submit(impatient_db, "m", MLP, epochs=FOREVER)
    wait_until(lambda: steps(impatient_db, job) > 3)
    pid = trainer_pid(impatient_db, job)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    settle(impatient_db, wait_until, job)
    row = job_row(impatient_db, job)
    assert (row["state"], row["sqlstate"]) == ("failed", "58000")
    assert "sent nothing for 6 s (pg_tensile.executor_timeout)" in row["error"]
    assert not alive(pid)


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "end", "message"),
    [
        pytest.param("while time.monotonic() < begun + 5: pass", "finished", None, id="a long step"),
        pytest.param("while True: pass", "failed", "s without sending anything and was killed", id="an endless loop"),
        pytest.param("time.sleep(600)", "failed", "sent nothing for 3 s (pg_tensile.executor_timeout)", id="a lock"),
    ],
)
def test_a_silent_trainer_is_killed_unless_it_computes(
    impatient_db: Connection,
    alter: Alter,
    wait_until: Wait,
    job_row: Row,
    code: str,
    end: str,
    message: str | None,
) -> None:
    """Long: the trainer is silent for seconds, until the time-out or beyond it."""
    alter({"pg_tensile.executor_timeout": "3s"})
    model = python_model(on_forward=f"begun = time.monotonic()\nif step == 3:\n    {code}")
    job = submit(impatient_db, "m", model, epochs=1)
    settle(impatient_db, wait_until, job, 120)
    row = job_row(impatient_db, job)
    assert (row["state"], row["sqlstate"]) == (end, "58000" if message else None)
    assert message is None or message in row["error"]


# -- retries ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_job_that_dies_once_is_tried_again(db: Connection, cluster: Any, wait_until: Wait, job_row: Row) -> None:
    marker = cluster.folder / f"once-{time.monotonic_ns()}"
    job = submit(db, "m", python_model(on_forward=f"if step == 3 and once({str(marker)!r}): os.abort()"))
    wait_until(lambda: state(db, job) == "interrupted")
    assert job_row(db, job)["reason"] == DEATHS["SIGABRT"][1]
    wait_until(lambda: ended(db, job))
    row = job_row(db, job)
    assert (row["state"], row["attempts"], row["error"]) == ("finished", 2, None)


@pytest.mark.long
def test_a_job_that_always_dies_is_given_up(db: Connection, alter: Alter, wait_until: Wait, job_row: Row) -> None:
    alter({"pg_tensile.max_retries": 1})
    job = submit(db, "m", python_model(on_build="os._exit(3)"))
    settle(db, wait_until, job)
    row = job_row(db, job)
    assert (row["state"], row["attempts"], row["retries"]) == ("failed", 2, 1)
    assert row["error"] == DEATHS["sys.exit"][1]


@pytest.mark.long
def test_a_job_resumes_from_its_checkpoint_after_a_fault(
    db: Connection, cluster: Any, wait_until: Wait, job_row: Row
) -> None:
    """The second attempt runs only the remaining epochs."""
    marker = cluster.folder / f"once-{time.monotonic_ns()}"
    counter = cluster.folder / f"passes-{time.monotonic_ns()}"
    model = python_model(
        on_forward=f"""
        if self.training:
            with open({str(counter)!r}, "a") as file:
                file.write("x")
        if self.training and step > 60 and once({str(marker)!r}): os.abort()
        """
    )
    options = {"checkpoint_interval": 0}  # 10 steps an epoch
    job = submit(db, "m", model, epochs=20, batch_size=40, validation=0.0, options=options)
    wait_until(lambda: state(db, job) == "interrupted")
    meta = value(db, "SELECT meta FROM tensile_internal.checkpoints WHERE job = %s AND meta IS NOT NULL", job)
    assert 1 <= meta["epoch"] <= 6 and meta["step"] == 0
    wait_until(lambda: ended(db, job))
    row = job_row(db, job)
    assert (row["state"], row["attempts"]) == ("finished", 2)
    first_attempt = len(Path(counter).read_text()) - (200 - 10 * meta["epoch"])
    assert 60 <= first_attempt <= 61


# -- death of the supervisor ------------------------------------------------------------------------------------------


def test_a_killed_supervisor_ends_its_trainer_and_the_job_resumes(
    db: Connection, cluster: Any, wait_until: Wait, job_row: Row
) -> None:
    """The job waits in its fifth epoch until then."""
    marker = cluster.folder / f"killed-{time.monotonic_ns()}"
    model = python_model(on_forward=f"while step > 40 and not os.path.exists({str(marker)!r}): time.sleep(0.01)")
    job = submit(db, "m", model, epochs=8, batch_size=40, options={"checkpoint_interval": 0})
    epoch = "SELECT max(epoch) FROM tensile.epoch_metrics WHERE job = %s"
    wait_until(lambda: (value(db, epoch, job) or 0) >= 2)
    worker, trainer = worker_pid(db, job), trainer_pid(db, job)
    assert worker is not None and trainer is not None
    cluster.expect(rf"\(PID {worker}\) was terminated by signal 9")
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: not alive(trainer), what="the trainer dies")
    marker.touch()
    with after_restart(cluster, db, wait_until) as conn:
        wait_until(lambda: ended(conn, job))
        row = job_row(conn, job)
        assert (row["state"], row["attempts"]) == ("finished", 2)
        assert value(conn, epoch, job) == 8


# -- the predictor ----------------------------------------------------------------------------------------------------


def connections(pid: int) -> int:
    """Count pipes and sockets of a process; it may open and close files of relations at any time."""
    links = (os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd"))
    return sum(link.startswith(("pipe:", "socket:")) for link in links)


@pytest.mark.long
def test_a_killed_predictor_comes_back_and_leaks_nothing(db: Connection, wait_until: Wait) -> None:
    db.execute("SET pg_tensile.predict_in_session = off")
    job = submit(db, "m", MLP, epochs=1)
    assert value(db, "SELECT wait_for_job(%s)", job) == "finished"
    ask = f"SELECT predict('m', r) FROM ({ROWS}) r LIMIT 1"
    before = value(db, ask)
    supervisor = inference_pid(db)
    assert supervisor is not None
    opened = connections(supervisor)
    for _ in range(2):
        (predictor,) = children(supervisor)
        os.kill(predictor, signal.SIGKILL)
        wait_until(lambda old=predictor: [pid for pid in children(supervisor) if pid != old], what="a new predictor")

        def answer() -> float | None:
            try:
                return value(db, ask)
            except Exception:
                return None

        assert wait_until(answer, what="predictions again") == before
    assert inference_pid(db) == supervisor
    assert connections(supervisor) == opened


def test_no_socket_of_a_predictor_outlives_a_crash(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster({"pg_tensile.predict_in_session": "off"})
    cluster.expect("was terminated by signal 9")
    ask = f"SELECT predict('m', r) FROM ({ROWS}) r LIMIT 1"

    def sockets() -> list[Path]:
        return [*cluster.folder.glob(".s.pg_tensile.*")]

    with cluster.connect() as db:
        finish(db, submit(db, "m", MLP, epochs=1))
        assert value(db, ask) is not None and sockets()
        supervisor = inference_pid(db)
        assert supervisor is not None
        os.kill(supervisor, signal.SIGKILL)
        with after_restart(cluster, db, wait_until) as conn:
            assert not sockets()
            assert value(conn, ask) is not None
    cluster.stop("immediate")
    wait_until(lambda: not cluster.processes(), what="the end of all processes")
    assert sockets()
    cluster.start()
    assert not sockets()


@pytest.mark.long
def test_a_predictor_that_cannot_start_is_logged_once(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster({"pg_tensile.predict_in_session": "off"})
    with cluster.connect() as db:
        job = submit(db, "m", MLP, epochs=1)
        assert value(db, "SELECT wait_for_job(%s)", job) == "finished"
        cluster.configure({"pg_tensile.python": "/bin/false", "pg_tensile.predict_timeout": "200ms"})
        cluster.reload()
        wait_until(lambda: value(db, "SHOW pg_tensile.python") == "/bin/false")
        until = time.monotonic() + 5
        while time.monotonic() < until:
            with pytest.raises(Exception, match="predict"):
                value(db, f"SELECT predict('m', r) FROM ({ROWS}) r LIMIT 1")
    assert cluster.log().count('"/bin/false" cannot run the predictor') == 1
