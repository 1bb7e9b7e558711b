"""The connection of a view, which reconnects after an error, and the queries that the view needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from pg_tensile.client.connection import Connection, ServerError, connect, extension_schema, refusals
from pg_tensile.tools.top import details, snapshot
from pg_tensile.tools.top.history import History
from pg_tensile.tools.top.snapshot import Snapshot

T = TypeVar("T")

RECONNECT = {"connect_timeout": "3"}  # seconds, in which no keys are read; the user's value takes precedence


class Reader:
    """A connection and its successors. `close` closes the current one."""

    def __init__(self, connection: Connection) -> None:
        info = connection.info
        self._parameters: dict[str, Any] = RECONNECT | info.get_parameters() | {"password": info.password or None}
        self._connection: Connection | None = connection
        self.where = f"{info.dbname} as {info.user} on {info.host}:{info.port}"

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def observe(self, history: History) -> Snapshot:
        """Return a snapshot of the server and add it to `history`. Raises ServerError."""
        current = self._ask(snapshot.read)
        unknown = history.unknown(current)
        history.add(current, self._ask(partial(snapshot.read_epochs, jobs=unknown)) if unknown else None)
        return current

    def details(self, job: int) -> details.Row:
        """Return the details of a job. Raises ServerError."""
        return self._ask(partial(details.read, job=job))

    def cancel(self, job: int) -> bool:
        """Cancel a job; return False if it had ended already. Raises ServerError."""
        return self._ask(partial(_cancel, job=job))

    def _ask(self, question: Callable[[Connection], T]) -> T:
        """Return the answer of `question` over the connection.

        After an error the next question opens a new connection: the old one may be broken, or have cached an older
        state of the extension."""
        try:
            with refusals():
                if self._connection is None:
                    self._connection = connect(**self._parameters)
                return question(self._connection)
        except ServerError:
            self.close()
            raise


def _cancel(connection: Connection, job: int) -> bool:
    schema = extension_schema(connection).replace('"', '""').replace("%", "%%")
    row = connection.execute(f'SELECT "{schema}".cancel_job(%s) AS cancelled', (job,)).fetchone()
    assert row is not None
    return bool(row["cancelled"])
