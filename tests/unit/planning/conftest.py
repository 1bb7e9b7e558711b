"""Limits for tests that try all policies on many traces."""

import pytest

from pg_tensile.planning.policies.swapadvisor import policy as swapadvisor


@pytest.fixture
def brief_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two generations of the policy that searches: each makes its plans in the same way."""
    monkeypatch.setattr(swapadvisor, "MOST_GENERATIONS", 2)
