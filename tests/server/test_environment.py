"""Jobs in a hostile environment: dropped objects, revoked privileges, exceeded limits and an unusable Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.support import (
    FOREVER,
    MLP,
    ROWS,
    SLOW_ROWS,
    Connection,
    Row,
    Wait,
    alive,
    children,
    inference_pid,
    phase,
    python_model,
    settle,
    state,
    steps,
    submit,
    trainer_pid,
    value,
    worker_pid,
)

Alter = Callable[[dict[str, object]], None]  # fixture alter

# -- dropped objects and revoked privileges ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def laboratory(new_cluster: Callable[..., Any]) -> Iterator[Any]:
    """A cluster whose jobs are those of database `lab`, which it has not yet."""
    cluster = new_cluster({"pg_tensile.database": "lab"}, extension=False)
    yield cluster
    cluster.end()


@pytest.mark.long
@pytest.mark.parametrize("moment", ["loading", "training"])
@pytest.mark.parametrize("drop", ["extension", "database", "role"])
def test_dropping_the_extension_database_or_role_ends_a_running_job(
    laboratory: Any, wait_until: Wait, drop: str, moment: str
) -> None:
    """Long: each case starts all processes in a new database."""
    query = SLOW_ROWS if moment == "loading" else ROWS
    cluster = laboratory
    admin = cluster.connect()
    admin.execute("CREATE DATABASE lab")
    with cluster.connect("lab") as db:
        db.execute("CREATE EXTENSION pg_tensile CASCADE")
    admin.execute("CREATE ROLE alice LOGIN IN ROLE tensile_user")
    with cluster.connect("lab", user="alice") as alice:
        job = submit(alice, "m", MLP, epochs=FOREVER, query=query, policy=None)
    with cluster.connect("lab") as db:
        wait_until(lambda: phase(db, job) == moment and (moment == "loading" or steps(db, job) > 3))
        worker, trainer = worker_pid(db, job), trainer_pid(db, job)
        assert worker is not None and trainer is not None
        if drop == "extension":
            db.execute("DROP EXTENSION pg_tensile")
        elif drop == "role":
            admin.execute("DROP ROLE alice")
    if drop == "database":
        admin.execute("DROP DATABASE lab WITH (FORCE)")
    wait_until(lambda: not alive(worker) and not alive(trainer), what="worker and trainer end")
    if drop == "role":
        with cluster.connect("lab") as db:
            wait_until(lambda: state(db, job) == "failed", what=lambda: state(db, job))
            assert 'role "alice" was dropped' in value(db, "SELECT error FROM tensile.jobs WHERE job = %s", job)
    command_line = "pyworker trainer" if drop == "role" else "pyworker"  # the scheduler's planner may stay
    wait_until(
        lambda: not any(command_line in command for command in cluster.processes().values()),
        what=lambda: str(cluster.processes()),
    )
    admin.execute("DROP DATABASE IF EXISTS lab WITH (FORCE)")
    admin.execute("DROP ROLE IF EXISTS alice")
    admin.close()


def test_a_worker_that_cannot_connect_fails_its_job_with_the_reason(
    impatient_db: Connection, cluster: Any, wait_until: Wait, job_row: Row
) -> None:
    with cluster.connect("template1") as elsewhere:
        with impatient_db.transaction():
            job = submit(impatient_db, "m", MLP)
            elsewhere.execute("ALTER DATABASE postgres ALLOW_CONNECTIONS false")
        try:
            settle(impatient_db, wait_until, job)
        finally:
            elsewhere.execute("ALTER DATABASE postgres ALLOW_CONNECTIONS true")
    error = 'its worker ended with an error: database "postgres" is not currently accepting connections'
    assert (state(impatient_db, job), job_row(impatient_db, job)["error"]) == ("failed", error)


def test_a_job_of_a_role_without_connect_fails(
    impatient_db: Connection, cluster: Any, wait_until: Wait, job_row: Row
) -> None:
    impatient_db.execute("CREATE ROLE bob LOGIN IN ROLE tensile_user")
    try:
        with cluster.connect(user="bob") as conn, conn.transaction():
            job = submit(conn, "m", MLP)
            impatient_db.execute("REVOKE CONNECT ON DATABASE postgres FROM PUBLIC")
        settle(impatient_db, wait_until, job)
        row = job_row(impatient_db, job)
        assert (row["state"], row["sqlstate"], row["attempts"]) == ("failed", "42501", 0)
        assert row["error"] == 'role "bob" no longer has the CONNECT privilege for database "postgres"'
    finally:
        impatient_db.execute("GRANT CONNECT ON DATABASE postgres TO PUBLIC")
        impatient_db.execute("DELETE FROM tensile_internal.jobs; DELETE FROM tensile_internal.models; DROP ROLE bob")


# -- limits of children -----------------------------------------------------------------------------------------------


def nice(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[16])


@pytest.mark.long
def test_training_gives_way_to_the_server(db: Connection, wait_until: Wait) -> None:
    job = submit(db, "m", MLP, epochs=FOREVER)
    wait_until(lambda: steps(db, job) > 0)
    worker, trainer = worker_pid(db, job), trainer_pid(db, job)
    assert worker is not None and trainer is not None
    assert nice(trainer) == nice(worker) + 10, "the default of pg_tensile.nice"
    db.execute("SELECT cancel_job(%s)", (job,))
    job = submit(db, "quick", MLP, epochs=1)
    assert value(db, "SELECT wait_for_job(%s)", job) == "finished"
    db.execute("SET pg_tensile.predict_in_session = off")
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
    db: Connection, alter: Alter, wait_until: Wait, job_row: Row, allocate: str
) -> None:
    """Long: the child allocates two gigabytes."""
    alter({"pg_tensile.child_memory": "2GB"})
    greedy = submit(db, "greedy", python_model(on_forward=allocate))
    settle(db, wait_until, greedy, 90)
    row = job_row(db, greedy)
    assert (row["state"], row["sqlstate"], row["attempts"]) == ("failed", "53200", 1), row["error"]
    assert "pg_tensile.child_memory" in row["hint"] and "2048 MB" in row["hint"]
    modest = submit(db, "modest", MLP)
    assert value(db, "SELECT wait_for_job(%s)", modest) == "finished"


@pytest.mark.long
def test_a_trainer_that_ignores_a_refusal_is_killed(
    db: Connection, alter: Alter, wait_until: Wait, job_row: Row
) -> None:
    """Takes seconds: the time-out of the trainer passes."""
    alter({"pg_tensile.executor_timeout": "8s"})
    deaf = """
        from pyworker.children import memory
        from pyworker.wire import FrameType
        usual = memory.MemoryClient._handle
        memory.MemoryClient._handle = lambda self, frame: None if frame.type == FrameType.REFUSE else usual(self, frame)
    """
    job = submit(db, "deaf", python_model(on_build=deaf), policy="joint", memory_budget="1kB")
    trainer = wait_until(lambda: trainer_pid(db, job))
    settle(db, wait_until, job, 120)
    row = job_row(db, job)
    assert (row["state"], row["sqlstate"]) == ("failed", "53200")
    assert row["error"] == "the trainer continues although there is no device memory for it"
    assert not alive(trainer)


@pytest.mark.long
def test_absurd_numbers_of_a_trainer_fail_its_own_job_only(db: Connection, wait_until: Wait, job_row: Row) -> None:
    db.execute("DELETE FROM tensile_internal.device_profiles")
    absurd = """
        from pyworker.children import overhead
        most = 2**63 - 1 - (1 << 20)
        overhead.Overhead.bytes = property(lambda self: most, lambda self, bytes: None)
    """
    job = submit(db, "absurd", python_model(on_build=absurd), policy="joint")
    settle(db, wait_until, job, 90)
    row = job_row(db, job)
    assert (row["state"], row["sqlstate"]) == ("failed", "22023")
    assert 'device "cpu" cannot have' in row["error"]
    assert value(db, "SELECT count(*) FROM tensile.device_profiles") == 0
    honest = submit(db, "honest", MLP, policy="joint")
    assert value(db, "SELECT wait_for_job(%s)", honest) == "finished"


# -- an unusable Python -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("python", "message"),
    [
        pytest.param("/nowhere/python3", 'cannot start "/nowhere/python3": No such file', id="missing"),
        pytest.param("/etc/passwd", 'cannot start "/etc/passwd": Permission denied', id="not executable"),
        pytest.param("/bin/false", '"/bin/false" cannot run the trainer: trainer exited with status 1', id="no Python"),
        pytest.param(
            "/usr/bin/python3", 'the Python of the trainer, "/usr/bin/python3", has no PyTorch', id="no torch"
        ),
    ],
)
def test_a_python_that_cannot_run_the_trainer(
    impatient_db: Connection, alter: Alter, wait_until: Wait, job_row: Row, python: str, message: str
) -> None:
    alter({"pg_tensile.python": python})
    job = submit(impatient_db, "m", MLP)
    settle(impatient_db, wait_until, job)
    row = job_row(impatient_db, job)
    assert (row["state"], row["sqlstate"], row["attempts"]) == ("failed", "58P01", 1)
    assert message in row["error"]
    assert "pg_tensile.python" in row["hint"]
