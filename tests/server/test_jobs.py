"""The life of a job: its states, its turn in the queue, how it is stopped and how it goes on."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
import pytest

from tests.server.support import (
    FOREVER,
    MLP,
    ROWS,
    Connection,
    alive,
    cpu_seconds,
    executor_pid,
    interrupt,
    phase,
    python_model,
    register,
    state,
    steps,
    submit,
    value,
    worker_pid,
)

Wait = Callable[..., Any]
Row = Callable[[Connection, int], dict[str, Any]]

SLOW_ROWS = "SELECT a, y FROM (" + ROWS + ") r, LATERAL pg_sleep(0.05 + 0 * a)"  # 20 s


def ended(conn: Connection, job: int) -> bool:
    return value(conn, "SELECT ended_at IS NOT NULL FROM tensile.jobs WHERE id = %s", job)


def is_none(conn: Connection, sql: str, *parameters: Any) -> bool:
    return value(conn, sql, *parameters) is None


def gone(conn: Connection) -> bool:
    return value(conn, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pg_tensile worker'") == 0


# -- states -----------------------------------------------------------------------------------------------------------


def test_a_job_trains_and_leaves_a_version(db: Connection, job_row: Row, wait_until: Wait) -> None:
    job = submit(db, "m", MLP, epochs=3)
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
    assert value(db, "SELECT deployed_version FROM tensile.models WHERE name = 'm'") == 1
    stored = value(db, "SELECT sum(octet_length(data)) FROM tensile.model_weights")
    assert stored > 0 and stored == value(db, "SELECT weight_bytes FROM tensile.model_versions WHERE job = %s", job)
    assert value(db, "SELECT count(*) FROM tensile.checkpoints WHERE job = %s", job) == 0
    wait_until(lambda: gone(db), what="the worker leaves")
    assert value(db, "SELECT count(*) FROM tensile._progress()") == 0


def is_part(names: list[str], whole: list[str]) -> bool:
    """Whether `names` is `whole` without some of it."""
    rest = iter(whole)
    return all(name in rest for name in names)


def test_a_job_goes_through_its_states_and_phases(db: Connection) -> None:
    """Seen by a session that does nothing but look."""
    model = python_model(on_forward="time.sleep(0.02 if self.training else 0.7)")
    job = submit(db, "m", model, epochs=1, query=SLOW_ROWS + " WHERE a > 0.8")
    states: list[str] = []
    phases: list[str] = []
    deadline = time.monotonic() + 60
    while states[-1:] != ["finished"] and time.monotonic() < deadline:
        for seen, now in ((states, state(db, job)), (phases, phase(db, job))):
            if now is not None and (not seen or seen[-1] != now):
                seen.append(now)
    order = ["queued", "starting", "running", "waiting", "running", "finished"]
    assert states[-2:] == ["running", "finished"] and is_part(states, order)
    order = ["starting", "loading", "preparing", "building", "waiting", "training", "validating", "saving"]
    assert phases == [name for name in order if name in phases]
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


def test_a_worker_waits_outside_any_transaction(db: Connection, wait_until: Wait) -> None:
    job = submit(db, "m", python_model(on_forward="if step > 1: time.sleep(0.5)"), epochs=FOREVER)
    wait_until(lambda: phase(db, job) == "training")
    idle = (
        "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND state = 'idle' AND wait_event_type = 'Extension'"
        " AND xact_start IS NULL AND backend_xmin IS NULL AND query LIKE 'CALL tensile._step(%%'"
    )
    wait_until(lambda: value(db, idle, worker_pid(db, job)) == 1)


def test_autovacuum_sees_what_a_running_job_replaces(db: Connection, wait_until: Wait) -> None:
    """Old checkpoints are dead rows, of the TOAST table above all."""
    job = submit(db, "m", {"type": "mlp", "hidden": [256, 256]}, epochs=FOREVER, options={"checkpoint_interval": 1})
    dead = (
        "SELECT s.n_dead_tup > 0 OR s.autovacuum_count > 0 FROM pg_class c"
        " JOIN pg_stat_all_tables s ON s.relid = c.reltoastrelid WHERE c.oid = 'tensile.checkpoint_chunks'::regclass"
    )
    db.execute("SELECT pg_stat_reset()")
    wait_until(lambda: value(db, dead), 90, "dead rows are counted")
    assert state(db, job) == "running"


@pytest.mark.long
def test_waiting_processes_do_not_compute(db: Connection, wait_until: Wait) -> None:
    """Neither the controller nor a worker whose executor is busy with one long step. Long: the step takes seconds."""
    job = submit(db, "m", python_model(on_forward="if step > 1: time.sleep(3)"), epochs=5)
    wait_until(lambda: phase(db, job) == "training")
    pids = [row[0] for row in db.execute("SELECT pid FROM pg_stat_activity WHERE backend_type LIKE 'pg_tensile %'")]
    assert len(pids) >= 3
    before = {pid: cpu_seconds(pid) for pid in pids}
    until = time.monotonic() + 2
    wait_until(lambda: time.monotonic() > until)
    assert {pid: cpu_seconds(pid) - before[pid] for pid in pids if cpu_seconds(pid) - before[pid] > 0.2} == {}


# -- the queue --------------------------------------------------------------------------------------------------------


def order_of_start(conn: Connection, jobs: list[int]) -> list[int]:
    rows = conn.execute("SELECT id FROM tensile.jobs WHERE id = ANY(%s) ORDER BY started_at", (jobs,)).fetchall()
    return [row[0] for row in rows]


def test_priority_comes_first_then_age_and_ageing_beats_priority(
    fresh_cluster: Callable[..., Any], wait_until: Wait
) -> None:
    with fresh_cluster({"pg_tensile.max_jobs": 1, "pg_tensile.ageing": "100s"}).connect() as db:
        blocker = submit(db, "blocker", MLP, epochs=FOREVER)
        wait_until(lambda: state(db, blocker) == "running")
        old, young, urgent, starved = (
            submit(db, name, MLP, epochs=1, priority=priority)
            for name, priority in [("old", 0), ("young", 0), ("urgent", 5), ("starved", -5)]
        )
        # 1100 s in the queue are worth 11 steps of priority
        db.execute("UPDATE tensile.jobs SET submitted_at = now() - interval '1100 s' WHERE id = %s", (starved,))
        db.execute("SELECT cancel_job(%s)", (blocker,))
        jobs = [old, young, urgent, starved]
        wait_until(lambda: all(state(db, job) == "finished" for job in jobs))
        assert order_of_start(db, jobs) == [starved, urgent, old, young]


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


def test_without_a_background_worker_a_job_stays_queued_and_says_so_once(
    fresh_cluster: Callable[..., Any], wait_until: Wait
) -> None:
    # launcher, controller, scheduler and logical replication launcher leave one
    cluster = fresh_cluster({"max_worker_processes": 5, "max_parallel_workers": 0})
    with cluster.connect() as db:
        first = submit(db, "first", MLP, epochs=FOREVER)
        wait_until(lambda: state(db, first) == "running")
        second = submit(db, "second", MLP, epochs=1)
        reason = "SELECT reason FROM tensile.jobs WHERE id = %s AND state = 'queued'"
        wait_until(lambda: "max_worker_processes" in (value(db, reason, second) or ""))
        until = time.monotonic() + 4
        wait_until(lambda: time.monotonic() > until)
        db.execute("SELECT cancel_job(%s)", (first,))
        wait_until(lambda: state(db, second) == "finished")
        assert value(db, "SELECT attempts FROM tensile.jobs WHERE id = %s", second) == 1
    assert cluster.log().count("no background worker is free") == 1


# -- cancelling -------------------------------------------------------------------------------------------------------


def test_cancel_a_queued_job(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    with fresh_cluster({"pg_tensile.max_jobs": 1}).connect() as db:
        blocker = submit(db, "blocker", MLP, epochs=FOREVER)
        wait_until(lambda: state(db, blocker) == "running")
        queued = submit(db, "queued", MLP)
        assert value(db, "SELECT cancel_job(%s)", queued) is True
        assert (state(db, queued), reason(db, queued)) == ("cancelled", BY_CANCEL_JOB)
        assert value(db, "SELECT cancel_job(%s)", queued) is False


BY_CANCEL_JOB = "cancelled by cancel_job"
TERMINATED = "its worker was terminated (pg_terminate_backend)"


def reason(conn: Connection, job: int) -> str | None:
    found: str | None = value(conn, "SELECT reason FROM tensile.jobs WHERE id = %s", job)
    return found


def cancels(db: Connection, job: int, wait_until: Wait) -> None:
    """Cancel the job and see it, its worker and its executor end."""
    pids = [pid for pid in (worker_pid(db, job), executor_pid(db, job)) if pid is not None]
    assert value(db, "SELECT cancel_job(%s)", job) is True
    wait_until(lambda: state(db, job) == "cancelled" and gone(db), what=lambda: f"still {state(db, job)}")
    wait_until(lambda: not any(alive(pid) for pid in pids), what="worker and executor end")
    assert reason(db, job) == BY_CANCEL_JOB


@pytest.mark.parametrize(
    ("arguments", "when"),
    [
        pytest.param({}, lambda db, job: state(db, job) != "queued", id="starting"),
        pytest.param({}, lambda db, job: executor_pid(db, job) is not None, id="importing"),
        pytest.param({"query": SLOW_ROWS}, lambda db, job: phase(db, job) == "loading", id="loading"),
        pytest.param(
            {"query": "SELECT a, y FROM (" + ROWS + ") r WHERE pg_sleep(600) IS NOT NULL"},
            lambda db, job: phase(db, job) == "loading",
            id="in one long call",
        ),
        pytest.param({}, lambda db, job: steps(db, job) > 3, id="training"),
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
    wait_until(lambda: state(db, job) == "cancelled" and gone(db))
    assert reason(db, job) == "cancelled by pg_cancel_backend"


FEEDS = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pg_tensile worker' AND wait_event = 'PgSleep'"


@pytest.mark.parametrize("call", ["set_job_priority(%s, 5)", "tensile._notify(%s)", "tensile._notify_stop(%s)"])
def test_what_does_not_end_a_job_that_loads_does_not_disturb_it(
    db: Connection, wait_until: Wait, job_row: Row, call: str
) -> None:
    """The last one interrupts the query without a reason: the query is run again, and that is no other attempt."""
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
    wait_until(lambda: state(db, job) == "failed" and gone(db))
    row = job_row(db, job)
    assert (row["sqlstate"], row["error"]) == ("42704", 'model "m" was dropped')
    assert row["hint"]


# -- stopping and going on --------------------------------------------------------------------------------------------


def resumable(conn: Connection, name: str = "m", epochs: int = 40, **options: Any) -> int:
    """A job that takes some seconds, too short for a checkpoint if no option asks for it."""
    model = python_model(on_forward="time.sleep(0.005)")
    return submit(conn, name, model, epochs=epochs, batch_size=40, options=options)


def has_checkpoint(conn: Connection, job: int) -> bool:
    return value(conn, "SELECT count(*) FROM tensile.checkpoints WHERE job = %s AND meta IS NOT NULL", job) > 0


def epochs_done(conn: Connection, job: int) -> int:
    return value(conn, "SELECT coalesce(max(epoch), 0) FROM tensile.epoch_metrics WHERE job = %s", job)


def test_a_worker_that_is_stopped_leaves_a_checkpoint_and_the_job_goes_on(
    db: Connection, cluster: Any, wait_until: Wait, job_row: Row
) -> None:
    job = resumable(db)
    wait_until(lambda: epochs_done(db, job) >= 3)
    assert not has_checkpoint(db, job)
    first = worker_pid(db, job)
    interrupt(cluster, db, job, wait_until)
    assert reason(db, job) == "pg_tensile.database was changed"
    wait_until(lambda: worker_pid(db, job) not in (first, None), what="the next attempt")
    epoch = value(db, "SELECT (meta ->> 'epoch')::int FROM tensile.checkpoints WHERE job = %s", job)
    assert epoch >= 2
    wait_until(lambda: state(db, job) == "finished")
    row = job_row(db, job)
    assert (row["attempts"], row["retries"]) == (2, 0)
    assert epochs_done(db, job) == 40


def test_an_interrupted_job_ends_with_the_numbers_of_an_undisturbed_one(
    db: Connection, cluster: Any, wait_until: Wait
) -> None:
    undisturbed = resumable(db, "undisturbed", 12)
    wait_until(lambda: state(db, undisturbed) == "finished")
    disturbed = resumable(db, "disturbed", 12)
    wait_until(lambda: epochs_done(db, disturbed) >= 2)
    interrupt(cluster, db, disturbed, wait_until)
    wait_until(lambda: state(db, disturbed) == "finished")
    assert value(db, "SELECT attempts FROM tensile.jobs WHERE id = %s", disturbed) == 2
    numbers = "SELECT epoch, split, samples, loss, accuracy, f1 FROM tensile.epoch_metrics WHERE job = %s ORDER BY 1, 2"
    assert db.execute(numbers, (disturbed,)).fetchall() == db.execute(numbers, (undisturbed,)).fetchall()
    weights = (
        "SELECT data FROM tensile.model_weights w JOIN tensile.model_versions v ON v.id = w.version WHERE job = %s"
    )
    assert value(db, weights, disturbed) == value(db, weights, undisturbed)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_job_goes_on_after_the_server_was_stopped(
    fresh_cluster: Callable[..., Any], wait_until: Wait, mode: str
) -> None:
    cluster = fresh_cluster()
    with cluster.connect() as db:
        job = resumable(db, checkpoint_interval=0)
        wait_until(lambda: epochs_done(db, job) >= 3 and has_checkpoint(db, job))
    cluster.stop(mode)
    wait_until(lambda: not cluster.processes(), what="the end of every process")
    cluster.start()
    with cluster.connect() as db:
        wait_until(lambda: state(db, job) == "finished")
        attempts, retries, submitted = db.execute(
            "SELECT attempts, retries, started_at < pg_postmaster_start_time() FROM tensile.jobs WHERE id = %s", (job,)
        ).fetchone()
        assert (attempts, retries, submitted) == (2, 0, True)
        assert epochs_done(db, job) == 40


@pytest.mark.parametrize("moment", ["importing", "loading", "training"])
def test_a_terminated_worker_ends_its_job(db: Connection, wait_until: Wait, job_row: Row, moment: str) -> None:
    """While it loads it runs the query and cannot listen: PostgreSQL ends it, and the controller sees to the job."""
    job = submit(db, "m", MLP, epochs=FOREVER, query=SLOW_ROWS if moment == "loading" else ROWS)
    if moment == "importing":
        wait_until(lambda: executor_pid(db, job) is not None)
    else:
        wait_until(lambda: phase(db, job) == moment)
    first, executor = worker_pid(db, job), executor_pid(db, job)
    assert first is not None and executor is not None
    db.execute("SELECT pg_terminate_backend(%s)", (first,))
    wait_until(lambda: not alive(first) and not alive(executor), what="worker and executor end")
    wait_until(lambda: ended(db, job))
    row = job_row(db, job)
    assert (row["state"], row["reason"], row["attempts"]) == ("cancelled", TERMINATED, 1)
    assert value(db, "SELECT count(*) FROM tensile.checkpoints WHERE job = %s", job) == 0


# -- who hears of it --------------------------------------------------------------------------------------------------


def lines(cluster: Any) -> list[str]:
    """What the server's log says of jobs, without the varying numbers."""
    found = re.findall(r"LOG: +pg_tensile: (job .*)", cluster.log())
    return [re.sub(r"seconds=[0-9.]+", "seconds=S", line) for line in found]


