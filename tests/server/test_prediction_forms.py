"""predict_probabilities and predict_all, and the forms in which every function takes a row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Json, Jsonb

from tests.server.refusals import refusal
from tests.server.shared import SharedServer
from tests.server.support import Connection, finish, submit, value

POINTS = """
    CREATE TABLE points AS
    SELECT i AS id, cos(i) AS a, sin(i * 0.7) AS b, 3 * cos(i) + sin(i * 0.7) AS height, cos(i) > 0 AS east,
           (ARRAY['low', 'mid "le"', 'high', NULL])[1 + i % 4] AS level, i % 3 * 10 AS number
    FROM generate_series(1, 400) i
"""
TRAINED: dict[str, dict[str, Any]] = {  # by name: what train_model is called with
    "height": {"target": "height"},
    "unvalidated": {"target": "height", "validation": 0.0},
    "east": {"target": "east"},
    "level": {"target": "level", "query": "SELECT a, b, level FROM points WHERE level IS NOT NULL"},
    "number": {"target": "number", "options": {"task": "classification"}},
}
ROW = "SELECT a, b FROM points WHERE id = 7"
FUNCTIONS = {
    "predict": "height",
    "predict_class": "level",
    "predict_interval": "height",
    "predict_probabilities": "level",
    "predict_all": "level",
    "explain_prediction": "height",
}


@pytest.fixture(scope="module")
def server(shared_server: SharedServer) -> SharedServer:
    """The worker's cluster with models of all tasks."""
    with shared_server.connect() as conn:
        conn.execute(POINTS)
        jobs = []
        for name, trained in TRAINED.items():
            query = f"SELECT a, b, {trained['target']} FROM points"
            jobs.append(submit(conn, name, {"type": "mlp", "hidden": [8]}, **{"query": query} | trained))
        for job in jobs:
            finish(conn, job)
        value(conn, "SELECT predict('height', '{1,2}'::float8[])")  # starts the predictor
    return shared_server


@pytest.fixture
def conn(server: Any) -> Iterator[Connection]:
    with server.connect() as connection:
        yield connection


# ---- probabilities ----


def probabilities(conn: Connection, model: str, row: str = ROW) -> list[tuple[str, float]]:
    ask = f"SELECT p.* FROM ({row}) t, LATERAL predict_probabilities(%s, t) p"
    return conn.execute(ask, (model,)).fetchall()


def test_all_classes_have_a_probability_and_the_most_probable_comes_first(conn: Connection) -> None:
    for model, labels in (
        ("east", {"true", "false"}),
        ("level", {"low", 'mid "le"', "high"}),
        ("number", {"0", "10", "20"}),
    ):
        rows = probabilities(conn, model)
        shares = [share for _, share in rows]
        assert {label for label, _ in rows} == labels
        assert sum(shares) == pytest.approx(1) and shares == sorted(shares, reverse=True)
        best = conn.execute("SELECT label, probability FROM predict_rows(%s, %s)", (model, ROW)).fetchone()
        assert best is not None and (best[0], pytest.approx(best[1], abs=1e-6)) == rows[0]
        assert rows[0][0] == value(conn, f"SELECT predict_class(%s, t) FROM ({ROW}) t", model)


def test_probabilities_of_many_rows_are_those_of_predict(conn: Connection) -> None:
    count, off = conn.execute("""
        SELECT count(*), max(abs(p.probability - predict('east', t)))
        FROM points t, LATERAL predict_probabilities('east', t) p WHERE p.label = 'true'
    """).fetchall()[0]
    assert count == 400 and off < 1e-6
    pairs = conn.execute("SELECT predict_probabilities('level', t) FROM points t LIMIT 5").fetchall()
    assert len(pairs) == 5


def test_predictions_with_probabilities_are_counted(conn: Connection) -> None:
    rows = "SELECT coalesce(sum(rows), 0)::int FROM tensile.predictions WHERE model = 'level'"
    before = value(conn, rows)
    probabilities(conn, "level", "SELECT a, b FROM points LIMIT 10")
    conn.execute("SELECT predict_all('level', t) FROM points t LIMIT 10")
    assert value(conn, rows) == before + 20


def test_a_regression_has_no_probabilities(conn: Connection) -> None:
    sqlstate, message, hint = refusal(conn, "SELECT * FROM predict_probabilities('height', '{1, 2}'::float8[])")
    assert sqlstate == "42804" and "no classes" in message and hint == "Use predict."


# ---- everything at once ----


def test_everything_about_a_regression_is_its_value_and_interval(conn: Connection) -> None:
    for coverage in (0.9, 0.5):
        found, lower, prediction, upper = conn.execute(
            f"SELECT predict_all('height', t, %s), i.* FROM ({ROW}) t, predict_interval('height', t, %s) i",
            (coverage, coverage),
        ).fetchall()[0]
        assert found == {"value": prediction, "interval": {"lower": lower, "upper": upper, "coverage": coverage}}
    default = value(conn, f"SELECT predict_all('height', t) FROM ({ROW}) t")
    assert default["interval"]["coverage"] == 0.9


def test_an_interval_that_the_model_lacks_is_left_out(conn: Connection) -> None:
    assert value(conn, "SELECT predict_all('unvalidated', '{1, 2}'::float8[])").keys() == {"value"}
    assert value(conn, "SELECT predict_all('height', '{1, 2}'::float8[], 0.9999)").keys() == {"value"}
    for coverage in (0, 1, "NaN"):
        for model in ("height", "level"):
            ask = f"SELECT predict_all('{model}', '{{1, 2}}'::float8[], '{coverage}')"
            assert refusal(conn, ask)[0] == "22023"


