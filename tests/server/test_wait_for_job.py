"""wait_for_job: end states, errors, timeouts and snapshots."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psycopg
import pytest

from tests.server.refusals import refused
from tests.server.support import Connection, train_late

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_waiting_in_the_transaction_that_submitted(flights: Connection) -> None:
    with flights.transaction(force_rollback=True):
        job = train_late(flights)
        with flights.transaction(force_rollback=True):
            refused("55000", f"job {job}", "Commit first", lambda: flights.execute("SELECT wait_for_job(%s)", (job,)))


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_waiting_with_a_fixed_snapshot(db: Connection, level: str) -> None:
    with db.transaction(force_rollback=True):
        db.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        refused("55000", level.lower(), "await_job", lambda: db.execute("SELECT wait_for_job(1)"))


def test_unknown_jobs(db: Connection) -> None:
    for call in (
        "SELECT wait_for_job(987654321)",
        "CALL await_job(987654321)",
        "SELECT cancel_job(987654321)",
    ):
        refused("42704", "job 987654321 does not exist", "tensile.jobs", partial(db.execute, call))
    for call in ("SELECT wait_for_job(NULL)", "SELECT cancel_job(NULL)"):
        refused("42704", "job null does not exist", "tensile.jobs", partial(db.execute, call))


@pytest.fixture
def job_in_state(flights: Connection) -> Iterator[Callable[..., int]]:
    """`job_in_state("failed", ended=True, sqlstate=…)`: insert a job that no controller starts."""

    def insert(state: str, *, ended: bool, **columns: object) -> int:
        columns |= {"state": state, "model": "late", "owner": "postgres", "query": "", "target": "late"}
        columns |= {"epochs": 1, "batch_size": 1, "optimizer": "sgd", "learning_rate": 1, "validation": 0, "seed": 0}
        columns |= {"priority": 0, "options": "{}", "settings": "{}"}
        columns |= {"ended_at": "now"} if ended else {"not_before": "2999-01-01"}
        names, marks = ", ".join(columns), ", ".join(f"%({name})s" for name in columns)
        row = flights.execute(
            f"INSERT INTO tensile_internal.jobs ({names}) VALUES ({marks}) RETURNING id", columns
        ).fetchone()
        assert row is not None
        return int(row[0])

    yield insert
    flights.execute("DELETE FROM tensile_internal.jobs")


def messages_of(conn: Connection, statement: str) -> list[tuple[str | None, str | None, str | None]]:
    """Severity, message and detail of each message that a statement raises."""
    found: list[tuple[str | None, str | None, str | None]] = []

    def note(diag: psycopg.errors.Diagnostic) -> None:
        found.append((diag.severity_nonlocalized, diag.message_primary, diag.message_detail))

    conn.add_notice_handler(note)
    try:
        conn.execute(statement)
    finally:
        conn.remove_notice_handler(note)
    return found


@pytest.mark.parametrize(
    ("split", "kind", "told"),
    [
        ("validation", "mean", "log_loss 0.25, rmse 0.01235 (the mean of the training rows: 0.5)"),
        ("training", "last", "log_loss 0.25, rmse 0.01235 (the last value before: 0.5)"),
        ("training", "frequencies", "log_loss 0.25 (the frequencies of the classes: 0.75), rmse 0.01235"),
    ],
)
def test_a_finished_job_tells_its_warnings_and_how_good_the_version_is(
    flights: Connection, job_in_state: Callable[..., int], split: str, kind: str, told: str
) -> None:
    """The kept epoch's metrics, not the last one's; job_history has the same."""
    course = {"kept_epoch": 2, "stopped": "early_stopping", "version": 3, "warnings": ["7 of 9 rows were skipped"]}
    course["baseline"] = json.dumps({"kind": kind, "split": split, "rmse": 0.5, "log_loss": 0.75, "r2": 0})
    job = job_in_state("finished", ended=True, **course)
    for epoch, rmse in ((1, 2.5), (2, 0.0123456), (3, 99.0)):
        for each in {"training", split}:
            of_epoch = {"job": job, "epoch": epoch, "split": each}
            flights.execute(
                "INSERT INTO tensile_internal.epochs (job, epoch, split) VALUES (%(job)s, %(epoch)s, %(split)s)",
                of_epoch,
            )
            metrics = {"rmse": rmse, "r2": 1234567.0, "loss": rmse, "precision": 0.5}
            for metric, number in (metrics | {"log_loss": 0.9, "calibrated_log_loss": 0.25}).items():
                flights.execute(
                    "INSERT INTO tensile_internal.metrics"
                    " VALUES (%(job)s, %(epoch)s, %(split)s, %(metric)s, %(value)s)",
                    of_epoch | {"metric": metric, "value": number},
                )
    expected = [
        ("WARNING", f"job {job}: 7 of 9 rows were skipped", None),
        (
            "NOTICE",
            f'version 3 of model "late": {told}, r2 1235000 on the {split} rows',
            "Its weights are those after epoch 2 of 3; "
            "training ended because nothing improved any more (early_stopping).",
        ),
    ]
    assert messages_of(flights, f"SELECT wait_for_job({job})") == expected
    assert messages_of(flights, f"CALL await_job({job})") == expected
    columns = "epochs, kept_epoch, stopped, training_loss, rmse, baseline_rmse"
    row = flights.execute(f"SELECT {columns} FROM tensile.job_history WHERE job = %s", (job,)).fetchone()
    expected_row = (0.0123456, 0.5) if split == "validation" else (None, None)
    assert row == (3, 2, "early_stopping", 0.0123456, *expected_row)
    beside = "SELECT DISTINCT split, baseline FROM tensile.metrics WHERE job = %s AND metric = 'rmse'"
    assert set(flights.execute(beside, (job,))) == {("training", None), (split, 0.5)} - (
        {("training", None)} if split == "training" else set()
    )


def test_wait_raises_the_jobs_own_error(flights: Connection, job_in_state: Callable[..., int]) -> None:
    job = job_in_state(
        "failed", ended=True, sqlstate="22012", error="division by zero", hint="look at row 7", detail="row 7"
    )
    for call in (f"SELECT wait_for_job({job})", f"CALL await_job({job})"):
        error = refused("22012", "division by zero", "look at row 7", partial(flights.execute, call))
        assert error.diag.message_detail == "row 7"
    bare = job_in_state("failed", ended=True, error="that was it")
    with pytest.raises(psycopg.errors.InternalError_, match="that was it") as caught:
        flights.execute("SELECT wait_for_job(%s)", (bare,))
    assert (caught.value.diag.message_hint, caught.value.diag.message_detail) == (None, None)


@pytest.mark.parametrize("state", ["finished", "cancelled"])
def test_wait_returns_the_final_state(flights: Connection, job_in_state: Callable[..., int], state: str) -> None:
    job = job_in_state(state, ended=True)
    assert flights.execute("SELECT wait_for_job(%s)", (job,)).fetchone() == (state,)
    assert flights.execute(f"CALL await_job({job})").fetchone() == (state,)
    assert flights.execute("SELECT cancel_job(%s)", (job,)).fetchone() == (False,)


def test_wait_times_out(flights: Connection, job_in_state: Callable[..., int]) -> None:
    job = job_in_state("interrupted", ended=False, reason="waits for its turn")
    for call in (f"SELECT wait_for_job({job}, '50 ms')", f"CALL await_job({job}, '50 ms')"):
        error = refused(
            "57014",
            f"job {job} has not ended in time: it is interrupted",
            "cancel_job",
            partial(flights.execute, call),
        )
        assert error.diag.message_detail == "waits for its turn"


@pytest.mark.parametrize(("deadline", "least"), [("NULL", 0.9), ("now() + '50 ms'", 0.02), ("now()", 0)])
def test_a_waiting_session_sleeps(db: Connection, deadline: str, least: float) -> None:
    """Without a change it waits a second, or until the deadline."""
    db.execute("SELECT tensile_worker._wait_round(now())")  # the first call of a session returns at once
    start = time.perf_counter()
    db.execute(f"SELECT tensile_worker._wait_round({deadline})")
    assert time.perf_counter() - start >= least


def test_cancel_wakes_a_waiting_session(
    flights: Connection,
    connect: Callable[..., Connection],
    job_in_state: Callable[..., int],
    wait_until: Callable[..., Any],
) -> None:
    job = job_in_state("interrupted", ended=False)
    waiting = connect()
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(lambda: waiting.execute("SELECT wait_for_job(%s, '20 s')", (job,)).fetchone())
        wait_until(lambda: activity(flights, waiting) is not None)
        assert flights.execute("SELECT cancel_job(%s)", (job,)).fetchone() == (True,)
        assert answer.result(timeout=5) == ("cancelled",)
    assert flights.execute("SELECT cancel_job(%s)", (job,)).fetchone() == (False,)


def activity(conn: Connection, session: Connection) -> tuple[Any, ...] | None:
    """Return the start of a session's transaction if it waits in a function of the extension, else None."""
    return conn.execute(
        "SELECT xact_start FROM pg_stat_activity"
        " WHERE pid = %s AND state = 'active' AND wait_event_type IN ('Extension', 'IPC')",
        (session.info.backend_pid,),
    ).fetchone()


def test_the_procedure_holds_no_snapshot(
    flights: Connection,
    connect: Callable[..., Connection],
    job_in_state: Callable[..., int],
    wait_until: Callable[..., Any],
) -> None:
    job = job_in_state("interrupted", ended=False)
    waiting = connect()
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(lambda: waiting.execute(f"CALL await_job({job})").fetchone())
        first = wait_until(lambda: activity(flights, waiting))
        wait_until(
            lambda: activity(flights, waiting) not in (None, first), what="the waiting session commits now and then"
        )
        flights.execute("SELECT cancel_job(%s)", (job,))
        assert answer.result(timeout=5) == ("cancelled",)
