"""The SQL examples of the documents, executed in order in a new database for each document; and the SQL reference
agrees with the catalogue.

The comment before a block says how it is treated (tests/documents.py). Some documents use a TABLE of the demo
or of the benchmarks, which is created here; statements of training.md that need the end of a job wait for it.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from benchmarks import flights
from scripts.demo import sql
from scripts.sql_reference import ARGUMENTS, COMMAND, REFERENCE, columns, functions, render, settings
from tests.documents import DOCUMENTS, Block, blocks, statements
from tests.pretrained import minilm
from tests.repository import REPOSITORY
from tests.server.support import Connection, Wait, register, value

WITH_SQL = [path for path in DOCUMENTS if path != REFERENCE and blocks(path, "sql")]
NOT_EXECUTED = 1  # blocks of all documents
NOTES = re.compile(r"|no rows|until \d+ rows|setup:.+|not executed: .+", re.DOTALL)
SUBMITS = re.compile(r"\b(train_model|schedule_training|tune_model)\(")
NEEDS_JOBS_TO_HAVE_ENDED = re.compile(r"\b(predict|predict_class|predict_rows|predict_table|train_model)\(")
DIAMONDS = f"""
    {sql.TABLES}
    INSERT INTO diamonds
        SELECT i, c, (ARRAY['Fair', 'Good', 'Ideal'])[1 + i % 3], (ARRAY['D', 'G', 'J'])[1 + i % 3 * i % 3],
               (ARRAY['SI1', 'VS1'])[1 + i % 2], 4000 * c * c * (1 + i % 3)
        FROM (SELECT i, 0.2 + i * 37 % 1000 / 500.0 AS c FROM generate_series(1, 1200) i UNION ALL
              SELECT i, 0.2 + i * 37 % 1000 / 500.0 FROM generate_series(52001, 52200) i) AS weights;
"""
FLIGHTS = f"""
    {sql.TABLES} {flights.TABLES} {flights.DEPARTURES}
    INSERT INTO planes (tailnum, year, seats, engine)
        SELECT 'N' || i, 1990 + i, 100 + 10 * i, (ARRAY['Turbo-fan', 'Turbo-jet'])[1 + i % 2]
        FROM generate_series(0, 19) i;
    INSERT INTO weather (origin, time_hour, temp, humid, wind_speed, precip, pressure, visib)
        SELECT airport, timestamptz '2013-01-01' + i * interval '1 hour', 50 + 20 * sin(i), 60, 10 + 8 * cos(i), 0,
               1013, 10
        FROM generate_series(0, 799) i, unnest(ARRAY['EWR', 'JFK', 'LGA']) airport;
    INSERT INTO flights (year, month, day, arr_delay, carrier, tailnum, origin, dest, distance, hour, time_hour)
        SELECT 2013, 1, 1 + i % 28, 40 * sin(i), (ARRAY['UA', 'AA', 'B6'])[1 + i % 3], 'N' || i % 20,
               (ARRAY['EWR', 'JFK', 'LGA'])[1 + i % 3], (ARRAY['IAH', 'MIA'])[1 + i % 2], 200 + 37 * i % 2000, i % 24,
               timestamptz '2013-01-01' + i % 800 * interval '1 hour'
        FROM generate_series(1, 2000) i;
    INSERT INTO digits
        SELECT i, i % 3, ARRAY(SELECT (abs(p - 20 * (i % 3)) + i) % 17 FROM generate_series(1, 64) p ORDER BY p)
        FROM generate_series(1, 300) i;
    SELECT register_model('digit', '{{"type": "cnn", "channels": [4]}}');
    SELECT train_model('digit', 'SELECT label, image FROM digits', 'label', epochs => 2,
                       options => '{{"task": "classification"}}');
    SELECT wait_for_job(1);
