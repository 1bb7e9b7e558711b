"""materialize_predictions: which rows are predicted again, privileges, refusals, refreshes at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from tests.server.refusals import refused
from tests.server.shared import SharedServer
from tests.server.support import MLP, Connection, Wait, finish, register, submit, value

POINTS = """
    CREATE TABLE points AS
    SELECT i AS id, i % 5 AS "Sub ""id", cos(i) AS a, sin(i * 0.7) AS b, cos(i) + sin(i * 0.7) > 0 AS y, 'x' AS note
    FROM generate_series(1, 300) i
"""
QUERY = "SELECT id, a, b FROM points"
TRAINING = "SELECT a, b, y FROM points"


@pytest.fixture(scope="module")
def server(shared_server: SharedServer) -> SharedServer:
    """The worker's cluster with two versions of a model, and a model without any."""
    with shared_server.connect() as conn:
        conn.execute(POINTS)
        finish(conn, submit(conn, "model", MLP, query=TRAINING, target="y", seed=1))
        finish(conn, submit(conn, "model", query=TRAINING, target="y", seed=2))
        register(conn, "untrained")
    return shared_server


@pytest.fixture
def conn(server: Any) -> Iterator[Connection]:
    """A session whose changes are undone."""
    with server.connect() as made:
        made.autocommit = False
        yield made
        made.rollback()


def refresh(conn: Connection, query: str = QUERY, into: str = "kept", key: list[str] | None = None) -> Any:
    """Return how many rows were predicted, unchanged and removed."""
    call = "SELECT predicted, unchanged, removed FROM materialize_predictions('model', %s, %s, %s)"
    return conn.execute(call, (query, into, key)).fetchone()


def kept(conn: Connection, columns: str = "id, prediction, label, probability", table: str = "kept") -> list[Any]:
    return conn.execute(f"SELECT {columns} FROM {table} ORDER BY 1").fetchall()


def predicted(conn: Connection, query: str = QUERY) -> list[Any]:
    """Return id, prediction, label and probability of all rows of the query."""
    numbered = f"SELECT id, row_number() OVER () AS n FROM ({query} ORDER BY id) q"
    call = "SELECT id, prediction, label, probability FROM predict_rows('model', %s) JOIN numbered ON n = row_number"
    return conn.execute(f"WITH numbered AS ({numbered}) {call} ORDER BY id", (f"{query} ORDER BY id",)).fetchall()


def test_only_new_and_changed_rows_are_predicted(conn: Connection) -> None:
    assert refresh(conn, key=["id"]) == (300, 0, 0)
    first = kept(conn, "id, predicted_at")
    assert [row[0] for row in first] == list(range(1, 301)) and len({row[1:] for row in kept(conn)}) > 10
    assert [row[2] for row in kept(conn)] == [row[2] for row in predicted(conn)]
    assert refresh(conn) == (0, 300, 0)
    conn.execute("UPDATE points SET a = a + 1 WHERE id IN (7, 9)")
    conn.execute("UPDATE points SET note = 'not in the query' WHERE id = 8")
    conn.execute("INSERT INTO points SELECT 301, 1, 0.5, NULL, true, 'new'")
    conn.execute("DELETE FROM points WHERE id BETWEEN 11 AND 20")
    assert refresh(conn, f"{QUERY};") == (3, 288, 10)
    assert [row[0] for row in kept(conn)] == [row[0] for row in predicted(conn)]
    for found, expected in zip(kept(conn), predicted(conn), strict=True):
        assert found[:1] + found[2:3] == expected[:1] + expected[2:3]
        assert found[1] == pytest.approx(expected[1], rel=1e-5)
    assert kept(conn, "DISTINCT version") == [(2,)]


def test_another_version_predicts_all_rows_again(conn: Connection) -> None:
    refresh(conn, key=["id"])
    before = kept(conn)
    conn.execute("SELECT deploy_model('model', 1)")
    assert refresh(conn) == (300, 0, 0)
    assert kept(conn) != before and kept(conn, "DISTINCT version") == [(1,)]
    conn.execute("SELECT deploy_model('model', 2)")
    assert refresh(conn) == (300, 0, 0) and kept(conn) == before


def test_names_are_quoted_and_keys_may_have_several_columns(conn: Connection) -> None:
    conn.execute('CREATE SCHEMA "Odd ""one"')
    table, key = '"Odd ""one"."drop table points; --"', ["id", 'Sub "id']
    query = 'SELECT id, "Sub ""id", a, b FROM points -- all'
    assert refresh(conn, query, table, key) == (300, 0, 0)
    assert refresh(conn, query, table) == (0, 300, 0)
    assert len(kept(conn, "*", table)) == 300 and value(conn, "SELECT count(*) FROM points") == 300


