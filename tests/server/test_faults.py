"""Processes die at any moment, in any way: the job says how, nobody else notices, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.server.support import (
    FOREVER,
    MLP,
    ROWS,
    Connection,
    alive,
    children,
    executor_pid,
    phase,
    python_model,
    state,
    steps,
    submit,
    undisturbed,
    value,
    worker_pid,
)

Wait = Callable[..., Any]
Row = Callable[[Connection, int], dict[str, Any]]

SLOW_ROWS = "SELECT a, y FROM (" + ROWS + ") r, LATERAL pg_sleep(0.05 + 0 * a)"


def ended(conn: Connection, job: int) -> bool:
    return value(conn, "SELECT ended_at IS NOT NULL FROM tensile.jobs WHERE id = %s", job)


@pytest.fixture(scope="module")
def impatient(new_cluster: Callable[..., Any]) -> Iterator[Any]:
    """A cluster that gives up at the first fault."""
    cluster = new_cluster({"pg_tensile.max_retries": 0})
    yield cluster
    cluster.end()


@pytest.fixture
def once(impatient: Any) -> Iterator[Connection]:
    """A connection to it; checks that the test leaves no worker, slot, executor or file."""
    with impatient.connect() as db:
        before = set(impatient.processes())
        yield db
        assert value(db, "SELECT count(*) FROM tensile._progress()") == 0
        assert value(db, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pg_tensile worker'") == 0
        left = {pid: command for pid, command in impatient.processes().items() if pid not in before}
        assert not any("pyworker executor" in command for command in left.values()), left
        assert impatient.leftovers() == []
        db.execute("DELETE FROM tensile.jobs")
        db.execute("DELETE FROM tensile.models")


@pytest.fixture
def other(impatient: Any) -> Iterator[Connection]:
    """Somebody else's session."""
    with impatient.connect() as conn:
        yield conn


def settled(db: Connection, wait_until: Wait, job: int, seconds: float = 30) -> None:
    """The job has ended and its worker is gone."""
    wait_until(lambda: ended(db, job), seconds, lambda: f"job {job} is {state(db, job)}")
    workers = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pg_tensile worker'"
    wait_until(lambda: value(db, workers) == 0, what="the worker leaves")


# -- deaths from within -----------------------------------------------------------------------------------------------

DEATHS = {
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "executor was killed by signal 9 (SIGKILL)"),
    "SIGSEGV": ("os.kill(os.getpid(), signal.SIGSEGV)", "executor was killed by signal 11 (SIGSEGV)"),
    "SIGABRT": ("os.abort()", "executor was killed by signal 6 (SIGABRT)"),
    "sys.exit": ("sys.exit(3)", "executor exited with status 3"),
    "os._exit": ("os._exit(0)", "executor exited with status 0"),
}
MODEL_MOMENTS = ("building", "training", "validating")


# sys.exit while the model is built is an error of the architecture, like any exception there
@pytest.mark.parametrize(
    ("death", "moment"), [pair for pair in product(DEATHS, MODEL_MOMENTS) if pair != ("sys.exit", "building")]
)
def test_the_executor_dies(
    once: Connection, other: Connection, wait_until: Wait, job_row: Row, death: str, moment: str
) -> None:
    code, message = DEATHS[death]
    model = {
        "building": python_model(on_build=code),
        "training": python_model(on_forward=f"if self.training and step == 3: {code}"),
        "validating": python_model(on_forward=f"if not self.training: {code}"),
    }[moment]
    with undisturbed(once, other):
        job = submit(once, "m", model)
        settled(once, wait_until, job)
    row = job_row(once, job)
    assert (row["state"], row["attempts"], row["sqlstate"], row["error"]) == ("failed", 1, "58000", message)
    assert "pg_tensile.max_retries" in row["hint"]
    if death in ("SIGSEGV", "SIGABRT"):
        assert "Fatal Python error" in row["traceback"]


