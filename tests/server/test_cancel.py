"""Jobs cancelled or terminated in each phase."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.server.support import (
    BY_CANCEL_JOB,
    ENDLESS_ROWS,
    FEEDS,
    FOREVER,
    MLP,
    ROWS,
    SLOW_ROWS,
    TERMINATED,
    Connection,
    Row,
    Wait,
    alive,
    ended,
    no_workers,
    phase,
    python_model,
    reason,
    state,
    steps,
    submit,
    trainer_pid,
    value,
    worker_pid,
)


def cancels(db: Connection, job: int, wait_until: Wait) -> None:
    """Cancel the job and check that it, its worker and its trainer end."""
    pids = [pid for pid in (worker_pid(db, job), trainer_pid(db, job)) if pid is not None]
    assert value(db, "SELECT cancel_job(%s)", job) is True
    wait_until(lambda: state(db, job) == "cancelled" and no_workers(db), what=lambda: f"still {state(db, job)}")
    wait_until(lambda: not any(alive(pid) for pid in pids), what="worker and trainer end")
    assert reason(db, job) == BY_CANCEL_JOB


@pytest.mark.parametrize(
    ("arguments", "when"),
    [
        pytest.param({}, lambda db, job: state(db, job) != "queued", id="starting"),
        pytest.param({}, lambda db, job: trainer_pid(db, job) is not None, id="importing"),
        pytest.param({"query": SLOW_ROWS}, lambda db, job: phase(db, job) == "loading", id="loading"),
        pytest.param(
            {"query": ENDLESS_ROWS},
            lambda db, job: phase(db, job) == "loading",
            id="in one long call",
        ),
        pytest.param({"policy": "joint"}, lambda db, job: steps(db, job) > 3, id="training"),
    ],
)
def test_cancel_a_job(
    db: Connection, wait_until: Wait, arguments: dict[str, Any], when: Callable[[Connection, int], bool]
) -> None:
    job = submit(db, "m", MLP, **{"epochs": FOREVER, **arguments})
    wait_until(lambda: when(db, job))
    cancels(db, job, wait_until)


def test_cancel_a_job_that_waits_for_its_next_attempt(db: Connection, wait_until: Wait) -> None:
    job = submit(db, "m", python_model(on_build="os.kill(os.getpid(), signal.SIGKILL)"))
    wait_until(lambda: state(db, job) == "interrupted")
    assert value(db, "SELECT cancel_job(%s)", job) is True
    wait_until(lambda: state(db, job) == "cancelled")
    assert reason(db, job) == BY_CANCEL_JOB


@pytest.mark.parametrize("moment", ["loading", "training"])
def test_pg_cancel_backend_cancels_the_job(db: Connection, wait_until: Wait, moment: str) -> None:
    job = submit(db, "m", MLP, epochs=FOREVER, query=SLOW_ROWS if moment == "loading" else ROWS)
    wait_until(lambda: phase(db, job) == moment)
    db.execute("SELECT pg_cancel_backend(%s)", (worker_pid(db, job),))
    wait_until(lambda: state(db, job) == "cancelled" and no_workers(db))
    assert reason(db, job) == "cancelled by pg_cancel_backend"


@pytest.mark.long
@pytest.mark.parametrize(
    "call", ["set_job_priority(%s, 5)", "tensile_internal._notify(%s)", "tensile_internal._notify_stop(%s)"]
)
def test_calls_that_do_not_end_a_loading_job_do_not_disturb_it(
    db: Connection, wait_until: Wait, job_row: Row, call: str
) -> None:
    """The last call interrupts the query without a reason: the query runs again within the same attempt."""
    job = submit(db, "m", MLP, query=SLOW_ROWS + " WHERE a > 0.8")  # 4 s
    wait_until(lambda: phase(db, job) == "loading" and value(db, FEEDS) == 1)
    db.execute(f"SELECT {call}", (job,))
    assert value(db, "SELECT wait_for_job(%s)", job) == "finished"
    row = job_row(db, job)
    assert (row["attempts"], row["retries"], row["reason"]) == (1, 0, None)
    assert row["rows"] == value(db, "SELECT count(*) FROM (" + ROWS + ") r WHERE a > 0.8")


def test_a_model_dropped_while_it_trains_fails_the_job(db: Connection, wait_until: Wait, job_row: Row) -> None:
    job = submit(db, "m", MLP, epochs=FOREVER)
    wait_until(lambda: steps(db, job) > 0)
    db.execute("SELECT drop_model('m')")
    wait_until(lambda: state(db, job) == "failed" and no_workers(db))
    row = job_row(db, job)
    assert (row["sqlstate"], row["error"]) == ("42704", 'model "m" was dropped')
    assert row["hint"]


@pytest.mark.parametrize("moment", ["importing", "loading", "training"])
def test_a_terminated_worker_ends_its_job(db: Connection, wait_until: Wait, job_row: Row, moment: str) -> None:
    """A worker that loads runs the query and cannot react: PostgreSQL ends it, and the controller ends the job."""
    job = submit(db, "m", MLP, epochs=FOREVER, query=SLOW_ROWS if moment == "loading" else ROWS)
    if moment == "importing":
        wait_until(lambda: trainer_pid(db, job) is not None)
    else:
        wait_until(lambda: phase(db, job) == moment)
    first, trainer = worker_pid(db, job), trainer_pid(db, job)
    assert first is not None and trainer is not None
    db.execute("SELECT pg_terminate_backend(%s)", (first,))
    wait_until(lambda: not alive(first) and not alive(trainer), what="worker and trainer end")
    wait_until(lambda: ended(db, job))
    row = job_row(db, job)
    assert (row["state"], row["reason"], row["attempts"]) == ("cancelled", TERMINATED, 1)
    assert value(db, "SELECT count(*) FROM tensile_internal.checkpoints WHERE job = %s", job) == 0
