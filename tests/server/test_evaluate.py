"""evaluate_model and feature_importance: results, groups, refusals, privileges and the end of their trainer.

Small models are trained once for the file; metrics are compared with those of scikit-learn on what predict_rows
returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import psycopg
import pytest

from tests.server.explaining import backend
from tests.server.recording import child_python
from tests.server.refusals import refused
from tests.server.shared import SharedServer, configure
from tests.server.support import Connection, Wait, children, python_model, register, submit, value

TABLE = """
    CREATE TABLE flights AS
    SELECT i AS id, (i % 24)::int2 AS hour, nullif(i % 700, 13)::int AS distance, (i % 100) / 10.0 AS wind,
           i % 3 = 0 AS weekend, '2024-01-01'::timestamptz + i * interval '1 hour' AS departure,
           (ARRAY['UA', 'AA', 'B6', 'DL'])[i % 4 + 1] AS carrier, ARRAY[i % 7, i % 5, i % 3] AS recent,
           1 + (i % 24) * 2.0 + (i * i % 101) / 10.0 AS delay,
           CASE WHEN i % 24 + i * i % 7 > 15 THEN 'late' ELSE 'on time' END AS verdict, i % 24 / 8 AS part
    FROM generate_series(1, 9000) i
"""
FEATURES = "hour, distance, wind, weekend, departure, carrier, recent"
TRAINED = {  # name: features, target, options
    "delay": (FEATURES, "delay", {}),
    "verdict": (FEATURES, "verdict", {}),
    "part": ("hour, carrier", "part", {"task": "classification"}),
}


@pytest.fixture(scope="module")
def server(shared_server: SharedServer) -> SharedServer:
    """The worker's cluster with trained models."""
    with shared_server.connect() as conn:
        conn.execute(TABLE)
        conn.execute("GRANT SELECT ON flights TO PUBLIC")
        jobs = []
        for name, (features, target, options) in TRAINED.items():
            query = f"SELECT {features}, {target} FROM flights"
            architecture = {"type": "mlp", "hidden": [16]}
            jobs.append(submit(conn, name, architecture, query=query, target=target, epochs=2, options=options, seed=1))
        register(conn, "untrained")
        for job in jobs:
            assert value(conn, "SELECT wait_for_job(%s, '100 s')", job) == "finished"
    return shared_server


@pytest.fixture
def conn(server: Any) -> Iterator[Connection]:
    with server.connect() as connection:
        yield connection


Key = tuple[str, str | None, str | None, float | None]


def evaluated(conn: Connection, model: str, query: str = "TABLE flights", **arguments: Any) -> dict[Key, float | None]:
    """Return the values of evaluate_model without groups by metric, label, predicted and quantile."""
    groups = grouped(conn, model, query, **arguments)
    assert list(groups) == [None]
    return groups[None]


def grouped(
    conn: Connection, model: str, query: str = "TABLE flights", **arguments: Any
) -> dict[str | None, dict[Key, float | None]]:
    named = "".join(f", {name} => %({name})s" for name in arguments)
    sql = f"SELECT * FROM evaluate_model(%(model)s, %(query)s{named})"
    groups: dict[str | None, dict[Key, float | None]] = {}
    for group, *key, number, _ in conn.execute(sql, {"model": model, "query": query} | arguments).fetchall():
        of_group = groups.setdefault(group, {})
        assert tuple(key) not in of_group
        of_group[tuple(key)] = number
    return groups


def scalar(values: dict[Key, float | None], name: str) -> float | None:
    return values[name, None, None, None]


def predicted(conn: Connection, model: str, query: str = "TABLE flights") -> list[tuple[float, str, float]]:
    sql = "SELECT prediction, label, probability FROM predict_rows(%s, %s) ORDER BY row_number"
    return conn.execute(sql, (model, query)).fetchall()


def targets(conn: Connection, column: str, query: str = "TABLE flights") -> list[Any]:
    return [target for (target,) in conn.execute(f"SELECT {column} FROM ({query}) q").fetchall()]


