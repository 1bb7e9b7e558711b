"""Names that train_model has registered itself: a training that ends before its first epoch leaves none behind."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conftest import sweep
from tests.server.refusals import refused
from tests.server.support import (
    ENDLESS_ROWS,
    FOREVER,
    ROWS,
    Connection,
    Wait,
    ended,
    finish,
    state,
    submit,
    value,
)
from tests.server.tuning import finished, tune

CLUSTER_SETTINGS = {"pg_tensile.max_jobs": 1}
NO_TARGET = "SELECT 1.0::float8 AS x, NULL::float8 AS y"
NAMES = "SELECT array_agg(model ORDER BY model) FROM tensile.models"
LOCK = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"


@pytest.fixture(scope="module")
def server(module_cluster: Any) -> Any:
    return module_cluster


@pytest.fixture
def conn(server: Any) -> Iterator[Connection]:
    with server.connect() as connection:
        yield connection
    with server.connect() as connection:
        sweep(connection)
        connection.execute("DELETE FROM tensile_internal.tunings")


def failed(conn: Connection, name: str) -> int:
    """Submit a job that fails because it has no target, and wait for its error."""
    job = submit(conn, name, query=NO_TARGET)
    refused("22000", "is null in all 1 rows", "", lambda: finish(conn, job))
    return job


def waiting_job(conn: Connection, wait_until: Wait, name: str) -> int:
    """Return a queued job of an unregistered model, behind one that reads its rows."""
    reading = submit(conn, "reading", query=ENDLESS_ROWS)
    wait_until(lambda: state(conn, reading) == "running")
    return submit(conn, name)


def test_a_failed_training_leaves_its_job_but_no_name(conn: Connection) -> None:
    job = failed(conn, "misspelt")
    assert value(conn, NAMES) is None
    row = conn.execute("SELECT model_id, model, state FROM tensile.jobs WHERE job = %s", (job,)).fetchone()
    assert row == (None, "misspelt", "failed")
    assert conn.execute("SELECT model, state FROM tensile.job_history WHERE job = %s", (job,)).fetchone() == (
        "misspelt",
        "failed",
    )
    finish(conn, submit(conn, "misspelt"))
    assert value(conn, NAMES) == ["misspelt"]


def test_a_registered_name_stays_and_its_architecture_is_open_again(conn: Connection) -> None:
    conn.execute("SELECT register_model('registered', NULL, 'a description')")
    failed(conn, "registered")
    model = conn.execute("SELECT architecture, architecture_reason, description FROM tensile.models").fetchone()
    assert model == (None, None, "a description")


def test_cancelled_before_the_first_epoch(conn: Connection, wait_until: Wait) -> None:
    queued = waiting_job(conn, wait_until, "queued")
    assert value(conn, "SELECT cancel_job(%s)", queued) is True
    assert value(conn, NAMES) == ["reading"]
    reading = value(conn, "SELECT job FROM tensile.jobs WHERE model = 'reading'")
    assert value(conn, "SELECT cancel_job(%s)", reading) is True
    wait_until(lambda: ended(conn, reading))
    assert value(conn, NAMES) is None
    assert value(conn, "SELECT array_agg(model ORDER BY job) FROM tensile.jobs") == ["reading", "queued"]


def test_an_epoch_keeps_the_name(conn: Connection, wait_until: Wait) -> None:
    job = submit(conn, "begun", epochs=FOREVER)
    wait_until(lambda: value(conn, "SELECT count(*) > 0 FROM tensile_internal.epochs WHERE job = %s", job))
    conn.execute("SELECT cancel_job(%s)", (job,))
    wait_until(lambda: ended(conn, job))
    assert value(conn, NAMES) == ["begun"]
    failed(conn, "begun")
    assert value(conn, NAMES) == ["begun"]


@pytest.mark.parametrize(
    "use",
    [
        "SELECT grant_model('used', 'public', 'predict')",
        "SELECT set_model_retention('used', 3)",
        "SELECT set_model_memory_budget('used', '100MB')",
        "SELECT set_model_owner('used', 'postgres')",
        f"SELECT schedule_training('used', $q${ROWS}$q$, 'y', every => '1 day')",
    ],
)
def test_what_refers_to_a_name_keeps_it(conn: Connection, wait_until: Wait, use: str) -> None:
    queued = waiting_job(conn, wait_until, "used")
    conn.execute(use)
    conn.execute("SELECT cancel_job(%s)", (queued,))
    assert state(conn, queued) == "cancelled"
    assert value(conn, NAMES) == ["reading", "used"]


def test_a_tuning_that_fails_leaves_no_name(conn: Connection) -> None:
    tuning = tune(conn, "tuned", query=NO_TARGET, trials=1, parallel=1, space={"dropout": [0.1]})
    refused("22000", "is null in all 1 rows", "", lambda: finished(conn, tuning))
    assert value(conn, NAMES) is None
    assert value(conn, "SELECT model FROM tensile_internal.tunings WHERE id = %s", tuning) == "tuned"
    conn.execute("SELECT register_model('tuned')")


def test_a_tuning_that_is_cancelled_leaves_no_name(conn: Connection, wait_until: Wait) -> None:
    tuning = tune(conn, "tuned", query=ENDLESS_ROWS, space={"dropout": [0.1]})
    running = "SELECT count(*) FROM tensile.jobs WHERE tuning = %s AND state = 'running'"
    wait_until(lambda: value(conn, running, tuning) == 1)
    conn.execute("SELECT cancel_tuning(%s)", (tuning,))
    wait_until(lambda: value(conn, "SELECT count(*) = 0 FROM tensile.jobs WHERE ended_at IS NULL"))
    wait_until(lambda: value(conn, NAMES) is None)


@pytest.mark.parametrize("end", ["SELECT cancel_job(%(job)s)", "SELECT drop_model('twice')"])
def test_a_second_training_waits_for_the_end_of_the_first(
    server: Any, conn: Connection, wait_until: Wait, end: str
) -> None:
    """It is told that the name is gone, instead of referring to a model that is gone."""
    job = waiting_job(conn, wait_until, "twice")
    with server.connect() as second, ThreadPoolExecutor(1) as thread:
        with conn.transaction():
            conn.execute(end, {"job": job})
            submitted = thread.submit(submit, second, "twice")
            with server.connect() as watching:
                wait_until(lambda: value(watching, LOCK, second.info.backend_pid) == 1, what="the second session waits")
        refused("55006", 'model "twice" has just been dropped', "again", submitted.result)
        again = submit(second, "twice")
        assert value(second, "SELECT model_id IS NOT NULL FROM tensile.jobs WHERE job = %s", again)


def test_a_transaction_that_refers_to_a_name_keeps_it_and_holds_no_job_up(
    server: Any, conn: Connection, wait_until: Wait
) -> None:
    job = waiting_job(conn, wait_until, "twice")
    with server.connect() as second, second.transaction():
        second.execute(
            "SELECT FROM tensile_internal.models WHERE name = 'twice' FOR KEY SHARE"
        )  # as train_model begins
        assert value(conn, "SELECT cancel_job(%s)", job) is True
        assert value(conn, NAMES) == ["reading", "twice"]
        again = submit(second, "twice")
    assert value(conn, "SELECT model FROM tensile.jobs WHERE job = %s AND model_id IS NOT NULL", again) == "twice"


def test_the_name_of_another_role_is_free_after_its_training_has_failed(server: Any, conn: Connection) -> None:
    conn.execute("CREATE ROLE trainer LOGIN; GRANT tensile_user TO trainer")
    with server.connect(user="trainer") as theirs:
        failed(theirs, "free")
    conn.execute("SELECT register_model('free')")
    sweep(conn)
    conn.execute("DROP ROLE trainer")