"""
TABLES = {"README.md": DIAMONDS, "training.md": FLIGHTS}
PATIENT = {"training.md"}  # its examples are not meant to be pasted one after the other
# Columns with self-explanatory names; all others have a comment.
SELF_EXPLANATORY = {
    *("id", "name", "job", "model", "model_id", "version", "owner", "owner_id", "device", "state", "reason"),
    *("architecture", "description", "tuning", "query", "target", "epochs", "batch_size", "optimizer"),
    *("validation", "seed", "policy", "priority", "options", "sqlstate", "error", "hint", "detail"),
    *("dtype", "shape", "bytes", "at", "created_at", "updated_at", "submitted_at", "started_at", "ended_at"),
    *("captured_at", "measured_at", "calibrated_at"),
}


@pytest.fixture(scope="module")
def server(new_cluster: Callable[..., Any], clusters_folder: Path) -> Iterator[Any]:
    """A cluster whose pg_tensile.model_path has the folder minilm."""
    shutil.copytree(minilm(), clusters_folder / "documents" / "minilm", dirs_exist_ok=True)
    cluster = new_cluster({"pg_tensile.model_path": clusters_folder / "documents"}, extension=False)
    yield cluster
    cluster.end()


@pytest.fixture
def enter(server: Any, wait_until: Wait) -> Iterator[Callable[[str], Connection]]:
    """`enter(name)`: connect to a new database, in which pg_tensile works from now on. ALTER SYSTEM is
    undone afterwards."""
    with contextlib.ExitStack() as connections:

        def make(name: str) -> Connection:
            with server.connect() as conn:
                conn.execute(f'CREATE DATABASE "{name}"')
            server.configure({"pg_tensile.database": name})
            server.reload()
            conn = connections.enter_context(server.connect(name))
            wait_until(lambda: value(conn, "SHOW pg_tensile.database") == name)
            return conn

        yield make
    with server.connect() as conn:
        conn.execute("ALTER SYSTEM RESET ALL")
        conn.execute("SELECT pg_reload_conf()")


# ---- examples -------------------------------------------------------------------------------------------------------


def rows(conn: Connection, statement: str) -> list[Any] | None:
    """Execute a statement; return its rows, None if it is no query."""
    cursor = conn.execute(statement.encode())
    return cursor.fetchall() if cursor.description is not None else None


def follow(conn: Connection, block: Block, wait_until: Wait) -> None:
    """Execute a block as its note says. Raises AssertionError, psycopg.Error."""
    assert NOTES.fullmatch(block.note), f"unknown note: {block.note}"
    if block.note.startswith("not executed"):
        return
    if block.note.startswith("setup:"):
        for statement in statements(block.note.removeprefix("setup:")):
            conn.execute(statement.encode())
    until = re.fullmatch(r"until (\d+) rows", block.note)
    for statement in statements(block.text):
        if until is not None:
            wait_until(lambda sql=statement: len(rows(conn, sql) or ()) >= int(until[1]), what=f"line {block.line}")
            continue
        result = rows(conn, statement)
        assert result is None or bool(result) == (block.note != "no rows"), f"{statement}\nreturned {result}"


def patient(document: Path, conn: Connection, wait_until: Wait) -> Iterator[Block]:
    """Yield the document's statements one by one, each when it can be executed."""
    for block in blocks(document, "sql"):
        for statement in statements(block.text):
            if NEEDS_JOBS_TO_HAVE_ENDED.search(statement):
                wait_until(lambda: value(conn, "SELECT count(*) FROM tensile.progress") == 0, 240, "jobs end")
            yield block._replace(text=statement)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("document", WITH_SQL, ids=[path.stem for path in WITH_SQL])
def test_examples_work(document: Path, enter: Callable[[str], Connection], wait_until: Wait) -> None:
    """Takes minutes in all: a reader's jobs are trained."""
    conn = enter(document.stem.lower())
    examples: Iterator[Block] = iter(blocks(document, "sql"))
    if not any("CREATE EXTENSION" in block.text for block in blocks(document, "sql")):
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
    if document.name in TABLES:
        for statement in statements(TABLES[document.name]):
            conn.execute(statement.encode())
    if document.name in PATIENT:
        examples = patient(document, conn, wait_until)
    for block in examples:
        try:
            follow(conn, block, wait_until)
        except (psycopg.Error, AssertionError) as error:
            raise AssertionError(f"{document.name}, line {block.line}: {error}") from error


def test_the_examples_of_the_readme_are_valid(enter: Callable[[str], Connection]) -> None:
    """All are planned, which finds functions, arguments and columns that do not exist; jobs are submitted, but do not
    begin."""
    conn = enter("valid")
    conn.execute("CREATE EXTENSION pg_tensile CASCADE")
    for statement in statements(DIAMONDS):
        conn.execute(statement.encode())
    register(conn, "price")
    submitted = 0
    for block in blocks(REPOSITORY / "README.md", "sql"):
        for statement in statements(block.text):
            conn.execute(f"EXPLAIN {statement}".encode())
            if SUBMITS.search(statement):
                with conn.transaction(force_rollback=True):
                    assert rows(conn, statement)
                submitted += 1
    assert submitted == 4


def test_nearly_all_examples_are_executed() -> None:
    assert {"README.md", "tutorial.md", "training.md", "operations.md"} <= {path.name for path in WITH_SQL}
    notes = [block.note for path in WITH_SQL for block in blocks(path, "sql")]
    assert sum(note.startswith("not executed") for note in notes) == NOT_EXECUTED


# ---- the reference --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def described(server: Any) -> Iterator[Connection]:
    with server.connect() as conn:
        conn.execute("CREATE DATABASE described")
    with server.connect("described") as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        yield conn


def test_the_sql_reference_agrees_with_the_catalogue(described: Connection) -> None:
    assert REFERENCE.exists(), f"run {COMMAND}"
    assert REFERENCE.read_text() == render(described), f"run {COMMAND}"


def test_everything_public_is_described(described: Connection) -> None:
    assert len(functions(described)) > 15 and len(settings(described)) > 10
    assert [function for function in functions(described) if not function.description] == []
    assert [column.relation for column in columns(described) if not column.about] == []
    assert [setting.name for setting in settings(described) if not setting.purpose] == []
    assert {name for function in functions(described) for name in function.names} == set(ARGUMENTS)
    silent = {column.name: column for column in columns(described) if not column.description}
    assert silent.keys() == SELF_EXPLANATORY, sorted(silent.keys() ^ SELF_EXPLANATORY)