@pytest.mark.parametrize(("model", "named"), [("east", True), ("level", False), ("number", True)])
def test_everything_about_a_class_is_its_label_and_all_probabilities(conn: Connection, model: str, named: bool) -> None:
    found = value(conn, f"SELECT predict_all(%s, t) FROM ({ROW}) t", model)
    rows = probabilities(conn, model)
    assert found["probabilities"] == dict(rows) and (found["label"], found["probability"]) == rows[0]
    assert ("value" in found) == named
    if named:
        assert found["value"] == value(conn, f"SELECT predict(%s, t) FROM ({ROW}) t", model)


def test_numbers_are_written_in_full_whatever_the_session_prints(conn: Connection) -> None:
    ask = f"SELECT predict_all('height', t)::text FROM ({ROW}) t"
    expected = value(conn, ask)
    conn.execute("SET extra_float_digits = -15")
    assert value(conn, ask) == expected


# ---- forms of a row ----


def answer(conn: Connection, function: str, features: str, *parameters: Any) -> Any:
    return conn.execute(f"SELECT x.* FROM {function}(%s, {features}) x", (FUNCTIONS[function], *parameters)).fetchall()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_row_may_be_a_record_an_array_or_an_object_of_any_type(conn: Connection, function: str) -> None:
    a, b = conn.execute(ROW).fetchall()[0]
    text = json.dumps({"b": b, "a": a, "other": [1]})
    expected = conn.execute(f"SELECT x.* FROM ({ROW}) t, {function}(%s, t) x", (FUNCTIONS[function],)).fetchall()
    assert expected
    assert answer(conn, function, f"'{text}'") == expected
    for type in ("json", "jsonb", "text", "varchar", "unknown"):
        assert answer(conn, function, f"'  {text}'::{type}") == expected
    assert answer(conn, function, "%s", text) == expected
    for form in (Json, Jsonb):
        assert answer(conn, function, "%s", form(json.loads(text))) == expected
    assert answer(conn, function, "%s", [a, b]) == expected
    assert answer(conn, function, f"ARRAY[{a!r}, {b!r}]") == expected
    budgeted = answer(conn, function, f"'{text}', memory_budget => '1 GB'")
    assert len(budgeted) == len(expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_null_row_needs_no_cast(conn: Connection, function: str) -> None:
    for null in ("NULL", "%(none)s"):
        rows = conn.execute(f"SELECT x.* FROM {function}('height', {null}) x", {"none": None}).fetchall()
        assert all(cell is None for row in rows for cell in row)


def test_parameters_of_prepared_statements_have_the_type_that_they_are_given(conn: Connection) -> None:
    a, b = conn.execute(ROW).fetchall()[0]
    ask = "SELECT predict(%s, %s)"
    expected = value(conn, f"SELECT predict('height', t) FROM ({ROW}) t")
    rows: list[Any] = [json.dumps({"a": a, "b": b}), Json({"a": a, "b": b}), Jsonb({"a": a, "b": b}), [a, b], None]
    for _ in range(7):  # from the sixth on with a generic plan
        for row in rows:
            assert conn.execute(ask, ("height", row), prepare=True).fetchone() == (None if row is None else expected,)
    with psycopg.ClientCursor(conn) as cursor:  # parameters in the text
        for row in rows[:4]:
            assert cursor.execute(ask, ("height", row)).fetchone() == (expected,)
    assert value(conn, "SELECT predict('height', %s)", [1, 2]) is not None  # whole numbers


def test_a_text_that_is_no_object_says_what_would_do(conn: Connection) -> None:
    for text in ("{1, 2}", " {NULL,0.5}"):
        sqlstate, message, hint = refusal(conn, f"SELECT predict('height', '{text}')")
        assert sqlstate == "22P02" and "must be a JSON object" in message and "::float8[]" in hint
    for text in ("", "[1, 2]", "1", "null", "(1,2)", '"a"', "a: 1"):
        sqlstate, _, hint = refusal(conn, f"SELECT predict('height', '{text}')")
        assert sqlstate == "22P02" and hint == 'Pass {"name": value, ...} with the features: a, b.'
    for text in ("{", '{"a": 1', '{"a", "b"}', '{"a": 1} {"b": 2}', '{"a": NaN}'):
        assert refusal(conn, f"SELECT predict('height', '{text}')")[0] == "22P02"
    assert refusal(conn, "SELECT predict('height', '{}')")[0] == "42703"
    assert refusal(conn, "SELECT predict('height', '[1, 2]'::json)")[0] == "22P02"


def test_explanations_of_an_array_have_its_values(conn: Connection) -> None:
    rows = conn.execute("SELECT feature, value FROM explain_prediction('height', '{0.5, NULL}'::float8[])").fetchall()
    assert rows == [("a", "0.5"), ("b", None), (None, None)]


def test_other_roles_need_the_privilege_to_predict(conn: Connection, server: Any) -> None:
    conn.execute("CREATE ROLE forms LOGIN IN ROLE tensile_user")
    with server.connect(user="forms") as other:
        for function in FUNCTIONS:
            assert refusal(other, f"SELECT {function}('height', '{{\"a\": 1, \"b\": 2}}')")[0] == "42501"
        conn.execute("SELECT grant_model('level', 'forms')")
        assert len(other.execute("SELECT predict_probabilities('level', '{\"a\": 1, \"b\": 2}')").fetchall()) == 3
        assert value(other, "SELECT predict_all('level', '{\"a\": 1, \"b\": 2}')")
