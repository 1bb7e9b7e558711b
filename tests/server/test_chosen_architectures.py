"""Models without an architecture, and names that are not registered: train_model chooses by the query's columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.server.explaining import explained
from tests.server.refusals import refused
from tests.server.support import ROWS, Connection, Row, Wait, finish, submit, value

TABLE = "tabular"  # type for queries without an array
MODEL = "SELECT architecture->>'type', architecture_reason, owner_name FROM tensile.models WHERE name = %s"
COLUMNS = "SELECT 1.5::float8 AS a, 'x' AS c, 2.0::float8 AS y"


@pytest.fixture
def notices(db: Connection) -> Iterator[list[str]]:
    messages: list[str] = []

    def keep(diagnostic: psycopg.errors.Diagnostic) -> None:
        messages.append(f"{diagnostic.severity}: {diagnostic.message_primary}")

    db.add_notice_handler(keep)
    yield messages
    db.remove_notice_handler(keep)


@pytest.mark.parametrize(
    ("columns", "type", "reason"),
    [
        ("1 AS n", TABLE, "no column is an array"),
        ("1 AS n, '\\x00'::bytea AS image", "cnn", '"image" is the only array, which is taken as an image'),
        ("ARRAY[1.5]::float4[] AS v", "cnn", '"v" is the only array, which is taken as an image'),
        ("ARRAY[1.5]::numeric[] AS v", "cnn", '"v" is the only array, which is taken as an image'),
        ("ARRAY[1]::int2[] AS v, 'a' AS t", "cnn", '"v" is the only array, which is taken as an image'),
        ("ARRAY[1]::int4[] AS t", "transformer", '"t" is the only array, of integers, which are taken as tokens'),
        ("ARRAY[1]::int8[] AS t", "transformer", '"t" is the only array, of integers, which are taken as tokens'),
        ("ARRAY[1] AS t, ARRAY[2] AS u", TABLE, "2 columns are arrays, which are taken as numbers"),
    ],
)
def test_the_types_of_the_columns_decide(
    db: Connection, notices: list[str], columns: str, type: str, reason: str
) -> None:
    query = f"SELECT {columns}, 2.0::float8 AS y"
    for name in ("registered", "unregistered"):
        with db.transaction(force_rollback=True):
            if name == "registered":
                db.execute("SELECT register_model(%s)", (name,))
                assert db.execute(MODEL, (name,)).fetchone() == (None, None, "postgres")
            submit(db, name, query=query)
            assert db.execute(MODEL, (name,)).fetchone() == (type, reason, "postgres")
            assert notices == [f'NOTICE: model "{name}" is registered with the architecture {type}: {reason}']
            notices.clear()


@pytest.mark.long
def test_an_unregistered_model_is_trained_and_keeps_its_architecture(
    db: Connection, notices: list[str], job_row: Row
) -> None:
    first = submit(db, "late")
    finish(db, first)
    finish(db, submit(db, "late", query=f"SELECT *, ARRAY[1, 2] AS tokens FROM ({ROWS}) r"))
    assert sum("is registered" in notice for notice in notices) == 1
    assert value(db, "SELECT architecture->>'type' FROM tensile.models WHERE name = 'late'") == TABLE
    assert job_row(db, first)["version"] == 1
    with db.transaction(force_rollback=True):  # chosen again
        db.execute("SELECT register_model('late', NULL, replace => true)")
        submit(db, "late", query=f"SELECT *, ARRAY[1, 2] AS tokens FROM ({ROWS}) r")
        assert db.execute(MODEL, ("late",)).fetchone()[0] == "transformer"  # type: ignore[index]


def test_it_can_be_submitted_by_a_function(db: Connection) -> None:
    db.execute(
        "CREATE FUNCTION pg_temp.submitted() RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN"
        f" RETURN train_model('by a function', $q${COLUMNS}$q$, 'y'); END $$"
    )
    with db.transaction(force_rollback=True):
        assert value(db, "SELECT pg_temp.submitted()") > 0


def test_a_refused_submission_registers_nothing(db: Connection) -> None:
    refused("22023", "epochs is out of range", "", lambda: submit(db, "refused", epochs=0))
    assert value(db, "SELECT count(*) FROM tensile.models WHERE name = 'refused'") == 0


def test_explaining_chooses_and_registers_nothing(db: Connection, notices: list[str]) -> None:
    explanation = explained(db, "explained")
    assert explanation["architecture"] == TABLE and explanation["start"]
    assert notices == [] and value(db, "SELECT count(*) FROM tensile.models WHERE name = 'explained'") == 0


def test_a_model_of_another_role_is_not_taken_over(
    db: Connection, roles: Callable[..., str], connect: Callable[..., Connection]
) -> None:
    db.execute("SELECT register_model('theirs')")
    other = roles("other")
    with connect(other) as conn:
        refused("42501", 'permission denied for model "theirs"', "grant_model", lambda: submit(conn, "theirs"))
        with conn.transaction(force_rollback=True):
            submit(conn, "mine", query=COLUMNS)
            assert conn.execute(MODEL, ("mine",)).fetchone() == (TABLE, "no column is an array", other)
    db.execute("SELECT grant_model('theirs', %s, 'train')", (other,))
    with connect(other) as conn, conn.transaction(force_rollback=True):
        submit(conn, "theirs", query=COLUMNS)
        assert conn.execute(MODEL, ("theirs",)).fetchone() == (TABLE, "no column is an array", "postgres")


def test_a_role_that_may_not_register_models_cannot_do_so_by_training(
    db: Connection, roles: Callable[..., str], connect: Callable[..., Connection]
) -> None:
    trainer = roles("trainer")
    with connect(trainer) as conn, db.transaction(force_rollback=True):
        db.execute("REVOKE EXECUTE ON FUNCTION register_model FROM tensile_user")
        with db.transaction(force_rollback=True):
            db.execute(f"SET LOCAL ROLE {trainer}")
            message = 'permission denied to register model "new"'
            refused("42501", message, "register_model", lambda: submit(db, "new", query=COLUMNS))
        with conn.transaction(force_rollback=True):
            submit(conn, "new", query=COLUMNS)  # the revocation is not committed


@pytest.mark.usefixtures("db")
def test_two_sessions_that_register_the_same_name(connect: Callable[..., Connection], wait_until: Wait) -> None:
    """The second one waits for the first and is told, instead of training the other's model."""
    waits = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
    with connect("postgres") as first, connect("postgres") as second, ThreadPoolExecutor(1) as thread:
        with first.transaction():
            first.execute("SELECT register_model('twice')")
            submitted = thread.submit(submit, second, "twice", query=COLUMNS)
            wait_until(lambda: value(first, waits, second.info.backend_pid) == 1, what="the second session waits")
        refused("55006", 'model "twice" has just been registered', "again", submitted.result)
        with second.transaction(force_rollback=True):
            submit(second, "twice", query=COLUMNS)
