"""Splits, weights, transforms and categories from SQL; errors before anything is trained, and warnings of jobs."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from tests.server.explaining import explain, explained
from tests.server.support import Connection, finish, register, submit, value

# A series that grows: the newest rows differ from all others. Groups of 10 rows share a number.
SERIES = """
    CREATE TABLE series AS
    SELECT timestamp '2024-01-01' + i * interval '1 hour' AS at, i / 10 AS shop, 'shop ' || i / 10 AS shop_name,
           sin(i) AS x, cos(sin(i)) AS z, CASE WHEN i % 3 = 0 THEN 'rare' ELSE 'usual' END AS label, i % 4 AS heavy,
           exp(3 + sin(i) * 2) AS amount, CASE WHEN i > 5 THEN i END AS partial
    FROM generate_series(1, 400) i
"""
QUERY = "SELECT x, z, {columns}, {target} FROM series"


@pytest.fixture
def series(db: Connection) -> Connection:
    db.execute(SERIES)
    register(db, "m")
    return db


def query(columns: str, target: str = "amount") -> str:
    return QUERY.format(columns=columns, target=target)


def train(conn: Connection, columns: str, target: str = "amount", **arguments: Any) -> int:
    job = submit(conn, "m", query=query(columns, target), target=target, **arguments)
    finish(conn, job)
    return job


def split_of(conn: Connection, job: int) -> dict[str, Any]:
    split: dict[str, Any] = value(conn, "SELECT training -> 'split' FROM tensile.model_versions WHERE job = %s", job)
    return split


def samples(conn: Connection, job: int) -> dict[str, int]:
    rows = conn.execute("SELECT DISTINCT split, samples FROM tensile_internal.epochs WHERE job = %s", (job,)).fetchall()
    return dict(rows)


def warnings_of(conn: Connection, job: int) -> list[str]:
    return value(conn, "SELECT warnings FROM tensile.jobs WHERE job = %s", job) or []


# ---- splits ----


@pytest.mark.long
def test_the_newest_rows_validate(series: Connection) -> None:
    job = train(series, "at", split_by="at", validation=0.25)
    expected = value(series, "SELECT min(at) FROM (SELECT at FROM series ORDER BY at DESC LIMIT 100) s")
    assert split_of(series, job) == {
        "by": "time",
        "column": "at",
        "threshold": expected.isoformat(),
        "training_rows": 300,
        "validation_rows": 100,
    }
    assert samples(series, job) == {"training": 300, "validation": 100}
    assert value(series, "SELECT count(predict('m', s)) FROM series s") == 400  # the time is a feature
    lines = explain(series, query=query("at"), target="amount", split_by="at", validation=0.25)
    assert any(f'by time: rows validate from {expected.isoformat()} on (column "at")' in line for line in lines)


@pytest.mark.long
@pytest.mark.parametrize("column", ["shop", "shop_name"])
def test_groups_stay_together(series: Connection, column: str) -> None:
    job = train(series, column, split_by=column)
    split = split_of(series, job)
    assert (split["by"], split["column"], split["threshold"]) == ("group", column, None)
    assert split["training_rows"] + split["validation_rows"] == 400 and 70 <= split["validation_rows"] <= 90
    features = value(series, "SELECT preprocessing -> 'features' FROM tensile.model_versions WHERE job = %s", job)
    assert [feature["name"] for feature in features] == ["x", "z"]
    assert explained(series, query=query(column), target="amount", split_by=column)["split"] == split


def test_rows_of_the_validation_query_validate(series: Connection) -> None:
    condition = " WHERE shop >= 30"
    text = query("label")
    queries: dict[str, Any] = {"query": f"{text} WHERE shop < 30", "validation_query": text + condition}
    job = submit(series, "m", target="amount", **queries)
    finish(series, job)
    validation = value(series, f"SELECT count(*) FROM series{condition}")
    assert split_of(series, job) == {
        "by": "query",
        "column": None,
        "threshold": None,
        "training_rows": 400 - validation,
        "validation_rows": validation,
    }
    assert samples(series, job)["validation"] == validation


@pytest.mark.parametrize(
    ("columns", "arguments", "message"),
    [
        ("partial", {"split_by": "partial"}, 'the split column "partial" is null in 5 of 400 rows'),
        ("1 AS g", {"split_by": "g"}, 'all 400 rows have the same group "g"'),
        ("date '2024-01-01' AS d", {"split_by": "d"}, 'all 400 rows have the same time "d"'),
        ("ARRAY[x] AS a", {"split_by": "a"}, 'the split column "a" is an array'),
        ("CASE WHEN x > 0 THEN 1 END AS w", {"options": {"weight": "w"}}, 'the weight column "w" is null in'),
        ("x AS w", {"options": {"weight": "w"}}, 'the weight column "w" is negative in'),
        (
            "'nan'::float8 AS w",
            {"options": {"weight": "w"}},
            'the weight column "w" is infinite or not a number in 400',
        ),
        ("0 AS w", {"options": {"weight": "w"}}, 'the weight column "w" is 0 in all training rows'),
        ("label AS w", {"options": {"weight": "w"}}, 'the weight column "w" has the type text'),
        ("label", {"options": {"weight": "v"}}, 'the query has no weight column "v"'),
        ("label", {"options": {"class_weight": "balanced"}}, "class_weight balances the labels of a classification"),
        (
            "label",
            {"options": {"task": "classification", "target_transform": "log"}},
            "target_transform log is for a regression",
        ),
    ],
)
def test_data_that_cannot_be_used_fail_the_job_and_the_explanation(
    series: Connection, columns: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(psycopg.Error, match=message) as caught:
        train(series, columns, **arguments)
    assert caught.value.diag.message_hint
    with pytest.raises(psycopg.Error, match=message):
        explain(series, query=query(columns), target="amount", **arguments)


def test_a_constant_target_is_an_error(series: Connection) -> None:
    text = "SELECT x, 7.5 AS y FROM series"
    job = submit(series, "m", query=text, target="y")
    with pytest.raises(psycopg.Error, match=r'the target "y" is 7\.5 in all') as caught:
        finish(series, job)
    assert "nothing to learn" in (caught.value.diag.message_hint or "")
    with pytest.raises(psycopg.Error, match=r'the target "y" is 7\.5 in all'):
        explain(series, query=text, target="y")


# ---- weights, transforms, categories ----


def test_rows_count_by_their_weights(series: Connection) -> None:
    options = {"weight": "heavy", "class_weight": "balanced"}
    job = train(series, "heavy", target="label", policy="joint", options=options)
    features = value(series, "SELECT preprocessing -> 'features' FROM tensile.model_versions WHERE job = %s", job)
    assert "heavy" not in [feature["name"] for feature in features]
    assert value(series, "SELECT count(predict('m', s)) FROM series s") == 400


@pytest.mark.long
@pytest.mark.parametrize("transform", ["log", "quantile", "auto"])
def test_transformed_targets_are_predicted_in_their_own_unit(series: Connection, transform: str) -> None:
    options = {"target_transform": transform}
    job = train(series, "label", epochs=60, learning_rate=0.01, batch_size=32, options=options)
    target = value(series, "SELECT preprocessing -> 'target' FROM tensile.model_versions WHERE job = %s", job)
    assert target["transform"] in ("log", "quantile", None) and (
        transform == "auto" or target["transform"] == transform
    )
    assert value(series, "SELECT regr_r2(predict('m', s), s.amount) FROM series s") > 0.9
    assert value(series, "SELECT abs(avg(predict('m', s)) / avg(s.amount) - 1) FROM series s") < 0.2


def test_a_column_of_many_distinct_texts_is_hashed(series: Connection) -> None:
    series.execute(
        "CREATE TABLE visits AS SELECT 'https://example.org/' || i AS url, i AS y, sin(i) AS x"
        " FROM generate_series(1, 80000) i"
    )
    job = submit(series, "m", query="SELECT url, x, y FROM visits", target="y", epochs=1, batch_size=4096)
    finish(series, job, "180 s")
    feature = value(series, "SELECT preprocessing #> '{features,0}' FROM tensile.model_versions WHERE job = %s", job)
    assert feature["categories"] == [] and feature["buckets"] == 1024
    before = value(series, "SELECT coalesce(sum(unknown_categories), 0) FROM tensile.predictions")
    assert value(series, """SELECT predict('m', '{"url": "https://example.org/new", "x": 0.5}'::jsonb)""") is not None
    assert value(series, "SELECT coalesce(sum(unknown_categories), 0) FROM tensile.predictions") == before
    assert any('column "url" is different in nearly every row' in warning for warning in warnings_of(series, job))


# ---- warnings ----


@pytest.mark.long
def test_suspicious_data_are_warned_about(series: Connection) -> None:
    columns = "at, 7 AS seven, row_number() OVER () AS id, log(amount) AS leak"
    warnings = warnings_of(series, train(series, columns))
    expected = (
        'the split is random, but "at" is a time: rows from the same time are on both sides',
        'column "seven" is constant in the training rows',
        'column "id" is different in nearly every row',
        "enough to predict the target nearly without error",
    )
    for part in expected:
        assert any(part in warning for warning in warnings), (part, warnings)
    assert explained(series, query=query(columns), target="amount")["warnings"] == warnings


def test_a_model_that_is_no_better_than_its_baseline_is_warned_of(series: Connection) -> None:
    """What the version, the history and an evaluation have beside its metrics is what AVG says."""
    text = "SELECT x, heavy, hashfloat8(amount) / 1e6::float8 AS noise FROM series"
    job = submit(series, "m", query=text, target="noise", epochs=2)
    finish(series, job)
    (warning,) = warnings_of(series, job)
    assert " better than the mean of the training rows: rmse " in warning
    stored = value(series, "SELECT metrics -> 'baseline' FROM tensile.model_versions WHERE job = %s", job)
    columns = "baseline_rmse, baseline_r2"
    assert series.execute(f"SELECT {columns} FROM tensile.job_history WHERE job = %s", (job,)).fetchone() == (
        stored["rmse"],
        stored["r2"],
    )
    assert value(series, "SELECT baseline FROM tensile.model_status") == stored["rmse"]
    mean = value(series, "SELECT (preprocessing->'baseline'->>'mean')::float8 FROM tensile.model_versions")
    evaluation = f"SELECT metric, baseline FROM evaluate_model('m', {text!r}) WHERE quantile IS NULL"
    beside: dict[str, float | None] = dict(series.execute(evaluation).fetchall())
    error = f"SELECT sqrt(avg((noise - {mean!r}) ^ 2)) FROM ({text}) s"
    assert beside["rmse"] == pytest.approx(value(series, error)) and beside["rows"] is None


def test_ordinary_data_are_not(series: Connection) -> None:
    text = "SELECT x + random() * 0 AS x, label, heavy, 2 * x + sin(heavy + 3 * cos(heavy * 9 + shop)) AS y FROM series"
    job = submit(series, "m", query=text, target="y", epochs=30, learning_rate=0.01)
    finish(series, job)
    assert warnings_of(series, job) == []
