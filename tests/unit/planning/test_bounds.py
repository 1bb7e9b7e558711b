"""The bound on a plan's time: undercut by no plan, tight where the answer is known, and safe without a solver."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.errors import BudgetError
from pg_tensile.planning import bounds
from pg_tensile.planning.bounds import classes, least_us, program, solved_us
from pg_tensile.planning.bounds.absences import absences
from pg_tensile.planning.bounds.knapsack import cut_us
from pg_tensile.planning.compression.coding import Coding
from pg_tensile.planning.device.profile import RTX_A6000, DeviceProfile, Direction
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.codecs import with_codecs
from pg_tensile.planning.plan.memory import floor_bytes, footprint
from pg_tensile.planning.plan.order import as_executed
from pg_tensile.planning.plan.plan import NO_EVENTS, Event, EventKind, Plan
from pg_tensile.planning.policies import POLICIES
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Mode, Trace
from tests.examples import examples
from tests.unit.graphs import MIXED, RECOMPUTE_ALL, SWAP_ALL, Style, dice, random_plan, random_trace
from tests.unit.handmade import network, trace_of

READ, WRITE, CREATE = Mode.READ, Mode.WRITE, Mode.CREATE
MIB = 1 << 20
SLOW = RTX_A6000.with_link(1e9)
ROUNDING = 1 + 1e-9


def us_of(trace: Trace, plan: Plan, profile: DeviceProfile) -> float:
    return simulate([SimulatedJob(trace, plan)], profile)[0].iteration_us


def device_peak(trace: Trace, plan: Plan = NO_EVENTS) -> int:
    return footprint(trace, plan).device_peak_bytes


def linked(random: Random) -> DeviceProfile:
    """A device whose lanes differ, and on which copying takes about as long as computing."""
    out, inward = (random.choice((1e7, 1e8, 1e9)) * random.choice((1, 3)) for _ in Direction)
    return RTX_A6000.with_link(out, inward, random.choice((1.0, 0.9, 0.5)))


# ---- never undercut ----


@given(random=dice(), style=st.sampled_from((MIXED, SWAP_ALL, RECOMPUTE_ALL, Style(leave=0.2))))
@examples(40, long=300)
def test_no_plan_is_faster(random: Random, style: Style) -> None:
    trace = random_trace(random, 16, 20)
    plan, profile = random_plan(random, trace, style), linked(random)
    assert least_us(trace, profile, device_peak(trace, plan)) <= us_of(trace, plan, profile) * ROUNDING


@given(random=dice(), cuts=st.integers(1, 6), like=st.sampled_from((1.03, 1e9)), part=st.floats(0.2, 0.8))
@examples(10, long=40)
def test_no_plan_is_faster_wherever_the_iteration_is_cut(random: Random, cuts: int, like: float, part: float) -> None:
    """Between a few cuts, many tensors lie alike."""
    trace, profile = random_trace(random, 24, 24), linked(random)
    budget = round(floor_bytes(trace) * (1 - part) + device_peak(trace) * part)
    try:
        plan = POLICIES["joint"]({0: trace}, profile, budget)[0]
    except BudgetError:
        plan = random_plan(random, trace, SWAP_ALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "CUTS", cuts)
        patch.setattr(classes, "LIKE", like)
        assert least_us(trace, profile, device_peak(trace, plan)) <= us_of(trace, plan, profile) * ROUNDING


@given(random=dice())
@examples(10, long=60)
def test_no_compressed_swap_is_faster(random: Random) -> None:
    """Codecs that move fewer bytes, but may take longer than the link."""
    trace = random_trace(random, 16, 20)
    nbytes = trace.tensor_bytes
    codec = np.array([random.random() < 0.5 for _ in nbytes]).astype(np.uint8) * (nbytes > 0)
    coding_us = [np.array([random.choice((0.0, 1.0, 50.0)) for _ in nbytes]) for _ in range(3)]
    coded = trace.with_coding(Coding(codec, nbytes // 4, *coding_us))
    profile = linked(random)
    plan = with_codecs(coded, random_plan(random, trace, SWAP_ALL))
    plain = Plan.build([event._replace(codec=0) for event in plan.events])
    peak = device_peak(trace, plain)
    for chosen in (plan, plain):
        assert least_us(coded, profile, peak) <= us_of(coded, chosen, profile) * ROUNDING


@pytest.mark.parametrize(
    "policy", [pytest.param(name, marks=[pytest.mark.long] * (name == "swapadvisor")) for name in POLICIES]
)
@given(random=dice(), part=st.floats(0, 1))
@examples(10)
def test_no_policy_is_faster(policy: str, random: Random, part: float) -> None:
    trace, profile = random_trace(random, 14, 16), linked(random)
    least = floor_bytes(trace)
    try:
        plan = POLICIES[policy]({0: trace}, profile, least + round((device_peak(trace) - least) * part))[0]
    except BudgetError:
        return
    us, executed = us_of(trace, plan, profile), as_executed(roofline.timed(trace, profile), plan)
    assert least_us(executed, profile, device_peak(trace, plan)) <= us * ROUNDING


@pytest.mark.parametrize("link", [2e9, 1e10])
@pytest.mark.parametrize("saved", [0.2, 0.5, 0.65])
def test_no_policy_is_faster_on_a_network(link: float, saved: float) -> None:
    """Its tensors are alike, so they are few classes."""
    trace, profile = network(24), RTX_A6000.with_link(link, duplex_factor=0.9)
    budget = int(device_peak(trace) * (1 - saved))
    plan = POLICIES["joint"]({0: trace}, profile, budget)[0]
    us, bound_us = us_of(trace, plan, profile), least_us(trace, profile, budget)
    assert float(trace.latency_us.sum()) <= bound_us <= us * ROUNDING


# ---- known by hand ----


def test_a_tensor_leaves_and_returns_between_its_accesses() -> None:
    """Tensor 1 is in the way of operator 4. While it is copied out and back, only 2 × 100 µs are computed."""
    trace = trace_of(
        (9000.0, {0: READ}), (1e6, {1: CREATE}), (100.0, {0: READ}), (1000.0, {2: CREATE}), (100.0, {0: READ}),
        (100.0, {1: READ}), (9000.0, {0: READ}), sizes=(0, 8 * MIB, 16 * MIB),
    )  # fmt: skip
    moved = SLOW.transfer_us(8 * MIB, Direction.OUT)
    total = float(trace.latency_us.sum())
    added, half_added = (least_us(trace, SLOW, budget * MIB) - total for budget in (16, 20))
    assert added == pytest.approx(2 * (moved - 100.0), rel=0.02)  # a hundredth is made again meanwhile
    assert half_added == pytest.approx(2 * (moved / 2 - 100.0), rel=0.02)
    assert cut_us(trace, SLOW, trace.footprint - 16 * MIB) < total + moved  # one cut alone sees two long halves


def test_a_tensor_counts_once() -> None:
    """Parameter 1 has time to come back, but is too small for operator 3; parameter 2 has none."""
    trace = trace_of(
        (1e4, {1: READ}), (1e4, {2: READ}), (10.0, {3: CREATE}), (1e4, {2: READ}), (1e5, {1: READ}),
        sizes=(0, MIB, 8 * MIB, 16 * MIB), persistent=2,
    )  # fmt: skip
    moved = SLOW.transfer_us(8 * MIB, Direction.IN)
    assert least_us(trace, SLOW, 16 * MIB) == pytest.approx(float(trace.latency_us.sum()) + moved)


def test_a_tensor_that_is_swapped_is_not_made_again_as_well() -> None:
    """Tensor 2 can return in both ways at no cost, but parameter 1 has to leave as well."""
    trace = trace_of(
        (1.0, {0: READ, 2: CREATE}), (1e5, {1: READ}), (10.0, {3: CREATE}), (1e4, {1: READ}), (1e5, {2: READ}),
        sizes=(0, 8 * MIB, 8 * MIB, 16 * MIB), persistent=1,
    )  # fmt: skip
    moved = SLOW.transfer_us(8 * MIB, Direction.IN)
    assert least_us(trace, SLOW, 16 * MIB) == pytest.approx(float(trace.latency_us.sum()) + moved)


def test_what_is_used_across_the_end_of_the_iteration_moves_there() -> None:
    """Parameter 1 is in the way of operators 1 and 6, and accessed by 3 and 4; only 50 and 70 µs lie in between."""
    trace = trace_of(
        (1000.0, {2: CREATE}), (50.0, {0: READ}), (500.0, {1: READ}), (500.0, {1: WRITE}), (70.0, {0: READ}),
        (1000.0, {3: CREATE}), (10.0, {0: READ}), sizes=(0, 8 * MIB, 16 * MIB, 16 * MIB), persistent=1,
    )  # fmt: skip
    moved = SLOW.transfer_us(8 * MIB, Direction.OUT)
    total = float(trace.latency_us.sum())
    assert least_us(trace, SLOW, 16 * MIB) == pytest.approx(total + (moved - 50.0) + (moved - 70.0))


def test_both_lanes_share_the_link() -> None:
    """Two parameters change places twice in each iteration: one is copied out while the other is copied in."""
    trace = trace_of(
        (100.0, {1: WRITE, 3: CREATE}), (100.0, {2: WRITE, 4: CREATE}), (10.0, {0: READ}),
        sizes=(0, 8 * MIB, 8 * MIB, 16 * MIB, 16 * MIB), persistent=2,
    )  # fmt: skip
    moved = SLOW.transfer_us(8 * MIB, Direction.OUT)
    for factor in (1.0, 0.8, 0.5):
        us = least_us(trace, SLOW.with_link(1e9, duplex_factor=factor), 24 * MIB)
        assert us == pytest.approx(200.0 + 2 * moved / factor)
    codec, none = np.array([0, 1, 1, 0, 0], np.uint8), np.zeros(5)
    coded = trace.with_coding(Coding(codec, trace.tensor_bytes // 16, none + 4000.0, none + 4000.0, none))
    us = least_us(coded, SLOW.with_link(1e9, duplex_factor=0.5), 24 * MIB)  # coders do not slow each other down
    assert us == pytest.approx(200.0 + 2 * 4000.0, rel=0.1)


def test_inputs_that_have_changed_end_recomputations() -> None:
    """Tensor 2 is made from parameter 1, which operator 3 changes: after that it can only be swapped."""
    rows: list[tuple[float, dict[int, Mode]]] = [
        (100.0, {1: READ, 2: CREATE}), (10.0, {0: READ}), (1000.0, {1: WRITE}), (1000.0, {0: READ, 3: CREATE}),
        (10.0, {0: READ}), (100.0, {2: READ}),
    ]  # fmt: skip
    sizes = (MIB, 1024, 8 * MIB, 16 * MIB)
    changed = trace_of(*rows, sizes=sizes, persistent=1)
    kept = trace_of(*rows[:2], (1000.0, {1: READ}), *rows[3:], sizes=sizes, persistent=1)
    gap = absences(changed, SLOW)
    assert gap.until[gap.tensor == 2].tolist() == [3] and gap.recompute_us[gap.tensor == 2].tolist() == [100.0]
    total, moved = float(kept.latency_us.sum()), SLOW.transfer_us(8 * MIB, Direction.IN)
    assert least_us(kept, SLOW, 18 * MIB) <= total + 100.0 < total + moved / 2 < least_us(changed, SLOW, 18 * MIB)


def test_inputs_that_change_next_may_still_be_used() -> None:
    """Tensor 2 is made again between operator 2, for which it left, and operator 3, which changes parameter 1."""
    trace = trace_of(
        (100.0, {1: READ, 2: CREATE}), (10.0, {0: READ, 3: CREATE}), (10.0, {1: WRITE}), (10.0, {2: READ}),
        sizes=(0, 0, 8 * MIB, 16 * MIB), persistent=1,
    )  # fmt: skip
    assert least_us(trace, SLOW, 16 * MIB) == pytest.approx(float(trace.latency_us.sum()) + 100.0)


def test_one_copy_out_serves_all_gaps_of_a_version() -> None:
    """Tensor 1 is away twice, the second time without a copy."""
    trace = trace_of(
        (1e6, {1: CREATE}), (100.0, {0: READ, 2: CREATE}), (100.0, {1: READ}), (100.0, {0: READ, 3: CREATE}),
        (100.0, {1: READ}), sizes=(0, 8 * MIB, 16 * MIB, 16 * MIB),
    )  # fmt: skip
    moved = SLOW.transfer_us(8 * MIB, Direction.OUT)
    added = least_us(trace, SLOW, 16 * MIB) - float(trace.latency_us.sum())
    assert added == pytest.approx(3 * moved, rel=0.02)


def test_swaps_are_compressed_where_that_is_faster() -> None:
    trace = trace_of(
        (1e6, {0: READ, 1: CREATE}), (10.0, {2: CREATE}), (10.0, {1: READ}), sizes=(0, 8 * MIB, 16 * MIB)
    )  # fmt: skip
    moved, quarter = (SLOW.transfer_us(size * MIB, Direction.OUT) for size in (8, 2))
    for coding_us, expected in ((0.0, quarter), (1e6, moved)):
        times = np.full(3, coding_us)
        coding = Coding(np.array([0, 1, 0], np.uint8), trace.tensor_bytes // 4, times, times, np.zeros(3))
        added = least_us(trace.with_coding(coding), SLOW, 16 * MIB) - float(trace.latency_us.sum())
        assert added == pytest.approx(2 * expected, rel=0.02)


def test_a_copy_out_may_wait_until_it_is_needed() -> None:
    """Tensor 2 leaves for operator 3, for which it is made again in 1 µs. So tensor 1, which is there meanwhile, need
    not be copied out before the long operator 5."""
    trace = trace_of(
        (1.0, {0: READ, 2: CREATE}), (1e6, {0: READ, 1: CREATE}), (10.0, {3: CREATE}), (10.0, {1: READ, 2: READ}),
        (1e5, {0: READ}), (10.0, {4: CREATE}), (1e5, {0: READ}), (10.0, {1: READ}),
        sizes=(0, 8 * MIB, MIB, 16 * MIB, 24 * MIB),
    )  # fmt: skip
    assert least_us(trace, SLOW, 24 * MIB) == pytest.approx(float(trace.latency_us.sum()) + 1.0, abs=0.1)


def test_a_parameter_may_be_copied_out_long_after_it_was_written() -> None:
    """Parameter 1 is written at the end, and copied out during operator 2 of the next iteration."""
    trace = trace_of(
        (10.0, {1: READ}), (1e5, {0: READ}), (10.0, {2: CREATE}), (1e5, {0: READ}), (10.0, {1: READ}),
        (10.0, {1: WRITE}), (10.0, {0: READ}), sizes=(0, 8 * MIB, 16 * MIB), persistent=1,
    )  # fmt: skip
    assert least_us(trace, SLOW, 16 * MIB) == pytest.approx(float(trace.latency_us.sum()))


def test_a_recomputation_may_come_early_and_hide_a_swap_in() -> None:
    """Tensor 2 leaves for operator 3 only. It is made again while parameter 1 comes back for operator 4."""
    trace = trace_of(
        (10.0, {1: READ}), (8000.0, {0: READ, 2: CREATE}), (10.0, {3: CREATE}), (10.0, {1: READ}), (10.0, {0: READ}),
        (10.0, {2: READ}), sizes=(0, 8 * MIB, MIB, 16 * MIB), persistent=1,
    )  # fmt: skip
    moved = SLOW.transfer_us(8 * MIB, Direction.IN)
    assert least_us(trace, SLOW, 16 * MIB) == pytest.approx(float(trace.latency_us.sum()) + moved)
    plan = Plan.build([
        Event(EventKind.RELEASE, 1, 1, 1), Event(EventKind.SWAP_IN, 1, 3, 4), Event(EventKind.RECOMPUTE, 2, 3, 6)
    ])  # fmt: skip
    assert us_of(trace, plan, SLOW) == pytest.approx(float(trace.latency_us.sum()) + moved)
    assert device_peak(trace, plan) == 16 * MIB


def test_a_class_costs_what_its_cheapest_member_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of tensors 1 and 2 has to leave; a byte of tensor 1, which is larger, costs less."""
    monkeypatch.setattr(classes, "LIKE", 1e9)
    profile = replace(SLOW, transfer_latency_us=5000.0)
    trace = trace_of(
        (1e6, {0: READ, 1: CREATE, 2: CREATE}), (10.0, {3: CREATE}), (10.0, {1: READ, 2: READ}),
        sizes=(0, 16 * MIB, MIB, 16 * MIB),
    )  # fmt: skip
    moved = 2 * profile.transfer_us(16 * MIB, Direction.OUT)
    added = least_us(trace, profile, 17 * MIB) - float(trace.latency_us.sum())
    assert 0.9 * moved < added <= moved


