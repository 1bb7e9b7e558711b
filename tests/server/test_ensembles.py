"""Models of several members: trees and lines that are fitted at once, and a network, which takes longer.

The default architecture is an ensemble; its first version predicts while the network is trained.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import psycopg
import pytest

from pg_tensile.client import TrainingFailed, connect
from tests.server.refusals import refused
from tests.server.support import (
    FOREVER,
    Connection,
    Wait,
    children,
    finish,
    interrupt,
    phase,
    settle,
    state,
    submit,
    value,
)

ROWS = """
    SELECT i AS id, i * 7919 % 1000 / 1000.0 AS a, 'c' || i % 4 AS c, CASE WHEN i % 9 > 0 THEN i * 31 % 100 END AS b,
           sin(i * 7919 % 1000 / 150.0) + i % 4 + (i * 31 % 100) / 50.0 AS y
    FROM generate_series(1, {rows}) i
"""
MANY = f"SELECT a, c, b, y FROM ({ROWS.format(rows=2600)}) r"  # more than are cross-validated
FEW = f"SELECT a, c, b, y FROM ({ROWS.format(rows=60)}) r"
VERSIONS = "SELECT version, architecture FROM tensile.model_versions WHERE model = 'm' ORDER BY version"
BEST: dict[str, Any] = {"keep": "best"}


def train(conn: Connection, query: str = MANY, architecture: Any = None, **arguments: Any) -> int:
    options = BEST | arguments.pop("options", {})
    given: dict[str, Any] = {"query": query, "target": "y", "epochs": 2, "batch_size": 100} | arguments
    return submit(conn, "m", architecture, **given, options=options)


def predictions(conn: Connection, query: str = FEW) -> list[float]:
    return [row[0] for row in conn.execute("SELECT prediction FROM predict_rows('m', %s)", (query,)).fetchall()]


def types(conn: Connection) -> list[Any]:
    """Return the members of the only version, or its type."""
    ((_, architecture),) = conn.execute(VERSIONS).fetchall()
    return architecture.get("members") or [architecture["type"]]


def first_version(conn: Connection, job: int) -> int:
    return int(value(conn, "SELECT wait_for_first_version(%s, '2 min')", job))


def test_a_first_version_predicts_until_a_better_one_replaces_it(db: Connection, wait_until: Wait) -> None:
    """Predictions that are kept are made anew, and evaluations of the first version go with it."""
    job = train(db, epochs=FOREVER)
    assert first_version(db, job) == 1
    with connect(db.info.dsn) as client:
        assert client.job(job).first_version(progress=False, timeout=0) == 1
    assert types(db) == ["boosted"]
    wait_until(lambda: value(db, "SELECT phase FROM tensile.progress WHERE job = %s", job) == "training")
    assert value(db, "SELECT stage FROM tensile.progress WHERE job = %s", job) == "best"
    before = predictions(db)
    keyed = f"SELECT row_number() OVER () AS id, r.* FROM ({FEW}) r"
    refresh = "SELECT predicted FROM materialize_predictions('m', %s, 'kept', ARRAY['id'])"
    assert value(db, refresh, keyed) == 60
    assert value(db, refresh, keyed) == 0
    db.execute("SELECT evaluate_model('m', %s)", (FEW,))
    assert value(
        db, "SELECT r2 > 0.9 FROM (SELECT value AS r2 FROM evaluate_model('m', %s) WHERE metric = 'r2') e", FEW
    )
    db.execute("SELECT cancel_job(%s)", (job,))
    settle(db, wait_until, job)
    assert state(db, job) == "cancelled"
    assert predictions(db) == before
    finish(db, train(db))
    assert [row[0] for row in db.execute(VERSIONS).fetchall()] == [1, 2]
    assert value(db, "SELECT deployed_version FROM tensile.models WHERE model = 'm'") == 2
    reasons = [row[0] for row in db.execute("SELECT reason FROM tensile.deployments ORDER BY decided_at").fetchall()]
    assert reasons == [
        f"first version of job {job}",
        f"first version of job {job + 1}",
        f"trained by job {job + 1}",
    ]
    assert value(db, refresh, keyed) == 60


@pytest.mark.parametrize(
    ("stages", "expected", "course"),
    [("first", ["boosted"], "^Its trees are those after round "), ("best", None, "he network is that after epoch ")],
)
def test_a_job_can_end_after_one_stage(db: Connection, stages: str, expected: list[str] | None, course: str) -> None:
    job = train(db, options={"stages": stages})
    finish(db, job)
    assert expected is None or types(db) == expected
    assert value(db, "SELECT tensile_worker._course(%s) ~ %s", job, course)
    assert value(db, "SELECT count(*) FROM tensile.deployments") == 1
    assert value(db, "SELECT rmse < 0.5 FROM tensile.job_history WHERE job = %s", job)


@pytest.mark.parametrize("max_time", ["4 seconds", "50 milliseconds"])
def test_the_time_counts_over_all_stages(db: Connection, max_time: str) -> None:
    """It is up during the training of the network or, on a busy machine as well, before that."""
    job = train(db, epochs=FOREVER, max_time=max_time)
    finish(db, job)
    members = value(db, "SELECT training -> 'members' FROM tensile.model_versions WHERE job = %s", job)
    assert members[0]["type"] == "boosted"
    assert value(db, "SELECT stopped FROM tensile.jobs WHERE job = %s", job) == "max_time"


@pytest.mark.parametrize(
    "architecture", [{"type": "boosted", "rounds": 60}, {"type": "linear"}], ids=["boosted", "linear"]
)
def test_a_fitted_model_does_what_others_do(db: Connection, architecture: dict[str, Any]) -> None:
    """Intervals, attributions, importance, evaluation, drift, and a file that can be imported."""
    job = train(db, architecture=architecture, learning_rate=None)
    finish(db, job)
    course = {"boosted": "Its trees are those after round ", "linear": "Its coefficients are those with the best of "}
    assert value(db, "SELECT tensile_worker._course(%s)", job).startswith(course[architecture["type"]])
    assert types(db) == [architecture["type"]]
    row = '\'{"a": 0.5, "c": "c2", "b": 7}\'::jsonb'
    interval = db.execute(f"SELECT * FROM predict_interval('m', {row}, 0.9)").fetchone()
    assert interval is not None
    lower, prediction, upper = interval
    assert lower <= prediction <= upper
    assert value(db, f"SELECT predict('m', {row}, '2MB')") == pytest.approx(prediction, rel=1e-5)
    parts = db.execute(f"SELECT feature, attribution FROM explain_prediction('m', {row})").fetchall()
    assert {name for name, _ in parts} >= {"a", "b", "c"}
    ranking = db.execute("SELECT feature FROM feature_importance('m', %s)", (MANY,)).fetchall()
    assert ranking[0][0] == "c"
    assert value(db, "SELECT value FROM evaluate_model('m', %s) WHERE metric = 'r2'", MANY) > 0.5
    before = predictions(db)
    db.execute("SELECT import_model(export_model('m'), 'copy')")
    copied = db.execute("SELECT prediction FROM predict_rows('copy', %s)", (FEW,)).fetchall()
    assert [item[0] for item in copied] == before


def test_few_rows_are_cross_validated(db: Connection) -> None:
    job = train(db, FEW, batch_size=None)
    finish(db, job)
    metrics = value(db, "SELECT metrics FROM tensile.model_versions WHERE job = %s", job)
    assert metrics["validation"]["samples"] == 60
    assert metrics["cross_validation"]["folds"] == 5
    assert metrics["cross_validation"]["spread"]["rmse"] > 0
    history = value(db, "SELECT rmse FROM tensile.job_history WHERE job = %s", job)
    assert history == pytest.approx(metrics["validation"]["rmse"])
    assert "linear" in {
        member["type"] for member in value(db, "SELECT training->'members' FROM tensile.model_versions")
    }


def test_the_gate_compares_the_last_version_with_the_one_before_the_job(db: Connection) -> None:
    finish(db, train(db, options={"stages": "first"}))
    gate = {"deploy": "if_better", "gate": {"query": FEW, "metric": "rmse"}}
    worse = MANY.replace(" y FROM", " -y AS y FROM")
    job = train(db, worse, options=gate)
    first_version(db, job)
    assert value(db, "SELECT deployed_version FROM tensile.models WHERE model = 'm'") == 1
    finish(db, job)
    assert value(db, "SELECT deployed_version FROM tensile.models WHERE model = 'm'") == 1
    decision = "SELECT decision, version, previous_version FROM tensile.deployments WHERE job = %s"
    assert db.execute(decision, (job,)).fetchall() == [("kept", 2, 1)]


def test_a_first_version_may_be_dropped_while_its_job_goes_on(cluster: Any, db: Connection, wait_until: Wait) -> None:
    """It is not deployed. The job's result then has a number of its own, also in the decision of the gate."""
    finish(db, train(db, options={"stages": "first"}))
    query = f"SELECT g.* FROM ({FEW}) g, pg_advisory_xact_lock_shared(7)"
    with cluster.connect() as other, other.transaction():
        other.execute("SELECT pg_advisory_xact_lock(7)")
        job = train(db, options={"deploy": "if_better", "gate": {"query": query, "metric": "rmse"}})
        assert first_version(db, job) == 2
        wait_until(lambda: phase(db, job) == "comparing")
        db.execute("SELECT drop_model_version('m', 2)")
    finish(db, job)
    result = value(db, "SELECT version FROM tensile.jobs WHERE job = %s", job)
    assert result == 3
    assert value(db, "SELECT version FROM tensile.deployments WHERE job = %s", job) == result