def test_the_log_has_a_line_for_each_turn_of_a_job(
    fresh_cluster: Callable[..., Any], wait_until: Wait, job_row: Row
) -> None:
    cluster = fresh_cluster({"pg_tensile.max_retries": 1})
    with cluster.connect() as db:
        owner = f'owner="{db.info.user}"'
        register(db, "m")
        with db.transaction(force_rollback=True):
            submit(db, "m")
        good = submit(db, "m")
        assert value(db, "SELECT wait_for_job(%s)", good) == "finished"
        bad = submit(db, "bad", python_model(on_build="os._exit(3)"))
        wait_until(lambda: ended(db, bad))
        db.execute("SELECT tensile._log_job(%s)", ("pg_tensile: job 0 two\nlines",))
        told = submit(db, "m", epochs=FOREVER)
        wait_until(lambda: steps(db, told) > 0)
        db.execute("SELECT cancel_job(%s)", (told,))
        wait_until(lambda: ended(db, told))
        died = "executor exited with status 3"
        assert lines(cluster) == [
            f'job {good} submitted: model="m" {owner}',
            f'job {good} started: model="m" {owner} attempt=1',
            f'job {good} finished: model="m" {owner} seconds=S',
            f'job {bad} submitted: model="bad" {owner}',
            f'job {bad} started: model="bad" {owner} attempt=1',
            f'job {bad} interrupted: model="bad" {owner} attempt=1 reason="{died}"',
            f'job {bad} started: model="bad" {owner} attempt=2',
            f'job {bad} failed: model="bad" {owner} seconds=S sqlstate=58000 reason="{died}"',
            "job 0 two lines",
            f'job {told} submitted: model="m" {owner}',
            f'job {told} started: model="m" {owner} attempt=1',
            f'job {told} cancelled: model="m" {owner} seconds=S reason="{BY_CANCEL_JOB}"',
        ]
        cluster.configure({"pg_tensile.log_jobs": "off"})
        cluster.reload()
        wait_until(lambda: value(db, "SHOW pg_tensile.log_jobs") == "off")
        quiet = submit(db, "m")
        assert value(db, "SELECT wait_for_job(%s)", quiet) == "finished"
        assert not any(line.startswith(f"job {quiet} ") for line in lines(cluster)[1:])


