"""Calls of explain_training."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from tests.server.support import (
    ROWS,
    Connection,
    value,
)


def call(function: str, arguments: dict[str, Any]) -> str:
    named = ", ".join(f"{name} => %({name})s" for name in arguments)
    return f"SELECT {function}({named})"


def explain(conn: Connection, model: str = "m", **arguments: Any) -> list[str]:
    """Call explain_training and return its lines."""
    arguments = {"model": model, "query": ROWS, "target": "y"} | arguments
    if "options" in arguments:
        arguments["options"] = Jsonb(arguments["options"])
    return [line for (line,) in conn.execute(call("explain_training", arguments), arguments).fetchall()]


def explained(conn: Connection, model: str = "m", **arguments: Any) -> dict[str, Any]:
    (line,) = explain(conn, model, **(arguments | {"options": {"format": "json"} | arguments.get("options", {})}))
    explanation: dict[str, Any] = json.loads(line)
    return explanation


def backend(conn: Connection) -> int:
    return int(value(conn, "SELECT pg_backend_pid()"))


@contextmanager
def explaining(conn: Connection, **arguments: Any) -> Iterator[list[BaseException]]:
    """Call explain_training in a thread, which appends its error to `errors`."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            explain(conn, **arguments)
        except psycopg.Error as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield errors
    thread.join(30)
    assert not thread.is_alive()
