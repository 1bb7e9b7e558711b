"""Calls of explain_training."""

from __future__ import annotations

import json
from typing import Any

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
