"""The arguments split_by, validation_query and max_time: what is refused, stored and passed on."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest

from tests.server.explaining import explain
from tests.server.refusals import refused
from tests.server.support import ROWS, Connection, Row, finish, register, submit, train_late, value

QUERY = "SELECT distance, carrier, late FROM flights"


@pytest.mark.parametrize(
    ("query", "sqlstate", "message", "hint"),
    [
        ("", "42601", "the validation query is empty", "SELECT"),
        (f"{QUERY}; SELECT 1", "42601", "the validation query has more than one statement", "SELECT"),
        ("DROP TABLE flights", "42601", "the validation query is not a SELECT", "SELECT"),
        (f"{QUERY} FOR UPDATE", "25006", "the validation query must not change anything", "read only"),
        ("SELECT distance, carrier FROM flights", "42804", 'column "late" is missing', "the same columns"),
        (
            f"{QUERY.replace('late', 'late, legs')}",
            "42804",
            'column "legs" of the validation query',
            "the same columns",
        ),
        ("SELECT carrier, distance, late FROM flights", "42804", 'is "carrier", but that of', "the same columns"),
        (
            "SELECT distance::text, carrier, late FROM flights",
            "42804",
            'column "distance" has type text in the validation query',
            "Cast it to",
        ),
    ],
)
def test_wrong_validation_queries(flights: Connection, query: str, sqlstate: str, message: str, hint: str) -> None:
    refused(sqlstate, message, hint, lambda: train_late(flights, validation_query=query))


@pytest.mark.parametrize(
    ("query", "error"),
    [
        (f"{QUERY}) v; DELETE FROM flights; --", psycopg.errors.SyntaxError),
        (f"{QUERY}) v UNION ALL SELECT 1, 'a', true, true FROM (SELECT 1", psycopg.errors.SyntaxError),
        (f"{QUERY} /* not closed", psycopg.errors.SyntaxError),
        ("SELECT missing, carrier, late FROM flights", psycopg.errors.UndefinedColumn),
        ("SELECT * FROM missing", psycopg.errors.UndefinedTable),
    ],
)
def test_queries_that_cannot_be_parsed_by_themselves(
    flights: Connection, query: str, error: type[psycopg.Error]
) -> None:
    for arguments in ({"query": query, "validation_query": QUERY}, {"validation_query": query}):
        with pytest.raises(error):
            train_late(flights, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"split_by": "carrier"}, "split_by and validation_query contradict"), ({"validation": 0.3}, "validation is 0.3")],
)
def test_contradictory_arguments(flights: Connection, arguments: dict[str, object], message: str) -> None:
    refused("22023", message, "Leave", lambda: train_late(flights, validation_query=QUERY, **arguments))


def test_the_name_of_the_flag_is_reserved(flights: Connection) -> None:
    query = "SELECT distance AS tensile_validation, late FROM flights"
    with flights.transaction(force_rollback=True):
        train_late(flights, query=query)
    refused("42701", "is reserved", "AS", lambda: train_late(flights, query=query, validation_query=query))


def test_temporary_tables_are_refused(flights: Connection) -> None:
    flights.execute("CREATE TEMP TABLE held AS SELECT distance, carrier, late FROM flights")
    query = "SELECT * FROM held"
    refused("0A000", "the validation query reads the temp", "", lambda: train_late(flights, validation_query=query))


def test_the_caller_needs_the_privileges_of_the_validation_query(
    db: Connection, roles: Callable[..., str], connect: Callable[..., Connection]
) -> None:
    db.execute("CREATE TABLE public.held AS SELECT 1.0::float8 AS x, 2.0::float8 AS y")
    query, held = "SELECT 1.0::float8 AS x, 2.0::float8 AS y", "SELECT x, y FROM public.held"
    with connect(roles("stranger")) as conn:
        register(conn, "strangers")
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied for table held") as caught:
            submit(conn, "strangers", query=query, validation_query=held)
        assert "validation query" in (caught.value.diag.context or "")
    db.execute("DROP TABLE public.held")


@pytest.mark.long
@pytest.mark.parametrize(
    ("query", "validation_query"),
    [
        (f"{ROWS} -- a comment", f"{ROWS};"),
        (f"{ROWS}; -- a comment behind the semicolon", f"/* a comment */ {ROWS} /* another */"),
        (f";; {ROWS} ; ;", f"({ROWS}) UNION ALL ({ROWS}) ORDER BY a LIMIT 50"),
        (f"WITH q AS ({ROWS}) TABLE q", "VALUES (0.5::float8, 0.5::float8, 'c1', 'yes') -- '"),
    ],
)
def test_rows_of_both_queries_are_read_by_one_statement(
    db: Connection, job_row: Row, query: str, validation_query: str
) -> None:
    if "VALUES" in validation_query:
        validation_query = f"SELECT * FROM ({validation_query}\n) v (a, b, c, y)"
    counts = [value(db, f"SELECT count(*) FROM ({text.rstrip(';')}\n) q") for text in (ROWS, validation_query)]
    job = submit(db, "m", {"type": "mlp", "hidden": [4]}, query=query, validation_query=validation_query)
    finish(db, job)
    row = job_row(db, job)
    assert (row["query"], row["validation_query"]) == (query, validation_query)
    assert row["rows"] == sum(counts)
    assert explain(db, query=query, validation_query=validation_query)


def test_the_arguments_are_stored(db: Connection, job_row: Row) -> None:
    register(db, "m")
    with db.transaction(force_rollback=True):
        job = submit(db, "m", split_by="c", max_time="90 s")
        row = job_row(db, job)
    assert (row["split_by"], row["validation_query"], row["max_time"].total_seconds()) == ("c", None, 90)


def test_a_column_that_is_missing_when_the_job_starts_fails_it(db: Connection) -> None:
    db.execute(f"CREATE TABLE changing AS {ROWS}")
    register(db, "m")
    with db.transaction():
        job = submit(db, "m", query="SELECT * FROM changing", split_by="c")
        db.execute("ALTER TABLE changing RENAME c TO d")
    with pytest.raises(psycopg.errors.UndefinedColumn, match='split_by "c" is not a column'):
        finish(db, job)
