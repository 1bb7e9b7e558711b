"""The connection that a client and its jobs share: used by one thread at a time, with its errors translated."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from psycopg import sql

from pg_tensile.client.calls import call
from pg_tensile.client.connection import Connection, ServerError, extension_schema, refusals
from pg_tensile.errors import noted

Row = dict[str, Any]


class ConnectionLost(ServerError):
    """The connection is closed, or has broken. Jobs continue without it."""


class Session:
    """A connection opened by `pg_tensile.client.connection.connect`, which the session closes.

    Threads may share it: a lock serialises their uses, each of which lasts for one statement, or for reading one job's
    record.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.RLock()
        with self.asking():
            self.schema = extension_schema(connection)

    @property
    def connection(self) -> Connection:
        return self._connection

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextmanager
    def asking(self) -> Iterator[Connection]:
        """Lock the connection for this thread and yield it.

        Errors of the server and texts that cannot be encoded are raised as ServerError, and as ConnectionLost if the
        connection is closed or broken."""
        with self._lock:
            try:
                with refusals():
                    yield self._connection
            except ServerError as error:
                raise noted(self._lost(error) if self._connection.closed else error) from error.__cause__
            except UnicodeError as error:
                hint = "Connect with client_encoding=utf8, and leave lone surrogates out."
                raise noted(ServerError(f"a text cannot be sent to the server: {error}", hint)) from None

    def _lost(self, error: ServerError) -> ConnectionLost:
        hint = "Jobs continue without it. Connect again; job(number) finds a job again."
        if not self._connection.broken:
            return ConnectionLost("the client is closed", hint)
        return ConnectionLost(f"the connection to the server is lost: {error.message.splitlines()[0]}", hint)

    def rows(self, query: str | sql.Composed, parameters: Mapping[str, Any] | tuple[Any, ...] = ()) -> list[Row]:
        """Return the rows of a query. Raises ServerError."""
        with self.asking() as connection:
            return connection.execute(query, parameters).fetchall()

    def answer(
        self,
        function: str,
        required: Mapping[str, Any],
        optional: Mapping[str, Any] | None = None,
        schema: str | None = None,
    ) -> list[Any]:
        """Return the values of a call (see calls.call), one for each row that the function returns.

        `schema` is that of the function; None means the extension's. Raises ArgumentError, ServerError."""
        called, parameters = call(schema or self.schema, function, required, optional)
        return [row["answer"] for row in self.rows(sql.SQL("SELECT {} AS answer").format(called), parameters)]
