"""Errors as a user sees them."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest


def refused(sqlstate: str, message: str, hint: str, attempt: Callable[[], object]) -> psycopg.Error:
    """The attempt raises that error: SQLSTATE, part of its sentence, part of the hint, which is never missing."""
    with pytest.raises(psycopg.Error) as caught:
        attempt()
    error = caught.value
    assert error.sqlstate == sqlstate, f"{error.sqlstate}: {error}"
    assert message in (error.diag.message_primary or ""), error.diag.message_primary
    assert error.diag.message_hint, f"no hint: {error}"
    assert hint in error.diag.message_hint, error.diag.message_hint
    return error