def test_the_query_is_the_callers(server: Any) -> None:
    """With its search_path, its settings and its privileges, on its own temporary tables as well."""
    with server.connect() as conn:
        conn.execute("CREATE TEMPORARY TABLE mine AS SELECT id, a, b FROM points WHERE id < 10")
        conn.execute("SET search_path = pg_temp, public")
        assert refresh(conn, "SELECT * FROM mine", "pg_temp.answers", ["id"]) == (9, 0, 0)
        conn.execute("SELECT count(*) FROM answers")


def test_roles_need_the_privileges_of_what_the_call_does(server: Any) -> None:
    with server.connect() as conn:
        conn.execute("CREATE ROLE reader LOGIN; GRANT tensile_user TO reader; GRANT SELECT ON points TO reader")
        conn.execute("CREATE SCHEMA theirs AUTHORIZATION reader")
        conn.execute("SET ROLE reader")
        refused("42501", "permission denied", "grant_model", lambda: refresh(conn, QUERY, "theirs.kept", ["id"]))
        assert value(conn, "SELECT to_regclass('theirs.kept')") is None
        conn.execute("RESET ROLE")
        conn.execute("SELECT grant_model('model', 'reader', 'predict')")
        conn.execute("SET ROLE reader")
        assert refresh(conn, QUERY, "theirs.kept", ["id"]) == (300, 0, 0)
        assert value(conn, "SELECT tableowner FROM pg_tables WHERE schemaname = 'theirs'") == "reader"
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="points"):
            conn.execute("RESET ROLE; REVOKE SELECT ON points FROM reader; SET ROLE reader")
            refresh(conn, QUERY, "theirs.kept")
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="public"):
            refresh(conn, "SELECT 1 AS id, 1.0 AS a, 1.0 AS b", "public.kept", ["id"])


@pytest.mark.parametrize(
    ("arguments", "sqlstate", "message", "hint"),
    [
        ((None, QUERY, "kept", ["id"]), "22004", "must not be null", "Give all three."),
        (("model", None, "kept", ["id"]), "22004", "must not be null", "Give all three."),
        (("model", QUERY, None, ["id"]), "22004", "must not be null", "Give all three."),
        (("model", QUERY, "kept", None), "22004", "the key of table kept is not known", "key => '{id}'"),
        (("model", QUERY, "kept", []), "22004", "the key of table kept is not known", "key => '{id}'"),
        (("model", QUERY, "kept", ["id", None]), "22004", "the key of table kept is not known", "key => '{id}'"),
        (("model", QUERY, "points", ["id"]), "55000", "table points was not made by", "another name"),
        (("untrained", QUERY, "kept", ["id"]), "55000", "no version to predict with", "train_model"),
        (("nothing", QUERY, "kept", ["id"]), "42704", 'model "nothing" does not exist', ""),
    ],
)
def test_wrong_arguments_are_refused(
    conn: Connection, arguments: tuple[Any, ...], sqlstate: str, message: str, hint: str
) -> None:
    call = "SELECT * FROM materialize_predictions(%s, %s, %s, %s)"
    refused(sqlstate, message, hint, lambda: conn.execute(call, arguments))


@pytest.mark.parametrize(
    ("query", "key", "error"),
    [
        ("SELECT 1 AS id, a, b FROM points", ["id"], psycopg.errors.CardinalityViolation),
        ("SELECT nullif(id, 3) AS id, a, b FROM points", ["id"], psycopg.errors.NotNullViolation),
        (QUERY, ["nothing"], psycopg.errors.UndefinedColumn),
        ("SELECT id, a FROM points", ["id"], psycopg.Error),
        ("DELETE FROM points RETURNING id, a, b", ["id"], psycopg.errors.SyntaxError),
        ("SELECT 1) q; DROP TABLE points; --", ["id"], psycopg.Error),
    ],
)
def test_wrong_queries_change_nothing(server: Any, query: str, key: list[str], error: type[Exception]) -> None:
    with server.connect() as conn:
        with pytest.raises(error):
            refresh(conn, query, "never", key)
        assert value(conn, "SELECT to_regclass('never')") is None
        assert value(conn, "SELECT count(*) FROM points") == 300


def test_refreshes_at_the_same_time_take_turns(server: Any, wait_until: Wait) -> None:
    """The second one waits for the first, and finds nothing to do."""
    with server.connect() as first, server.connect() as second, server.connect() as watching:
        refresh(first, into="shared", key=["id"])
        first.execute("UPDATE points SET b = b + 1 WHERE id <= 5")
        found: list[Any] = []
        with first.transaction():
            assert refresh(first, into="shared") == (5, 295, 0)
            thread = threading.Thread(target=lambda: found.append(refresh(second, into="shared")))
            thread.start()
            waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'shared'::regclass"
            wait_until(lambda: value(watching, waits) == 1)
            assert value(watching, "SELECT count(*) FROM shared") == 300  # readers do not wait
        thread.join()
        assert found == [(0, 300, 0)]
        watching.execute("DROP TABLE shared")


# -- keys and columns of any type -------------------------------------------------------------------------------------

