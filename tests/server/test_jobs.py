"""The life of a job: states, phases, waits and errors."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import psycopg
import pytest

from tests.server.support import (
    FOREVER,
    MLP,
    SLOW_ROWS,
    Connection,
    Row,
    Wait,
    cpu_seconds,
    ended,
    no_workers,
    phase,
    python_model,
    state,
    steps,
    submit,
    value,
    worker_pid,
)


def is_none(conn: Connection, sql: str, *parameters: Any) -> bool:
    return value(conn, sql, *parameters) is None


# -- states -----------------------------------------------------------------------------------------------------------


def test_a_job_trains_and_leaves_a_version(db: Connection, job_row: Row, wait_until: Wait) -> None:
    job = submit(db, "m", MLP, epochs=3, policy=None)
    assert value(db, "SELECT wait_for_job(%s)", job) == "finished"
    row = job_row(db, job)
    assert row["submitted_at"] < row["started_at"] < row["ended_at"]
    assert (row["attempts"], row["version"], row["rows"], row["error"], row["reason"]) == (1, 1, 400, None, None)
    assert row["fingerprint"].startswith("400:")
    splits = db.execute(
        "SELECT epoch, split, samples, loss FROM tensile.epoch_metrics WHERE job = %s", (job,)
    ).fetchall()
    assert sorted(split[:2] for split in splits) == [(e, s) for e in (1, 2, 3) for s in ("training", "validation")]
    assert all(split[2] > 0 and split[3] > 0 for split in splits)
    assert value(db, "SELECT deployed_version FROM tensile.models WHERE model = 'm'") == 1
    stored = value(db, "SELECT sum(octet_length(data)) FROM tensile_internal.model_weights")
    assert stored > 0 and stored == value(db, "SELECT weight_bytes FROM tensile.model_versions WHERE job = %s", job)
    assert value(db, "SELECT count(*) FROM tensile_internal.checkpoints WHERE job = %s", job) == 0
    wait_until(lambda: no_workers(db), what="the worker exits")
    assert value(db, "SELECT count(*) FROM tensile_worker._progress()") == 0


def is_part(names: list[str], whole: list[str]) -> bool:
    """True if `names` is a subsequence of `whole`."""
    rest = iter(whole)
    return all(name in rest for name in names)


def test_a_job_goes_through_its_states_and_phases(db: Connection, wait_until: Wait) -> None:
    """A session polls them."""
    model = python_model(on_forward="time.sleep(0.1 if self.training else 0.5)")
    job = submit(db, "m", model, epochs=1, query=SLOW_ROWS + " WHERE a BETWEEN 0 AND 0.1", batch_size=4)
    states: list[str] = []
    phases: list[str] = []

    def finished() -> bool:
        for seen, now in ((states, state(db, job)), (phases, phase(db, job))):
            if now is not None and (not seen or seen[-1] != now):
                seen.append(now)
        return states[-1] == "finished"

    wait_until(finished)
    order = ["queued", "starting", *("running", "waiting", "running") * 2, "finished"]  # waits twice for memory
    assert states[-2:] == ["running", "finished"] and is_part(states, order)
    order = ["starting", "loading", "preparing", "building", *("waiting", "training") * 2, "validating", "saving"]
    assert is_part(phases, order)
    assert {"loading", "training", "validating"} <= set(phases)


def test_no_snapshot_is_held_while_a_job_trains(db: Connection, wait_until: Wait) -> None:
    job = submit(db, "m", MLP, epochs=FOREVER)
    wait_until(lambda: steps(db, job) > 0)
    pid = worker_pid(db, job)
    oldest = "SELECT backend_xmin::text::bigint FROM pg_stat_activity WHERE pid = %s"
    for _ in range(3):
        now = value(db, "SELECT pg_current_xact_id()::text::bigint")
        behind = oldest + " AND backend_xmin::text::bigint < " + str(now)
        wait_until(partial(is_none, db, behind, pid), what="the worker's xmin moves on")


@pytest.mark.long
def test_a_worker_waits_outside_any_transaction(db: Connection, wait_until: Wait) -> None:
    job = submit(db, "m", python_model(on_forward="if step > 1: time.sleep(0.5)"), epochs=FOREVER)
    wait_until(lambda: phase(db, job) == "training")
    idle = (
        "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND state = 'idle' AND wait_event_type = 'Extension'"
        " AND xact_start IS NULL AND backend_xmin IS NULL AND query LIKE 'CALL tensile_worker._step(%%'"
    )
    wait_until(lambda: value(db, idle, worker_pid(db, job)) == 1)


@pytest.mark.long
def test_autovacuum_sees_what_a_running_job_replaces(db: Connection, wait_until: Wait) -> None:
    """Old checkpoints are dead rows, mainly of the TOAST table."""
    job = submit(db, "m", {"type": "mlp", "hidden": [256, 256]}, epochs=FOREVER, options={"checkpoint_interval": 1})
    dead = (
        "SELECT s.n_dead_tup > 0 OR s.autovacuum_count > 0 FROM pg_class c"
        " JOIN pg_stat_all_tables s ON s.relid = c.reltoastrelid"
        " WHERE c.oid = 'tensile_internal.checkpoint_chunks'::regclass"
    )
    db.execute("SELECT pg_stat_reset()")
    wait_until(lambda: value(db, dead), 90, "dead rows are counted")
    assert state(db, job) == "running"


@pytest.mark.long
def test_waiting_processes_do_not_compute(db: Connection, wait_until: Wait) -> None:
    """Neither the controller nor a worker whose trainer is in a long step. Long: the step takes seconds."""
    job = submit(db, "m", python_model(on_forward="if step > 1: time.sleep(3)"), epochs=5)
    wait_until(lambda: phase(db, job) == "training")
    pids = [row[0] for row in db.execute("SELECT pid FROM pg_stat_activity WHERE backend_type LIKE 'pg_tensile %'")]
    assert len(pids) >= 3
    before = {pid: cpu_seconds(pid) for pid in pids}
    until = time.monotonic() + 2
    wait_until(lambda: time.monotonic() > until)
    assert {pid: cpu_seconds(pid) - before[pid] for pid in pids if cpu_seconds(pid) - before[pid] > 0.2} == {}


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "sqlstate", "message"),
    [
        pytest.param(
            "SELECT 1.0 / (i - 300) AS a, i % 2 AS y FROM generate_series(1, 400) i", "22012", "zero", id="row"
        ),
        pytest.param("SELECT cos(i) AS a, i % 2 AS y FROM generate_series(1, 0) i", "22000", "no rows", id="no rows"),
        pytest.param(
            "SELECT cos(i) AS a, 'x' AS y FROM generate_series(1, 50) i", "22000", "only one value", id="one class"
        ),
        pytest.param(
            "SELECT cos(i) AS a, NULL::text AS y FROM generate_series(1, 50) i", "22000", "null", id="all null"
        ),
    ],
)
def test_unsuitable_data_fails_the_job_with_the_reason(
    db: Connection, wait_until: Wait, job_row: Row, query: str, sqlstate: str, message: str
) -> None:
    job = submit(db, "m", MLP, query=query, options={"task": "classification"})
    wait_until(lambda: ended(db, job))
    row = job_row(db, job)
    assert (row["state"], row["attempts"]) == ("failed", 1)
    assert row["sqlstate"] == sqlstate
    assert message in row["error"]
    assert row["hint"] or row["detail"]
    wait_until(lambda: no_workers(db))
    with pytest.raises(psycopg.Error, match=message) as caught:
        db.execute("SELECT wait_for_job(%s)", (job,))
    assert caught.value.sqlstate == row["sqlstate"]


def test_a_query_that_fails_at_a_row_names_the_row(db: Connection, wait_until: Wait, job_row: Row) -> None:
    query = "SELECT 1.0 / (i - 300) AS a, i % 2 AS y FROM generate_series(1, 400) i"
    job = submit(db, "m", MLP, query=query)
    wait_until(lambda: ended(db, job))
    assert "row 300" in job_row(db, job)["detail"]


def test_a_model_that_raises_leaves_its_traceback(db: Connection, wait_until: Wait, job_row: Row) -> None:
    job = submit(db, "m", python_model(on_forward="if step == 3: raise RuntimeError('enough of this')"))
    wait_until(lambda: ended(db, job))
    row = job_row(db, job)
    assert (row["state"], row["attempts"]) == ("failed", 1)
    assert "enough of this" in row["error"]
    assert "in forward" in row["traceback"]