def test_a_gate_lets_a_first_version_pass_where_there_is_none(db: Connection) -> None:
    gate = {"deploy": "if_better", "gate": {"query": FEW, "metric": "rmse"}}
    job = train(db, options=gate)
    assert first_version(db, job) == 1
    finish(db, job)
    decisions = db.execute("SELECT decision, version, previous_version FROM tensile.deployments ORDER BY decided_at")
    assert decisions.fetchall() == [("deployed", 1, None), ("deployed", 1, 1)]


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_an_interrupted_job_keeps_its_first_version(cluster: Any, db: Connection, wait_until: Wait, how: str) -> None:
    """The next attempt fits the trees again, and makes no other first version."""
    job = train(db, epochs=FOREVER)
    first_version(db, job)
    wait_until(lambda: value(db, "SELECT phase FROM tensile.progress WHERE job = %s", job) == "training")
    created = value(db, "SELECT created_at FROM tensile.model_versions WHERE job = %s", job)
    if how == "restart":
        interrupt(cluster, db, job, wait_until)
    else:
        worker = value(db, "SELECT pid FROM tensile.progress WHERE job = %s", job)
        for child in children(worker):
            os.kill(child, signal.SIGKILL)
        wait_until(lambda: value(db, "SELECT attempts FROM tensile.jobs WHERE job = %s", job) == 2)
    wait_until(lambda: value(db, "SELECT phase FROM tensile.progress WHERE job = %s", job) == "training")
    assert value(db, "SELECT created_at FROM tensile.model_versions WHERE job = %s", job) == created
    db.execute("SELECT cancel_job(%s)", (job,))
    settle(db, wait_until, job)


def test_members_that_do_not_fit_are_left_out(db: Connection) -> None:
    job = train(db, memory_budget="600kB", policy="joint", batch_size=20)
    finish(db, job)
    warnings = value(db, "SELECT array_to_string(warnings, '; ') FROM tensile.jobs WHERE job = %s", job)
    assert "the model consists of the network alone" in warnings
    assert types(db) == ["tabular"]


def test_what_has_no_plan_is_not_explained(db: Connection) -> None:
    db.execute("""SELECT register_model('m', '{"type": "boosted"}')""")
    call = "SELECT explain_training('m', %s, 'y')"
    refused("22023", "follows no plan", "networks", lambda: db.execute(call, (FEW,)))


def test_waiting_for_the_first_version_of_a_job_that_fails(db: Connection) -> None:
    job = train(db, "SELECT i AS a, 1 / (i - 50) AS y FROM generate_series(1, 100) i")
    with pytest.raises(psycopg.errors.DivisionByZero):
        first_version(db, job)
    with connect(db.info.dsn) as client, pytest.raises(TrainingFailed, match="division by zero"):
        client.job(job).first_version(progress=False)
