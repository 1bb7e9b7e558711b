"""Scatter of a row's steps, and the causes that its own fields tell."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.execution.backends.conditions import IDLE, Conditions
from pg_tensile.tools.bench.conditions import TurnConditions
from pg_tensile.tools.bench.row import Row
from pg_tensile.tools.bench.scatter import SCATTERED, scatter, scatter_causes, scatter_notes

STEADY = Conditions(1500, 2000, 50, 200.0, ())
UNEVEN = [[10.0, 10.0, 13.0], [10.0, 12.0, 10.0]]  # by round; no first step is slower
STEPS = st.lists(st.lists(st.floats(0.1, 100), min_size=1, max_size=4), min_size=1, max_size=4)


def turn(
    start: Conditions = STEADY, end: Conditions = STEADY, host: float = 0.0, device: float = 0.0
) -> TurnConditions:
    return TurnConditions(start, end, host, device)


def causes(step_ms: list[list[float]] = UNEVEN, **values: Any) -> list[str]:
    """The causes of a row whose steps scatter, on a steady accelerator but for `values`."""
    known: dict[str, Any] = {"conditions": [turn()], "allocator_retries": 0, "passive_swap_ins": 0} | values
    return scatter_causes(Row("net", "joint", "cuda:0", 8, step_ms=step_ms, scatter=scatter(step_ms), **known))


def test_the_scatter_is_of_all_steps():
    """Of eleven steps, the tenth percentile is the second and the ninetieth the tenth."""
    assert scatter([[10.0] * 5, [11.0] * 6]) == pytest.approx(1 / 11)  # between two steady rounds, too
    assert scatter([[float(ms) for ms in range(1, 12)]]) == pytest.approx((10 - 2) / 6)
    assert scatter([[3.0]]) is None and scatter([[3.0], [3.0]]) == 0


@given(STEPS, st.floats(0.1, 10))
def test_the_scatter_does_not_depend_on_the_unit_or_the_rounds(step_ms: list[list[float]], factor: float):
    found = scatter(step_ms)
    times = [ms for steps in step_ms for ms in steps]
    assert found == scatter([times])
    if found is not None:
        assert found >= 0
        assert scatter([[ms * factor for ms in steps] for steps in step_ms]) == pytest.approx(found, abs=1e-9)


def test_a_row_whose_steps_agree_needs_no_cause():
    assert causes([[10.0, 10.2, 10.1]], allocator_retries=3) == []
    assert causes([[10.0]], allocator_retries=3) == []


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ({"conditions": [turn(end=Conditions(1469, 2000, 50))]}, "the SM clock was 1,469 to 1,500 MHz"),
        ({"conditions": [turn(), turn(Conditions(1500, 1500, 50))]}, "the memory clock was 1,500 to 2,000 MHz"),
        (
            {"conditions": [turn(end=Conditions(1500, 2000, 50, 200.0, ("sw_power_cap", IDLE))), turn()]},
            "clocks were lowered by sw_power_cap",
        ),
        ({"conditions": [turn(), turn(end=Conditions(1500, 2000, 56))]}, "the device warmed up from 50 to 56 °C"),
        ({"allocator_retries": 1}, "the allocator gave its cached memory back once, for lack of memory"),
        ({"allocator_retries": 2}, "the allocator gave its cached memory back 2 times, for lack of memory"),
        ({"passive_swap_ins": 4}, "tensors were swapped in passively, on average up to 4 a step"),
        ({"conditions": [turn(), turn(host=0.25)]}, "other processes used 25% of the processors in a round"),
        ({"conditions": [turn(device=0.5), turn()]}, "other processes used 50% of the device in a round"),
        (
            {"step_ms": [[12.0, 10.0, 10.0], [33.0, 30.0, 30.0], [9.0, 10.0, 10.0]]},
            "the first counted step of a round took 1.10 × as long as the others (see --warmup)",
        ),
        (
            {"transfer_ms": 6.0, "simulated_transfer_ms": 5.0},
            "transfers took 1.20 × as long as at the rates of the device's profile",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_cause_is_seen_alone(values: dict[str, Any], cause: str):
    assert causes(**values) == [cause]


def test_small_differences_are_no_cause():
    nearly = Conditions(1480, 1970, 55, 100.0, (IDLE,))
    found = causes(conditions=[turn(end=nearly, host=0.1, device=0.1)], transfer_ms=5.4, simulated_transfer_ms=5.0)
    assert found == ["no cause was seen: clocks, temperature, allocator and other processes were steady"]


def test_what_was_not_recorded_is_not_called_steady():
    on_host = causes(conditions=[TurnConditions(host_load=0.02)], allocator_retries=None)
    assert on_host == [
        "no cause was seen: other processes were steady; clocks, temperature and allocator were not recorded"
    ]
    assert causes(conditions=None, allocator_retries=None)[0].endswith("other processes were not recorded")


def test_a_line_for_each_row_that_scatters():
    calm = Row("net", "none", "host", 8, scatter=0.01, scatter_causes=[])
    busy = Row("net", "joint", "host", 8, budget="60%", scatter=0.2, scatter_causes=["one", "two"])
    assert scatter_notes([calm, busy]) == ["joint at 60%: steps scatter by 20%: one; two"]
    assert SCATTERED == 0.05  # as docs/bench.md says
