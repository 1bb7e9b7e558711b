"""Checks of errors as users see them."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest


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
