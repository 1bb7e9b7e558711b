"""Predictions within a memory budget: the same digits as without one, in all functions; privileges to set a model's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.server.refusals import refusal
from tests.server.shared import SharedServer, unload
from tests.server.support import Connection, Wait, submit, value

ROWS = """
    CREATE TABLE points AS
    SELECT i AS id, cos(i) AS a, sin(i * 0.7) AS b, (i % 10)::float8 AS c, cos(i) + sin(i * 0.7) AS y,
           ARRAY(SELECT (i * 7 + j * (i % 5 + 1)) % 256 FROM generate_series(1, 256) j) AS image,
           (ARRAY['ant', 'bee', 'cow'])[i % 3 + 1] AS animal
    FROM generate_series(1, 200) i
"""
# Excludes models that the predictor computes with numpy, whose digits differ from PyTorch's
NUMBERS = {"type": "mlp", "hidden": [256, 256, 256], "norm": "layer"}
IMAGES = {"type": "cnn", "channels": [8, 32], "hidden": [256, 256, 256], "norm": "batch"}
CLUSTER_SETTINGS = {"pg_tensile.device_memory": "1GB"}
BUDGET = "700kB"  # the weights take 0.5 and 1.1 MB


@pytest.fixture(scope="module")
def server(shared_server: SharedServer, wait_until: Wait) -> Iterator[SharedServer]:
    """The worker's cluster with trained models, and a predictor that has loaded none."""
    with shared_server.connect() as conn:
        # The predictor, asked for one row after the other, has the same bits within a budget and without.
        conn.execute("ALTER ROLE postgres SET pg_tensile.predict_in_session = off")
        conn.execute("ALTER ROLE postgres SET pg_tensile.predict_batching = off")
        conn.execute(ROWS)
        conn.execute("GRANT SELECT ON points TO PUBLIC")
        jobs = [
            submit(conn, "numbers", NUMBERS, query="SELECT a, b, c, y FROM points", target="y", epochs=1),
            submit(conn, "images", IMAGES, query="SELECT image, a, animal FROM points", target="animal", epochs=1),
        ]
        for job in jobs:
            assert value(conn, "SELECT wait_for_job(%s, '100 s')", job) == "finished"
        unload(conn, wait_until)
        yield shared_server
        conn.execute("ALTER ROLE postgres RESET ALL")


@pytest.fixture
def conn(server: Any) -> Iterator[Connection]:
    with server.connect() as connection:
        yield connection


def inference_bytes(conn: Connection) -> int:
    return int(value(conn, "SELECT inference_bytes FROM tensile.devices WHERE name = 'cpu'") or 0)


@pytest.mark.parametrize(
    "ask",
    [
        "predict('numbers', p{})",
        "predict('numbers', ARRAY[p.a, p.b, p.c]{})",
        "predict('numbers', to_jsonb(s){})",
        "predict_class('images', p{})",
        "predict_class('images', to_jsonb(i){})",
    ],
)
def test_every_overload_gives_the_same_digits(conn: Connection, ask: str) -> None:
    """The budget may change from row to row and be null."""
    rows = conn.execute(f"""
        SELECT {ask.format("")}, {ask.format(f", '{BUDGET}'")}, {ask.format(", memory_budget => budget")}
        FROM points p, LATERAL (SELECT p.a, p.b, p.c) s, LATERAL (SELECT p.image, p.a) i,
             LATERAL (SELECT (ARRAY['{BUDGET}', NULL])[p.id % 2 + 1] AS budget) b
        WHERE id <= 20
    """).fetchall()
    assert len(rows) == 20 and len({row[0] for row in rows}) > 1
    assert all(row[0] == row[1] == row[2] is not None for row in rows)


def test_null_arguments_are_null_and_predict_nothing(conn: Connection) -> None:
    for function in ("predict('numbers', NULL::float8[]", "predict(NULL, '{1,2,3}'::float8[]", "predict_class(NULL, p"):
        assert conn.execute(f"SELECT {function}, '{BUDGET}') FROM points p LIMIT 1").fetchone() == (None,)
    assert conn.execute("SELECT * FROM predict_rows('numbers', NULL)").fetchall() == []
    assert conn.execute("SELECT * FROM predict_rows(NULL, 'SELECT 1', '1MB')").fetchall() == []


