"""Databases with the encodings that PostgreSQL offers: names, features, labels and messages in their own letters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg import sql

from tests.server.refusals import refused
from tests.server.support import Connection, value

# Letters of each encoding: two values, and a name
LETTERS = {
    "LATIN1": ("Zürich", "Málaga", "naïve"),
    "EUC_JP": ("大阪", "東京", "京都"),
    "WIN1252": ("Zürich", "Málaga", "naïve €"),
    "KOI8R": ("Москва", "Казань", "Тверь"),
    "SQL_ASCII": ("Zürich", "東京", "naïve €"),  # in UTF-8
}


@pytest.fixture(scope="module")
def server(new_cluster: Callable[..., Any]) -> Iterator[Any]:
    cluster = new_cluster(extension=False)
    yield cluster
    cluster.end()


@pytest.fixture
def enter(server: Any) -> Iterator[Callable[[str], Connection]]:
    """`enter(encoding)`: connect to a new database with this encoding, in which pg_tensile works; with SQL_ASCII, the
    client's encoding is that as well."""
    opened: list[Connection] = []

    def make(encoding: str) -> Connection:
        with server.connect() as admin:
            options = "CREATE DATABASE encoded TEMPLATE template0 LOCALE 'C' ENCODING {}"
            admin.execute(sql.SQL(options).format(sql.Literal(encoding)))
        server.alter({"pg_tensile.database": "encoded"})
        opened.append(server.connect("encoded"))
        if encoding != "SQL_ASCII":
            opened[-1].execute("SET client_encoding = 'UTF8'")
        opened[-1].execute("CREATE EXTENSION pg_tensile CASCADE")
        return opened[-1]

    yield make
    for conn in opened:
        conn.execute("SELECT release_database()")
        conn.close()
        with server.connect() as admin:
            admin.execute("DROP DATABASE encoded")


def text(conn: Connection, query: str) -> str:
    """Return the first value of the query; of a database without encoding, UTF-8 is expected."""
    cursor = conn.cursor()
    row = cursor.execute(query.encode()).fetchone()
    assert row is not None
    return row[0].decode() if isinstance(row[0], bytes) else str(row[0])


@pytest.mark.long
@pytest.mark.parametrize("encoding", LETTERS)
def test_letters_of_the_encoding(enter: Callable[[str], Connection], encoding: str) -> None:
    """Takes long because each encoding has a database and a training of its own."""
    conn = enter(encoding)
    one, other, name = LETTERS[encoding]
    conn.execute(
        f"""CREATE TABLE "{name}" AS
            SELECT CASE i % 2 WHEN 0 THEN '{one}' ELSE '{other}' END AS "f {name}", cos(i) AS x,
                   CASE i % 2 WHEN 0 THEN 'y {one}' ELSE 'n {other}' END AS "y {name}"
            FROM generate_series(1, 300) i""".encode()
    )
    query = f"""SELECT * FROM "{name}" """
    train = f"SELECT train_model('{name}', '{query}', 'y {name}', epochs => 5, policy => 'none')"
    assert text(conn, f"SELECT wait_for_job({text(conn, train)}, '90 s')") == "finished"
    assert f'"f {name}" is enough to predict' in text(conn, "SELECT warnings[1] FROM tensile.jobs")
    row = f"""{{"f {name}": "{one}", "x": 0}}"""
    assert text(conn, f"SELECT predict_class('{name}', '{row}'::jsonb)") == f"y {one}"
    assert text(conn, f"SELECT label FROM predict_rows('{name}', '{query} WHERE x = cos(1)')") == f"n {other}"
    with pytest.raises(psycopg.Error, match="is missing") as caught:
        text(conn, f"SELECT predict_class('{name}', '{{}}'::jsonb)")
    assert caught.value.diag.context is None
    assert encoding == "SQL_ASCII" or name in str(caught.value)


def test_names_of_models(enter: Callable[[str], Connection]) -> None:
    """The byte of the euro sign is a control character in ISO 8859, and a letter in WIN1250."""
    conn = enter("WIN1250")
    conn.execute("SELECT register_model('10 € Łódź')")
    for control in (1, 31, 127):
        attempt = partial(conn.execute, "SELECT register_model(%s)", (chr(control),))
        refused("22023", "invalid model name", "control", attempt)
    assert value(conn, "SELECT model FROM tensile.models") == "10 € Łódź"


def test_bytes_that_are_not_utf8_in_a_database_without_encoding(enter: Callable[[str], Connection]) -> None:
    conn = enter("SQL_ASCII")
    conn.execute(rb"CREATE TABLE t AS SELECT E'Z\xfcrich' AS city, i::float8 AS y FROM generate_series(1, 50) i")
    train = b"SELECT train_model('m', 'SELECT ''\xfc'' AS x, 1 AS y', 'y')"
    refused("22021", "a text is not in UTF-8", "SQL_ASCII", partial(conn.execute, train))
    with pytest.raises(psycopg.errors.CharacterNotInRepertoire):
        conn.execute(b"SELECT register_model('\xfc')")
    job = value(conn, "SELECT train_model('m', 'SELECT * FROM t', 'y')")
    wait = partial(conn.execute, "SELECT wait_for_job(%s, '60 s')", (job,))
    refused("22021", "a text is not in UTF-8", "convert them", wait)
