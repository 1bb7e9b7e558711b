"""All methods: the leading one, and the tables."""

from __future__ import annotations

import pytest

from benchmarks.experiments.cases import EXPERIMENTS, FULL, runs
from benchmarks.plans import methods
from benchmarks.plans.methods import cells, is_right, rivals, row_checks


def row(policy: str, peak: int, eor: float, **values):
    found = {
        "experiment": "savings", "case": "a network", "policy": policy, "label": policy, "budget": None,
        "vanilla_peak_bytes": 100, "device_peak_bytes": peak, "peak_bytes": peak, "msr": 1 - peak / 100, "eor": eor,
        "cbr": (1 - peak / 100) / eor, "bit_identical": True, "gradient_difference": None, "error": None,
        "budget_bytes": None, "latencies": "measured", "first_eor": eor,
    }  # fmt: skip
    return found | values


def ahead(*rows) -> dict[str, bool]:
    return {rival.row["label"]: rival.ahead for rival in rivals(rows)}


def test_joint_is_ahead_of_who_needs_more_time_for_no_less_memory():
    rows = [row("none", 100, 1.0), row("joint", 80, 1.02), row("joint", 50, 1.2), row("joint", 30, 1.5)]
    assert ahead(*rows, row("vdnn", 80, 1.1), row("capuchin", 50, 1.1), row("lru", 20, 9.0)) == {
        "vdnn": True, "capuchin": False, "lru": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("peak", "eor"),
    [(29, None), (30, 1.5), (40, 1.35), (50, 1.2), (79, 1.026), (80, 1.02), (90, 1.01), (99, 1.001), (120, 1)],
)
def test_between_two_of_its_rows_joint_is_on_the_line(peak, eor):
    rows = [row("none", 100, 1.0), row("joint", 80, 1.02), row("joint", 50, 1.2), row("joint", 30, 1.5)]
    (rival,) = rivals([*rows, row("vdnn", peak, 1.3, msr=0.5)])
    assert rival.joint == (eor if eor is None else pytest.approx(eor))


def test_a_row_that_needs_less_and_is_faster_counts():
    (rival,) = rivals([row("joint", 80, 1.3), row("joint", 50, 1.2), row("vdnn", 70, 1.3)])
    assert rival.joint == 1.2


def test_noise_is_not_being_behind():
    assert ahead(row("joint", 50, 1.03), row("capuchin", 50, 1.01)) == {"capuchin": True}
    assert ahead(row("joint", 50, 1.05), row("capuchin", 50, 1.01)) == {"capuchin": False}


def test_joint_is_where_any_experiment_has_measured_it():
    rows = [row("none", 100, 1.0), row("joint", 80, 1.0), row("joint", 50, 1.4), row("tensile", 75, 1.02)]
    assert ahead(*rows) == {"tensile": False}
    table = [row("joint", 73, 1.02, experiment="table3"), row("tensile", 73, 1.0, experiment="table3")]
    assert ahead(*rows, *table) == {"tensile": True}


def test_cases_are_compared_with_themselves():
    one, other = row("joint", 50, 1.0), row("capuchin", 50, 1.5, case="another network")
    assert [rival.joint for rival in rivals([one, other])] == [None]


@pytest.mark.parametrize(
    ("values", "right"),
    [
        ({}, True),
        ({"bit_identical": False}, False),
        ({"error": "no plan", "eor": None}, False),
        ({"policy": "peer:checkpoint", "bit_identical": False, "gradient_difference": 1e-6}, True),
        ({"policy": "peer:checkpoint", "bit_identical": False, "gradient_difference": 0.8}, False),
        ({"policy": "peer:checkpoint", "bit_identical": False}, False),
    ],
)
def test_who_computes_something_else_is_no_rival(values, right):
    found = row(values.get("policy", "lru"), 50, 1.1) | values
    assert is_right(found) == right
    assert len(ahead(row("joint", 50, 1.0), found)) == right
    assert ("wrong" in cells(found)[-1]) == (not right and found["error"] is None)


def test_bits_and_budgets_are_checked():
    assert [check.holds for check in row_checks(row("joint", 50, 1.0, budget_bytes=50))] == [True, True]
    broken = row("joint", 51, 1.0, budget_bytes=50, bit_identical=False)
    assert [check.holds for check in row_checks(broken)] == [False, False]
    assert not list(row_checks(row("joint", 50, 1.0, error="no plan")))


def test_every_run_is_a_scenario():
    listed = methods.scenarios("host", False)
    asked = methods.size(False)
    assert len({each.name for each in listed}) == len(listed)
    assert len(listed) + len(methods.left_out(asked)) == len(runs(EXPERIMENTS, asked))
    assert sum(each.seconds for each in listed) < 2 * 3600
    assert FULL.batch == 16