def test_who_listens_hears_of_every_end_and_nothing_more(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster({"pg_tensile.max_retries": 0})
    with cluster.connect() as db:
        db.execute("CREATE ROLE anybody LOGIN; CREATE ROLE leaver LOGIN IN ROLE tensile_user")
        with cluster.connect(user="anybody") as listener:
            listener.execute("LISTEN pg_tensile")
            register(db, "m")
            with cluster.connect(user="leaver") as theirs:
                register(theirs, "theirs")
                with theirs.transaction():
                    dropped = submit(theirs, "theirs")
                    # before the controller hears of it
                    db.execute("ALTER ROLE leaver NOLOGIN")
            wait_until(lambda: ended(db, dropped))
            good = submit(db, "m")
            assert value(db, "SELECT wait_for_job(%s)", good) == "finished"
            dies = submit(db, "dies", python_model(on_build="os._exit(3)"))
            wait_until(lambda: ended(db, dies))
            killed = submit(db, "m", epochs=FOREVER, query=SLOW_ROWS)
            wait_until(lambda: phase(db, killed) == "loading" and value(db, FEEDS) == 1)
            db.execute("SELECT pg_terminate_backend(%s)", (worker_pid(db, killed),))
            wait_until(lambda: ended(db, killed))
            with db.transaction(force_rollback=True):
                db.execute("SELECT cancel_job(%s)", (submit(db, "m"),))
            with db.transaction():
                queued = submit(db, "m")
                db.execute("SELECT cancel_job(%s)", (queued,))
            heard = [json.loads(n.payload) for n in listener.notifies(timeout=10, stop_after=5)]
            assert heard == [
                {"job": dropped, "state": "failed"},
                {"job": good, "state": "finished"},
                {"job": dies, "state": "failed"},
                {"job": killed, "state": "cancelled"},
                {"job": queued, "state": "cancelled"},
            ]
            assert list(listener.notifies(timeout=0.5)) == []


def test_a_fast_stop_while_a_job_loads(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster()
    with cluster.connect() as db:
        job = submit(db, "m", MLP, query=SLOW_ROWS)
        wait_until(lambda: phase(db, job) == "loading")
    cluster.stop("fast")
    cluster.start()
    with cluster.connect() as db:
        wait_until(lambda: phase(db, job) == "loading", what="the job starts again")


def test_a_fast_stop_saves_what_no_checkpoint_had(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    """Stopped in the middle of its first epoch, without a checkpoint so far."""
    cluster = fresh_cluster({"pg_tensile.checkpoint_interval": 0})
    with cluster.connect() as db:
        job = submit(db, "m", python_model(on_forward="time.sleep(0.01)"), epochs=1, batch_size=1)
        wait_until(lambda: steps(db, job) >= 20)
        assert not has_checkpoint(db, job)
    cluster.stop("fast")
    cluster.start()
    with cluster.connect() as db:
        wait_until(lambda: has_checkpoint(db, job) or state(db, job) == "finished")
        assert value(db, "SELECT (meta ->> 'step')::int FROM tensile.checkpoints WHERE job = %s", job) >= 20
        wait_until(lambda: state(db, job) == "finished")


def test_a_queued_job_survives_a_restart(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster({"pg_tensile.max_jobs": 1})
    with cluster.connect() as db:
        blocker = submit(db, "blocker", MLP, epochs=FOREVER)
        wait_until(lambda: state(db, blocker) == "running")
        queued = submit(db, "queued", MLP, priority=9)
    cluster.restart()
    with cluster.connect() as db:
        wait_until(lambda: state(db, queued) == "finished")


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
def test_data_that_cannot_be_trained_on_fails_the_job_and_says_why(
    db: Connection, wait_until: Wait, job_row: Row, query: str, sqlstate: str, message: str
) -> None:
    job = submit(db, "m", MLP, query=query, options={"task": "classification"})
    wait_until(lambda: ended(db, job))
    row = job_row(db, job)
    assert (row["state"], row["attempts"]) == ("failed", 1)
    assert row["sqlstate"] == sqlstate
    assert message in row["error"]
    assert row["hint"] or row["detail"]
    wait_until(lambda: gone(db))
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


def test_a_role_dropped_while_its_job_is_queued(
    fresh_cluster: Callable[..., Any], wait_until: Wait, job_row: Row
) -> None:
    cluster = fresh_cluster({"pg_tensile.max_jobs": 1})
    with cluster.connect() as db:
        blocker = submit(db, "blocker", MLP, epochs=FOREVER)
        wait_until(lambda: state(db, blocker) == "running")
        db.execute("CREATE ROLE leaver LOGIN IN ROLE tensile_user")
        with cluster.connect(user="leaver") as theirs:
            register(theirs, "theirs")
            job = submit(theirs, "theirs")
        db.execute("DROP ROLE leaver")
        db.execute("SELECT cancel_job(%s)", (blocker,))
        wait_until(lambda: ended(db, job))
        row = job_row(db, job)
        assert (row["state"], row["sqlstate"]) == ("failed", "42704")
        assert 'role "leaver" was dropped' in row["error"]
