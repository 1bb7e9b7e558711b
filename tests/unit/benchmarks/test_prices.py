"""The planner's prices are those that were found, and how they are chosen."""

from __future__ import annotations

import pytest

from benchmarks.experiments.networks import TUNING, UNTUNED
from benchmarks.plans.prices import ALTERNATIVES, GRID, choose
from benchmarks.results import FOLDER, Results
from pg_tensile.planning.job_planner import planner
from pg_tensile.planning.job_planner.prices import CONGESTED, PRICES

RESULTS = Results(FOLDER / "prices.json")


def test_the_planners_prices_are_those_that_were_found() -> None:
    (found,) = RESULTS.rows("chosen")
    assert [list(prices[:3]) for prices in PRICES] == found["prices"]
    assert [list(prices[:3]) for prices in CONGESTED] == found["congested"]
    assert found["networks"] == [network.title for network in TUNING]


def test_networks_that_prices_are_found_with_are_not_those_that_plans_are_judged_by() -> None:
    assert not {network.model for network in TUNING} & {network.model for network in UNTUNED}


def test_prices_are_chosen_for_what_they_add_to_those_chosen_before() -> None:
    one, two, three = GRID[:3]
    rows = [[1.0, 1.1, 3.0], [4.0, 3.9, 1.5], [1.2, 1.1, 3.0]]  # the third candidate is bad but where the others are
    assert choose(rows, [one, two, three], 2, [5.0] * 3) == [two, three]
    assert choose(rows, [one, two, three], 1, [1.0, 9.0, 1.0]) == [three]


@pytest.mark.parametrize("name", ALTERNATIVES)
def test_each_effect_is_that_of_a_constant_with_another_value(name: str) -> None:
    value = getattr(planner, name)
    effects = {row["constant"] for row in RESULTS.rows("effects")}
    assert value not in ALTERNATIVES[name]
    assert all(f"{name} = {other}" in effects for other in ALTERNATIVES[name])
