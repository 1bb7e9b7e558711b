"""Changes of a job's state in the server's log and in notifications."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.support import (
    BY_CANCEL_JOB,
    FEEDS,
    FOREVER,
    SLOW_ROWS,
    Row,
    Wait,
    ended,
    phase,
    python_model,
    register,
    steps,
    submit,
    value,
    worker_pid,
)


def lines(cluster: Any) -> list[str]:
    """Return the lines on jobs in the server's log, without varying numbers."""
    messages = re.findall(r"LOG: +pg_tensile: (job .*)", cluster.log())
    return [re.sub(r"seconds=[0-9.]+", "seconds=S", line) for line in messages]


@pytest.mark.long
def test_the_log_has_a_line_for_each_turn_of_a_job(
    fresh_cluster: Callable[..., Any], wait_until: Wait, job_row: Row
) -> None:
    """Takes seconds: three jobs end in three ways, one after two attempts."""
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
        db.execute("SELECT tensile_internal._log_job(%s)", ("pg_tensile: job 0 two\nlines",))
        told = submit(db, "m", epochs=FOREVER)
        wait_until(lambda: steps(db, told) > 0)
        db.execute("SELECT cancel_job(%s)", (told,))
        wait_until(lambda: ended(db, told))
        died = "trainer exited with status 3"
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


@pytest.mark.long
def test_every_end_of_a_job_is_notified_and_nothing_else(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
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
                    # before the controller is notified
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