@pytest.mark.parametrize(("model", "features"), [("numbers", "a, b, c"), ("images", "image, a")])
def test_predict_rows_gives_the_same_digits_in_the_same_batches(conn: Connection, model: str, features: str) -> None:
    ask = "SELECT * FROM predict_rows(%s, %s, %s)"
    query = f"SELECT {features} FROM points ORDER BY id LIMIT 64"
    whole = conn.execute(ask, (model, query, None)).fetchall()
    assert len(whole) == 64
    assert conn.execute(ask, (model, query, BUDGET)).fetchall() == whole
    query = f"SELECT {features} FROM points ORDER BY id"  # 200 rows are executed as 256
    budgeted = conn.execute(ask, (model, query, BUDGET)).fetchall()
    assert [row[0] for row in budgeted] == list(range(1, 201))
    for (_, number, label, probability), whole_row in zip(budgeted, whole, strict=False):
        expected = pytest.approx(whole_row[1] or whole_row[3], rel=1e-5)
        assert (label, number or probability) == (whole_row[2], expected)
    assert conn.execute(ask, (model, f"SELECT {features} FROM points LIMIT 0", BUDGET)).fetchall() == []


@pytest.mark.parametrize("budget", ["0", "-1", "-5MB", "abc", "", "1.5 parsecs", "9223372036854775808"])
def test_invalid_budgets_are_refused_as_by_train_model(conn: Connection, budget: str) -> None:
    expected = refusal(
        conn, "SELECT train_model('numbers', 'SELECT a, y FROM points', 'y', memory_budget => %s)", budget
    )
    assert expected[0] == "22023" and "8GB" in expected[2]
    assert refusal(conn, "SELECT predict('numbers', '{1,2,3}'::float8[], %s)", budget) == expected
    assert refusal(conn, "SELECT * FROM predict_rows('numbers', 'SELECT * FROM points', %s)", budget) == expected
    assert refusal(conn, "SELECT set_model_memory_budget('numbers', %s)", budget) == expected


def test_a_budget_that_is_too_small_or_more_than_there_is(conn: Connection) -> None:
    ask = "SELECT predict('numbers', '{1,2,3}'::float8[], %s)"
    sqlstate, message, hint = refusal(conn, ask, "1kB")
    refused_size = re.fullmatch(
        r"the model needs at least ([\d,]+) bytes of device memory, but may have 1,024", message
    )
    assert sqlstate == "53200" and refused_size and "larger memory budget" in hint
    least = int(refused_size[1].replace(",", ""))
    assert refusal(conn, ask, f"{least - 1} B")[0] == "53200"
    assert value(conn, ask, f"{least} B") == value(conn, ask, None)
    sqlstate, message, hint = refusal(conn, ask, "2GB")
    assert sqlstate == "22023" and "device_memory" in hint
    assert message == 'a memory_budget of 2,147,483,648 bytes is more than the 1,073,741,824 of device "cpu"'
    assert value(conn, ask, "1MB") == value(conn, ask, None)  # the session continues


def test_the_budget_is_the_device_memory_of_the_model(conn: Connection, wait_until: Wait) -> None:
    ask = "SELECT predict('numbers', '{1,2,3}'::float8[], %s)"
    value(conn, ask, BUDGET)
    before = inference_bytes(conn)
    value(conn, ask, "123456 kB")
    wait_until(lambda: inference_bytes(conn) - before == 123456 * 1024)
    value(conn, ask, "1000 MB")  # which evicts other models
    wait_until(lambda: 1000 * 1024**2 <= inference_bytes(conn) < 1024**3)
    assert value(conn, ask, BUDGET) == value(conn, ask, None)


def test_loaded_models_are_shown_with_their_budgets_to_those_who_may_see_the_model(
    conn: Connection, wait_until: Wait
) -> None:
    value(conn, "SELECT predict('numbers', '{1,2,3}'::float8[])")
    value(conn, "SELECT predict('numbers', '{1,2,3}'::float8[], '654000 B')")
    of_numbers = "SELECT weight_bytes FROM tensile.model_versions WHERE model = %s"
    weights = value(conn, of_numbers, "numbers")
    shown = "SELECT memory_budget, device_bytes, planned_bytes, host_bytes FROM tensile.loaded_models WHERE model = %s"

    def rows() -> dict[int | None, tuple[Any, ...]]:
        return {row[0]: row[1:] for row in conn.execute(shown, ("numbers",)).fetchall()}

    wait_until(lambda: {None, 654000} <= rows().keys())
    assert rows()[None] == (weights, None, 0)
    device_bytes, planned_bytes, host_bytes = rows()[654000]
    assert planned_bytes <= device_bytes == 654000 and host_bytes == weights
    total = "SELECT sum(device_bytes) FROM tensile.loaded_models"
    wait_until(lambda: value(conn, total) == inference_bytes(conn))
    conn.execute("CREATE ROLE stranger LOGIN IN ROLE tensile_user; SET ROLE stranger")
    try:
        assert rows() == {}
        assert value(conn, "SELECT count(*) FROM tensile_worker._loaded_models()") == 0
    finally:
        conn.execute("RESET ROLE; DROP ROLE stranger")


