"""The roles of the security tests, with rows that belong to alice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import psycopg
import pytest
from psycopg import sql

from tests.server.support import Connection, value


class Cast(NamedTuple):
    """Connections of the roles, and alice's job and version."""

    alice: Connection
    bob: Connection
    mallory: Connection
    job: int
    version: int


def current_user(conn: Connection) -> str:
    return str(value(conn, "SELECT current_user"))


def insert_job(db: Connection, owner: str, model: int | None, state: str = "interrupted") -> int:
    """Insert a job that never starts, or one that has ended."""
    return int(
        value(
            db,
            "INSERT INTO tensile_internal.jobs (model_id, model, owner, query, target, epochs, batch_size, optimizer,"
            " learning_rate, validation, seed, priority, options, settings, state, not_before, ended_at) VALUES"
            " (%s, 'late', %s, 'SELECT secret', 'late', 1, 1, 'sgd', 1, 0, 0, 0, '{}', '{}', %s, now() + '1 year',"
            " CASE WHEN %s <> 'interrupted' THEN now() END) RETURNING id",
            *(model, owner, state, state),
        )
    )


def denied(attempt: Callable[[], object], message: str = "") -> None:
    with pytest.raises(psycopg.Error) as caught:
        attempt()
    assert caught.value.sqlstate == "42501", f"{caught.value.sqlstate}: {caught.value}"
    assert message in str(caught.value)


@contextlib.contextmanager
def among_the_tables(db: Connection, role: str) -> Iterator[None]:
    """A transaction of a superuser that acts as `role`, which may name what is in tensile_internal, until it ends."""
    with db.transaction(force_rollback=True):
        identifier = sql.Identifier(role)
        db.execute(sql.SQL("GRANT USAGE ON SCHEMA tensile_internal TO {}").format(identifier))
        db.execute(sql.SQL("SET LOCAL ROLE {}").format(identifier))
        yield


def visible(db: Connection, role: str, table: str) -> int:
    """Return how many rows of a table row security shows to a role."""
    with among_the_tables(db, role):
        return int(value(db, f"SELECT count(*) FROM tensile_internal.{table}"))


def denied_within(conn: Connection, statement: sql.SQL | sql.Composed | str, message: str = "") -> None:
    """Check that an open transaction is denied a statement; it goes on."""
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match=message), conn.transaction():
        conn.execute(statement)
