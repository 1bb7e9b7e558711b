"""The processor time of plans, as ratios of measurements that take turns, so that a busy machine does not count."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from benchmarks.plans.rounds import PROMISE, medians, policy_s, round_s, tables
from tests.unit.measured import results_with


@pytest.mark.long
@pytest.mark.parametrize(("jobs", "ratio"), [(1, 1.8), (4, 0.5)])
def test_joint_takes_no_longer_than_it_did_for_large_traces(jobs: int, ratio: float) -> None:
    """Long: five thousand operators. It takes as long as `tensile` for one job and a quarter of that for four.

    Passes without a limit made `joint` four times as slow, or more."""
    taken = medians({policy: partial(policy_s, policy, jobs, 5_000) for policy in ("joint", "tensile")})
    assert taken["joint"] < ratio * taken["tensile"], taken


@pytest.mark.long
@pytest.mark.parametrize(("jobs", "operators"), [(1, 500), (2, 93), (4, 93)])
@pytest.mark.parametrize("may_be_brief", [False, True])
def test_a_promise_that_binds_nothing_takes_no_time(jobs: int, operators: int, may_be_brief: bool) -> None:
    """Long: rounds of many passes. Memory for a promise was searched for by hundreds more, five times as many."""
    promises = {"none": None, "promised": PROMISE}
    taken = medians({name: partial(round_s, jobs, operators, each, may_be_brief) for name, each in promises.items()})
    assert taken["promised"] < 1.8 * taken["none"], taken


def test_the_page_has_a_row_for_each_case(tmp_path: Path) -> None:
    row = {"jobs": 2, "operators": 1_000, "joint": 0.5, "tensile": 0.25}
    row |= {"first": 0.11, "first_promised": 0.12, "thorough": 1.5, "thorough_promised": 1.6}
    lines = tables(results_with(tmp_path, {"table": "policies", **row}, {"table": "rounds", **row}))
    assert "| 2 | 1,000 | 0.50 | 0.25 | 2.00 |" in lines
    assert "| 2 | 1,000 | 0.11 | 0.12 | 1.50 | 1.60 |" in lines
