"""Changes on a device that are reasons to plan."""

from __future__ import annotations

import pytest

from pyworker.supervisors.scheduling.device_views import Situation

BEFORE = Situation(1000, 0, 0, 0, 0.0, 0, 0, {1: ("then", False)}, {1: 100}, {1: 0}, {}, (), {1: 0}, False)
MEASURED = ["the memory of job 1 besides its tensors was measured"]


@pytest.mark.parametrize(("overhead", "words"), [(100, []), (101, MEASURED), (95, []), (80, MEASURED)])
def test_a_job_that_takes_more_or_much_less_besides_its_tensors(overhead: int, words: list[str]) -> None:
    assert BEFORE._replace(overheads={1: overhead}).changes(BEFORE) == words


def test_it_is_no_other_reason_where_the_trace_is_new() -> None:
    after = BEFORE._replace(overheads={1: 500}, traces={1: ("now", False)})
    assert after.changes(BEFORE) == ["job 1 needs another plan"]