def close(value: float | None) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-12)


# -- results ----------------------------------------------------------------------------------------------------------


def test_metrics_of_two_classes_are_scikit_learns_on_the_predictions(conn: Connection) -> None:
    from sklearn import metrics as sk
    from sklearn.calibration import calibration_curve

    values = evaluated(conn, "verdict")
    answers = predicted(conn, "verdict")
    probability = np.array([answer[0] for answer in answers])
    labels = np.array([answer[1] for answer in answers])
    actual = np.array(targets(conn, "verdict"))
    positive = actual == "on time"
    expected = {
        "rows": 9000,
        "skipped_rows": 0,
        "unseen_labels": 0,
        "accuracy": sk.accuracy_score(actual, labels),
        "balanced_accuracy": sk.balanced_accuracy_score(actual, labels),
        "f1": sk.f1_score(actual, labels, pos_label="on time"),
        "precision": sk.precision_score(actual, labels, pos_label="on time"),
        "recall": sk.recall_score(actual, labels, pos_label="on time"),
        "mcc": sk.matthews_corrcoef(actual, labels),
        "log_loss": sk.log_loss(positive, probability),
        "brier": sk.brier_score_loss(positive, probability),
        "roc_auc": sk.roc_auc_score(positive, probability),
        "pr_auc": sk.average_precision_score(positive, probability),
    }
    assert {name: scalar(values, name) for name in expected} == close(expected)  # type: ignore[arg-type]
    confusion = sk.confusion_matrix(actual, labels, labels=["late", "on time"])
    for row, label in enumerate(("late", "on time")):
        for column, answer in enumerate(("late", "on time")):
            assert values.get(("confusion", label, answer, None), 0) == confusion[row, column]
    frequency, mean = calibration_curve(positive, probability, n_bins=10, strategy="quantile")
    for name, numbers in (("calibration_frequency", frequency), ("calibration_probability", mean)):
        assert [number for key, number in values.items() if key[0] == name] == close(list(numbers))  # type: ignore[arg-type]
    assert sum(number or 0 for key, number in values.items() if key[0] == "calibration_rows") == 9000


@pytest.mark.long
def test_metrics_of_several_classes_are_scikit_learns_on_the_predictions(conn: Connection) -> None:
    """Long: an evaluation in a process of its own; test_scores.py compares the scores of several classes."""
    from sklearn import metrics as sk

    values = evaluated(conn, "part")
    answers = predicted(conn, "part")
    labels, actual = np.array([int(answer[1]) for answer in answers]), np.array(targets(conn, "part"))
    expected = {
        "accuracy": sk.accuracy_score(actual, labels),
        "balanced_accuracy": sk.balanced_accuracy_score(actual, labels),
        "f1": sk.f1_score(actual, labels, average="macro", zero_division=0),
        "precision": sk.precision_score(actual, labels, average="macro", zero_division=0),
        "recall": sk.recall_score(actual, labels, average="macro", zero_division=0),
        "mcc": sk.matthews_corrcoef(actual, labels),
    }
    assert {name: scalar(values, name) for name in expected} == close(expected)  # type: ignore[arg-type]
    assert 0 < (scalar(values, "log_loss") or 0) < 2
    assert 0.5 < (scalar(values, "roc_auc") or 0) <= 1
    pairs = {(int(key[1] or ""), int(key[2] or "")): number for key, number in values.items() if key[0] == "confusion"}
    matrix = sk.confusion_matrix(actual, labels, labels=[0, 1, 2])
    assert pairs == {(i, j): matrix[i, j] for i in range(3) for j in range(3) if matrix[i, j]}