def test_a_models_budget_is_the_default_of_all_sessions(conn: Connection, server: Any, wait_until: Wait) -> None:
    ask = "SELECT predict('numbers', '{1,2,3}'::float8[])"
    expected = value(conn, ask)
    shown = "SELECT memory_budget FROM tensile.models WHERE model = 'numbers'"
    loaded = "SELECT count(*) FROM tensile.loaded_models WHERE memory_budget = %s"
    assert value(conn, shown) is None
    with server.connect() as session:
        value(session, ask)
        conn.execute("SELECT set_model_memory_budget('numbers', '654321 B')")
        assert value(conn, shown) == 654321
        assert value(session, ask) == expected
        wait_until(lambda: value(conn, loaded, 654321) == 1)
        rows = "SELECT * FROM predict_rows('numbers', 'SELECT 1 AS a, 2 AS b, 3 AS c')"
        conn.execute("SELECT set_model_memory_budget('numbers', '654322 B')")
        assert session.execute(rows).fetchall() == [(1, expected, None, None)]
        wait_until(lambda: value(conn, loaded, 654322) == 1)
        assert value(session, "SELECT predict('numbers', '{1,2,3}'::float8[], '654323 B')") == expected
        wait_until(lambda: value(conn, loaded, 654323) == 1)
        conn.execute("SELECT set_model_memory_budget('numbers', '1000 B')")
        assert refusal(session, ask)[0] == "53200"
        conn.execute("SELECT set_model_memory_budget('numbers', NULL)")
        assert value(session, ask) == expected
    assert value(conn, shown) is None


def test_only_the_owner_sets_a_models_budget(conn: Connection) -> None:
    conn.execute("CREATE ROLE stranger LOGIN IN ROLE tensile_user; SELECT grant_model('numbers', 'stranger')")
    try:
        conn.execute("SET ROLE stranger")
        set_it = "SELECT set_model_memory_budget(%s, '1MB')"
        assert refusal(conn, set_it, "numbers")[0] == "42501"
        assert refusal(conn, set_it, "number")[0] == "42704"
        assert value(conn, "SELECT predict('numbers', '{1,2,3}'::float8[], '1MB')") is not None
    finally:
        conn.execute("RESET ROLE; SELECT revoke_model('numbers', 'stranger'); DROP ROLE stranger")


def test_sessions_with_and_without_budgets_do_not_disturb_each_other(server: Any, conn: Connection) -> None:
    expected = conn.execute("SELECT predict('numbers', p) FROM points p ORDER BY id LIMIT 50").fetchall()

    def ask(budget: str | None) -> list[tuple[Any, ...]]:
        with server.connect() as session:
            query = "SELECT predict('numbers', p, %s) FROM points p ORDER BY id LIMIT 50"
            return session.execute(query, (budget,)).fetchall()

    with ThreadPoolExecutor(6) as sessions:
        answers = list(sessions.map(ask, [None, "600kB", "700kB", None, "700kB", "2MB"]))
    assert answers == [expected] * 6


def test_models_that_cannot_be_captured_fail_with_the_reason(conn: Connection) -> None:
    source = """
import torch
class Model(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 1e9 else super().forward(x) * 2
def build(n_inputs, n_outputs):
    return Model(n_inputs, n_outputs)
"""
    query = "SELECT a, y FROM points"
    job = submit(conn, "moody", {"type": "python", "source": source}, query=query, target="y", epochs=1)
    assert value(conn, "SELECT wait_for_job(%s, '60 s')", job) == "finished"
    assert value(conn, "SELECT predict('moody', %s)", Jsonb({"a": 1})) is not None
    sqlstate, message, hint = refusal(conn, "SELECT predict('moody', %s, '1MB')", Jsonb({"a": 1}))
    assert sqlstate == "0A000" and message and hint
