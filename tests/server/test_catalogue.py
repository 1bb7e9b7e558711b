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


def test_a_role_has_no_more_jobs_at_once_than_its_limit(tx: Connection, new_job: NewJob) -> None:
    """An automatic calibration does not count, nor does what is queued; the reason goes when there is room."""
    tx.execute("CREATE ROLE ann; ALTER ROLE ann SET pg_tensile.role_max_jobs = 2")
    new_job("running", owner="ann")
    new_job("running", owner="ann", kind="calibrate", automatic=True)
    second, third, others = new_job(owner="ann"), new_job("interrupted", owner="ann"), new_job(priority=-1)
    assert queue(tx) == [second, others]
    full = 'role "ann" runs 2 of 2 jobs (pg_tensile.role_max_jobs)'
    assert [columns(tx, job, "reason") for job in (second, third, others)] == [(None,), (full,), (None,)]
    assert tx.execute("SELECT job FROM tensile_internal._queue_next(2)").fetchall() == [(second,), (others,)]
    tx.execute("ALTER ROLE ann SET pg_tensile.role_max_jobs = 1")
    assert queue(tx) == [others]
    tx.execute("ALTER ROLE ann RESET pg_tensile.role_max_jobs")
    assert queue(tx) == [second, third, others]
    assert [columns(tx, job, "reason") for job in (second, third)] == [(None,), (None,)]


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
        ("REVOKE tensile_user FROM {role}; GRANT tensile_predictor TO {role}", "42501"),
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
        (None, [], [3, 4, 5, 6, 7]),  # the default of pg_tensile.version_retention
        (None, [1], [1, 3, 4, 5, 6, 7]),  # the deployed version is kept in addition
        (0, [], [1, 2, 3, 4, 5, 6, 7]),
        (1, [], [7]),
        (3, [], [5, 6, 7]),
        (9, [], [1, 2, 3, 4, 5, 6, 7]),
        (2, [2], [2, 6, 7]),
        (2, [2, 7], [2, 6, 7]),  # so is the one that rollback_model returns to
        (1, [2, 7], [7]),  # unless only one is kept
    ],
)
def test_retention_drops_the_oldest_versions_when_one_is_complete(
    tx: Connection, new_job: NewJob, model: int, keep: int | None, deployed: list[int], left: list[int]
) -> None:
    """`deployed`: the versions whose jobs deploy them, all of them if it is empty."""
    call(tx, "_set_model_retention", scalar(tx, "SELECT 'postgres'::regrole::oid"), "late", keep)
    for version in range(1, 8):
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
    assert scalar(tx, "SELECT array_agg(version ORDER BY version) FROM tensile.job_history") == [1, 2, 3, 4, 5, 6, 7]


def test_retention_keeps_what_an_open_job_uses(tx: Connection, new_job: NewJob, model: int) -> None:
    """One has made a first version and goes on, another has begun with the weights of an older version."""
    makes, ends = new_job("running", model_id=model, tuning=1), new_job("running", model_id=model)
    begun = tx.execute(
        "INSERT INTO tensile_internal.model_versions"
        " (model_id, version, job, task, preprocessing, architecture, weight_bytes)"
        " SELECT %s, n, CASE WHEN n IN (4, 9) THEN CASE n WHEN 4 THEN %s ELSE %s END END, 'binary', '{}', '{}',"
        "        CASE WHEN n < 9 THEN 1 END FROM generate_series(1, 9) n RETURNING id",
        (model, makes, ends),
    ).fetchall()[1]
    warm = new_job("interrupted", model_id=model, tuning=1, start_version=begun[0])
    call(tx, "_end_job", ends, "finished")
    versions = "SELECT array_agg(version ORDER BY version) FROM tensile.model_versions"
    assert scalar(tx, versions) == [2, 4, 5, 6, 7, 8, 9]
    for job in (makes, warm):
        tx.execute("UPDATE tensile_internal.jobs SET state = 'cancelled', ended_at = now() WHERE id = %s", (job,))
    tx.execute("SELECT tensile_internal._drop_old_versions(m) FROM tensile_internal.models m")
    assert scalar(tx, versions) == [5, 6, 7, 8, 9]


def test_a_job_cannot_finish_without_a_version(tx: Connection, new_job: NewJob, model: int) -> None:
    job = new_job("running", model_id=model)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="version"):
        call(tx, "_end_job", job, "finished")
