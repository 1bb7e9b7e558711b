"""Settings of a role, a session or a database do not change training and its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from tests.server.support import MLP, ROWS, Connection, register, submit, value

RATE = 0.0014999  # 0.001 with fewer digits


@pytest.mark.long
def test_training_does_not_depend_on_extra_float_digits(
    db: Connection, roles: Callable[..., str], connect: Callable[..., Connection]
) -> None:
    def loss(role: str) -> float:
        with connect(role) as conn:
            job = submit(conn, f"of {role}", MLP, epochs=1, learning_rate=RATE)
            assert value(conn, "SELECT wait_for_job(%s, '60 s')", job) == "finished"
        return float(value(db, "SELECT training_loss FROM tensile.job_history WHERE job = %s", job))

    plain, terse = roles("plain"), roles("terse")
    db.execute(f"ALTER ROLE {terse} SET extra_float_digits = -15")
    assert loss(terse) == loss(plain)


def test_arguments_are_kept_exactly_with_any_settings(db: Connection) -> None:
    """They become a jsonb, from which jobs and schedules take them."""
    register(db, "m")
    given = (RATE, "1 mon 2 days 00:00:00.000001")
    db.execute("SET extra_float_digits = -15; SET IntervalStyle = 'sql_standard'")
    call = "('m', %s, 'y', learning_rate => %s, max_time => %s, every => '1 day')"
    with db.transaction(force_rollback=True):
        schedule = value(db, f"SELECT schedule_training{call}", ROWS, *given)
        job = submit(db, "m", learning_rate=RATE, max_time=given[1])
        db.execute("SET LOCAL extra_float_digits = 1; SET LOCAL IntervalStyle = 'postgres'")
        trained = "SELECT learning_rate, max_time::text FROM tensile.jobs WHERE job = %s"
        assert db.execute(trained, (job,)).fetchone() == given
        scheduled = (
            "SELECT arguments->'learning_rate', arguments->>'max_time' FROM tensile_internal.schedules WHERE id = %s"
        )
        assert db.execute(scheduled, (schedule,)).fetchone() == given


@pytest.mark.long
def test_row_security_off_stops_neither_explaining_nor_waiting(
    db: Connection, roles: Callable[..., str], connect: Callable[..., Connection]
) -> None:
    user = connect(roles("user"))
    register(user, "m")
    user.execute("SET row_security = off")
    explained = "SELECT count(*) > 5 FROM explain_training('m', %s, 'y', epochs => 1)"
    assert value(user, explained, ROWS)
    job = submit(user, "m", epochs=1)
    assert value(user, "SELECT wait_for_job(%s, '60 s')", job) == "finished"


def test_row_security_off_still_holds_for_the_query(
    db: Connection, roles: Callable[..., str], connect: Callable[..., Connection]
) -> None:
    """With row_security = off the caller wants an error instead of a part of the rows."""
    user = connect(roles("user"), options=f"-c search_path={value(db, 'SELECT current_schema()')},public")
    register(user, "m")
    db.execute("CREATE TABLE few AS " + ROWS)
    db.execute("ALTER TABLE few ENABLE ROW LEVEL SECURITY; GRANT SELECT ON few TO PUBLIC")
    db.execute("CREATE POLICY yes_only ON few USING (y = 'yes')")
    user.execute("SET row_security = off")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
        user.execute("SELECT explain_training('m', 'SELECT * FROM few', 'y')")


@pytest.mark.parametrize("encoding", ["EUC_JP", "LATIN1"])
def test_databases_of_other_encodings(db: Connection, cluster: Any, encoding: str) -> None:
    """The script and the library's messages use no character that other encodings lack."""
    name = sql.Identifier(f"in_{encoding.lower()}")
    options = sql.SQL("TEMPLATE template0 ENCODING {} LC_COLLATE 'C' LC_CTYPE 'C'").format(sql.Literal(encoding))
    db.execute(sql.SQL("CREATE DATABASE {} {}").format(name, options))
    try:
        with cluster.connect(f"in_{encoding.lower()}") as conn:
            conn.execute("CREATE EXTENSION pg_tensile CASCADE")
            register(conn, "m")
            with pytest.raises(psycopg.Error) as caught:
                conn.execute("SELECT register_model('n', %s)", (Jsonb({"type": "cnn", "input": 5}),))
            assert all(part.isascii() for part in (str(caught.value), caught.value.diag.message_hint or ""))
    finally:
        db.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))
