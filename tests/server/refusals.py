"""Checks of errors as users see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.server.support import Connection


def refused(sqlstate: str, message: str, hint: str, attempt: Callable[[], object]) -> psycopg.Error:
    """Check that `attempt` raises an error with this SQLSTATE, part of the message and part of the hint; return it."""
    with pytest.raises(psycopg.Error) as caught:
        attempt()
    error = caught.value
    assert error.sqlstate == sqlstate, f"{error.sqlstate}: {error}"
    assert message in (error.diag.message_primary or ""), error.diag.message_primary
    assert error.diag.message_hint, f"no hint: {error}"
    assert hint in error.diag.message_hint, error.diag.message_hint
    return error


def refusal(conn: Connection, sql: str, *parameters: Any) -> tuple[str | None, str, str]:
    """Return SQLSTATE, message and hint of the error that the statement raises."""
    with pytest.raises(psycopg.Error) as caught:
        conn.execute(sql, parameters)
    diag = caught.value.diag
    return diag.sqlstate, diag.message_primary or "", diag.message_hint or ""
