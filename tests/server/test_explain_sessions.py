"""Sessions of explain_training: cancellation, job slots, isolation and leftovers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from tests.server.cast import among_the_tables, current_user, denied, denied_within
from tests.server.explaining import backend, explain, explained, explaining
from tests.server.support import (
    FOREVER,
    ROWS,
    Connection,
    Wait,
    alive,
    children,
    phase,
    python_model,
    register,
    submit,
    value,
)

# -- ends -------------------------------------------------------------------------------------------------------------


SLOW_QUERY = f"SELECT q.*, pg_sleep(1) IS NULL AS slow FROM ({ROWS}) q"


@pytest.mark.parametrize("busy_with", ["query", "model"])
def test_cancel_ends_the_trainer_at_once(
    db: Connection, cluster: Any, connect: Callable[..., Connection], wait_until: Wait, busy_with: str
) -> None:
    marker = cluster.folder / f"building-{time.monotonic_ns()}"
    register(db, "m", python_model(on_build=f"once({str(marker)!r})\ntime.sleep(1000)" if busy_with == "model" else ""))
    conn = connect()
    conn.execute(f"SET search_path = {value(db, 'SELECT current_schema()')}, public")
    pid = backend(conn)
    with explaining(conn, query=SLOW_QUERY if busy_with == "query" else ROWS) as errors:
        trainer = wait_until(lambda: next(iter(children(pid)), None))
        event = "SELECT wait_event = 'PgSleep' FROM pg_stat_activity WHERE pid = %s"
        wait_until(lambda: value(db, event, pid) if busy_with == "query" else marker.exists())
        db.execute("SELECT pg_cancel_backend(%s)", (pid,))
    (error,) = errors
    assert isinstance(error, psycopg.errors.QueryCanceled)
    assert "user request" in str(error)
    wait_until(lambda: not alive(trainer))
    assert value(conn, "SELECT 1") == 1


def test_statement_timeout(db: Connection) -> None:
    register(db, "m", python_model(on_build="time.sleep(1000)"))
    db.execute("SET statement_timeout = '1s'")
    with pytest.raises(psycopg.errors.QueryCanceled, match="statement timeout"):
        explain(db)
    db.execute("RESET statement_timeout")
    assert not children(backend(db))


def test_the_trainer_ends_with_its_session(
    db: Connection, connect: Callable[..., Connection], wait_until: Wait
) -> None:
    register(db, "m", python_model(on_build="time.sleep(1000)"))
    conn = connect()
    pid = backend(conn)
    with explaining(conn) as errors:
        trainer = wait_until(lambda: next(iter(children(pid)), None))
        db.execute("SELECT pg_terminate_backend(%s)", (pid,))
    assert len(errors) == 1
    wait_until(lambda: not alive(trainer))


@pytest.mark.long
def test_several_sessions_explain_at_once(db: Connection, connect: Callable[..., Connection]) -> None:
    register(db, "m")
    sessions = [connect() for _ in range(3)]
    explanations: list[list[str]] = []
    threads = [threading.Thread(target=lambda conn=conn: explanations.append(explain(conn))) for conn in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(explanations) == 3
    assert len({lines[0] for lines in explanations}) == 1


@pytest.mark.long
def test_an_explanation_takes_a_job_slot_and_gives_it_back(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster({"pg_tensile.max_jobs": 1})
    with cluster.connect() as db, cluster.connect() as conn:
        running = submit(db, "busy", python_model(), epochs=FOREVER)
        register(db, "m", python_model(on_build="time.sleep(1000)"))
        register(db, "wrong", python_model(on_build="raise ValueError('no')"))
        wait_until(lambda: phase(db, running) == "training")
        with pytest.raises(psycopg.errors.InsufficientResources, match="no job slot is free") as caught:
            explain(conn)
        assert "pg_tensile.max_jobs" in (caught.value.diag.message_hint or "")
        assert (caught.value.diag.message_detail or "").startswith("explain_training takes one of the 1 slots")
        db.execute("SELECT cancel_job(%s)", (running,))
        for _ in range(2):  # an error frees the slot

            def refused() -> bool:
                try:
                    explain(conn, "wrong")
                except psycopg.errors.InsufficientResources:
                    return False  # the job's worker is exiting
                except psycopg.Error as error:
                    assert "no" in str(error)
                return True

            wait_until(refused)
        pid = backend(conn)
        with explaining(conn) as errors:
            wait_until(lambda: next(iter(children(pid)), None))
            waits = submit(db, "waits", python_model())
            with cluster.connect() as other, pytest.raises(psycopg.errors.InsufficientResources):
                explain(other)
            assert value(db, "SELECT state FROM tensile.jobs WHERE job = %s", waits) == "queued"
            assert value(db, "SELECT count(*) FROM tensile_worker._progress()") == 0
            db.execute("SELECT pg_terminate_backend(%s)", (pid,))
        assert len(errors) == 1
        assert value(db, "SELECT wait_for_job(%s, '60 s')", waits) == "finished", "the slot is free again"


# -- attacks ----------------------------------------------------------------------------------------------------------


def test_sessions_cannot_start_a_trainer_with_their_own_spec(db: Connection, grantee: Connection) -> None:
    spec = Jsonb({"architecture": {"type": "python", "source": "import os; os.abort()"}, "options": {}})
    run = sql.SQL("SELECT tensile_internal._session_run({}, '/tmp')").format(spec)
    explain = """SELECT tensile_internal._explain_training(0, '{"model": "m"}', '', '{}')"""
    for function, call in (("_session_run", run), ("_explain_training", explain)):
        denied(partial(grantee.execute, call), "permission denied for schema tensile_internal")
        with among_the_tables(db, current_user(grantee)):
            denied_within(db, call, f"permission denied for function {function}")
    for private in ("tensile_worker._session_wait(-1, 0, false)", "tensile_worker._session_feed(0)"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            grantee.execute(f"SELECT {private}")


@pytest.mark.parametrize(
    ("attempt", "sqlstate"),
    [
        ("tensile_worker._session_wait(-1, 0, false)", "42501"),
        ("tensile_worker._session_feed(3)", "42501"),
        ("explain_training('m', 'SELECT 1 AS a, 2 AS y', 'y')", "55000"),
    ],
)
def test_the_query_of_an_explanation_cannot_use_what_the_explanation_may(
    grantee: Connection, attempt: str, sqlstate: str
) -> None:
    body = sql.Literal(f"BEGIN PERFORM {attempt}; RETURN 1; END")
    grantee.execute(sql.SQL("CREATE FUNCTION attempt() RETURNS int LANGUAGE plpgsql AS {}").format(body))
    with pytest.raises(psycopg.Error) as caught:
        explain(grantee, query=f"SELECT attempt() AS z, q.* FROM ({ROWS}) q")
    assert caught.value.sqlstate == sqlstate


@pytest.mark.long
def test_others_jobs_are_not_shown(db: Connection, grantee: Connection, wait_until: Wait) -> None:
    """The sums include other roles' jobs without naming them."""
    job = submit(db, "secret_model", {"type": "mlp", "hidden": [8]}, epochs=FOREVER)
    wait_until(lambda: value(db, "SELECT count(*) FROM tensile.epoch_metrics WHERE job = %s", job))
    explanation = explained(grantee)
    db.execute("SELECT cancel_job(%s)", (job,))
    assert explanation["admission"]["running"] == 1
    assert "secret_model" not in json.dumps(explanation)


def test_nothing_is_left_in_the_file_system(db: Connection, cluster: Any) -> None:
    register(db, "m")
    explain(db, policy="none")
    assert cluster.leftovers(sockets=False) == []
