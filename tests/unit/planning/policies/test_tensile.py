"""The policy tensile: the paper's rules on handmade traces, and what must hold for any trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.planning.building_blocks.cover import Cover
from pg_tensile.planning.building_blocks.link_slots import Timetable
from pg_tensile.planning.device.profile import RTX_A6000, DeviceProfile
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan import memory
from pg_tensile.planning.plan.access_sequence import boundary
from pg_tensile.planning.plan.plan import NO_EVENTS, Event, EventKind, Plan
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.policies import named_policy
from pg_tensile.planning.policies.tensile import rounds as tensile
from pg_tensile.planning.simulator.simulator import SimulatedJob, Timeline, simulate
from pg_tensile.planning.trace.trace import Mode, Trace
from tests.examples import examples
from tests.unit.graphs import random_trace
from tests.unit.handmade import network, trace_of

READ, STATS, WRITE, CREATE = Mode.READ, Mode.STATS, Mode.WRITE, Mode.CREATE
OUT, IN, RECOMPUTE = EventKind.SWAP_OUT, EventKind.SWAP_IN, EventKind.RECOMPUTE
# a byte a µs each way
SLOW = replace(RTX_A6000, transfer_latency_us=0.0, launch_us=0.0).with_link(1e6)


def planned(trace: Trace, budget_bytes: int | None = None, profile: DeviceProfile = SLOW, **options: object) -> Plan:
    plan = tensile.plan({7: trace}, profile, budget_bytes, **options)[7]  # type: ignore[arg-type]
    validate(trace, plan)
    return plan


def device_peak(trace: Trace, plan: Plan = NO_EVENTS) -> int:
    return memory.footprint(trace, plan).device_peak_bytes


def simulated(trace: Trace, plan: Plan, profile: DeviceProfile = SLOW) -> Timeline:
    return simulate([SimulatedJob(trace, plan)], profile)[0]


def valley(*, idle_us: float, sizes: tuple[int, ...] = (0, 50, 50)) -> Trace:
    """1 is made, lies idle while operator 3 makes and reads 2, and is read again by operator 5."""
    return trace_of(
        (10, {1: CREATE}), (idle_us, {}), (10, {2: CREATE}), (idle_us, {}), (10, {1: READ}), sizes=sizes
    )  # fmt: skip


# ---- where a swap may stand ----


def test_a_tensor_goes_as_early_and_comes_as_late_as_possible():
    """Made by 1, which ends at 10 µs; 50 µs there and back; operator 5 starts at 220 µs."""
    trace = valley(idle_us=100)
    plan = planned(trace)
    assert list(plan.events) == [Event(OUT, 1, 1, 2), Event(IN, 1, 3, 5, delay_us=50)]
    assert device_peak(trace) == 100 and device_peak(trace, plan) == 50
    transfers = simulated(trace, plan).transfers
    assert [(each.start_us, each.end_us) for each in transfers] == [(10, 60), (170, 220)]


@pytest.mark.parametrize(("before_us", "after_us", "swapped"), [(50, 50, True), (49, 100, False), (100, 49, False)])
def test_both_transfers_need_time_of_their_own_around_the_peak(before_us, after_us, swapped):
    """Out before the peak operator, back after it: 50 µs each."""
    trace = trace_of(
        (10, {1: CREATE}), (before_us, {}), (10, {2: CREATE}), (after_us, {}), (10, {1: READ}), sizes=(0, 50, 50)
    )  # fmt: skip
    assert (len(planned(trace)) > 0) is swapped


def test_what_the_peak_operator_accesses_is_no_candidate():
    trace = trace_of(
        (10, {1: CREATE}), (100, {}), (10, {1: READ, 2: CREATE}), (100, {}), (10, {1: READ}), sizes=(0, 50, 50)
    )  # fmt: skip
    assert planned(trace) == NO_EVENTS


def test_a_copy_may_start_while_the_tensor_is_read_but_not_before_its_last_write():
    read, written = (
        trace_of((10, {1: CREATE}), (100, {1: mode}), (60, {}), (10, {2: CREATE}), (100, {}), (10, {1: READ}),
                 sizes=(0, 50, 50))
        for mode in (READ, WRITE)
    )  # fmt: skip
    assert planned(read).events[0] == Event(OUT, 1, 1, 2)
    assert planned(written).events[0] == Event(OUT, 1, 2, 3)


def test_the_largest_tensor_of_the_peak_comes_first():
    """There is time for one of 1 and 2."""
    trace = trace_of(
        (10, {1: CREATE, 2: CREATE}), (60, {}), (10, {3: CREATE}), (60, {}), (10, {1: READ, 2: READ}),
        sizes=(0, 40, 50, 50),
    )  # fmt: skip
    assert {event.tensor for event in planned(trace).events} == {2}


def test_after_a_swap_the_new_peak_counts():
    """1 lies over the first peak, 2 over the second, which is the peak only once 1 is gone."""
    trace = trace_of(
        (10, {1: CREATE}), (100, {}), (10, {3: CREATE}), (100, {}), (10, {1: READ, 2: CREATE}), (100, {}),
        (10, {4: CREATE}), (100, {}), (10, {2: READ}), sizes=(0, 50, 45, 70, 60),
    )  # fmt: skip
    plan = planned(trace)
    assert {event.tensor for event in plan.events} == {1, 2}
    assert device_peak(trace, plan) == 95  # operator 5 accesses both


def test_transfers_of_one_direction_do_not_overlap():
    trace = trace_of(
        (10, {1: CREATE, 2: CREATE}), (100, {}), (10, {3: CREATE}), (100, {}), (10, {1: READ, 2: READ}),
        sizes=(0, 50, 50, 60),
    )  # fmt: skip
    times = sorted((each.direction, each.start_us, each.end_us) for each in simulated(trace, planned(trace)).transfers)
    assert times == [(0, 10, 60), (0, 60, 110), (1, 120, 170), (1, 170, 220)]


def test_on_a_single_lane_a_transfer_in_does_not_overlap_one_out():
    """2 has to leave while 1 comes back."""
    trace = trace_of(
        (10, {1: CREATE}), (60, {}), (10, {3: CREATE}), (10, {2: CREATE}), (50, {}), (10, {1: READ}), (10, {4: CREATE}),
        (60, {}), (10, {2: READ}), sizes=(0, 50, 50, 60, 60),
    )  # fmt: skip
    assert {event.tensor for event in planned(trace).events} == {1, 2}
    assert {event.tensor for event in planned(trace, lanes=1).events} == {1}
    with pytest.raises(ValueError, match="not 3"):
        planned(trace, lanes=3)


def test_the_device_learns_late_of_a_transfer_end():
    trace = valley(idle_us=50)
    assert len(planned(trace)) == 2
    assert planned(trace, profile=replace(SLOW, handover_us=1.0)) == NO_EVENTS


def test_directions_that_slow_each_other_down_are_planned_slow():
    profile = SLOW.with_link(1e6, duplex_factor=0.5)
    trace = valley(idle_us=99)
    assert planned(trace, profile=profile) == NO_EVENTS
    assert len(planned(trace, profile=profile, lanes=1)) == 2
    assert len(planned(valley(idle_us=100), profile=profile)) == 2


# ---- the other accesses ----


def test_the_rest_of_the_accesses_is_swapped_in_from_the_same_copy():
    """The peak is at operator 3; afterwards 1 is read again and again."""
    trace = trace_of(
        (10, {1: CREATE}), (60, {}), (10, {2: CREATE}), (60, {}), (10, {1: READ}), (1, {}), (60, {}), (10, {1: READ}),
        (1, {}), (40, {}), (10, {1: READ}), sizes=(0, 50, 50),
    )  # fmt: skip
    plan = planned(trace)
    assert [(event.kind, event.deadline) for event in plan.events] == [(OUT, 2), (IN, 5), (IN, 8)]
    assert simulated(trace, plan).bytes_out == 50


def test_what_is_written_is_copied_out_again():
    """Peaks at operators 3 and 7, and a write between them."""
    trace = trace_of(
        (10, {1: CREATE}), (60, {}), (10, {2: CREATE}), (60, {}), (10, {1: WRITE}), (60, {}), (10, {3: CREATE}),
        (60, {}), (10, {1: READ}), sizes=(0, 50, 50, 50),
    )  # fmt: skip
    plan = planned(trace)
    assert [event.kind for event in plan.events] == [OUT, IN, OUT, IN]
    assert device_peak(trace, plan) == 50


# ---- across iterations ----


def training_step(*, update_us: float = 100, start_us: float = 100) -> Trace:
    """1: parameter, 2: its moment. 2 reads the parameter, 5 updates both; the peak is at operator 3."""
    return trace_of(
        (start_us, {}), (10, {1: READ, 3: CREATE}), (10, {3: READ, 4: CREATE}), (100, {}),
        (10, {1: WRITE, 2: WRITE}), (update_us, {}), sizes=(0, 10, 50, 10, 40), persistent=2,
    )  # fmt: skip


def test_optimizer_state_leaves_after_its_update_and_is_back_before_the_next():
    trace = training_step()
    plan = planned(trace)
    assert [event for event in plan.events if event.tensor == 2] == [
        Event(IN, 2, 3, 5, delay_us=50), Event(OUT, 2, 5, 6)
    ]  # fmt: skip
    state = boundary(trace, plan)
    assert 2 not in state.device and 2 in state.host
    assert device_peak(trace) == 110 and device_peak(trace, plan) == 60
    assert simulated(trace, plan).stall_us == 0


def test_nothing_is_under_way_at_the_end_of_the_iteration():
    """The copy out after the update would not end in time."""
    assert 2 not in {event.tensor for event in planned(training_step(update_us=49)).events}


def test_an_updated_parameter_is_back_before_its_first_use():
    trace = trace_of(
        (60, {}), (10, {1: READ, 2: CREATE}), (10, {}), (10, {1: WRITE, 2: READ}), (60, {}), (10, {3: CREATE}),
        sizes=(0, 50, 10, 50), persistent=1,
    )  # fmt: skip
    plan = planned(trace)
    assert list(plan.events) == [Event(IN, 1, 0, 2, delay_us=10), Event(OUT, 1, 4, 5)]
    assert device_peak(trace, plan) == 60


def test_what_is_never_written_is_never_copied_out():
    trace = trace_of(
        (60, {}), (10, {1: READ}), (10, {}), (10, {2: CREATE}), (60, {}), (10, {1: READ}), sizes=(0, 50, 50),
        persistent=1,
    )  # fmt: skip
    plan = planned(trace)
    assert {event.kind for event in plan.events} == {IN}
    timeline = simulated(trace, plan)
    assert (timeline.bytes_out, timeline.passive_swap_ins, timeline.device_peak_bytes) == (0, 0, 50)


def test_a_copy_made_on_the_way_is_given_up_for_one_across_iterations():
    """1 first leaves between its two reads, over the peak at 4, then after its update, over the peak at 9."""
    trace = trace_of(
        (60, {}), (10, {1: READ}), (60, {}), (10, {2: CREATE}), (60, {}), (10, {1: READ}), (10, {1: WRITE}),
        (60, {}), (10, {3: CREATE}), sizes=(0, 50, 60, 55), persistent=1,
    )  # fmt: skip
    plan = planned(trace)
    assert [(event.kind, event.deadline) for event in plan.events] == [(IN, 2), (IN, 6), (OUT, 8)]
    assert simulated(trace, plan).bytes_out == 50
    assert device_peak(trace, plan) == 60


# ---- several jobs ----


def test_each_job_has_its_share_of_the_link():
    trace = valley(idle_us=100)
    for jobs, swapped in ((2, True), (3, False)):
        plans = tensile.plan(dict.fromkeys(range(jobs), trace), SLOW, None)
        assert all((len(plan) > 0) is swapped for plan in plans.values())
    assert tensile.plan({}, SLOW, None) == {}


def test_the_budget_is_for_all_jobs_together():
    """Both have the same memory, but only one of them can be recomputed cheaply: that suffices."""
    cheap, dear = recomputable(us=1), recomputable(us=1000)
    both = device_peak(cheap) + device_peak(dear)
    plans = tensile.plan({1: cheap, 2: dear}, SLOW, both - 1)
    assert [event.kind for event in plans[1].events] == [RECOMPUTE]
    assert plans[2] == NO_EVENTS


def test_a_smaller_swap_share_is_a_priority():
    traces = {1: valley(idle_us=200), 2: valley(idle_us=200)}
    plans = tensile.plan_limited(traces, SLOW, None, {1: tensile.Limits(swap_share=0.0), 2: tensile.Limits()})
    assert plans[1] == NO_EVENTS and len(plans[2]) == 2


def test_a_tensor_too_large_for_the_swap_share_leaves_it_to_the_next():
    """Of 90 bytes, 2 has 50 and 1 has 40."""
    trace = trace_of(
        (10, {1: CREATE, 2: CREATE}), (200, {}), (10, {3: CREATE}), (200, {}), (10, {1: READ, 2: READ}),
        sizes=(0, 40, 50, 100),
    )  # fmt: skip
    for share, swapped in ((1.0, {1, 2}), (0.9, {2}), (0.5, {1}), (0.4, set())):
        assert {event.tensor for event in planned(trace, swap_share=share).events} == swapped
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="swap_share"):
            planned(trace, swap_share=share)


def test_a_limit_of_one_job_is_met_by_its_own_tensors():
    """Recomputing in 1 is cheaper, but 2 is the one with a limit."""
    traces = {1: recomputable(us=1), 2: recomputable(us=1000)}
    limits = {1: tensile.Limits(), 2: tensile.Limits(most_bytes=device_peak(traces[2]) - 1)}
    plans = tensile.plan_limited(traces, SLOW, 1000, limits)
    assert plans[1] == NO_EVENTS
    assert [event.kind for event in plans[2].events] == [RECOMPUTE]


def test_what_a_job_counts_with_anyway_is_not_saved():
    """Recomputing in 1 is cheaper, but would free nothing, for 1 counts with more in any case."""
    traces = {1: recomputable(us=1), 2: recomputable(us=1000)}
    least = device_peak(traces[1]) + 50
    limits = {1: tensile.Limits(least_bytes=least), 2: tensile.Limits()}
    plans = tensile.plan_limited(traces, SLOW, least + device_peak(traces[2]) - 1, limits)
    assert plans[1] == NO_EVENTS
    assert [event.kind for event in plans[2].events] == [RECOMPUTE]


# ---- recomputation ----


def recomputable(us: float = 1.0) -> Trace:
    """No time to swap 1, which operator 1 makes from the batch in `us`; the peak is at operator 2."""
    return trace_of(
        (us, {0: READ, 1: CREATE}), (1, {2: CREATE}), (1, {0: READ, 1: READ}), sizes=(10, 50, 50)
    )  # fmt: skip


def test_nothing_is_recomputed_without_a_budget_or_within_it():
    trace = recomputable()
    assert planned(trace) == NO_EVENTS
    assert planned(trace, device_peak(trace)) == NO_EVENTS
    assert planned(trace, device_peak(trace) - 1).events[0] == Event(RECOMPUTE, 1, 2, 3)


def test_nothing_is_recomputed_that_swapping_saves():
    trace = valley(idle_us=100)
    assert {event.kind for event in planned(trace, 60).events} == {OUT, IN}


def test_most_bytes_a_microsecond_come_first():
    """1: 50 bytes in 5 µs, 2: 30 bytes in 1 µs; one of them is enough."""
    trace = trace_of(
        (5, {0: READ, 1: CREATE}), (1, {0: READ, 2: CREATE}), (1, {3: CREATE}), (1, {0: READ, 1: READ, 2: READ}),
        sizes=(1, 50, 30, 50),
    )  # fmt: skip
    plan = planned(trace, 110)
    assert [event.tensor for event in plan.events] == [2]
    assert {event.tensor for event in planned(trace, 90).events} == {1, 2}


def test_inputs_that_are_gone_are_recomputed_and_their_time_counts():
    """2 takes 1 µs from 1, which took 100 µs and is dead; 3 takes 50 µs from the batch."""
    trace = trace_of(
        (100, {0: READ, 1: CREATE}), (1, {1: READ, 2: CREATE}), (50, {0: READ, 3: CREATE}), (1, {4: CREATE}),
        (1, {0: READ, 2: READ, 3: READ}), sizes=(1, 5, 80, 80, 160),
    )  # fmt: skip
    assert [event.tensor for event in planned(trace, 310).events] == [3]
    plan = planned(trace, 170)
    assert [(event.tensor, event.trigger) for event in plan.events] == [(1, 4), (2, 4), (3, 4)]


def test_what_was_made_from_a_swapped_tensor_is_not_recomputed():
    """1 is swapped over the peak and comes back right before operator 6; 2, made from it, is needed before."""
    trace = trace_of(
        (10, {1: CREATE}), (1, {1: READ, 2: CREATE}), (100, {}), (10, {3: CREATE}), (10, {2: READ}), (100, {}),
        (10, {1: READ}), sizes=(0, 60, 20, 60),
    )  # fmt: skip
    plan = planned(trace, 10, profile=replace(SLOW, in_bytes_per_s=0.8e6))
    assert {event.tensor for event in plan.events} == {1}


def test_what_is_recomputed_is_not_swapped_as_well():
    """1 is recomputed over the peak at 2. Over that at 4, 3 is recomputed from 1, which could leave from there on: its
    copy out would have to start before the first peak, where 1 is dropped."""
    trace = trace_of(
        (10, {0: READ, 1: CREATE}), (60, {2: CREATE}), (1, {1: READ, 3: CREATE}), (1, {4: CREATE}), (100, {}), (1, {}),
        (1, {3: READ}), (1, {}), (1, {0: READ, 1: READ}), sizes=(0, 50, 140, 30, 100),
    )  # fmt: skip
    plan = planned(trace, 0)
    assert [(event.kind, event.tensor, event.deadline) for event in plan.events] == [
        (RECOMPUTE, 1, 3), (RECOMPUTE, 1, 7), (RECOMPUTE, 3, 7)
    ]  # fmt: skip


def test_a_budget_out_of_reach_gives_the_best_plan():
    trace = recomputable()
    plan = planned(trace, 0)
    assert device_peak(trace, plan) == 60 == memory.floor_bytes(trace)


def test_what_a_recomputation_takes_itself_counts():
    """Making 1 again discards 3, as large as what it would save."""
    trace = trace_of(
        (1, {0: READ, 1: CREATE, 3: CREATE}), (1, {2: CREATE}), (1, {0: READ, 1: READ}), sizes=(1, 50, 50, 80)
    )  # fmt: skip
    assert planned(trace, 0) == NO_EVENTS


# ---- any trace ----

FAST = replace(RTX_A6000, transfer_latency_us=0.3).with_link(1e9, 0.5e9)  # against 0 … 4096 bytes in 0 … 20 µs


def trace_with_latencies(trace: Trace) -> Trace:
    return roofline.timed(trace, FAST)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Trace, DeviceProfile, int | None, int]:
    """A trace with up to 50 operators, a device, a budget and lanes."""
    random = Random(draw(st.integers(0, 1 << 32)))
    size = draw(st.sampled_from((12, 25, 50)))
    trace = random_trace(random, size, size)
    profile = replace(
        FAST.with_link(draw(st.sampled_from((2e8, 1e9, 5e9))), 1e9, draw(st.sampled_from((1.0, 0.7, 0.5)))),
        transfer_latency_us=draw(st.sampled_from((0.0, 0.3, 2.0))),
        handover_us=draw(st.sampled_from((0.0, 1.0))),
    )
    budget = draw(st.sampled_from((None, 0.0, 0.7, 1.0)))
    budget_bytes = None if budget is None else int(budget * device_peak(trace))
    return trace, profile, budget_bytes, draw(st.sampled_from((1, 2)))


@given(problems())
@examples(20, long=120)
def test_plans_are_valid_take_no_more_memory_and_stall_nobody(problem):
    trace, profile, budget_bytes, lanes = problem
    plan = planned(trace, budget_bytes, profile, lanes=lanes)
    assert device_peak(trace, plan) <= device_peak(trace)
    timeline = simulated(trace, plan, profile)
    assert timeline.stall_us < 1e-6
    assert timeline.passive_swap_ins == 0
    transfers = sorted((each.start_us, each.end_us) for each in timeline.transfers)
    if lanes == 1:
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(transfers))
    if budget_bytes is None or device_peak(trace) <= budget_bytes:
        assert RECOMPUTE not in plan.rows["kind"]


@given(problems(), st.floats(0, 1))
def test_no_more_than_the_swap_share_is_swapped(problem, share):
    trace, profile, _, lanes = problem
    plan = planned(trace, None, profile, lanes=lanes, swap_share=share)
    swapped = np.unique(plan.rows["tensor"][plan.rows["kind"] == IN])
    job = tensile.Job(roofline.timed(trace, profile), tensile.Link.share(profile, 1, lanes), tensile.Limits())
    assert trace.tensor_bytes[swapped].sum() <= share * job.swappable_bytes


@given(problems(), st.integers(1, 3))
def test_plans_are_the_same_every_time(problem, jobs):
    trace, profile, budget_bytes, lanes = problem
    first, second = (
        tensile.plan(dict.fromkeys(range(jobs), each), profile, budget_bytes, lanes=lanes)
        for each in (trace, Trace.from_bytes(trace.to_bytes()))
    )
    assert first == second
    for plan in first.values():
        validate(trace, plan)


@given(problems())
@examples(15)
def test_no_round_raises_the_peak_and_every_plan_keeps_to_the_peak_counted(problem):
    trace, profile, budget_bytes, lanes = problem
    job = tensile.Job(roofline.timed(trace, profile), tensile.Link.share(profile, 1, lanes), tensile.Limits())
    peaks = [job.peak_bytes]
    for _ in rounds(job, budget_bytes is not None):
        peaks.append(job.peak_bytes)
        plan = job.plan()
        validate(trace, plan)
        assert device_peak(trace, plan) <= job.peak_bytes
    assert peaks[0] == device_peak(trace)
    assert peaks == sorted(peaks, reverse=True)


def rounds(job: tensile.Job, recompute: bool) -> Iterator[None]:
    ways = [(tensile.Job.largest, tensile.Job.swap), (tensile.Job.most_valuable, tensile.Job.recompute)][
        : 1 + recompute
    ]
    while any(tensile._take_first([job], *way) for way in ways):
        yield


# ---- size ----


def test_small_gains_end_the_planning_unless_the_budget_is_exceeded(monkeypatch):
    trace = network(200)
    everything = planned(trace, profile=RTX_A6000)
    monkeypatch.setattr(tensile, "ROUNDS", 10)
    monkeypatch.setattr(tensile, "SMALL_GAIN", 0.5)  # of the peak in three rounds: there is none
    few = planned(trace, profile=RTX_A6000)
    assert 10 <= len({event.tensor for event in few.events}) < len({event.tensor for event in everything.events})
    budget_bytes = device_peak(trace, everything)
    assert device_peak(trace, planned(trace, budget_bytes, RTX_A6000)) <= budget_bytes


def test_rounds_that_count_together_may_be_more_than_those_before(monkeypatch):
    monkeypatch.setattr(tensile, "ROUNDS", 2)
    monkeypatch.setattr(tensile, "OPERATORS_A_ROUND", 100)
    trace = network(200)
    assert len(planned(trace, profile=RTX_A6000)) > 7


def test_the_plan_of_five_thousand_operators_saves_memory_without_stalls():
    trace = network(1430)
    plan = planned(trace, profile=RTX_A6000)
    assert device_peak(trace, plan) < 0.6 * device_peak(trace)
    assert simulated(trace, plan, RTX_A6000).stall_us < 1e-3


def test_it_is_known_by_name():
    assert named_policy("tensile") is tensile.plan


# ---- what it is built of ----


@given(st.integers(1, 40), st.randoms(use_true_random=False))
def test_the_first_key_that_covers_an_operator(operators, random):
    cover = Cover[tuple[int, int]](operators)
    ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number in range(random.randint(0, 25)):
        if ranges and random.random() < 0.3:
            gone = random.choice(list(ranges))
            cover.remove(gone)
            del ranges[gone]
        key = (random.randint(0, 5), number)
        ends = [sorted(random.choices(range(operators), k=2)) for _ in range(random.randint(1, 2))]
        ranges[key] = [(first, last) for first, last in ends]
        cover.insert(key, ranges[key])
        for operator in range(operators):
            covering = [key for key, each in ranges.items() if any(first <= operator <= last for first, last in each)]
            assert cover.first(operator) == min(covering, default=None)


@given(st.lists(st.sampled_from((0.0, 0.5, 3.0, 10.0)), min_size=1, max_size=30), st.randoms(use_true_random=False))
@examples(20)
def test_a_lane_is_never_booked_twice(latencies, random):
    ends = np.cumsum(latencies).tolist()
    lane = Timetable(ends)
    booked: list[tuple[float, float]] = []
    for _ in range(15):
        first, last = sorted(random.uniform(ends[0], ends[-1]) for _ in range(2))
        us = random.choice((0.25, 1.0, 4.5))
        if booked and random.random() < 0.2:
            lane.cancel(*booked.pop(random.randrange(len(booked))))
        start = random.choice((lane.earliest, lane.latest))(us, first, last)
        if start is None:
            continue
        assert first <= start and start + us <= last
        assert all(start + us <= other or other + length <= start for other, length in booked)
        operator, delay_us = lane.trigger(start)
        assert abs(ends[operator] + delay_us - start) < 1e-6 or start == first
        lane.book(start, us)
        booked.append((start, us))


def test_the_earliest_and_the_latest_place_in_a_lane():
    lane = Timetable([0.0, 10.0, 20.0, 40.0])
    assert lane.earliest(5, 0, 40) == 0 and lane.latest(5, 0, 40) == 35
    lane.book(5, 10)
    assert lane.earliest(5, 0, 40) == 0 and lane.earliest(6, 0, 40) == 15 and lane.earliest(5, 1, 40) == 15
    assert lane.latest(5, 0, 19) == 0 and lane.latest(6, 0, 20) is None
    assert lane.trigger(15) == (1, 5) and lane.trigger(20) == (2, 0)
    lane.cancel(5, 10)
    assert lane.earliest(10, 5, 40) == 5
