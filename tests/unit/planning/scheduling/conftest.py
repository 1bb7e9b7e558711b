"""Plans of few passes for all tests of the scheduler: less good, and made in a fraction of the time."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.policies.joint.share_out import share_out

# The modules: the package of the second has a function of its name.
PLANNER, SHARING = sys.modules[JobPlanner.__module__], sys.modules[share_out.__module__]
OPERATORS = 300
SMALL: int = SHARING.OPERATORS


@pytest.fixture(autouse=True, scope="module")
def few_passes() -> Iterator[None]:
    """Make plans as for traces of thousands of operators: of few passes, and for few divisions of memory and link."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PLANNER, "OPERATORS", OPERATORS)
        patch.setattr(SHARING, "OPERATORS", 1)
        yield


@pytest.fixture
def many_divisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the memory and the link be divided in as many ways as for small traces."""
    monkeypatch.setattr(SHARING, "OPERATORS", SMALL)
