"""deploy_model, rollback_model and the table of deployments. Versions are rows without weights."""

from __future__ import annotations

import threading
from collections.abc import Callable

import psycopg
import pytest

from tests.server.cast import current_user
from tests.server.refusals import refused
from tests.server.support import Connection, value


@pytest.fixture
def model(db: Connection) -> str:
    """A model with five versions, none of which is deployed."""
    db.execute("""SELECT register_model('m', '{"type": "mlp"}')""")
    db.execute(
        "INSERT INTO tensile_internal.model_versions (model_id, version, task, preprocessing, architecture,"
        " weight_bytes)"
        " SELECT id, v, 'regression', '{}', architecture, 0 FROM tensile_internal.models, generate_series(1, 5) v"
        " WHERE name = 'm'"
    )
    return "m"


def deploy(db: Connection, *versions: int) -> None:
    for version in versions:
        db.execute("SELECT deploy_model('m', %s)", (version,))


def rollback(db: Connection) -> int:
    return int(value(db, "SELECT rollback_model('m')"))


def test_deployments_say_who_what_when_and_why(db: Connection, model: str) -> None:
    db.execute("SELECT deploy_model('m', 2, 'the first that works')")
    db.execute("SELECT deploy_model('m', 2, 'again')")  # changes nothing
    db.execute("SELECT deploy_model(model => 'm', version => 3)")
    assert value(db, "SELECT rollback_model('m', reason => 'too slow')") == 2
    rows = db.execute(
        "SELECT version, decision, reason, decided_by, previous_version, ended_at IS NULL, metric, job"
        " FROM tensile.deployments ORDER BY id"
    ).fetchall()
    assert rows == [
        (2, "deployed", "the first that works", "postgres", None, False, None, None),
        (3, "deployed", None, "postgres", 2, False, None, None),
        (2, "rolled back", "too slow", "postgres", 3, True, None, None),
    ]
    ends = "SELECT bool_and(ended_at = next) FROM (SELECT ended_at, lead(decided_at) OVER (ORDER BY id) AS next FROM"
    assert value(db, f"{ends} tensile.deployments) d WHERE next IS NOT NULL")
    assert value(db, "SELECT deployed_version FROM tensile.models WHERE model = 'm'") == 2


def test_rollbacks_go_back_one_deployment_each(db: Connection, model: str) -> None:
    deploy(db, 1, 2, 3)
    assert rollback(db) == 2
    deploy(db, 4)
    assert rollback(db) == 2  # not 3, from which there was a return
    assert rollback(db) == 1
    refused("55000", 'model "m" has no earlier deployment', "deploy_model", lambda: rollback(db))
    deploy(db, 5)
    assert rollback(db) == 1


def test_versions_that_were_dropped_are_passed_over(db: Connection, model: str) -> None:
    deploy(db, 1, 2, 1, 3)
    db.execute("SELECT drop_model_version('m', 2)")
    assert rollback(db) == 1
    refused("55000", "no earlier deployment", "dropped", lambda: rollback(db))


def test_nothing_to_return_to(db: Connection, model: str) -> None:
    refused("55000", "no earlier deployment", "deploy_model", lambda: rollback(db))
    refused("42704", 'model "none" does not exist', "", lambda: db.execute("SELECT rollback_model('none')"))
    refused("42704", "has no version 9", "It has: 1", lambda: deploy(db, 9))


def test_deployments_at_the_same_time_follow_each_other(
    db: Connection, model: str, connect: Callable[..., Connection]
) -> None:
    sessions = [connect() for _ in range(4)]
    ready = threading.Barrier(len(sessions))

    def work(session: Connection, version: int) -> None:
        ready.wait()
        for _ in range(10):
            session.execute("SELECT deploy_model('m', %s)", (version,))

    workers = [threading.Thread(target=work, args=(session, place + 1)) for place, session in enumerate(sessions)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert value(db, "SELECT count(*) FROM tensile.deployments WHERE ended_at IS NULL") == 1
    chain = "SELECT bool_and(previous_version IS NOT DISTINCT FROM before AND follows IS NOT DISTINCT FROM follow)"
    windows = "lag(version) OVER w AS before, lag(id) OVER w AS follow"
    assert value(db, f"{chain} FROM (SELECT *, {windows} FROM tensile.deployments WINDOW w AS (ORDER BY id)) d")
    in_force = value(db, "SELECT version FROM tensile.deployments WHERE ended_at IS NULL")
    assert value(db, "SELECT deployed_version FROM tensile.models WHERE model = 'm'") == in_force


def test_a_deployment_that_is_rolled_back_with_its_transaction_leaves_nothing(db: Connection, model: str) -> None:
    deploy(db, 1)
    with db.transaction(force_rollback=True):
        deploy(db, 2)
    assert value(db, "SELECT array_agg(version) FROM tensile.deployments") == [1]


def test_deployments_are_visible_as_the_model_is(
    db: Connection, model: str, roles: Callable[..., str], connect: Callable[..., Connection]
) -> None:
    deploy(db, 1, 2)
    other = connect(roles("other"))
    count = "SELECT count(*) FROM tensile.deployments"
    assert value(other, count) == 0
    for call in ("rollback_model('m')", "deploy_model('m', 1, 'mine')"):
        refused("42501", 'must be owner of model "m"', "postgres", lambda: other.execute(f"SELECT {call}"))  # noqa: B023
    db.execute("SELECT grant_model('m', %s)", (current_user(other),))
    assert value(other, count) == 2
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        other.execute("UPDATE tensile_internal.deployments SET reason = 'mine'")
    db.execute("SELECT drop_model('m')")
    assert value(db, count) == 0