@pytest.mark.parametrize("in_session", ["on", "off"])
def test_metrics_of_a_regression_are_scikit_learns_on_the_predictions(conn: Connection, in_session: str) -> None:
    """Sessions and the predictor have other last bits, and an evaluation has those of either."""
    from sklearn import metrics as sk

    conn.execute(f"SET pg_tensile.predict_in_session = {in_session}")
    values = evaluated(conn, "delay")
    prediction = np.array([answer[0] for answer in predicted(conn, "delay")])
    actual = np.array(targets(conn, "delay::float8"))
    expected = {
        "r2": sk.r2_score(actual, prediction),
        "rmse": sk.root_mean_squared_error(actual, prediction),
        "mae": sk.mean_absolute_error(actual, prediction),
        "mape": sk.mean_absolute_percentage_error(actual, prediction),
        "median_absolute_error": sk.median_absolute_error(actual, prediction),
    }
    assert {name: scalar(values, name) for name in expected} == close(expected)  # type: ignore[arg-type]
    for quantile in (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99):
        residual = values["residual_quantile", None, None, quantile]
        assert residual == close(np.quantile(actual - prediction, quantile))


def test_groups_are_evaluated_by_themselves(conn: Connection) -> None:
    query = "SELECT *, CASE WHEN hour < 12 THEN weekend END AS kind FROM flights ORDER BY id"
    groups = grouped(conn, "verdict", query, by="kind")
    assert set(groups) == {"true", "false", None}
    answers, actual = predicted(conn, "verdict", query), targets(conn, "verdict", query)
    kinds = targets(conn, "kind", query)
    for name, kind in (("true", True), ("false", False), (None, None)):
        index = [number for number, of_row in enumerate(kinds) if of_row is kind]
        assert scalar(groups[name], "rows") == len(index)
        accuracy = np.mean([answers[number][1] == actual[number] for number in index])
        assert scalar(groups[name], "accuracy") == close(float(accuracy))


@pytest.mark.parametrize(
    ("by", "names"),
    [
        pytest.param("carrier", {"UA", "AA", "B6", "DL"}, marks=pytest.mark.long),
        pytest.param("part", {"0", "1", "2"}, marks=pytest.mark.long),
        pytest.param("departure::date - '2024-01-01' > 100", {"true", "false"}, marks=pytest.mark.long),
        ("departure::date", None),
    ],
)
def test_groups_of_each_type(conn: Connection, by: str, names: set[str] | None) -> None:
    """All types but one, with the most groups, are long: each is an evaluation in a process of its own."""
    groups = grouped(conn, "delay", f"SELECT {FEATURES}, delay, {by} AS by FROM flights", by="by")
    assert set(groups) == names if names else "2024-01-01" in groups
    assert sum(scalar(values, "rows") or 0 for values in groups.values()) == 9000


@pytest.mark.long
def test_types_may_differ_from_those_of_the_training(conn: Connection) -> None:
    """Long: it evaluates six times."""
    changed = "hour::int8, distance::numeric, wind::float4, weekend, departure, carrier::varchar, recent::float8[]"
    before = evaluated(conn, "delay", f"SELECT {FEATURES}, delay FROM flights")
    after = evaluated(conn, "delay", f"SELECT delay::float8, '{{}}'::jsonb AS more, {changed} FROM flights;")
    assert scalar(after, "rmse") == pytest.approx(scalar(before, "rmse"), rel=1e-6)
    query = "SELECT hour, carrier, part::{} FROM flights"
    exact = evaluated(conn, "part", query.format("int4"))
    for kind in ("text", "numeric", "int2"):
        assert evaluated(conn, "part", query.format(kind)) == exact


@pytest.mark.long
def test_labels_that_training_did_not_have_are_errors(conn: Connection) -> None:
    query = "SELECT {}, CASE WHEN id <= 3000 THEN 'diverted' ELSE verdict END AS verdict FROM flights"
    values = evaluated(conn, "verdict", query.format(FEATURES))
    assert scalar(values, "unseen_labels") == 3000
    whole = evaluated(conn, "verdict", "SELECT * FROM flights WHERE id > 3000")
    assert scalar(values, "accuracy") == close((scalar(whole, "accuracy") or 0) * 2 / 3)
    assert scalar(values, "log_loss") is None
    assert sum(number or 0 for key, number in values.items() if key[:2] == ("confusion", "diverted")) == 3000


