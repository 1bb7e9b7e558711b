"""Errors of children as those of the server."""

from __future__ import annotations

import pytest

from pyworker.supervisors.failures import failure_of_frame


@pytest.mark.parametrize(
    ("sent", "kept"),
    [("22023", "22023"), *((bad, "XX000") for bad in ("00000", "01000", "ab!{}", "42", "22023\n", "", 5, None))],
)
def test_an_sqlstate_that_cannot_be_raised_becomes_an_internal_error(sent: object, kept: str) -> None:
    failure = failure_of_frame({"sqlstate": sent, "message": "no", "hint": "perhaps"})
    assert (failure.sqlstate, failure.message, failure.hint) == (kept, "no", "perhaps")
