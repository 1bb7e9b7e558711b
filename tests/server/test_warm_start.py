"""The option start: training begins with the weights of the deployed version, with its preprocessing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import sweep
from tests.server.refusals import refused
from tests.server.support import FOREVER, Connection, Wait, finish, interrupt, settle, state, submit, value

ROWS = "SELECT i / 100.0 AS x, 'c' || i % {kinds} AS c, {slope} * i / 100.0 + i % 3 AS y FROM generate_series(1, 200) i"
OLD = ROWS.format(kinds=3, slope=2)
NEW = ROWS.format(kinds=5, slope=4)  # other means, and categories that are new
TABULAR = {"type": "tabular", "members": 2, "projection": 16, "hidden": 16, "layers": 1}
STILL = {"learning_rate": 1e-9, "epochs": 1}  # weights hardly change


def train(conn: Connection, query: str, **arguments: Any) -> int:
    """Train the model m on a regression; return the finished job."""
    options = {"refit": False, "average_weights": False} | arguments.pop("options", {})
    small = {"target": "y", "epochs": 30, "batch_size": 20, "learning_rate": 0.01}
    job = submit(conn, "m", query=query, **small | arguments, options=options)  # type: ignore[arg-type]
    finish(conn, job)
    return job


def answers(conn: Connection) -> list[float]:
    return [row[0] for row in conn.execute("SELECT prediction FROM predict_rows('m', %s)", (OLD,)).fetchall()]


def warnings(conn: Connection, job: int) -> str:
    return str(value(conn, "SELECT array_to_string(warnings, '; ') FROM tensile.jobs WHERE job = %s", job) or "")


@pytest.fixture(scope="module")
def contents(cluster: Any) -> bytes:
    """The file of a version that has been trained on the old rows."""
    with cluster.connect() as conn:
        train(conn, OLD, architecture={"type": "mlp", "hidden": [4]}, epochs=1)
        exported = bytes(value(conn, "SELECT export_model('m')"))
        sweep(conn)
    return exported


@pytest.fixture
def old(db: Connection, contents: bytes) -> Connection:
    """A connection with the deployed version 1 of the model m."""
    db.execute("SELECT import_model(%b, 'm')", (contents,))
    return db


@pytest.mark.parametrize(
    ("architecture", "policy"),
    [pytest.param(TABULAR, "joint", marks=pytest.mark.long), ({"type": "mlp", "hidden": [8]}, "none")],
    ids=["tabular", "mlp"],
)
def test_training_begins_with_the_deployed_version(db: Connection, architecture: dict[str, Any], policy: str) -> None:
    """With steps that are next to nothing, the answers stay those of the version before, on data of other means and
    categories; without the option they are others.

    The first case is long: its network is captured and planned."""
    first = train(db, OLD, architecture=architecture, options={"start": "deployed"})  # there is none: no warning
    assert "training did not begin" not in warnings(db, first)
    before = answers(db)
    job = train(db, NEW, options={"start": "deployed"}, policy=policy, **STILL)
    assert answers(db) == pytest.approx(before, abs=1e-3)
    assert "training did not begin" not in warnings(db, job)
    assert value(db, "SELECT start_version IS NOT NULL FROM tensile.jobs WHERE job = %s", job)
    train(db, NEW, **STILL)
    assert answers(db) != pytest.approx(before, abs=1e-1)


@pytest.mark.parametrize(
    ("query", "arguments", "reason"),
    [
        (f"SELECT *, x * x AS z FROM ({OLD}) r", {}, "the features are different: z"),
        (f"SELECT x::text AS x, c, y FROM ({OLD}) r", {}, 'the feature "x" has another type'),
        (f"SELECT x, c, y > 3 AS y FROM ({OLD}) r", {}, "the target is different"),
        (OLD, {"options": {"quantiles": [0.1, 0.9]}}, "the target's transformation or quantiles"),
    ],
)
def test_weights_that_do_not_suit_are_not_used(
    old: Connection, query: str, arguments: dict[str, Any], reason: str
) -> None:
    options = {"start": "deployed"} | arguments.get("options", {})
    job = train(old, query, options=options, epochs=1)
    assert f"training did not begin with the weights of version 1: {reason}" in warnings(old, job)


def test_another_architecture_starts_from_scratch(old: Connection) -> None:
    old.execute("""SELECT register_model('m', '{"type": "mlp", "hidden": [5]}', replace => true)""")
    assert "the architecture is different" in warnings(old, train(old, OLD, options={"start": "deployed"}, epochs=1))


def test_a_job_goes_on_from_where_it_began(
    cluster: Any, db: Connection, old: Connection, contents: bytes, wait_until: Wait
) -> None:
    """An attempt begins with the version of the first attempt, although another one is deployed by now."""
    db.execute("SELECT import_model(%b, 'm')", (contents,))
    options = {"start": "deployed", "checkpoint_interval": 0, "keep": "last"}
    job = submit(db, "m", query=NEW, target="y", epochs=FOREVER, options=options)
    saved = "SELECT count(*) > 0 FROM tensile_internal.checkpoints WHERE job = %s AND meta IS NOT NULL"
    wait_until(lambda: value(db, saved, job))
    start = value(db, "SELECT start_version FROM tensile.jobs WHERE job = %s", job)
    interrupt(cluster, db, job, wait_until)
    db.execute("SELECT deploy_model('m', 2)")
    wait_until(lambda: state(db, job) == "running")
    assert value(db, "SELECT start_version FROM tensile.jobs WHERE job = %s", job) == start
    epoch = value(db, "SELECT (meta->>'epoch')::int FROM tensile_internal.checkpoints WHERE job = %s", job)
    later = "SELECT (meta->>'epoch')::int > %s FROM tensile_internal.checkpoints WHERE job = %s AND meta IS NOT NULL"
    wait_until(lambda: value(db, later, epoch, job))
    db.execute("SELECT cancel_job(%s)", (job,))
    settle(db, wait_until, job)


def test_wrong_values(db: Connection) -> None:
    wrong = {"start": "best"}
    refused("22023", 'key "start"', "deployed", lambda: train(db, OLD, architecture=TABULAR, options=wrong))
    both = {"start": "deployed", "ranks": 2}
    refused("22023", "a job with ranks cannot begin with", "ranks", lambda: train(db, OLD, options=both))