@pytest.mark.long
def test_undefined_metrics_are_null(conn: Connection) -> None:
    values = evaluated(conn, "verdict", "SELECT * FROM flights WHERE verdict = 'late'")
    assert scalar(values, "roc_auc") is None
    assert scalar(values, "mcc") is None
    assert scalar(values, "accuracy") is not None
    assert scalar(evaluated(conn, "delay", "SELECT * FROM flights LIMIT 1"), "r2") is None


def test_rows_without_a_target_are_counted(conn: Connection) -> None:
    values = evaluated(conn, "delay", f"SELECT {FEATURES}, nullif(delay > 10, true)::int AS delay FROM flights")
    assert (scalar(values, "rows") or 0) + (scalar(values, "skipped_rows") or 0) == 9000
    assert scalar(values, "skipped_rows") == value(conn, "SELECT count(*) FROM flights WHERE delay > 10")


@pytest.mark.long
def test_a_memory_budget_changes_no_metric_by_much(conn: Connection) -> None:
    whole, within = evaluated(conn, "delay"), evaluated(conn, "delay", memory_budget="2MB")
    assert scalar(within, "rmse") == pytest.approx(scalar(whole, "rmse"), rel=1e-5)
    refused("53200", "needs at least", "larger", lambda: evaluated(conn, "delay", memory_budget="1kB"))


@pytest.mark.long
def test_a_version(conn: Connection) -> None:
    assert evaluated(conn, "delay", version=1) == evaluated(conn, "delay")
    refused("42704", 'model "delay" has no version 2', "model_versions", lambda: evaluated(conn, "delay", version=2))
    refused("22023", "no version 0", "from 1", lambda: evaluated(conn, "delay", version=0))


# -- importance -------------------------------------------------------------------------------------------------------


def importance(conn: Connection, model: str, query: str = "TABLE flights", **arguments: Any) -> list[Any]:
    named = "".join(f", {name} => %({name})s" for name in arguments)
    sql = f"SELECT * FROM feature_importance(%(model)s, %(query)s{named})"
    return conn.execute(sql, {"model": model, "query": query} | arguments).fetchall()


def test_the_informative_feature_is_the_most_important(conn: Connection) -> None:
    rows = importance(conn, "delay", f"SELECT {FEATURES}, delay FROM flights LIMIT 2000")
    assert {row[0] for row in rows} == set(FEATURES.split(", "))
    assert rows[0][0] == "hour"
    assert rows[0][1] > 0.5 > max(row[1] for row in rows[1:])
    assert {row[3] for row in rows} == {"r2"}
    assert all(row[2] >= 0 for row in rows)


@pytest.mark.long
def test_a_constant_feature_has_no_importance(conn: Connection) -> None:
    query = (
        "SELECT hour, 5 AS distance, wind, weekend, '2024-01-01'::date AS departure, text 'UA' AS carrier,"
        " ARRAY[1, 2, 3] AS recent, verdict FROM flights LIMIT 1000"
    )
    rows = importance(conn, "verdict", query, repeats=2, metric="roc_auc", seed=3)
    constant = {row[0]: row[1:] for row in rows}
    for name in ("distance", "departure", "carrier", "recent"):
        assert constant[name] == (0, 0, "roc_auc")
    assert constant["hour"][0] > 0
    assert importance(conn, "verdict", query, repeats=2, metric="roc_auc", seed=3) == rows


def test_importance_is_refused(conn: Connection) -> None:
    refused("22023", 'no metric "r3"', "rmse", lambda: importance(conn, "delay", metric="r3"))
    refused("22023", "repeats is 0", "Ten", lambda: importance(conn, "delay", repeats=0))
    refused("22004", '"seed" must not be null', "default", lambda: importance(conn, "delay", seed=None))
    one = "SELECT * FROM flights WHERE verdict = 'late'"
    refused("22000", "not defined", "another", lambda: importance(conn, "verdict", one, metric="roc_auc"))


