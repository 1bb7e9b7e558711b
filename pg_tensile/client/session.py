"""What the client and its jobs share: one connection, used by one thread at a time, and what its errors become."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from psycopg import sql

from pg_tensile.client.calls import call, noted
from pg_tensile.client.connection import Connection, ServerError, extension_schema, refusals

Row = dict[str, Any]


class ConnectionLost(ServerError):
    """The connection is closed, or has broken. Jobs go on without it."""


class Session:
    """A connection as `pg_tensile.client.connection.connect` makes it, which the session closes.

    Threads may share it: each statement waits for its turn, and nothing keeps it for longer than a statement takes.
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
        """The connection, for this thread alone. What goes wrong is raised as ServerError, or as ConnectionLost if
        there is no connection any more."""
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
        hint = "Jobs go on without it. Connect again; job(number) finds a job again."
        if not self._connection.broken:
            return ConnectionLost("the client is closed", hint)
        return ConnectionLost(f"the connection to the server is lost: {error.message.splitlines()[0]}", hint)

    def rows(self, query: str | sql.Composed, parameters: Mapping[str, Any] | tuple[Any, ...] = ()) -> list[Row]:
        """What a query returns. Raises ServerError."""
        with self.asking() as connection:
            return connection.execute(query, parameters).fetchall()

    def answer(
        self,
        function: str,
        required: Mapping[str, Any],
        optional: Mapping[str, Any] | None = None,
        schema: str | None = None,
    ) -> list[Any]:
        """The values that a function returns (see calls.call), one for each row. Raises ArgumentError, ServerError."""
        called, parameters = call(schema or self.schema, function, required, optional)
        return [row["answer"] for row in self.rows(sql.SQL("SELECT {} AS answer").format(called), parameters)]
