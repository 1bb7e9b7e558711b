"""The policy joint: within every budget, valid, the same every time, and not slower than it has to be."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from pg_tensile.errors import BudgetError
from pg_tensile.planning.building_blocks.idle import idle_intervals
from pg_tensile.planning.building_blocks.keep import (
    least_bytes,
    relaxed,
    relaxed_swap_all,
    without_superfluous,
)
from pg_tensile.planning.building_blocks.link_time import Lane
from pg_tensile.planning.building_blocks.swaps import swaps
from pg_tensile.planning.building_blocks.transfer_times import schedule
from pg_tensile.planning.device.profile import RTX_A6000, DeviceProfile, Direction
from pg_tensile.planning.job_planner import planner
from pg_tensile.planning.job_planner.candidate import EXACT, Candidate
from pg_tensile.planning.job_planner.planner import PERFECT, AbandonedError, JobPlanner
from pg_tensile.planning.job_planner.prices import LONGEST_CHAIN, Prices
from pg_tensile.planning.job_planner.sweep import sweep
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.memory import floor_bytes, footprint
from pg_tensile.planning.plan.plan import Event, EventKind, Plan
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.policies.joint import policy
from pg_tensile.planning.policies.joint import share_out as share_out_module
from pg_tensile.planning.policies.joint.contention import WORTH, times_us
from pg_tensile.planning.policies.joint.part import SlowdownError, Terms, UnplannableError
from pg_tensile.planning.policies.joint.share_out import share_out
from pg_tensile.planning.simulator.simulator import SimulatedJob, Timeline, simulate
from pg_tensile.planning.trace.lists import Columns
from pg_tensile.planning.trace.trace import Mode, Trace
from tests.examples import examples
from tests.unit.graphs import random_trace
from tests.unit.handmade import network, trace_of

READ, WRITE, CREATE = Mode.READ, Mode.WRITE, Mode.CREATE
OUT, IN, RECOMPUTE = EventKind.SWAP_OUT, EventKind.SWAP_IN, EventKind.RECOMPUTE
MIB = 1 << 20
LINKS = (1e7, 1e8, 1e10)  # bytes/s: from too slow for anything to free of charge


def device_peak(trace: Trace, plan: Plan) -> int:
    return footprint(trace, plan).device_peak_bytes


def timeline(trace: Trace, plan: Plan, profile: DeviceProfile = RTX_A6000) -> Timeline:
    return simulate([SimulatedJob(trace, plan)], profile)[0]


def kinds(plan: Plan) -> set[EventKind]:
    return {event.kind for event in plan.events}


def budget_of(trace: Trace, part: float) -> int:
    """Between the least and what the trace takes without a plan."""
    least, most = least_bytes(trace), footprint(trace).device_peak_bytes
    return least + round((most - least) * part)


# ---- any graph ----


@pytest.mark.long
@given(
    seed=st.integers(0, 1 << 32),
    operators=st.sampled_from((8, 20, 60)),
    part=st.floats(0, 1),
    link=st.sampled_from(LINKS),
)
@examples(40)
def test_plans_keep_to_the_budget_are_valid_and_the_same_every_time(seed, operators, part, link):
    trace = random_trace(Random(seed), operators, operators + 10)
    profile = RTX_A6000.with_link(link)
    budget = budget_of(trace, part)
    plan = policy.plan({5: trace}, profile, budget)[5]
    validate(trace, plan)
    assert device_peak(trace, plan) <= budget
    assert policy.plan({5: Trace.from_bytes(trace.to_bytes())}, profile, budget)[5] == plan


@given(
    seed=st.integers(0, 1 << 32),
    part=st.floats(0, 1),
    prices=st.builds(Prices, st.floats(0, 2), st.floats(0, 1), st.integers(1, 24), st.booleans()),
    link=st.sampled_from(LINKS),
)
@example(seed=81, part=0.05, prices=Prices(0.5, 0.8, 22), link=1e10)  # a swap right after a recomputation
@examples(20, long=150)
def test_every_pass_ends_with_a_valid_plan_or_says_what_is_missing(seed, part, prices, link):
    trace = random_trace(Random(seed), 40, 50)
    profile = RTX_A6000.with_link(link)
    budget = budget_of(trace, part)
    outcome = sweep(Columns(trace), profile, budget, prices)
    if outcome.shortage is None:
        sequence = AccessSequence(trace, Plan.build(outcome.events))
        sequence.check()
        assert device_peak(trace, sequence.plan) <= budget
        plan = schedule(sequence, profile, device_peak(trace, sequence.plan))
        validate(trace, plan)
        assert device_peak(trace, plan) <= device_peak(trace, sequence.plan)
        assert timeline(trace, plan, profile).iteration_us <= timeline(trace, sequence.plan, profile).iteration_us * 1.5
    else:
        assert outcome.shortage.bytes > 0


@given(seed=st.integers(0, 1 << 32), part=st.floats(0, 1))
@examples(15)
def test_swapping_what_does_not_fit_keeps_to_the_budget(seed, part):
    trace = random_trace(Random(seed), 30, 40)
    budget = budget_of(trace, part)
    plan = relaxed_swap_all(trace, budget)
    assert plan is not None
    validate(trace, plan)
    assert device_peak(trace, plan) <= budget
    assert relaxed_swap_all(trace, least_bytes(trace) - 1) is None


@pytest.mark.long
@given(seed=st.integers(0, 1 << 32), jobs=st.integers(2, 4), part=st.floats(0, 1))
@examples(20)
def test_jobs_fit_into_a_budget_together(seed, jobs, part):
    random = Random(seed)
    traces = {job * 3: random_trace(random, 16, 20) for job in range(jobs)}
    budget = sum(budget_of(trace, part) for trace in traces.values())
    plans = policy.plan(traces, RTX_A6000, budget)
    assert plans.keys() == traces.keys()
    for job, plan in plans.items():
        validate(traces[job], plan)
    assert sum(device_peak(traces[job], plan) for job, plan in plans.items()) <= budget


# ---- budgets ----


def test_what_fits_is_left_alone():
    trace = network(6)
    assert len(policy.plan({0: trace}, RTX_A6000, footprint(trace).device_peak_bytes)[0]) == 0
    assert policy.plan({}, RTX_A6000, 1) == {} == policy.plan({}, RTX_A6000, None)


def test_a_budget_that_is_impossible_is_refused_with_the_smallest_possible_one():
    trace = network(6)
    with pytest.raises(BudgetError, match="the budget is 1,000,000") as error:
        policy.plan({0: trace}, RTX_A6000, 1_000_000)
    smallest = error.value.smallest_bytes
    assert smallest == floor_bytes(trace) and "backward" in error.value.operator
    assert device_peak(trace, policy.plan({0: trace}, RTX_A6000, smallest)[0]) <= smallest
    with pytest.raises(BudgetError):
        policy.plan({0: trace}, RTX_A6000, smallest - 1)


def test_several_jobs_that_cannot_fit_are_refused_with_the_smallest_possible_budget():
    traces = {0: network(6), 1: network(3)}
    smallest = sum(floor_bytes(trace) for trace in traces.values())
    with pytest.raises(BudgetError) as error:
        policy.plan(traces, RTX_A6000, smallest - 1)
    assert error.value.smallest_bytes == smallest
    plans = policy.plan(traces, RTX_A6000, smallest)
    assert sum(device_peak(traces[job], plan) for job, plan in plans.items()) == smallest


def test_more_memory_is_used_and_never_costs_time():
    trace = network(8)
    plans = [policy.plan({0: trace}, RTX_A6000, budget_of(trace, step / 11))[0] for step in range(12)]
    peaks = [device_peak(trace, plan) for plan in plans]
    times = [timeline(trace, plan).iteration_us for plan in plans]
    assert peaks == sorted(peaks) and len(set(peaks)) > 8
    assert all(more <= less * 1.03 for less, more in pairwise(times))


def test_without_a_budget_memory_is_given_back_that_costs_hardly_any_time():
    trace = network(12)
    plan = policy.plan({0: trace}, RTX_A6000, None)[0]
    assert device_peak(trace, plan) < 0.8 * footprint(trace).device_peak_bytes
    assert timeline(trace, plan).iteration_us <= planner.FREE * timeline(trace, Plan.build([])).iteration_us


# ---- the cheaper way ----


def chain(made_us: float) -> Trace:
    """Tensor 1 takes `made_us` to make and is needed again at the end; in between tensor 2 is too large beside it."""
    return trace_of(
        (made_us, {0: READ, 1: CREATE}),
        (5000.0, {0: READ, 3: CREATE}),
        (5000.0, {3: READ, 2: CREATE}),
        (5000.0, {2: READ, 4: CREATE}),
        (5000.0, {0: READ, 4: READ, 5: CREATE}),
        (100.0, {1: READ, 5: READ}),
        sizes=(MIB, 16 * MIB, 24 * MIB, MIB, MIB, MIB),
    )


@pytest.mark.parametrize(
    ("made_us", "link", "kind"),
    [
        (10.0, 1e9, RECOMPUTE),  # 17 ms each way, where there are 10
        (500.0, 25e9, OUT),  # hidden
        (100_000.0, 1e9, OUT),  # waiting is still shorter than recomputing
    ],
)
def test_a_tensor_is_swapped_or_recomputed_whatever_costs_less(made_us, link, kind):
    trace, profile = chain(made_us), RTX_A6000.with_link(link)
    plan = policy.plan({0: trace}, profile, 30 * MIB)[0]
    assert {event.tensor for event in plan.events if event.kind in (OUT, RECOMPUTE)} == {1}
    assert kind in kinds(plan) and len(kinds(plan) & {OUT, RECOMPUTE}) == 1
    cost = timeline(trace, plan, profile).iteration_us - timeline(trace, Plan.build([]), profile).iteration_us
    assert cost <= min(made_us, 2 * profile.transfer_us(16 * MIB, Direction.OUT)) + 100


def test_optimizer_state_is_away_until_it_is_needed():
    trace = trace_of(
        (100.0, {0: READ, 1: READ, 3: CREATE}),
        (5000.0, {3: READ, 4: CREATE}),
        (100.0, {4: READ, 5: CREATE}),
        (5000.0, {5: READ, 6: CREATE}),
        (100.0, {6: READ, 1: WRITE, 2: WRITE}),
        (5000.0, {0: READ}),
        sizes=(MIB, MIB, 16 * MIB, MIB, 16 * MIB, MIB, MIB),
        persistent=2,
    )
    plan = policy.plan({0: trace}, RTX_A6000, 24 * MIB)[0]
    assert {event.tensor for event in plan.events} == {2}
    assert AccessSequence(trace, plan).boundary.device == {1}
    assert timeline(trace, plan).stall_us < 100


def test_state_updated_last_is_copied_out_after_the_end_of_the_iteration():
    """Between its update and the end, there is no time for the copy; at the start of the next iteration there is."""
    trace = trace_of(
        (100.0, {0: READ, 1: READ, 3: CREATE}),
        (5000.0, {3: READ, 4: CREATE}),
        (100.0, {4: READ, 5: CREATE}),
        (100.0, {5: READ, 6: CREATE}),
        (5000.0, {6: READ, 7: CREATE}),
        (100.0, {7: READ, 1: WRITE, 2: WRITE}),
        sizes=(MIB, MIB, 16 * MIB, MIB, MIB, 16 * MIB, MIB, MIB),
        persistent=2,
    )
    plan = policy.plan({0: trace}, RTX_A6000, 24 * MIB)[0]
    assert 2 in {event.tensor for event in plan.events}
    assert 2 in AccessSequence(trace, plan).boundary.device
    assert timeline(trace, plan).stall_us < 100


def test_transfers_are_in_time_beside_a_busy_other_lane():
    planned = JobPlanner(network(12), RTX_A6000.with_link(2e10, duplex_factor=0.5))
    candidate = planned.within(int(0.6 * planned.vanilla.device_peak_bytes))
    assert candidate.transfers and candidate.us <= PERFECT * planned.vanilla.us


def test_a_parameter_leaves_ahead_where_the_link_will_be_full():
    """Between its first access and the peak, the link has time for one of two tensors; around the end for the other."""
    trace = trace_of(
        (6000.0, {0: READ, 2: CREATE}),
        (20000.0, {1: READ, 2: READ, 3: CREATE}),
        (6000.0, {2: READ, 4: CREATE}),
        (100.0, {4: READ, 5: CREATE}),
        (100.0, {5: READ, 6: CREATE}),
        (12000.0, {6: READ, 7: CREATE}),
        (100.0, {7: READ, 3: READ, 1: WRITE}),
        (6000.0, {0: READ}),
        sizes=(MIB, 16 * MIB, MIB, 16 * MIB, MIB, 32 * MIB, MIB, MIB),
        persistent=1,
    )
    profile = RTX_A6000.with_link(16 * MIB / 0.005)
    one = timeline(trace, policy.plan({0: trace}, profile, 36 * MIB)[0], profile)
    assert one.stall_us < 100 and one.bytes_out < 40 * MIB  # each of the two is copied out once
    found = sweep(Columns(trace), profile, 36 * MIB, Prices(0.06, 0.3, 2))
    plan = schedule(AccessSequence(trace, Plan.build(found.events)), profile, 36 * MIB)
    assert timeline(trace, plan, profile).stall_us > 3000


def test_a_chain_is_made_again_from_its_beginning():
    """1 → 2 → 3 are needed from the last to the first, and only the first is cheap to keep."""
    trace = trace_of(
        (10.0, {0: READ, 1: CREATE}),
        (10.0, {1: READ, 2: CREATE}),
        (10.0, {2: READ, 3: CREATE}),
        (1000.0, {0: READ, 4: CREATE}),
        (1000.0, {4: READ, 5: CREATE}),
        (1000.0, {3: READ, 5: READ, 6: CREATE}),
        (1000.0, {2: READ, 6: READ, 7: CREATE}),
        (1000.0, {1: READ, 7: READ, 8: CREATE}),
        sizes=(MIB, 4 * MIB, 8 * MIB, 8 * MIB, 16 * MIB, MIB, MIB, MIB, MIB),
    )
    slow = RTX_A6000.with_link(1e8)
    plan = policy.plan({0: trace}, slow, 27 * MIB)[0]
    assert kinds(plan) == {RECOMPUTE}
    assert timeline(trace, plan, slow).iteration_us <= timeline(trace, Plan.build([]), slow).iteration_us + 60


def test_recomputed_chains_are_not_longer_than_allowed():
    trace, budget = network(40), budget_of(network(40), 0.3)
    slow = RTX_A6000.with_link(1e9)
    for longest in (1, 3, LONGEST_CHAIN):
        outcome = sweep(Columns(trace), slow, budget, Prices(1.0, 0.3, longest))
        at_once: dict[int, int] = {}
        for event in outcome.events:
            if event.kind is RECOMPUTE:
                at_once[event.trigger] = at_once.get(event.trigger, 0) + 1
        assert max(at_once.values(), default=0) <= longest


def ladder(links: int) -> Trace:
    """Each link is made of the one before, in 10 µs, and needed again from the last to the first, beside something
    large."""
    operators: list[tuple[float, dict[int, Mode]]] = [
        (10.0, {max(0, link - 1): READ, link: CREATE}) for link in range(1, links + 1)
    ]
    sizes = [MIB] + [8 * MIB] * links
    incoming = 0
    for link in range(links, 0, -1):
        large, outgoing = len(sizes), len(sizes) + 1
        sizes += [16 * MIB, MIB]
        operators.append((1000.0, {link: READ, incoming: READ, large: CREATE}))
        operators.append((1000.0, {large: READ, outgoing: CREATE}))
        incoming = outgoing
    return trace_of(*operators, sizes=tuple(sizes))


@pytest.mark.parametrize("links", [3, 5])
def test_what_was_made_again_for_a_recomputation_goes_and_is_made_once_more(links):
    """There is room for one link beside what is large: of all others each is made again from the beginning."""
    trace, slow = ladder(links), RTX_A6000.with_link(1e8)
    plan = policy.plan({0: trace}, slow, 26 * MIB)[0]
    assert kinds(plan) == {RECOMPUTE}
    assert timeline(trace, plan, slow).recomputes == links * (links - 1) // 2


def test_a_swap_in_that_there_is_no_room_for_yet_waits():
    """Tensor 1 leaves for operator 2 and is on its way back while operator 3 runs, if that has room for it."""
    trace = trace_of(
        (100_000.0, {0: READ, 1: CREATE}),
        (1000.0, {0: READ, 2: CREATE}),
        (1000.0, {2: READ, 3: CREATE}),
        (1000.0, {1: READ, 3: READ}),
        sizes=(MIB, 8 * MIB, 14 * MIB, 6 * MIB),
    )
    plan = Plan.build(sweep(Columns(trace), RTX_A6000.with_link(1e9), 22 * MIB, Prices(0.0, 0.3)).events)
    validate(trace, plan)
    assert plan.events[-1] == Event(IN, 1, trigger=3, deadline=4) and device_peak(trace, plan) <= 22 * MIB


def test_a_swap_out_that_stands_in_the_way_is_waited_for():
    """Parameter 1 is away but for operator 3; its way out is longer than what comes before operator 5."""
    trace = trace_of(
        (1000.0, {0: READ, 2: CREATE}),
        (1000.0, {2: READ, 3: CREATE}),
        (1000.0, {3: READ, 1: WRITE}),
        (10.0, {0: READ}),
        (1000.0, {3: READ, 4: CREATE}),
        (1000.0, {4: READ}),
        sizes=(MIB, 8 * MIB, 16 * MIB, MIB, 16 * MIB),
        persistent=1,
    )
    plan = Plan.build(sweep(Columns(trace), RTX_A6000.with_link(1e9), 20 * MIB, Prices(0.0, 0.3)).events)
    validate(trace, plan)
    assert Event(OUT, 1, trigger=3, deadline=4) in plan.events and device_peak(trace, plan) <= 20 * MIB


# ---- what there is room for ----


@given(seed=st.integers(0, 1 << 32), part=st.floats(0, 1), room=st.floats(0, 1))
@examples(20, long=75)
def test_a_relaxed_plan_does_less_and_keeps_to_the_budget(seed, part, room):
    trace = random_trace(Random(seed), 40, 50)
    columns, budget = Columns(trace), budget_of(trace, part)
    outcome = sweep(columns, RTX_A6000.with_link(1e8), budget, Prices(0.1, 0.3))
    assume(outcome.shortage is None)
    sequence = AccessSequence(trace, Plan.build(outcome.events))
    most = footprint(trace, sequence.plan).device_peak_bytes
    limit = most + round((max(most, footprint(trace).device_peak_bytes) - most) * room)
    plan = without_superfluous(relaxed(sequence, limit, np.ones(len(sequence.plan))), columns)
    validate(trace, plan)
    assert device_peak(trace, plan) <= limit
    assert set(plan.events) <= set(sequence.plan.events)
    if limit >= 2 * footprint(trace).device_peak_bytes:
        assert len(plan) == 0


def test_what_costs_the_most_for_its_memory_stays():
    trace = trace_of(
        (100.0, {0: READ, 1: CREATE}),
        (100.0, {0: READ, 2: CREATE}),
        (100.0, {3: CREATE}),
        (100.0, {1: READ, 2: READ}),
        sizes=(MIB, 8 * MIB, 8 * MIB, 8 * MIB),
    )
    away = [Event(RECOMPUTE, 1, 3, 4), Event(RECOMPUTE, 2, 3, 4)]
    sequence = AccessSequence(trace, Plan.build(away))
    for dearer in (0, 1):
        cost_us = np.array([2.0, 1.0] if dearer == 0 else [1.0, 3.0])
        assert list(relaxed(sequence, 17 * MIB, cost_us).events) == [away[1 - dearer]]
    assert len(relaxed(sequence, 16 * MIB, cost_us)) == 2
    assert len(relaxed(sequence, 25 * MIB, cost_us)) == 0


def test_recomputations_that_nothing_reads_are_superfluous():
    trace = trace_of(
        (100.0, {0: READ, 1: CREATE}), (100.0, {1: READ, 2: CREATE}), (100.0, {3: CREATE}), (100.0, {2: READ}),
        sizes=(MIB, MIB, MIB, MIB),
    )  # fmt: skip
    early = [Event(RECOMPUTE, 1, 2, 3), Event(RECOMPUTE, 2, 2, 3)]
    late = [Event(RECOMPUTE, 1, 3, 4), Event(RECOMPUTE, 2, 3, 4)]
    swap = [Event(OUT, 2, 3, 3), Event(IN, 2, 3, 4)]
    for events, kept in ((early, early), (late, late), ([*early, *late], late), ([*early, *swap], [*early, *swap])):
        validate(trace, Plan.build(events))
        assert list(without_superfluous(Plan.build(events), Columns(trace)).events) == kept


def test_more_passes_avoid_what_costs_the_most():
    trace, slow = network(12), RTX_A6000.with_link(2e9)
    planner, hasty = JobPlanner(trace, slow), JobPlanner(trace, slow)
    hasty.refinements = 0
    budget = budget_of(trace, 0.5)
    assert planner.within(budget).us < 0.98 * hasty.within(budget).us
    assert planner.within(budget).device_peak_bytes <= budget


def test_those_that_lose_the_most_get_the_most():
    """The same network, once with a slow link's worth of memory to save and once with little to lose."""
    heavy, light = network(8, latency_us=10.0), network(8, latency_us=5000.0)
    budget = budget_of(heavy, 0.5) + budget_of(light, 0.5)
    planners = {0: JobPlanner(heavy, RTX_A6000), 1: JobPlanner(light, RTX_A6000)}
    chosen, _ = share_out(planners, budget)
    assert chosen[0].device_peak_bytes > chosen[1].device_peak_bytes
    lost = sum(chosen[job].us / planner.vanilla.us for job, planner in planners.items())
    assert lost <= sum(planner.within(budget // 2).us / planner.vanilla.us for planner in planners.values())


def lost(planners: dict[int, JobPlanner], chosen: dict[int, Candidate]) -> float:
    us = times_us(planners, chosen)
    return sum(us[job] / planner.vanilla.us - 1 for job, planner in planners.items())


@cache
def crowd() -> tuple[dict[int, JobPlanner], int]:
    """Return two jobs that wait for each other if their plans fill their parts of the link, and a budget."""
    planner = JobPlanner(network(10), RTX_A6000)
    return dict.fromkeys(range(2), planner), 2 * budget_of(planner.trace, 0.3)


def division_without_slack(
    monkeypatch: pytest.MonkeyPatch, planners: dict[int, JobPlanner], budget: int
) -> dict[int, Candidate]:
    with monkeypatch.context() as patch:
        patch.setattr(share_out_module, "with_slack", lambda parts, division, *_: division)
        return share_out(planners, budget).chosen


def test_plans_leave_slack_on_the_link_where_jobs_wait_for_each_other(monkeypatch):
    planners, budget = crowd()
    full = division_without_slack(monkeypatch, planners, budget)
    alone = sum(candidate.us / planners[job].vanilla.us - 1 for job, candidate in full.items())
    assert lost(planners, full) > alone + 2 * WORTH  # they wait
    chosen, shares = share_out(planners, budget)
    assert lost(planners, chosen) < lost(planners, full) - 2 * WORTH
    assert sum(shares[job] for job, candidate in chosen.items() if candidate.transfers) < 1 - EXACT
    assert sum(candidate.device_peak_bytes for candidate in chosen.values()) <= budget


def test_jobs_on_the_host_have_their_parts_of_the_link_whatever_the_others_do():
    planners, budget = crowd()
    chosen = share_out(planners, budget).chosen
    host = JobPlanner(planners[0].trace, replace(RTX_A6000, kind="host"))
    assert times_us(dict.fromkeys(chosen, host), chosen) == {job: plan.us for job, plan in chosen.items()}
    assert times_us(planners, chosen) != {job: plan.us for job, plan in chosen.items()}


def test_a_brief_division_fits_and_loses_little():
    traces = [network(8, latency_us=20.0 + job) for job in range(3)]
    budget = sum(budget_of(trace, 0.5) for trace in traces)
    planners = {job: JobPlanner(trace, RTX_A6000) for job, trace in enumerate(traces)}
    brief = share_out(planners, budget, brief=True)
    assert sum(candidate.device_peak_bytes for candidate in brief.chosen.values()) <= budget
    assert sum(share for job, share in brief.shares.items() if brief.chosen[job].transfers) <= 1 + 1e-9
    thorough = share_out(planners, budget)
    assert lost(planners, thorough.chosen) <= lost(planners, brief.chosen) < 3 * lost(planners, thorough.chosen)


def test_a_brief_division_keeps_promises():
    trace = network(12)
    link = RTX_A6000.with_link(2e9)
    planners = {job: JobPlanner(trace, link) for job in range(2)}
    budget = JobPlanner(trace, link, 0.5).saving(1.05).device_peak_bytes + budget_of(trace, 0.2)

    def slowdowns(terms: dict[int, Terms]) -> list[float]:
        division = share_out(planners, budget, terms, brief=True)
        assert sum(candidate.device_peak_bytes for candidate in division.chosen.values()) <= budget
        return [division.chosen[job].us / planners[job].vanilla.us for job in planners]

    assert min(slowdowns({})) > 1.05
    kept, other = slowdowns({0: Terms(most_slowdown=1.05)})
    assert kept <= 1.05 < other
    with pytest.raises(SlowdownError):
        share_out(planners, budget, dict.fromkeys(planners, Terms(most_slowdown=1.05)), brief=True)


def test_passes_that_count_on_waiting_are_few_unless_the_job_waits_much(monkeypatch):
    """Traces of many operators get few passes, in which those for slow iterations count, too."""
    monkeypatch.setattr(sys.modules[JobPlanner.__module__], "OPERATORS", 1)
    made = []

    def counted(*arguments: Any) -> Any:
        made.append(arguments)
        return sweep(*arguments)

    monkeypatch.setattr(sys.modules[JobPlanner.__module__], "sweep", counted)
    trace = network(16)
    slowdowns = []
    for bytes_per_s in (5e9, 1e9):
        joint = JobPlanner(trace, RTX_A6000.with_link(bytes_per_s))
        for passes, most in ((1, 1), (None, 3)):
            made.clear()
            best = joint.best(budget_of(trace, 0.4), passes)
            assert isinstance(best, Candidate)
            slowdowns.append(best.us / joint.vanilla.us)
            prices = {arguments[3] for arguments in made}
            stretched = sum(each.stretch > 1 for each in prices)
            assert len(prices) - stretched == most
            if slowdowns[-1] > planner.SLOW:
                assert stretched >= planner.FEW_STRETCHED
            else:
                assert stretched == 0
    assert any(planner.STRETCHED < slowdown < planner.SLOW for slowdown in slowdowns), slowdowns
    assert max(slowdowns) > planner.SLOW


@pytest.mark.parametrize("calls", [0, 5])
def test_a_division_ends_when_it_is_not_wanted_any_more(calls):
    traces = [network(12, latency_us=20.0 + job) for job in range(2)]
    planners = {job: JobPlanner(trace, RTX_A6000) for job, trace in enumerate(traces)}
    answers = iter([False] * calls + [True])
    with pytest.raises(AbandonedError):
        share_out(planners, sum(budget_of(trace, 0.5) for trace in traces), over=lambda: next(answers))


@pytest.mark.long
def test_large_jobs_share_nearly_as_well_as_small_ones(monkeypatch):
    """Long: four jobs are shared out twice."""
    traces = [network(12, latency_us=20.0 + job) for job in range(4)]
    budget = sum(budget_of(trace, 0.25) for trace in traces)
    planners = {job: JobPlanner(trace, RTX_A6000) for job, trace in enumerate(traces)}
    small, _ = share_out(planners, budget)
    monkeypatch.setattr(planner, "OPERATORS", 1)
    monkeypatch.setattr(share_out_module, "OPERATORS", 1)
    planners = {job: JobPlanner(trace, RTX_A6000) for job, trace in enumerate(traces)}
    large, _ = share_out(planners, budget)
    assert sum(candidate.device_peak_bytes for candidate in large.values()) <= budget
    assert lost(planners, small) <= lost(planners, large) < 2 * lost(planners, small)


@pytest.mark.long
@given(seed=st.integers(0, 1 << 32), part=st.floats(0, 1), caps=st.lists(st.floats(0, 1), min_size=3, max_size=3))
@examples(15)
def test_no_job_takes_more_than_it_may(seed, part, caps):
    random = Random(seed)
    traces = [random_trace(random, 16, 20) for _ in caps]
    planners = {job: JobPlanner(trace, RTX_A6000) for job, trace in enumerate(traces)}
    terms = {job: Terms(budget_of(trace, caps[job])) for job, trace in enumerate(traces)}
    budget = sum(budget_of(trace, part) for trace in traces)
    chosen, _ = share_out(planners, budget, terms)
    assert all(chosen[job].device_peak_bytes <= (terms[job].most_bytes or 0) for job in terms)
    assert sum(candidate.device_peak_bytes for candidate in chosen.values()) <= budget


def test_what_a_job_is_given_anyway_counts():
    traces = {0: network(12), 1: network(12)}
    planners = {job: JobPlanner(trace, RTX_A6000) for job, trace in traces.items()}
    whole = device_peak(traces[0], Plan.build([]))
    least = least_bytes(traces[1])
    chosen, _ = share_out(planners, whole + least, {0: Terms(least_bytes=whole)})
    assert len(chosen[0].plan) == 0 and chosen[1].device_peak_bytes <= least
    with pytest.raises(BudgetError):
        share_out(planners, whole + least - 1, {0: Terms(least_bytes=whole)})


def test_the_heavier_job_loses_less():
    planners = {job: JobPlanner(network(8), RTX_A6000.with_link(2e9)) for job in (0, 1)}
    budget = 2 * budget_of(network(8), 0.4)
    chosen, _ = share_out(planners, budget, {0: Terms(weight=1.0), 1: Terms(weight=16.0)})
    assert chosen[1].us < chosen[0].us


def test_host_memory_is_kept_to_where_it_can_be():
    traces = {0: network(12, latency_us=1000.0), 1: network(12, latency_us=1000.0)}
    planners = {job: JobPlanner(trace, RTX_A6000) for job, trace in traces.items()}
    budget = sum(budget_of(trace, 0.6) for trace in traces.values())

    def host(limit: int | None) -> int:
        chosen, _ = share_out(planners, budget, host_limit=limit)
        assert sum(candidate.device_peak_bytes for candidate in chosen.values()) <= budget
        return sum(planner.host_bytes(chosen[job]) for job, planner in planners.items())

    free = host(None)
    assert host(free) == free > 0
    assert host(free // 2) <= free // 2
    assert host(0) < free // 2  # as little as there is a plan with


def test_plans_have_no_more_events_than_they_may():
    trace = network(12)
    budget = budget_of(trace, 0.5)
    free = JobPlanner(trace, RTX_A6000).within(budget)
    limited = JobPlanner(trace, RTX_A6000, most_events=len(free.plan)).within(budget)
    assert len(limited.plan) <= len(free.plan)
    planners = {7: JobPlanner(trace, RTX_A6000, most_events=1)}
    with pytest.raises(UnplannableError, match="more events") as error:
        share_out(planners, budget)
    assert error.value.job == 7


def test_without_latencies_the_roofline_decides():
    trace = network(8)
    unknown = trace.with_latencies(np.zeros(trace.operator_count))
    plan = policy.plan({0: unknown}, RTX_A6000, budget_of(trace, 0.5))[0]
    validate(unknown, plan)
    assert len(plan) > 0


# ---- the lanes ----


@given(
    us=st.lists(st.sampled_from((0.0, 0.5, 1.0, 3.0)), min_size=1, max_size=12),
    requests=st.lists(
        st.tuples(
            st.booleans(), st.sampled_from((0.25, 1.0, 2.5, 9.0)), st.integers(0, 12), st.integers(0, 12), st.booleans()
        )
    ),
)
def test_a_lane_gives_every_time_once_and_the_nearest_first(us, requests):
    lane, free = Lane(us), list(us)
    for early, wanted, first, last, book in requests:
        last = min(last, len(us) - 1)
        places = [place for place in range(first, last + 1) if free[place] > 0]
        left, used = wanted, []
        for place in places if early else reversed(places):
            if left <= 0:
                break
            taken = min(left, free[place])
            left -= taken
            used.append((place, taken))
        booked = lane.earliest(wanted, first, last, book) if early else lane.latest(wanted, first, last, book)
        assert booked.us == pytest.approx(wanted - left)
        if used:
            assert (booked.first, booked.last) == (min(used)[0], max(used)[0])
        else:
            assert booked.first > booked.last
        if book:
            for place, taken in used:
                free[place] -= taken


def test_transfers_start_in_time_where_there_is_room():
    """Transfers that must end where they begin get the time that no other transfer needs."""
    trace = chain(3000.0)
    rows = relaxed_swap_all(trace, 30 * MIB)
    assert rows is not None and timeline(trace, rows).stall_us > 1000
    early = schedule(AccessSequence(trace, rows), RTX_A6000, 30 * MIB)
    validate(trace, early)
    assert device_peak(trace, early) <= 30 * MIB
    assert timeline(trace, early).stall_us < 100


def test_transfers_do_not_start_where_there_is_no_room():
    trace = chain(3000.0)
    rows = swaps(trace, idle_intervals(trace))
    least = device_peak(trace, rows)
    early = schedule(AccessSequence(trace, rows), RTX_A6000, least)
    validate(trace, early)
    assert device_peak(trace, early) == least