def test_the_smallest_tensors_may_be_anywhere() -> None:
    """Both tensors are in the way of operator 2; only tensor 1 is large enough to count."""
    trace = trace_of(
        (1e6, {0: READ, 1: CREATE, 2: CREATE}), (10.0, {3: CREATE}), (10.0, {1: READ, 2: READ}),
        sizes=(0, 8 * MIB, 16 << 10, 16 * MIB),
    )  # fmt: skip
    added = least_us(trace, SLOW, 16 * MIB) - float(trace.latency_us.sum())
    assert added == pytest.approx(2 * SLOW.transfer_us(8 * MIB, Direction.OUT), rel=0.02)


def test_tensors_that_no_operator_accesses_may_be_anywhere() -> None:
    trace = trace_of((100.0, {0: READ}), (100.0, {0: READ}), sizes=(MIB, 64 * MIB), persistent=1)
    assert least_us(trace, SLOW, MIB) == pytest.approx(200.0)


# ---- the solver ----


def test_without_a_solution_the_weaker_bound_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, profile = network(24), RTX_A6000.with_link(2e9)
    budget = device_peak(trace) // 2
    solved = solved_us(trace, profile, budget)
    assert solved is not None
    weaker = cut_us(trace, profile, trace.footprint - budget)
    assert float(trace.latency_us.sum()) <= weaker < solved
    assert least_us(trace, profile, budget) == solved
    assert solved_us(trace, profile, budget, limit_s=0.0) is None
    assert least_us(trace, profile, budget, limit_s=0.0) == weaker
    monkeypatch.setattr(bounds, "cut_us", lambda *_: 2 * solved)
    assert least_us(trace, profile, budget) == 2 * solved  # the larger of both


@given(random=dice(), size=st.sampled_from((1e-6, 1e-3, 1.0)))
@examples(10, long=50)
def test_wrong_dual_values_give_a_lower_bound_and_no_false_one(random: Random, size: float) -> None:
    import scipy.optimize

    trace, profile = random_trace(random, 16, 20), linked(random)
    least = floor_bytes(trace)
    budget = least + (device_peak(trace) - least) // 3
    exact = least_us(trace, profile, budget)
    solve = scipy.optimize.linprog

    def inexact(*arguments: Any, **keywords: Any) -> Any:
        found = solve(*arguments, **keywords)
        errors = [random.uniform(-size, size) for _ in found.ineqlin.marginals]
        found.ineqlin.marginals = found.ineqlin.marginals + np.array(errors)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scipy.optimize, "linprog", inexact)
        assert least_us(trace, profile, budget) <= exact * ROUNDING


def test_a_budget_below_the_floor_is_refused() -> None:
    trace = network(4)
    for ask in (least_us, solved_us):
        with pytest.raises(BudgetError):
            ask(trace, SLOW, floor_bytes(trace) - 1)
