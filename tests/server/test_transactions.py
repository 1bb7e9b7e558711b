"""Notifications sent at commit, and tensile_worker._wait_for_change, which waits for them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.server.stage import (
    LAUNCHER,
    processes,
    train,
)
from tests.server.support import Connection, Wait, register, value

CLUSTER_SETTINGS = {"pg_tensile.database": "", "max_prepared_transactions": 2}


@pytest.fixture
def quiet(module_cluster: Any, wait_until: Wait) -> Iterator[Any]:
    """A cluster without working processes, so that only the test changes anything."""
    with module_cluster.connect() as conn:
        wait_until(lambda: set(processes(conn)) == {LAUNCHER})
        conn.execute("CREATE TABLE t (x float8, y float8)")
        yield module_cluster
        conn.execute("DROP TABLE t; DELETE FROM tensile_internal.models")


class Sleeper(threading.Thread):
    """A session in tensile_worker._wait_for_change; `seconds` is how long it slept."""

    def __init__(self, conn: Connection, timeout_ms: int) -> None:
        super().__init__(daemon=True)
        self._conn = conn
        self._timeout_ms = timeout_ms
        self.seconds: float | None = None
        self.pid = conn.info.backend_pid
        conn.execute("SELECT tensile_worker._wait_for_change(0)")
        self.start()

    def run(self) -> None:
        start = time.monotonic()
        self._conn.execute("SELECT tensile_worker._wait_for_change(%s)", (self._timeout_ms,))
        self.seconds = time.monotonic() - start

    def sleeps(self, conn: Connection) -> bool:
        return bool(value(conn, "SELECT wait_event_type = 'Extension' FROM pg_stat_activity WHERE pid = %s", self.pid))


def test_a_commit_wakes_waiting_sessions_and_a_rollback_does_not(quiet: Any, wait_until: Wait) -> None:
    with quiet.connect() as conn, quiet.connect() as other:
        sleeper = Sleeper(other, 60_000)
        wait_until(lambda: sleeper.sleeps(conn))
        with conn.transaction(force_rollback=True):
            conn.execute("SELECT tensile_internal._notify(7)")
        with conn.transaction():
            with conn.transaction(force_rollback=True):
                conn.execute("SELECT tensile_internal._notify(7)")
            conn.execute("SELECT 1")
        sleeper.join(0.3)
        assert sleeper.seconds is None
        with conn.transaction():
            with conn.transaction():
                conn.execute("SELECT tensile_internal._notify(7)")
            sleeper.join(0.3)
            assert sleeper.seconds is None, "not before the commit"
        sleeper.join(2)
        assert sleeper.seconds is not None


def test_a_change_between_polling_and_waiting_is_not_missed(quiet: Any) -> None:
    with quiet.connect() as conn, quiet.connect() as other:
        conn.execute("SELECT tensile_worker._wait_for_change(60000)")  # the first call of a session returns at once
        other.execute("SELECT tensile_internal._notify(7)")
        conn.execute("SET statement_timeout = '30 s'; SELECT tensile_worker._wait_for_change(60000)")
        start = time.monotonic()
        conn.execute("SELECT tensile_worker._wait_for_change(200)")
        assert time.monotonic() - start >= 0.2, "the change is reported twice"


def test_waiting_for_a_change_can_be_cancelled(quiet: Any, wait_until: Wait) -> None:
    with quiet.connect() as conn, quiet.connect() as other:
        other.execute("SELECT tensile_worker._wait_for_change(0)")
        timer = threading.Timer(0.2, other.cancel)
        timer.start()
        with pytest.raises(psycopg.errors.QueryCanceled):
            other.execute("SELECT tensile_worker._wait_for_change(60000)")
        timer.join()
        assert value(other, "SELECT 1") == 1
        assert value(conn, "SELECT 1") == 1


def test_submitted_here_follows_savepoints(db: Connection) -> None:
    for model in "abc":
        register(db, model)

    def here(job: int) -> bool:
        return bool(value(db, "SELECT tensile_worker._submitted_here(%s)", job))

    with db.transaction(force_rollback=True):
        first = train(db, "a")
        assert here(first) and not here(first + 1)
        with db.transaction(force_rollback=True):
            second = train(db, "b")
            assert here(second)
        assert here(first) and not here(second)
        with db.transaction():
            third = train(db, "c")
        assert here(third)
    assert not here(first) and not here(third)


def test_prepare_transaction_is_refused_after_a_change(quiet: Any) -> None:
    with quiet.connect(autocommit=False) as conn:
        for statement in ("SELECT tensile_internal._notify(7)", "SELECT register_model('n', '{\"type\": \"mlp\"}')"):
            conn.execute(statement)
            with pytest.raises(psycopg.errors.FeatureNotSupported, match="cannot PREPARE"):
                conn.execute("PREPARE TRANSACTION 'p'")
            conn.rollback()
        conn.execute("INSERT INTO t VALUES (1, 2)")
        conn.execute("PREPARE TRANSACTION 'p'")
        conn.rollback()
        conn.autocommit = True
        conn.execute("COMMIT PREPARED 'p'")


def test_models_are_served_in_one_database_only(quiet: Any) -> None:
    """Versions have the same ids in other databases, so the predictor would answer with another model."""
    feature = {"name": "x", "kind": "numeric", "type": "float8"}
    preprocessing = json.dumps({"task": "regression", "target": {"name": "y"}, "features": [feature]})
    with quiet.connect() as conn:
        register(conn, "m")
        conn.execute(
            "INSERT INTO tensile_internal.model_versions (model_id, version, task, preprocessing, architecture,"
            " weight_bytes) SELECT id, 1, 'regression', %s, '{}', 1 FROM tensile_internal.models",
            (preprocessing,),
        )
        conn.execute("UPDATE tensile_internal.models SET deployed_version = 1")
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as caught:
            conn.execute("SELECT predict('m', '{1}'::float8[])")
        assert 'does not work in database "postgres"' in str(caught.value)
