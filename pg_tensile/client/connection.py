"""Connections to a server that has the extension. The server is found as psql finds it: by a connection string, a
service, or the PG… variables of the environment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.rows import DictRow, dict_row

from pg_tensile import __version__
from pg_tensile.errors import TensileError

Connection = psycopg.Connection[DictRow]

EXTENSION = """
    SELECT e.extversion, n.nspname AS schema, current_setting('pg_tensile.database', true) AS at_work,
           current_database() AS database
    FROM pg_catalog.pg_database d
         LEFT JOIN pg_catalog.pg_extension e ON e.extname = 'pg_tensile'
         LEFT JOIN pg_catalog.pg_namespace n ON n.oid = e.extnamespace
    WHERE d.datname = current_database()
"""


class ServerError(TensileError):
    """The server, the extension or the job was not found, or the server has refused a statement."""


def connect(conninfo: str = "", **parameters: Any) -> Connection:
    """Return a connection whose statements commit at once and whose rows are dicts.

    `conninfo` is a connection string or URI; `parameters` are those of libpq, such as host, port, user, dbname and
    password, and None means that a parameter is not given.

    Raises ServerError if no server answers, if it refuses the login, or if the database does not have pg_tensile in
    this version.
    """
    given = {name: value for name, value in parameters.items() if value is not None}
    try:
        connection = psycopg.connect(
            conninfo, autocommit=True, row_factory=dict_row, **{"fallback_application_name": "pg_tensile"} | given
        )
    except psycopg.OperationalError as error:
        hint = (
            "PGSERVICE, PGHOST, PGPORT, PGUSER and PGDATABASE say where it is and who you are; -d, -h, -p and -U of a"
            " command, or arguments of connect() in Python, go before them."
        )
        raise ServerError(f"cannot connect: {str(error).strip()}", hint) from None
    except psycopg.ProgrammingError as error:
        hint = 'Write it as "host=/tmp port=5432 dbname=mydb" or postgresql://user@host:port/mydb.'
        raise ServerError(f"the connection string cannot be used: {str(error).strip()}", hint) from None
    try:
        with refusals():
            extension_schema(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def extension_schema(connection: Connection) -> str:
    """Return the schema of the extension's functions. Raises ServerError if the database lacks this version of it."""
    row = connection.execute(EXTENSION).fetchone()
    assert row is not None
    if row["extversion"] is None:
        elsewhere = row["at_work"] not in (None, row["database"])
        hint = (
            f'pg_tensile works in database "{row["at_work"]}": connect to that one.'
            if elsewhere
            else "CREATE EXTENSION pg_tensile CASCADE; makes it, on a server that preloads the library."
        )
        raise ServerError(f'database "{row["database"]}" has no extension pg_tensile', hint)
    if row["extversion"] != __version__:
        message = f"the database has pg_tensile {row['extversion']}, and this is {__version__}"
        raise ServerError(
            message, "Install the same version on both sides; ALTER EXTENSION pg_tensile UPDATE; helps there."
        )
    return str(row["schema"])


@contextmanager
def refusals() -> Iterator[None]:
    """Raise errors of psycopg as ServerError, with the server's hint and detail."""
    try:
        yield
    except psycopg.Error as error:
        said = error.diag
        hint = said.message_hint
        if hint is None and error.sqlstate == "42501":
            hint = "Ask the object's owner for the privilege, or connect as another role."
        message = said.message_primary or str(error).strip() or "the connection was lost"
        raise ServerError(message, hint, said.message_detail) from error


def no_such_job(job: int) -> ServerError:
    hint = "tensile.progress and tensile.job_history list yours; members of pg_read_all_stats see all jobs."
    return ServerError(f"there is no job {job}, or it belongs to another role", hint)