KEYS = {
    "two columns": ("i AS k, i::text AS l", ["k", "l"]),
    "uuid": ("md5(i::text)::uuid AS k", ["k"]),
    "text with quotes": ("""'it''s "' || i || E'\\n\\\\' AS "we""ird col'" """, ["we\"ird col'"]),
    "empty text": ("CASE i WHEN 1 THEN '' ELSE i::text END AS k", ["k"]),
    "timestamptz": (
        "CASE i WHEN 1 THEN 'infinity' WHEN 2 THEN '-infinity'"
        " ELSE timestamptz '294276-12-31 00:00+00' - i * interval '1 us' END AS k",
        ["k"],
    ),
    "date": ("CASE i WHEN 1 THEN date '4713-01-01 BC' WHEN 2 THEN 'infinity' ELSE date '2020-1-1' + i END AS k", ["k"]),
    "numeric": ("CASE i WHEN 1 THEN 'NaN' WHEN 2 THEN 1e131071 ELSE i::numeric END AS k", ["k"]),
    "bigint": ("CASE i WHEN 1 THEN '-9223372036854775808' ELSE 9223372036854775807 - i END AS k", ["k"]),
    "float": ("CASE i WHEN 1 THEN 'NaN' WHEN 2 THEN '-0' ELSE i::float8 END AS k", ["k"]),
    "enum": ("CASE i WHEN 1 THEN 'sad'::mood ELSE 'it''s' END AS k, i AS l", ["k", "l"]),
    "domain": ("i::positive AS k", ["k"]),
    "bytea": ("decode(md5(i::text), 'hex') AS k", ["k"]),
    "bit, which has no hash": ("i::bit(10) AS k", ["k"]),
    "beside json": ("i AS k, json_build_object('i', i) AS l, point(i, 0) AS m, '<a/>'::xml AS n", ["k"]),
}
TYPES = "CREATE TYPE mood AS ENUM ('sad', 'it''s'); CREATE DOMAIN positive AS int CHECK (VALUE > 0)"
COLUMNS = "prediction float8, label text, probability float8, version int, predicted_at timestamptz, row_hash int8"
FIVE = "SELECT id AS k, a, b FROM points WHERE id <= 5"


@pytest.mark.parametrize("name", KEYS)
def test_keys_and_columns_of_any_type(conn: Connection, name: str) -> None:
    columns, key = KEYS[name]
    conn.execute(TYPES)
    conn.execute(f"CREATE VIEW keyed AS SELECT {columns}, i AS id FROM generate_series(1, 5) i".encode())
    query = "SELECT * FROM keyed JOIN (SELECT id, a, b FROM points) p USING (id)"
    assert refresh(conn, query, key=key) == (5, 0, 0)
    assert refresh(conn, query) == (0, 5, 0)
    conn.execute("UPDATE points SET a = 0 WHERE id = 3")
    assert refresh(conn, query) == (1, 4, 0)
    assert refresh(conn, f"{query} WHERE id < 4") == (0, 3, 2)


@pytest.mark.parametrize(
    "table",
    [
        "k int PRIMARY KEY, l int GENERATED ALWAYS AS (k * 2) STORED",
        "k int GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
        "k int GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY",
        "k bigint UNIQUE, l int DEFAULT 7",
    ],
)
def test_a_table_that_was_made_by_hand(conn: Connection, table: str) -> None:
    conn.execute(f"CREATE TABLE kept ({table}, {COLUMNS})".encode())
    assert refresh(conn, FIVE, key=["k"]) == (5, 0, 0)
    assert refresh(conn, FIVE, key=["k"]) == (0, 5, 0)


def test_a_partitioned_table(conn: Connection) -> None:
    conn.execute(f"CREATE TABLE kept (k int PRIMARY KEY, {COLUMNS}) PARTITION BY HASH (k)".encode())
    for part in range(2):
        bound = f"FOR VALUES WITH (MODULUS 2, REMAINDER {part})"
        conn.execute(f"CREATE TABLE part{part} PARTITION OF kept {bound}".encode())
    assert refresh(conn, FIVE) == (5, 0, 0)
    assert refresh(conn, FIVE) == (0, 5, 0)


def test_keys_that_identify_no_row(conn: Connection) -> None:
    def attempt(query: str, key: str) -> Callable[[], Any]:
        def call() -> Any:
            with conn.transaction():
                return refresh(conn, query, key=[key])

        return call

    same = "SELECT 1 AS k, a, b FROM points"
    error = refused("21000", "more than one row with the same key (k)", "Add columns", attempt(same, "k"))
    assert error.diag.context is None
    version = "SELECT id AS version, a, b FROM points"
    refused("42701", 'the key cannot have a column "version"', "AS", attempt(version, "version"))
    conn.execute(f"CREATE TABLE kept (k int, {COLUMNS}, UNIQUE (k, version))".encode())
    refused("55000", "no primary key or unique constraint for the key (k)", "ALTER TABLE", attempt(FIVE, "k"))
