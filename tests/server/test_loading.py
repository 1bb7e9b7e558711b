"""Loading the library: preloading, versions and settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from tests.conftest import sweep
from tests.server.stage import (
    BOTH,
    SCHEDULER,
    processes,
    running_in,
    terminate,
    train,
)
from tests.server.support import Connection, Wait, register, state, value


def test_without_preload_create_extension_gives_a_hint(fresh_cluster: Callable[..., Any]) -> None:
    cluster = fresh_cluster({"shared_preload_libraries": ""}, extension=False)
    with cluster.connect() as conn, pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as caught:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
    assert "shared_preload_libraries" in str(caught.value)
    assert caught.value.diag.message_hint is not None and "restart" in caught.value.diag.message_hint


def test_library_and_extension_have_one_version(db: Connection) -> None:
    version = value(db, "SELECT extversion FROM pg_extension WHERE extname = 'pg_tensile'")
    assert value(db, "SELECT tensile_worker._version()") == version


VERSION = "UPDATE pg_extension SET extversion = %s WHERE extname = 'pg_tensile'"


@pytest.fixture
def other_version(module_cluster: Any, wait_until: Wait) -> Iterator[Any]:
    """A cluster whose extension has another version than its library, as before ALTER EXTENSION UPDATE."""
    with module_cluster.connect() as conn:
        wait_until(lambda: running_in(conn, "postgres") == BOTH)
        register(conn, "m")
        conn.execute(VERSION, ("0.0.1",))
    yield module_cluster
    with module_cluster.connect() as conn:
        conn.execute(VERSION, (value(conn, "SELECT tensile_worker._version()"),))
        conn.execute("SELECT tensile_internal._notify(0)")
        sweep(conn)


@pytest.mark.parametrize(
    "call",
    [
        "train_model('m', 'SELECT 1.0 AS x, 2.0 AS y', 'y')",
        "explain_training('m', 'SELECT 1.0 AS x, 2.0 AS y', 'y')",
        "predict('m', '{1}'::float8[])",
        "(SELECT count(*) FROM predict_rows('m', 'SELECT 1.0 AS x'))",
    ],
)
def test_another_version_of_the_extension_is_refused(other_version: Any, call: str) -> None:
    with other_version.connect() as conn:
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as caught:
            conn.execute(f"SELECT {call}")
        version = value(conn, "SELECT tensile_worker._version()")
        assert f'"pg_tensile" has version 0.0.1, but the server\'s library has version {version}' in str(caught.value)
        hint = caught.value.diag.message_hint or ""
        assert "ALTER EXTENSION pg_tensile UPDATE" in hint and "make install" in hint
        conn.execute(VERSION, (version,))
        conn.execute("SELECT tensile_internal._notify(0)")  # as ALTER EXTENSION UPDATE does
        try:
            conn.execute(f"SELECT {call}")
        except psycopg.Error as error:
            assert "version 0.0.1" not in str(error)


def test_processes_wait_for_their_version(other_version: Any, wait_until: Wait) -> None:
    other_version.stop("fast")
    other_version.start()
    complaint = 'LOG: +extension "pg_tensile" has version 0.0.1, but'
    wait_until(lambda: len(re.findall(complaint, other_version.log())) == len(BOTH))
    with other_version.connect() as conn:
        for memory in ("1GB", "2GB"):  # each CREATE EXTENSION and reload wakes the launcher
            other_version.alter({"pg_tensile.device_memory": memory})
            conn.execute("SELECT tensile_internal._notify(0)")
            value(conn, "SELECT pg_sleep(0.5)")
        assert not running_in(conn, "postgres")
        assert len(re.findall(complaint, other_version.log())) == len(BOTH), "one line for each process"
        version = value(conn, "SELECT tensile_worker._version()")
        conn.execute(VERSION, (version,))
        conn.execute("SELECT tensile_internal._notify(0)")
        wait_until(lambda: running_in(conn, "postgres") == BOTH, what="the processes start")
    other_version.alter({"pg_tensile.device_memory": None})


@pytest.mark.long
def test_python_files_of_another_version_are_refused(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    """The versions differ between make install and the restart."""
    cluster = fresh_cluster()
    with cluster.connect() as conn:
        asleep = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = ANY(%s) AND wait_event_type = 'Extension'"
        wait_until(lambda: value(conn, asleep, list(BOTH)) == len(BOTH), what="the processes have checked the version")
        register(conn, "m")
        conn.execute(
            "CREATE OR REPLACE FUNCTION tensile_worker._version() RETURNS text LANGUAGE sql AS $$SELECT '0.0.1'$$"
        )
        job = train(conn)
        wait_until(lambda: state(conn, job) == "failed")
        sqlstate, error, hint = conn.execute("SELECT sqlstate, error, hint FROM tensile.jobs").fetchone()
        assert sqlstate == "55000" and error.endswith("the server's library has 0.0.1") and "restart" in hint
        terminate(conn, SCHEDULER)
        wait_until(lambda: "ERROR:  plpy.Error: the Python files of pg_tensile have" in cluster.log())
        wait_until(lambda: SCHEDULER not in processes(conn))


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:1234", "", "CPU "])
def test_a_device_that_cannot_exist_is_refused(db: Connection, device: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
        db.execute(f"ALTER SYSTEM SET pg_tensile.device = '{device}'")
    assert "cuda:N" in (caught.value.diag.message_detail or "")


def test_settings_are_documented_and_reserved(db: Connection) -> None:
    rows = db.execute("SELECT name, short_desc, context FROM pg_settings WHERE name LIKE 'pg\\_tensile.%'").fetchall()
    assert all(row[1].startswith(("Sets ", "Logs ")) for row in rows)
    of_sessions = {
        f"pg_tensile.{name}"
        for name in ("policy", "predict_batching", "predict_in_session", "predict_spin", "predict_timeout")
    }
    assert {row[0] for row in rows if row[2] == "user"} == of_sessions
    assert {row[0] for row in rows if row[2] == "postmaster"} == {"pg_tensile.max_jobs", "pg_tensile.plan_events"}
    with pytest.raises(psycopg.errors.InvalidName):
        db.execute("SET pg_tensile.no_such_setting = 1")
