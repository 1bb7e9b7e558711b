"""A statement predicts with one version: that which its snapshot shows, whatever is deployed meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from tests.server.refusals import refusal
from tests.server.support import MLP, Connection, finish, submit, value

# The predictor gives a row alone and the same row among others the same digits, not the same bits.
QUERY = "SELECT cos(i) AS a, sin(i * 0.7) AS b, cos(i) + sin(i * 0.7) AS y FROM generate_series(1, 200) i"
ASK = "SELECT round(predict('versions', '{0.3,0.4}'::float8[])::numeric, 5)"
OF_ROWS = "round(predict('versions', ARRAY[0.3, 0.4 + 0 * i])::numeric, 5)"
EACH = f"SELECT DISTINCT {OF_ROWS} FROM generate_series(1, 500) i"
IN_SESSION = ("on", "off")


@pytest.fixture(scope="module", params=IN_SESSION)
def server(request: pytest.FixtureRequest, shared_server: Any) -> Iterator[Any]:
    """A model with two versions, predicted by sessions themselves or by the predictor."""
    with shared_server.connect() as conn:
        conn.execute("ALTER ROLE postgres SET pg_tensile.predict_in_session = " + request.param)
        finish(conn, submit(conn, "versions", MLP, query=QUERY, epochs=1))
        finish(conn, submit(conn, "versions", query=QUERY, epochs=2, seed=7))
        yield shared_server
        conn.execute("SELECT drop_model('versions')")
        conn.execute("ALTER ROLE postgres RESET pg_tensile.predict_in_session")


@pytest.fixture
def conn(server: Any) -> Iterator[Connection]:
    with server.connect() as connection:
        connection.execute("SELECT deploy_model('versions', 1)")
        yield connection


@pytest.fixture
def other(server: Any) -> Iterator[Connection]:
    with server.connect() as connection:
        yield connection


def deploy(conn: Connection, version: int) -> Decimal:
    """Deploy a version and return what a new statement predicts."""
    conn.execute("SELECT deploy_model('versions', %s)", (version,))
    prediction: Decimal = value(conn, ASK)
    return prediction


def test_an_open_cursor_goes_on_with_its_version(conn: Connection, other: Connection) -> None:
    first = value(conn, ASK)
    with conn.transaction():
        conn.execute(f"DECLARE rows CURSOR FOR SELECT {OF_ROWS} FROM generate_series(1, 40) i")
        before = conn.execute("FETCH 5 FROM rows").fetchall()
        second = deploy(other, 2)
        after = conn.execute("FETCH ALL FROM rows").fetchall()
        assert second != first
        assert {*before, *after} == {(first,)} and len(after) == 35
        assert value(conn, ASK) == second
        assert conn.execute(EACH).fetchall() == [(second,)]
    assert value(conn, ASK) == second


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_transaction_with_one_snapshot_keeps_its_version(conn: Connection, other: Connection, level: str) -> None:
    first = value(conn, ASK)
    with conn.transaction():
        conn.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        conn.execute("SELECT 1")
        second = deploy(other, 2)
        assert value(conn, ASK) == first
        assert (
            value(
                conn, "SELECT round(prediction::numeric, 5) FROM predict_rows('versions', 'SELECT 0.3 AS a, 0.4 AS b')"
            )
            == first
        )
        conn.execute("CREATE TEMPORARY TABLE own AS SELECT 1")  # a later command of the same snapshot
        assert value(conn, ASK) == first
    assert value(conn, ASK) == second


def test_a_snapshot_of_another_transaction_brings_its_version(conn: Connection, other: Connection) -> None:
    first = value(conn, ASK)
    with conn.transaction():
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        exported = value(conn, "SELECT pg_export_snapshot()")
        second = deploy(other, 2)
        with other.transaction():
            other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            other.execute(f"SET TRANSACTION SNAPSHOT '{exported}'")
            assert value(other, ASK) == first
    assert value(other, ASK) == second


def test_own_changes_are_seen_by_the_next_command(conn: Connection, other: Connection) -> None:
    first = value(conn, ASK)
    with conn.transaction(force_rollback=True):
        row = conn.execute(
            "SELECT deploy_model('versions', 2), round(predict('versions', '{0.3,0.4}'::float8[])::numeric, 5)"
        ).fetchone()
        assert row is not None and row[1] == first
        second = value(conn, ASK)
        assert second != first and value(conn, ASK) == second
        assert value(other, ASK) == first
        with conn.transaction(force_rollback=True):
            assert deploy(conn, 1) == first
        assert value(conn, ASK) == second
    assert value(conn, ASK) == value(other, ASK) == first


def test_a_function_sees_what_each_of_its_statements_sees(conn: Connection) -> None:
    first = value(conn, ASK)
    conn.execute("""
        CREATE FUNCTION pg_temp.both() RETURNS numeric[] LANGUAGE plpgsql AS $$
        DECLARE
            before numeric := round(predict('versions', '{0.3,0.4}'::float8[])::numeric, 5);
        BEGIN
            PERFORM deploy_model('versions', 2);
            RETURN ARRAY[before, round(predict('versions', '{0.3,0.4}'::float8[])::numeric, 5)];
        END $$
    """)
    before, after = value(conn, "SELECT pg_temp.both()")
    assert before == first and after == value(conn, ASK) != first


def test_parallel_workers_predict_with_the_statements_version(conn: Connection, other: Connection) -> None:
    conn.execute("CREATE TEMPORARY TABLE unused AS SELECT 1")
    other.execute("DROP TABLE IF EXISTS many; CREATE TABLE many AS SELECT i FROM generate_series(1, 3000) i")
    try:
        first = value(conn, ASK)
        conn.execute("SET min_parallel_table_scan_size = 0; SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0")
        conn.execute("ALTER TABLE many SET (parallel_workers = 2)")
        ask = f"SELECT min(p), max(p) FROM (SELECT {OF_ROWS} AS p FROM many) t"
        plan = "\n".join(line for (line,) in conn.execute(f"EXPLAIN {ask}"))
        assert "Gather" in plan, plan
        with conn.transaction():
            conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            assert conn.execute(ask).fetchone() == (first, first)
            second = deploy(other, 2)
            assert conn.execute(ask).fetchone() == (first, first)
        assert conn.execute(ask).fetchone() == (second, second)
    finally:
        other.execute("DROP TABLE many")


def test_a_model_that_was_dropped_meanwhile_is_refused(conn: Connection, other: Connection, server: Any) -> None:
    finish(other, submit(other, "gone", MLP, query=QUERY, epochs=1))
    ask = "SELECT predict('gone', '{0.3,0.4}'::float8[])"
    with pytest.raises(psycopg.Error), conn.transaction():
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        conn.execute("SELECT 1")
        other.execute("SELECT drop_model('gone')")
        sqlstate, message, hint = refusal(conn, ask)
        assert sqlstate == "55000" and "was dropped" in message and "another transaction" in hint
        raise psycopg.errors.RaiseException
    assert refusal(conn, ask)[0] == "42704"
