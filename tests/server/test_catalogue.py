"""The bookkeeping functions: transitions between states of jobs, and the order of the queue.

Each test inserts its jobs in a transaction that is rolled back, so that no controller sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from tests.server.support import Connection

NewJob = Callable[..., int]


@pytest.fixture
def tx(db: Connection) -> Iterator[Connection]:
    with db.transaction(force_rollback=True):
        yield db


@pytest.fixture
def new_job(tx: Connection) -> NewJob:
    """`new_job(state="queued", age="1 min", priority=0, model_id=None, …)`: insert a job; return its id."""

    def insert(state: str = "queued", age: str = "0 s", **columns: object) -> int:
        columns |= {"state": state, "model": "late", "query": "", "target": "late", "epochs": 1, "batch_size": 1}
        columns |= {"optimizer": "sgd", "learning_rate": 1, "validation": 0, "seed": 0, "settings": "{}"}
        columns = {"owner": "postgres", "priority": 0, "options": "{}"} | columns
        names, marks = ", ".join(columns), ", ".join(f"%({name})s" for name in columns)
        submitted = "clock_timestamp() - %(age)s::interval"
        insert = f"INSERT INTO tensile_internal.jobs (submitted_at, {names}) VALUES ({submitted}, {marks})"
        return int(scalar(tx, f"{insert} RETURNING id", columns | {"age": age}))

    return insert


@pytest.fixture
def model(tx: Connection) -> int:
    return int(scalar(tx, "SELECT register_model('late', %(a)s)", {"a": Jsonb({"type": "mlp"})}))


def scalar(conn: Connection, query: str, parameters: dict[str, object] | None = None) -> Any:
    row = conn.execute(query, parameters).fetchone()
    assert row is not None
    return row[0]


def call(conn: Connection, function: str, *arguments: object) -> Any:
    marks = ", ".join(["%s"] * len(arguments))
    row = conn.execute(f"SELECT tensile_internal.{function}({marks})", arguments).fetchone()
    assert row is not None
    return row[0]


def columns(conn: Connection, job: int, *names: str) -> tuple[Any, ...]:
    with conn.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute("SELECT * FROM tensile.jobs WHERE job = %s", (job,)).fetchone()
    assert row is not None
    return tuple(row[name] for name in names)


def queue(conn: Connection) -> list[int]:
    return [job for (job,) in conn.execute("SELECT job FROM tensile_internal._queue_next()")]


# -- order of the queue -----------------------------------------------------------------------------------------------


def test_priority_first_then_age(tx: Connection, new_job: NewJob) -> None:
    young, old = new_job(age="10 s"), new_job(age="20 s")
    urgent, idle = new_job(priority=2), new_job(priority=-1, age="30 s")
    assert queue(tx) == [urgent, old, young, idle]
    assert tx.execute("SELECT job FROM tensile_internal._queue_next(2)").fetchall() == [(urgent,), (old,)]


def test_ageing_prevents_starvation(tx: Connection, new_job: NewJob) -> None:
    """300 s in the queue (pg_tensile.ageing) are worth a step of priority."""
    patient, urgent = new_job(age="901 s"), new_job(priority=3)
    assert queue(tx) == [patient, urgent]
    almost, more_urgent = new_job(age="1199 s"), new_job(priority=4)
    assert queue(tx)[:2] == [more_urgent, almost]


def test_only_jobs_that_may_start(tx: Connection, new_job: NewJob) -> None:
    for state in ("finished", "failed", "cancelled"):
        new_job(state, ended_at="now")
    new_job("starting")
    new_job("running")
    new_job("waiting")
    new_job("interrupted", not_before="2999-01-01")
    again = new_job("interrupted", not_before="2001-01-01")
    stopped = new_job("interrupted")
    assert queue(tx) == [again, stopped]


def test_how_long_until_a_job_may_start(tx: Connection, new_job: NewJob) -> None:
    new_job()
    new_job("interrupted", not_before="2001-01-01")
    assert call(tx, "_queue_delay_ms") is None
    job = new_job("interrupted", not_before="2999-01-01")
    assert call(tx, "_queue_delay_ms") == 3_600_000
    tx.execute("UPDATE tensile_internal.jobs SET not_before = clock_timestamp() + '2 s' WHERE id = %s", (job,))
    assert 1000 < call(tx, "_queue_delay_ms") <= 2000


# -- starting ---------------------------------------------------------------------------------------------------------


def test_a_job_starts_and_returns_to_the_queue(tx: Connection, new_job: NewJob, model: int) -> None:
    job = new_job(model_id=model)
    owner = scalar(tx, "SELECT oid FROM pg_roles WHERE rolname = 'postgres'")
    assert call(tx, "_job_starting", job) == owner
    assert columns(tx, job, "state", "attempts") == ("starting", 1)
    assert call(tx, "_job_starting", job) is None
    assert call(tx, "_job_requeue", job, "no worker is free") is True
    assert columns(tx, job, "state", "attempts", "reason") == ("queued", 0, "no worker is free")
    call(tx, "_job_starting", job)
    assert call(tx, "_job_requeue", job, "no worker is free") is False  # already stored
    tx.execute("UPDATE tensile_internal.jobs SET state = 'interrupted', attempts = 2 WHERE id = %s", (job,))
    call(tx, "_job_starting", job)
    call(tx, "_job_requeue", job, "no worker is free")
    assert columns(tx, job, "state", "attempts") == ("interrupted", 2)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("DROP ROLE {role}", "42704"),
        ("ALTER ROLE {role} RENAME TO {role}_2", "42704"),
        ("ALTER ROLE {role} NOLOGIN", "42704"),
        ("REVOKE tensile_user FROM {role}", "42501"),
    ],
)
def test_the_role_is_gone(tx: Connection, new_job: NewJob, model: int, change: str, expected: str) -> None:
    tx.execute("CREATE ROLE shortlived LOGIN IN ROLE tensile_user")
    job = new_job(model_id=model, owner="shortlived")
    tx.execute(change.format(role="shortlived"))
    assert call(tx, "_job_starting", job) is None
    state, sqlstate, error, hint = columns(tx, job, "state", "sqlstate", "error", "hint")
    assert (state, sqlstate) == ("failed", expected)
    assert "shortlived" in error
    assert hint


def test_the_model_is_gone(tx: Connection, new_job: NewJob) -> None:
    job = new_job()
    assert call(tx, "_job_starting", job) is None
    assert columns(tx, job, "state", "sqlstate", "error") == ("failed", "42704", 'model "late" was dropped')


def test_a_calibration_needs_no_model(tx: Connection, new_job: NewJob) -> None:
    job = new_job(kind="calibrate", model="")
    with pytest.raises(psycopg.errors.UniqueViolation), tx.transaction():
        new_job(kind="calibrate", model="")
    assert call(tx, "_job_starting", job) is not None
    assert columns(tx, job, "state") == ("starting",)
    call(tx, "_end_job", job, "finished")
    assert columns(tx, job, "state", "version") == ("finished", None)
    new_job(kind="calibrate", model="")  # the next in the queue


# -- interrupted ------------------------------------------------------------------------------------------------------


def test_faults_are_retried_with_growing_pauses_and_then_fail(tx: Connection, new_job: NewJob, model: int) -> None:
    job = new_job(model_id=model)
    for fault, pause in ((1, 1), (2, 2)):
        tx.execute("UPDATE tensile_internal.jobs SET state = 'running' WHERE id = %s", (job,))
        call(tx, "_interrupt_job", job, "killed", True, "line 1")
        assert columns(tx, job, "state", "retries", "reason", "traceback") == ("interrupted", fault, "killed", "line 1")
        seconds = scalar(
            tx, f"SELECT extract(epoch FROM not_before - clock_timestamp())::float8 FROM tensile.jobs WHERE job = {job}"
        )
        assert pause - 0.5 < seconds <= pause
    tx.execute("UPDATE tensile_internal.jobs SET state = 'running' WHERE id = %s", (job,))
    call(tx, "_interrupt_job", job, "killed", True, "line 1")
    assert columns(tx, job, "state", "sqlstate", "error", "traceback") == ("failed", "58000", "killed", "line 1")
    assert "pg_tensile.max_retries" in columns(tx, job, "hint")[0]


@pytest.mark.parametrize("state", ["starting", "running", "waiting"])
def test_stops_are_not_faults(tx: Connection, new_job: NewJob, model: int, state: str) -> None:
    job = new_job(state, model_id=model, retries=2)
    call(tx, "_reap", job, "server stop", False)
    assert columns(tx, job, "state", "retries", "not_before") == ("interrupted", 2, None)
    call(tx, "_reap", job, "server stop", True)
    assert columns(tx, job, "state", "retries") == ("interrupted", 2)  # no worker, nothing to reap


@pytest.mark.parametrize("state", ["starting", "running", "waiting"])
def test_a_cancelled_job_is_not_continued(tx: Connection, new_job: NewJob, model: int, state: str) -> None:
    job = new_job(state, model_id=model)
    assert scalar(tx, f"SELECT cancel_job({job})") is True
    assert columns(tx, job, "state", "cancel_requested") == (state, True)
    call(tx, "_reap", job, "its worker ended", True)
    assert columns(tx, job, "state", "reason") == ("cancelled", "cancelled by cancel_job")


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("retry", [True, False])
def test_an_interrupted_job_leaves_nothing_unfinished(tx: Connection, new_job: NewJob, model: int, retry: bool) -> None:
    job = new_job("running", model_id=model)
    tx.execute(
        "INSERT INTO tensile_internal.checkpoints (job, generation, meta) VALUES (%s, 1, '{}'), (%s, 2, NULL)",
        (job, job),
    )
    tx.execute(
        "INSERT INTO tensile_internal.model_versions (model_id, version, job, task, preprocessing, architecture)"
        " VALUES (%s, 1, %s, 'binary', '{}', '{}')",
        (model, job),
    )
    call(tx, "_interrupt_job", job, "its trainer died", retry)
    assert columns(tx, job, "state", "version") == ("interrupted", None)
    assert scalar(tx, "SELECT array_agg(generation) FROM tensile_internal.checkpoints") == [1]
    assert scalar(tx, "SELECT count(*) FROM tensile.model_versions") == 0


@pytest.mark.parametrize(("state", "kept"), [("failed", [1]), ("cancelled", []), ("finished", [])])
def test_only_failed_jobs_keep_a_checkpoint_and_only_finished_ones_a_version(
    tx: Connection, new_job: NewJob, model: int, state: str, kept: list[int]
) -> None:
    job = new_job("running", model_id=model)
    tx.execute(
        "INSERT INTO tensile_internal.checkpoints (job, generation, meta) VALUES (%s, 1, '{}'), (%s, 2, NULL)",
        (job, job),
    )
    tx.execute(
        "INSERT INTO tensile_internal.model_versions (model_id, version, job, task, preprocessing, architecture)"
        " VALUES (%s, 1, %s, 'binary', '{}', '{}')",
        (model, job),
    )
    call(tx, "_end_job", job, state)
    generations = tx.execute("SELECT generation FROM tensile_internal.checkpoints WHERE job = %s", (job,)).fetchall()
    assert [generation for (generation,) in generations] == kept
    version = 1 if state == "finished" else None
    assert columns(tx, job, "state", "version") == (state, version)
    assert scalar(tx, "SELECT max(version) FROM tensile.model_versions") == version
    assert scalar(tx, "SELECT deployed_version FROM tensile.models") == version
    call(tx, "_end_job", job, "failed", "XX000", "too late")
    assert columns(tx, job, "state") == (state,)


def test_a_new_version_is_deployed_unless_told_otherwise(tx: Connection, new_job: NewJob, model: int) -> None:
    deployed = []
    for version, options in ((1, {"deploy": False}), (2, {}), (3, {"deploy": False})):
        job = new_job("running", model_id=model, options=Jsonb(options))
        tx.execute(
            "INSERT INTO tensile_internal.model_versions (model_id, version, job, task, preprocessing, architecture)"
            " VALUES (%s, %s, %s, 'binary', '{}', '{}')",
            (model, version, job),
        )
        call(tx, "_end_job", job, "finished")
        deployed.append(scalar(tx, "SELECT deployed_version FROM tensile.models"))
    assert deployed == [None, 2, 2]


@pytest.mark.parametrize(
    ("keep", "deployed", "left"),
    [
        (None, [], [1, 2, 3, 4, 5]),
        (1, [], [5]),
        (3, [], [3, 4, 5]),
        (9, [], [1, 2, 3, 4, 5]),
        (2, [2], [2, 4, 5]),  # the deployed version is kept in addition
        (2, [2, 5], [2, 4, 5]),  # and so is the one that rollback_model returns to
        (1, [2, 5], [5]),  # unless only one is kept
    ],
)
def test_retention_drops_the_oldest_versions_when_one_is_complete(
    tx: Connection, new_job: NewJob, model: int, keep: int | None, deployed: list[int], left: list[int]
) -> None:
    """`deployed`: the versions whose jobs deploy them, all of them if it is empty."""
    tx.execute("UPDATE tensile_internal.models SET keep_versions = %s", (keep,))
    for version in range(1, 6):
        job = new_job("running", model_id=model, options=Jsonb({"deploy": version in (deployed or [version])}))
        row = tx.execute(
            "INSERT INTO tensile_internal.model_versions (model_id, version, job, task, preprocessing, architecture)"
            " VALUES (%s, %s, %s, 'binary', '{}', '{}') RETURNING id",
            (model, version, job),
        ).fetchone()
        tx.execute("INSERT INTO tensile_internal.model_weights VALUES (%s, 0, 'weights')", row)
        call(tx, "_end_job", job, "finished")
    versions = "SELECT array_agg(version ORDER BY version) FROM tensile.model_versions"
    assert scalar(tx, versions) == left
    assert scalar(tx, "SELECT count(*) FROM tensile_internal.model_weights") == len(left)
    assert scalar(tx, "SELECT array_agg(version ORDER BY version) FROM tensile.jobs") == [1, 2, 3, 4, 5]


def test_a_job_cannot_finish_without_a_version(tx: Connection, new_job: NewJob, model: int) -> None:
    job = new_job("running", model_id=model)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="version"):
        call(tx, "_end_job", job, "finished")
