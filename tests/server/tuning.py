"""Small tunings for tests: of an mlp on the rows of support.py, without plans."""

from __future__ import annotations

from typing import Any

from psycopg.types.json import Jsonb

from tests.server.support import ROWS, Connection

SPACE = {"learning_rate": {"low": 1e-4, "high": 1e-1, "log": True}, "hidden": [[4], [8], [16, 8]]}
SMALL = {"query": ROWS, "target": "y", "epochs": 4, "batch_size": 64, "policy": "none", "trials": 4, "space": SPACE}
ENDED = "SELECT wait_for_tuning(%s, '100 s')"
COLUMNS = "number, state, value, params, epochs, rungs"


def tune(conn: Connection, model: str = "m", **arguments: Any) -> int:
    """Call tune_model with small defaults; return the tuning."""
    arguments = SMALL | {"halving": None} | arguments
    for name in ("space", "options", "halving"):
        if arguments.get(name) is not None:
            arguments[name] = Jsonb(arguments[name])
    named = ", ".join(f"{name} => %({name})s" for name in arguments)
    row = conn.execute(f"SELECT tune_model(%(model)s, {named})", arguments | {"model": model}).fetchone()
    assert row is not None
    return int(row[0])


def trials(conn: Connection, tuning: int, columns: str = COLUMNS) -> list[tuple[Any, ...]]:
    return conn.execute(
        f"SELECT {columns} FROM tensile.trials WHERE tuning = %s ORDER BY number",
        (tuning,),
    ).fetchall()


def tuning_state(conn: Connection, tuning: int) -> str:
    row = conn.execute("SELECT state FROM tensile_internal.tunings WHERE id = %s", (tuning,)).fetchone()
    assert row is not None
    return str(row[0])


def finished(conn: Connection, tuning: int) -> None:
    """Wait for the tuning; raise its error."""
    row = conn.execute(ENDED, (tuning,)).fetchone()
    assert row == ("finished",)
