"""The queue of jobs: priority, age and the limits on jobs that run at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conftest import sweep
from tests.server.support import (
    BY_CANCEL_JOB,
    ENDLESS_ROWS,
    FOREVER,
    MLP,
    Connection,
    Row,
    Wait,
    ended,
    reason,
    register,
    state,
    submit,
    value,
)

CLUSTER_SETTINGS = {"pg_tensile.max_jobs": 1}


def order_of_start(conn: Connection, jobs: list[int]) -> list[int]:
    rows = conn.execute("SELECT job FROM tensile.jobs WHERE job = ANY(%s) ORDER BY started_at", (jobs,)).fetchall()
    return [row[0] for row in rows]


@pytest.fixture
def one_slot(module_cluster: Any) -> Iterator[Any]:
    """A cluster that runs one job at a time, without jobs."""
    yield module_cluster
    with module_cluster.connect() as conn:
        sweep(conn)


def block(conn: Connection, wait_until: Wait) -> int:
    """Submit a job that takes the slot until it is cancelled, and does nothing."""
    blocker = submit(conn, "blocker", MLP, query=ENDLESS_ROWS)
    wait_until(lambda: state(conn, blocker) == "running")
    return blocker


def test_cancel_a_queued_job(one_slot: Any, wait_until: Wait) -> None:
    with one_slot.connect() as db:
        block(db, wait_until)
        queued = submit(db, "queued", MLP)
        assert value(db, "SELECT cancel_job(%s)", queued) is True
        assert (state(db, queued), reason(db, queued)) == ("cancelled", BY_CANCEL_JOB)
        assert value(db, "SELECT cancel_job(%s)", queued) is False


def test_a_job_that_an_open_transaction_holds_does_not_hold_up_others(one_slot: Any, wait_until: Wait) -> None:
    """The transaction ends without a notification: it is rolled back."""
    with one_slot.connect() as db, one_slot.connect() as other:
        blocker = block(db, wait_until)
        held = submit(db, "held", MLP, epochs=1, priority=9)
        behind = submit(db, "behind", MLP, epochs=1)
        with other.transaction(force_rollback=True):
            other.execute("SELECT cancel_job(%s)", (held,))
            db.execute("SELECT cancel_job(%s)", (blocker,))
            wait_until(lambda: state(db, behind) == "finished")
            assert state(db, held) == "queued"
        wait_until(lambda: state(db, held) == "finished")


@pytest.mark.long
def test_priority_comes_first_then_age_and_ageing_beats_priority(one_slot: Any, wait_until: Wait) -> None:
    one_slot.alter({"pg_tensile.ageing": "100s"})
    with one_slot.connect() as db:
        blocker = block(db, wait_until)
        old, young, urgent, starved = (
            submit(db, name, MLP, epochs=1, priority=priority)
            for name, priority in [("old", 0), ("young", 0), ("urgent", 5), ("starved", -5)]
        )
        # 1100 s in the queue are worth 11 steps of priority
        db.execute(
            "UPDATE tensile_internal.jobs SET submitted_at = now() - interval '1100 s' WHERE id = %s", (starved,)
        )
        db.execute("SELECT cancel_job(%s)", (blocker,))
        jobs = [old, young, urgent, starved]
        wait_until(lambda: all(state(db, job) == "finished" for job in jobs))
        assert order_of_start(db, jobs) == [starved, urgent, old, young]
    one_slot.alter({"pg_tensile.ageing": None})


@pytest.mark.long
def test_never_more_jobs_than_max_jobs(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    with fresh_cluster({"pg_tensile.max_jobs": 2}).connect() as db:
        jobs = [submit(db, f"m{number}", MLP, epochs=1) for number in range(4)]
        busy = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pg_tensile worker'"
        seen: list[int] = []

        def finished() -> bool:
            seen.append(value(db, busy))
            return all(state(db, job) == "finished" for job in jobs)

        wait_until(finished)
        assert max(seen) == 2


@pytest.mark.long
def test_without_a_background_worker_a_job_stays_queued_and_logs_it_once(
    fresh_cluster: Callable[..., Any], wait_until: Wait
) -> None:
    # one is free beside launcher, controller, scheduler and logical replication launcher
    """Takes seconds: the controller tries several times."""
    cluster = fresh_cluster({"max_worker_processes": 5, "max_parallel_workers": 0})
    with cluster.connect() as db:
        first = submit(db, "first", MLP, epochs=FOREVER)
        wait_until(lambda: state(db, first) == "running")
        second = submit(db, "second", MLP, epochs=1)
        waits = "SELECT reason FROM tensile.jobs WHERE job = %s AND state = 'queued'"
        wait_until(lambda: "max_worker_processes" in (value(db, waits, second) or ""))
        until = time.monotonic() + 4
        wait_until(lambda: time.monotonic() > until)
        db.execute("SELECT cancel_job(%s)", (first,))
        wait_until(lambda: state(db, second) == "finished")
        assert value(db, "SELECT attempts FROM tensile.jobs WHERE job = %s", second) == 1
    assert cluster.log().count("no background worker is free") == 1


def test_a_queued_job_survives_a_restart(one_slot: Any, wait_until: Wait) -> None:
    with one_slot.connect() as db:
        block(db, wait_until)
        queued = submit(db, "queued", MLP, epochs=1, priority=9)
    one_slot.restart()
    with one_slot.connect() as db:
        wait_until(lambda: state(db, queued) == "finished")


def test_a_role_dropped_while_its_job_is_queued(one_slot: Any, wait_until: Wait, job_row: Row) -> None:
    with one_slot.connect() as db:
        blocker = block(db, wait_until)
        db.execute("CREATE ROLE leaver LOGIN IN ROLE tensile_user")
        with one_slot.connect(user="leaver") as theirs:
            register(theirs, "theirs")
            job = submit(theirs, "theirs")
        db.execute("DROP ROLE leaver")
        db.execute("SELECT cancel_job(%s)", (blocker,))
        wait_until(lambda: ended(db, job))
        row = job_row(db, job)
        assert (row["state"], row["sqlstate"]) == ("failed", "42704")
        assert 'role "leaver" was dropped' in row["error"]
