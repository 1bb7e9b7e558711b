"""Bounds for several jobs within one budget, against all divisions of small memories and against simulated plans."""

from __future__ import annotations

import random
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.experiments.cases import Case
from benchmarks.experiments.networks import PAPER, TINY
from benchmarks.experiments.suite import run_case
from benchmarks.experiments.together_bounds import Curve, checks, curve_of, least_sum_us, table_eors
from benchmarks.experiments.together_bounds import rows_of as bounds_of
from benchmarks.plans.papers import jobs_of, row_checks, rows_of
from pg_tensile.planning import bounds
from pg_tensile.planning.device.profile import GB, RTX_A6000
from pg_tensile.tools.bench.progress import Progress
from pg_tensile.tools.bench.simulated import captured, with_estimates
from pg_tensile.tools.cli.bench import parse

CNN, SLOW = TINY[3], RTX_A6000.with_link(GB)


def least(curve: Curve, peak: int) -> float:
    return next(us for above, us in reversed(list(zip(*curve, strict=True))) if peak > above)


@pytest.mark.parametrize("seed", range(20))
def test_no_division_of_the_memory_takes_less(seed: int) -> None:
    rng = random.Random(seed)
    curves = []
    for _ in range(rng.randint(2, 3)):
        above = tuple(sorted(rng.sample(range(1, 20), 4)))
        curves.append(Curve(above, tuple(sorted((rng.uniform(1, 9) for _ in above), reverse=True))))
    total = sum(curve.above_bytes[0] + 1 for curve in curves) + rng.randint(0, 20)
    sums = [
        sum(map(least, curves, peaks))
        for peaks in product(*(range(curve.above_bytes[0] + 1, 41) for curve in curves))
        if sum(peaks) <= total
    ]
    assert sum(curve.least_us[-1] for curve in curves) - 1e-9 <= least_sum_us(curves, total) <= min(sums) + 1e-9


def test_equal_jobs_have_the_convex_hull_at_an_equal_share() -> None:
    curve = Curve((0, 4, 6), (10.0, 6.0, 2.0))
    assert least_sum_us([curve] * 2, 6) == pytest.approx(12.0)  # halfway from 10 at 0 to 2 at 6, for each
    assert least_sum_us([curve] * 2, 100) == pytest.approx(4.0)


def test_between_two_budgets_the_bound_is_that_of_the_larger() -> None:
    trace = with_estimates(captured(parse(["bench", *CNN.arguments()])), SLOW).vanilla.trace
    curve = curve_of(trace, SLOW, 4)
    larger = curve.above_bytes[1:]
    for before, after, us in zip(curve.above_bytes, larger, curve.least_us, strict=False):
        assert us == least(curve, before + 1) == least(curve, after) == bounds.least_us(trace, SLOW, after)
        assert us <= bounds.least_us(trace, SLOW, before + 1)
    assert curve.least_us[0] > 1.02 * curve.least_us[-1] and curve.least_us[-1] == trace.latency_us.sum()


def test_simulated_plans_of_several_jobs_take_at_least_the_bound() -> None:
    """With a slow link, so that the bound is above vanilla's time. The rows are those of the benchmark's file."""
    curves = list(bounds_of(CNN, CNN.batch, SLOW, (2,)))
    assert all(check.holds for check in checks(curves))
    case = Case("2 × CNN", ((*CNN.arguments(), "--link", "1"),) * 2, ("none", "joint:budget=60%", "lru:budget=60%"))
    rows = [{"experiment": "fig6", "case": case.title, **row} for row in run_case(case, "sim:RTX_A6000", Progress())]
    results: Any = SimpleNamespace(tables={"fig6": rows, "bounds": curves})
    none, joint, lru = rows_of(results, "fig6")
    assert none["least_eor"] == pytest.approx(1) and joint["least_eor"] > 1.005 and lru["least_eor"] > 1.005
    assert [check.holds for row in (none, joint, lru) for check in row_checks(row) if "EOR" in check.what] == [True] * 3
    assert not all(check.holds for check in row_checks(joint | {"eor": joint["least_eor"] * 0.99}))
    assert table_eors(curves[0]) == sorted(table_eors(curves[0]))
    assert not all(check.holds for check in checks([curves[0] | {"least_us": curves[0]["least_us"][::-1]}]))


def test_bounds_are_for_the_graph_and_the_networks_of_the_row() -> None:
    assert jobs_of("3 × VGG-16") == ["VGG-16"] * 3 and jobs_of("mixed") == [network.title for network in PAPER]
    row = {"experiment": "fig6", "case": "2 × VGG-16", "early_update": True}
    results: Any = SimpleNamespace(tables={"fig6": [row]})
    assert rows_of(results, "fig6")[0]["least_eor"] is None