# -- small models -----------------------------------------------------------------------------------------------------


BLOCKED = """
import runpy, sys
sys.modules |= dict.fromkeys(("torch", "sklearn", "scipy", "pandas"))
del sys.argv[:2]
runpy.run_module("pyworker", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def without_libraries(server: SharedServer, conn: Connection, wait_until: Wait) -> Iterator[Connection]:
    """The connection, while children cannot import what takes long."""
    script = server.folder / "without_libraries"
    script.write_text(f"#!/bin/sh\nexec '{child_python()}' -c '{BLOCKED}' \"$@\"\n")
    script.chmod(0o755)
    before = value(conn, "SHOW pg_tensile.python")
    configure(server.cluster, conn, {"pg_tensile.python": script}, wait_until)
    yield conn
    configure(server.cluster, conn, {"pg_tensile.python": before}, wait_until)


def test_small_models_need_no_pytorch(without_libraries: Connection) -> None:
    conn = without_libraries
    answers, actual = predicted(conn, "delay"), np.array(targets(conn, "delay::float8"))
    errors = np.abs(actual - np.array([answer[0] for answer in answers]))
    assert scalar(evaluated(conn, "delay"), "mae") == pytest.approx(errors.mean(), rel=1e-13)
    assert scalar(evaluated(conn, "verdict"), "roc_auc") is not None
    assert importance(conn, "delay", "SELECT * FROM flights LIMIT 500", repeats=1)[0][0] == "hour"
    for setting in ("pg_tensile.predict_in_session = off", "pg_tensile.predict_in_session = on"):
        conn.execute(f"SET {setting}")
        budget: dict[str, Any] = {} if setting.endswith("off") else {"memory_budget": "2MB"}
        with pytest.raises(psycopg.errors.ExternalRoutineException, match="torch"):
            evaluated(conn, "delay", **budget)


def test_a_small_model_that_is_damaged(conn: Connection) -> None:
    models = "tensile.model_versions JOIN tensile.models m USING (model_id)"
    version = f"SELECT version_id FROM {models} WHERE m.model = 'part'"
    with conn.transaction(force_rollback=True):
        change = "UPDATE tensile_internal.model_weights SET data = overlay(data PLACING %s FROM 1) WHERE version = ({})"
        conn.execute(change.format(version), (b"\xff" * 4,))
        refused("XX001", "is damaged", "Deploy another version", lambda: evaluated(conn, "part"))


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sqlstate", "message", "hint"),
    [
        ({"model": "nothing"}, "42704", "does not exist", "register_model"),
        ({"model": "untrained"}, "55000", "no version to predict with", "train_model"),
        ({"model": None}, "22004", '"model" must not be null', "default"),
        ({"query": None}, "22004", '"query" must not be null', "default"),
        ({"query": "DELETE FROM flights"}, "42601", "not a SELECT", "SELECT"),
        ({"query": "SELECT id AS distance, hour, delay FROM flights"}, "42703", 'feature "wind" is missing', "column"),
        ({"query": "SELECT *, delay AS dellay, 1 AS hour FROM flights"}, "42702", '"hour" appears', "AS"),
        ({"query": f"SELECT {FEATURES}, delay AS dely FROM flights"}, "42703", 'target "delay" is missing', '"dely"'),
        ({"query": f"SELECT {FEATURES}, departure AS delay FROM flights"}, "42804", "cannot be of type", "number"),
        ({"query": f"SELECT {FEATURES}, text 'x' AS delay FROM flights"}, "42804", "cannot be of type text", "number"),
        ({"by": "nothing"}, "42703", '"nothing"', "return it"),
        ({"by": "recent"}, "42804", 'by "recent"', "cast"),
        ({"query": "SELECT * FROM flights LIMIT 0"}, "22000", "no rows", "WHERE"),
        ({"query": f"SELECT {FEATURES}, NULL::int AS delay FROM flights"}, "22000", "is null in all 9000 rows", "have"),
        ({"query": "SELECT *, 1 / (id - 500) AS z FROM flights", "by": "z"}, "22012", "division by zero", None),
        ({"query": "SELECT *, id * 2 AS z FROM flights UNION ALL TABLE flights", "by": "z"}, "42601", "", None),
        ({"memory_budget": "lots"}, "22023", "lots", "MB"),
    ],
)
def test_refusals(conn: Connection, arguments: dict[str, Any], sqlstate: str, message: str, hint: str | None) -> None:
    with pytest.raises(psycopg.Error) as caught:
        evaluated(conn, **({"model": "delay", "query": "TABLE flights"} | arguments))
    diag = caught.value.diag
    assert diag.sqlstate == sqlstate, diag.message_primary
    assert message in (diag.message_primary or "")
    assert hint is None or hint in (diag.message_hint or "")
    assert not children(backend(conn))


def test_too_many_groups(conn: Connection) -> None:
    query = "SELECT q.*, q.id + 100000 * g AS z FROM flights q, generate_series(1, 2) g"
    refused("22000", "18000 groups", "at most 10000", lambda: grouped(conn, "delay", query, by="z"))


def test_without_a_privilege(conn: Connection, server: Any) -> None:
    conn.execute("CREATE ROLE eve LOGIN IN ROLE tensile_user; CREATE TABLE secret AS TABLE flights")
    conn.execute("SET ROLE eve")
    refused("42501", "permission denied to predict", "grant_model", lambda: evaluated(conn, "delay"))
    refused("42501", "permission denied to predict", "grant_model", lambda: importance(conn, "delay"))
    conn.execute("RESET ROLE; SELECT grant_model('delay', 'eve'); SET ROLE eve")
    assert scalar(evaluated(conn, "delay"), "rows") == 9000
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied for table secret"):
        evaluated(conn, "delay", "TABLE secret")
    for attempt in ("tensile_worker._session_weights(1, 0)", "tensile_internal._evaluation_spec(1, NULL, '{}')"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute(f"SELECT {attempt}")


def test_the_query_cannot_read_the_weights(conn: Connection) -> None:
    conn.execute(
        "CREATE OR REPLACE FUNCTION attempt() RETURNS int LANGUAGE plpgsql"
        " AS 'BEGIN PERFORM tensile_worker._session_weights(1, 0); RETURN 1; END'"
    )
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="_session_weights"):
        evaluated(conn, "delay", "SELECT *, attempt() FROM flights")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="evaluate_model cannot be called"):
        evaluated(
            conn, "delay", "SELECT *, (SELECT count(*) FROM evaluate_model('delay', 'TABLE flights')) FROM flights"
        )


def test_a_timeout_ends_the_trainer(conn: Connection, wait_until: Wait) -> None:
    conn.execute("SET statement_timeout = '2s'")
    with pytest.raises(psycopg.errors.QueryCanceled, match="statement timeout"):
        evaluated(conn, "delay", "SELECT *, pg_sleep(1) FROM flights")
    conn.execute("RESET statement_timeout")
    assert not children(backend(conn))


@pytest.mark.long
def test_a_model_that_fails_or_dies(conn: Connection) -> None:
    broken = python_model(on_forward="if not self.training and x.shape[0] == 7: os.kill(os.getpid(), signal.SIGKILL)")
    query = "SELECT hour, wind, delay FROM flights LIMIT 500"
    job = submit(conn, "deadly", broken, query=query, target="delay", epochs=1)
    assert value(conn, "SELECT wait_for_job(%s, '60 s')", job) == "finished"
    assert scalar(evaluated(conn, "deadly", query), "rows") == 500
    error = refused("58000", "SIGKILL", "log", lambda: evaluated(conn, "deadly", query.replace("500", "7")))
    assert not children(backend(conn)), error
