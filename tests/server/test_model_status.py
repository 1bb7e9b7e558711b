"""tensile.model_status: the deployed version of each model, when it is trained again, and who sees what of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.server.cast import Cast, current_user
from tests.server.support import Connection, register, value

METRICS = {"epoch": 3, "training": {"rmse": 1.5, "log_loss": 0.2}, "validation": {"rmse": 2.5, "log_loss": 0.4}}


def status(conn: Connection, model: str = "late") -> dict[str, Any]:
    cursor = conn.execute("SELECT * FROM tensile.model_status WHERE model = %s", (model,))
    names = [column.name for column in cursor.description or ()]
    rows = cursor.fetchall()
    assert len(rows) <= 1
    return dict(zip(names, rows[0], strict=True)) if rows else {}


def deploy(
    db: Connection, model: str, task: str = "regression", metrics: Any = METRICS, job: int | None = None
) -> None:
    """Give the model a version, and let predictions use it."""
    version = value(
        db,
        "INSERT INTO tensile_internal.model_versions (model_id, version, job, task, preprocessing, architecture,"
        " metrics, rows, weight_bytes)"
        " SELECT m.id, 1 + count(v), %s, %s, '{}', '{}', %s, 400, 8 FROM tensile_internal.models m"
        " LEFT JOIN tensile_internal.model_versions v ON v.model_id = m.id"
        " WHERE m.name = %s GROUP BY m.id RETURNING version",
        *(job, task, Jsonb(metrics), model),
    )
    db.execute("SELECT deploy_model(%s, %s)", (model, version))


def test_a_model_without_a_version_has_a_row(db: Connection) -> None:
    register(db, "fresh")
    row = status(db, "fresh")
    assert (row.pop("model"), row.pop("owner")) == ("fresh", "postgres")
    assert set(row.values()) == {None}


@pytest.mark.parametrize(
    ("task", "metrics", "expected"),
    [
        ("regression", METRICS, ("rmse", 2.5, "validation")),
        ("binary", METRICS, ("log_loss", 0.4, "validation")),
        ("multiclass", METRICS, ("log_loss", 0.4, "validation")),
        (
            "binary",
            METRICS | {"validation": {"log_loss": 0.4, "calibrated_log_loss": 0.3}},
            ("log_loss", 0.3, "validation"),
        ),
        ("binary", METRICS | {"validation": None}, ("log_loss", 0.2, "training")),
        ("regression", METRICS | {"validation": {}}, ("rmse", None, "validation")),
        ("regression", None, ("rmse", None, None)),
    ],
)
def test_the_metric_is_that_of_the_epoch_that_was_kept(
    db: Connection, task: str, metrics: Any, expected: tuple[Any, ...]
) -> None:
    register(db, "late")
    deploy(db, "late", task, metrics)
    row = status(db)
    assert (row["metric"], row["value"], row["split"]) == expected
    assert (row["deployed_version"], row["task"], row["rows"]) == (1, task, 400)


def test_it_is_about_the_deployed_version(db: Connection) -> None:
    register(db, "late")
    deploy(db, "late")
    deploy(db, "late", metrics=METRICS | {"validation": {"rmse": 7.0}, "baseline": {"rmse": 9.0}})
    row = status(db)
    assert (row["deployed_version"], row["value"], row["baseline"]) == (2, 7.0, 9.0)
    db.execute("SELECT rollback_model('late')")
    row = status(db)
    assert (row["deployed_version"], row["value"], row["baseline"]) == (1, 2.5, None)
    assert row["deployed_at"] == value(db, "SELECT max(decided_at) FROM tensile.deployments")


def test_it_says_when_a_model_is_trained_again_and_by_which_job(db: Connection) -> None:
    db.execute("CREATE TABLE orders AS SELECT i::float8 AS x, i::float8 AS y FROM generate_series(1, 50) i")
    register(db, "late")
    query = "'late', 'SELECT * FROM orders', 'y'"
    db.execute(f"SELECT schedule_training({query}, every => '1 day', rows => 1000, source => 'orders', drift => 0.25)")
    row = status(db)
    assert row["next_training"] == value(db, "SELECT next_run FROM tensile_internal.schedules")
    assert row["schedule"] == "every 1 day, 1000 new rows of orders, drift above 0.25" and row["job"] is None
    db.execute("SELECT unschedule_training('late')")
    db.execute(f"SELECT schedule_training({query}, drift => 0.25)")
    row = status(db)
    assert (row["next_training"], row["schedule"]) == (None, "drift above 0.25")
    db.execute("SELECT unschedule_training('late')")
    assert status(db)["schedule"] is None
    with db.transaction(force_rollback=True):
        job = value(db, f"SELECT train_model({query})")
        assert status(db)["job"] == job


def test_who_sees_what(db: Connection, play: Cast) -> None:
    """A model with whoever has a grant on it; the warnings of its job, its schedule and drift with the owner only."""
    db.execute("UPDATE tensile_internal.jobs SET warnings = '{secret}', owner = %s", (current_user(play.alice),))
    db.execute("UPDATE tensile_internal.model_versions SET job = %s, metrics = %s", (play.job, Jsonb(METRICS)))
    db.execute("INSERT INTO tensile_internal.drift_alarms VALUES (%s, 'x', 0.5, 0.2)", (play.version,))
    play.alice.execute("SELECT deploy_model('late', 1)")
    sensitive = ("warnings", "drift", "drifted_column", "job")
    assert status(play.mallory) == {}
    for conn in (play.alice, play.bob):
        row = status(conn)
        assert (row["warnings"], row["drift"], row["drifted_column"]) == (["secret"], 0.5, "x")
        assert row["job"] == play.job
    play.alice.execute("SELECT grant_model('late', %s)", (current_user(play.mallory),))
    row = status(play.mallory)
    assert row["deployed_version"] == 1 and all(row[name] is None for name in sensitive)


def test_hundreds_of_models_are_read_by_indexes(db: Connection, play: Cast) -> None:
    """No relation but the models themselves is read as a whole for each of them."""
    db.execute(
        "INSERT INTO tensile_internal.models (name, owner, architecture) SELECT 'm' || i, %s, '{}'"
        " FROM generate_series(1, 300) i",
        (current_user(play.alice),),
    )
    db.execute(
        "INSERT INTO tensile_internal.model_versions (model_id, version, task, preprocessing, architecture,"
        " weight_bytes)"
        " SELECT m.id, v, 'binary', '{}', '{}', 8 FROM tensile_internal.models m, generate_series(1, 20) v"
        " WHERE m.name LIKE 'm%'"
    )
    db.execute("UPDATE tensile_internal.models SET deployed_version = 20 WHERE name LIKE 'm%'")
    db.execute("ANALYZE tensile_internal.models; ANALYZE tensile_internal.model_versions")
    try:
        plan = [
            line
            for (line,) in play.alice.execute("EXPLAIN (ANALYZE, COSTS off, TIMING off) TABLE tensile.model_status")
        ]
        assert value(play.alice, "SELECT count(*) FROM tensile.model_status WHERE deployed_version = 20") == 300
        scans = [line for line in plan if re.search(r"Seq Scan on (model_versions|jobs|deployments)", line)]
        assert all("loops=1)" in line or "never executed" in line for line in scans), plan
    finally:
        db.execute("DELETE FROM tensile_internal.models WHERE name LIKE 'm%'")
        db.execute("ANALYZE tensile_internal.models; ANALYZE tensile_internal.model_versions")