def test_an_exit_that_takes_its_time_is_an_exit(once: Connection, wait_until: Wait, job_row: Row) -> None:
    """As with libraries that take long to tear down: its connection is open as long as the process lives."""
    slowly = "import atexit\natexit.register(time.sleep, 4)\nsys.exit(3)"
    job = submit(once, "m", python_model(on_forward=f"if not self.training: exec({slowly!r})"))
    settled(once, wait_until, job)
    row = job_row(once, job)
    assert (row["state"], row["error"]) == ("failed", "executor exited with status 3")


# -- deaths from without ----------------------------------------------------------------------------------------------

MOMENTS: dict[str, tuple[dict[str, Any], Callable[[Connection, int], Any]]] = {
    "starting": ({}, lambda db, job: executor_pid(db, job) is not None),
    "loading": ({"query": SLOW_ROWS}, lambda db, job: phase(db, job) == "loading"),
    "training": ({"epochs": FOREVER}, lambda db, job: steps(db, job) > 3),
    "validating": ({"epochs": FOREVER}, lambda db, job: phase(db, job) == "validating"),
    "with checkpoints": (
        {"epochs": FOREVER, "batch_size": 100, "options": {"checkpoint_interval": 0}},
        lambda db, job: value(db, "SELECT count(*) FROM tensile.checkpoints WHERE job = %s AND meta IS NOT NULL", job),
    ),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_executor_is_killed(
    once: Connection, other: Connection, wait_until: Wait, job_row: Row, moment: str
) -> None:
    arguments, when = MOMENTS[moment]
    with undisturbed(once, other):
        job = submit(once, "m", python_model(on_forward="if not self.training: time.sleep(0.7)"), **arguments)
        wait_until(lambda: when(once, job))
        pid = wait_until(lambda: executor_pid(once, job))
        os.kill(pid, signal.SIGKILL)
        settled(once, wait_until, job)
    row = job_row(once, job)
    assert (row["state"], row["sqlstate"], row["error"]) == ("failed", "58000", DEATHS["SIGKILL"][1])
    assert not alive(pid)


def test_what_the_executor_started_dies_with_it(once: Connection, wait_until: Wait, job_row: Row) -> None:
    """A grandchild that also keeps the connection open."""
    model = python_model(on_build="if os.fork() == 0: time.sleep(600)\nos.kill(os.getpid(), signal.SIGKILL)")
    job = submit(once, "m", model)
    settled(once, wait_until, job)
    assert job_row(once, job)["error"] == DEATHS["SIGKILL"][1]


def test_a_hanging_executor_is_killed(fresh_cluster: Callable[..., Any], wait_until: Wait, job_row: Row) -> None:
    cluster = fresh_cluster({"pg_tensile.max_retries": 0, "pg_tensile.executor_timeout": "6s"})
    with cluster.connect() as db:
        job = submit(db, "m", MLP, epochs=FOREVER)
        wait_until(lambda: steps(db, job) > 3)
        pid = executor_pid(db, job)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        settled(db, wait_until, job)
        row = job_row(db, job)
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
def test_a_silent_executor_is_killed_unless_it_computes(
    fresh_cluster: Callable[..., Any], wait_until: Wait, job_row: Row, code: str, end: str, message: str | None
) -> None:
    """Long: the executor is silent for seconds, until the time-out or beyond it."""
    cluster = fresh_cluster({"pg_tensile.max_retries": 0, "pg_tensile.executor_timeout": "3s"})
    with cluster.connect() as db:
        job = submit(db, "m", python_model(on_forward=f"begun = time.monotonic()\nif step == 3:\n    {code}"), epochs=1)
        wait_until(lambda: ended(db, job), 120)
        row = job_row(db, job)
        assert (row["state"], row["sqlstate"]) == (end, "58000" if message else None)
        assert message is None or message in row["error"]


# -- retries ----------------------------------------------------------------------------------------------------------


def test_a_job_that_dies_once_is_tried_again(db: Connection, cluster: Any, wait_until: Wait, job_row: Row) -> None:
    marker = cluster.folder / f"once-{time.monotonic_ns()}"
    job = submit(db, "m", python_model(on_forward=f"if step == 3 and once({str(marker)!r}): os.abort()"))
    wait_until(lambda: state(db, job) == "interrupted")
    assert job_row(db, job)["reason"] == DEATHS["SIGABRT"][1]
    wait_until(lambda: ended(db, job))
    row = job_row(db, job)
    assert (row["state"], row["attempts"], row["error"]) == ("finished", 2, None)


def test_a_job_that_always_dies_is_given_up(fresh_cluster: Callable[..., Any], wait_until: Wait, job_row: Row) -> None:
    cluster = fresh_cluster({"pg_tensile.max_retries": 1})
    with cluster.connect() as db:
        job = submit(db, "m", python_model(on_build="os._exit(3)"))
        settled(db, wait_until, job)
        row = job_row(db, job)
        assert (row["state"], row["attempts"], row["retries"]) == ("failed", 2, 1)
        assert row["error"] == DEATHS["sys.exit"][1]


def test_a_job_goes_on_from_its_checkpoint_after_a_death(
    db: Connection, cluster: Any, wait_until: Wait, job_row: Row
) -> None:
    """The second attempt runs only the epochs that are missing."""
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
    meta = value(db, "SELECT meta FROM tensile.checkpoints WHERE job = %s AND meta IS NOT NULL", job)
    assert 1 <= meta["epoch"] <= 6 and meta["step"] == 0
    wait_until(lambda: ended(db, job))
    row = job_row(db, job)
    assert (row["state"], row["attempts"]) == ("finished", 2)
    first_attempt = len(Path(counter).read_text()) - (200 - 10 * meta["epoch"])
    assert 60 <= first_attempt <= 61


# -- the supervisor dies ----------------------------------------------------------------------------------------------


def test_a_killed_supervisor_takes_its_executor_along_and_the_job_goes_on(
    fresh_cluster: Callable[..., Any], wait_until: Wait, job_row: Row
) -> None:
    cluster = fresh_cluster({"restart_after_crash": "on"})
    cluster.expect("was terminated by signal 9")
    with cluster.connect() as db:
        model = python_model(on_forward="time.sleep(0.005)")
        job = submit(db, "m", model, epochs=30, batch_size=40, options={"checkpoint_interval": 0})
        epoch = "SELECT max(epoch) FROM tensile.epoch_metrics WHERE job = %s"
        wait_until(lambda: (value(db, epoch, job) or 0) >= 3)
        worker, executor = worker_pid(db, job), executor_pid(db, job)
        assert worker is not None and executor is not None
        os.kill(worker, signal.SIGKILL)
    wait_until(lambda: not alive(executor), what="the executor dies")

    def again() -> Connection | None:
        try:
            return cluster.connect()
        except Exception:
            return None

    with wait_until(again) as db:
        wait_until(lambda: ended(db, job))
        row = job_row(db, job)
        assert (row["state"], row["attempts"]) == ("finished", 2)
        assert value(db, epoch, job) == 30


# -- the ground is pulled away ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["loading", "training"])
@pytest.mark.parametrize("drop", ["extension", "database", "role"])
def test_what_a_running_job_needs_is_dropped(
    fresh_cluster: Callable[..., Any], wait_until: Wait, drop: str, moment: str
) -> None:
    arguments, when = MOMENTS[moment]
    cluster = fresh_cluster({"pg_tensile.database": "lab"}, extension=False)
    admin = cluster.connect()
    admin.execute("CREATE DATABASE lab")
    with cluster.connect("lab") as db:
        db.execute("CREATE EXTENSION pg_tensile CASCADE")
    admin.execute("CREATE ROLE alice LOGIN IN ROLE tensile_user")
    with cluster.connect("lab", user="alice") as alice:
        job = submit(alice, "m", MLP, **arguments)
    with cluster.connect("lab") as db:
        wait_until(lambda: when(db, job))
        worker, executor = worker_pid(db, job), executor_pid(db, job)
        assert worker is not None and executor is not None
        if drop == "extension":
            db.execute("DROP EXTENSION pg_tensile")
        elif drop == "role":
            admin.execute("DROP ROLE alice")
    if drop == "database":
        admin.execute("DROP DATABASE lab WITH (FORCE)")
    wait_until(lambda: not alive(worker) and not alive(executor), what="worker and executor end")
    if drop == "role":
        with cluster.connect("lab") as db:
            wait_until(lambda: state(db, job) == "failed", what=lambda: state(db, job))
            assert 'role "alice" was dropped' in value(db, "SELECT error FROM tensile.jobs WHERE id = %s", job)
    admin.close()
    left = "pyworker executor" if drop == "role" else "pyworker"  # the scheduler's planner may stay
    assert not any(left in command for command in cluster.processes().values())


def test_a_worker_that_cannot_connect_says_why(
    once: Connection, impatient: Any, wait_until: Wait, job_row: Row
) -> None:
    with impatient.connect("template1") as elsewhere:
        with once.transaction():
            job = submit(once, "m", MLP)
            elsewhere.execute("ALTER DATABASE postgres ALLOW_CONNECTIONS false")
        try:
            settled(once, wait_until, job)
        finally:
            elsewhere.execute("ALTER DATABASE postgres ALLOW_CONNECTIONS true")
    error = 'its worker ended with an error: database "postgres" is not currently accepting connections'
    assert (state(once, job), job_row(once, job)["error"]) == ("failed", error)


def test_a_role_without_connect_is_told(once: Connection, impatient: Any, wait_until: Wait, job_row: Row) -> None:
    once.execute("CREATE ROLE bob LOGIN IN ROLE tensile_user")
    try:
        with impatient.connect(user="bob") as conn, conn.transaction():
            job = submit(conn, "m", MLP)
            once.execute("REVOKE CONNECT ON DATABASE postgres FROM PUBLIC")
        settled(once, wait_until, job)
        row = job_row(once, job)
        assert (row["state"], row["sqlstate"], row["attempts"]) == ("failed", "42501", 0)
        assert row["error"] == 'role "bob" no longer has the CONNECT privilege for database "postgres"'
    finally:
        once.execute("GRANT CONNECT ON DATABASE postgres TO PUBLIC")
        once.execute("DELETE FROM tensile.jobs; DELETE FROM tensile.models; DROP ROLE bob")


# -- what children may take -------------------------------------------------------------------------------------------


def nice(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[16])


def test_training_gives_way_to_the_server(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster({"pg_tensile.nice": 5})
    with cluster.connect() as db:
        job = submit(db, "m", MLP, epochs=FOREVER)
        wait_until(lambda: steps(db, job) > 0)
        worker, executor = worker_pid(db, job), executor_pid(db, job)
        assert worker is not None and executor is not None
        assert nice(executor) == nice(worker) + 5
        db.execute("SELECT cancel_job(%s)", (job,))
        job = submit(db, "quick", MLP, epochs=1)
        assert value(db, "SELECT wait_for_job(%s)", job) == "finished"
        value(db, f"SELECT predict('quick', r) FROM ({ROWS}) r LIMIT 1")
        supervisor = inference_pid(db)
        assert supervisor is not None
        (predictor,) = children(supervisor)
        assert nice(predictor) == nice(supervisor), "sessions wait for it"


@pytest.mark.long
@pytest.mark.parametrize(
    "allocate",
    [
        pytest.param("kept = [torch.ones(64 << 20, dtype=torch.uint8) for _ in range(400)]", id="torch"),
        pytest.param("kept = [bytearray(64 << 20) for _ in range(400)]", id="python"),
    ],
)
def test_a_child_that_takes_too_much_memory_fails_its_job(
    fresh_cluster: Callable[..., Any], wait_until: Wait, job_row: Row, allocate: str
) -> None:
    """Long: the child fills two gigabytes."""
    cluster = fresh_cluster({"pg_tensile.child_memory": "2GB"})
    with cluster.connect() as db:
        greedy = submit(db, "greedy", python_model(on_forward=allocate))
        settled(db, wait_until, greedy, 90)
        row = job_row(db, greedy)
        assert (row["state"], row["sqlstate"], row["attempts"]) == ("failed", "53200", 1), row["error"]
        assert "pg_tensile.child_memory" in row["hint"] and "2048 MB" in row["hint"]
        modest = submit(db, "modest", MLP)
        assert value(db, "SELECT wait_for_job(%s)", modest) == "finished"


def test_an_executor_that_ignores_a_refusal_is_killed(
    fresh_cluster: Callable[..., Any], wait_until: Wait, job_row: Row
) -> None:
    cluster = fresh_cluster({"pg_tensile.executor_timeout": "8s"})
    deaf = """
        from pyworker.children import memory
        from pyworker.wire import FrameType
        usual = memory.MemoryClient._handle
        memory.MemoryClient._handle = lambda self, frame: None if frame.type == FrameType.REFUSE else usual(self, frame)
    """
    with cluster.connect() as db:
        job = submit(db, "deaf", python_model(on_build=deaf), policy="joint", memory_budget="1kB")
        executor = wait_until(lambda: executor_pid(db, job))
        settled(db, wait_until, job, 120)
        row = job_row(db, job)
        assert (row["state"], row["sqlstate"]) == ("failed", "53200")
        assert row["error"] == "the executor goes on although there is no device memory for it"
        assert not alive(executor)


def test_absurd_numbers_of_an_executor_fail_its_own_job_only(
    fresh_cluster: Callable[..., Any], wait_until: Wait, job_row: Row
) -> None:
    cluster = fresh_cluster()
    absurd = """
        from pyworker.children import memory
        most = 2**63 - 1 - (1 << 20)
        memory.MemoryClient.overhead_bytes = property(lambda self: most, lambda self, bytes: None)
    """
    with cluster.connect() as db:
        job = submit(db, "absurd", python_model(on_build=absurd), policy="joint")
        settled(db, wait_until, job, 90)
        row = job_row(db, job)
        assert (row["state"], row["sqlstate"]) == ("failed", "22023")
        assert 'device "cpu" cannot have' in row["error"]
        assert value(db, "SELECT count(*) FROM tensile.device_profiles") == 0
        honest = submit(db, "honest", MLP)
        assert value(db, "SELECT wait_for_job(%s)", honest) == "finished"


# -- a Python that cannot ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("python", "message"),
    [
        pytest.param("/nowhere/python3", 'cannot start "/nowhere/python3": No such file', id="missing"),
        pytest.param("/etc/passwd", 'cannot start "/etc/passwd": Permission denied', id="not executable"),
        pytest.param(
            "/bin/false", '"/bin/false" cannot run the executor: executor exited with status 1', id="no Python"
        ),
        pytest.param(
            "/usr/bin/python3", 'the Python of the executor, "/usr/bin/python3", has no PyTorch', id="no torch"
        ),
    ],
)
def test_a_python_that_cannot_run_the_executor(
    once: Connection, impatient: Any, wait_until: Wait, job_row: Row, python: str, message: str
) -> None:
    good = value(once, "SHOW pg_tensile.python")
    impatient.configure({"pg_tensile.python": python})
    impatient.reload()
    try:
        job = submit(once, "m", MLP)
        settled(once, wait_until, job)
    finally:
        impatient.configure({"pg_tensile.python": good})
        impatient.reload()
    row = job_row(once, job)
    assert (row["state"], row["sqlstate"], row["attempts"]) == ("failed", "58P01", 1)
    assert message in row["error"]
    assert "pg_tensile.python" in row["hint"]


# -- the predictor ----------------------------------------------------------------------------------------------------


def inference_pid(conn: Connection) -> int | None:
    found: int | None = value(conn, "SELECT pid FROM pg_stat_activity WHERE backend_type = 'pg_tensile inference'")
    return found


def connections(pid: int) -> int:
    """Pipes and sockets of a process: a server process may open and close relations' files at any time."""
    links = (os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd"))
    return sum(link.startswith(("pipe:", "socket:")) for link in links)


def test_a_killed_predictor_comes_back_and_leaks_nothing(db: Connection, wait_until: Wait) -> None:
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


def test_a_predictor_that_cannot_start_says_so_once(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster()
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
