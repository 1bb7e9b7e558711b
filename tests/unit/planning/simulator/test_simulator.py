"""The simulator, against timelines worked out by hand, and what holds for every plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.errors import InvalidPlanError, SimulationError
from pg_tensile.planning.device.profile import RTX_A6000, Direction
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan import memory
from pg_tensile.planning.plan.access_sequence import AccessSequence, boundary
from pg_tensile.planning.plan.actions import ActionKind
from pg_tensile.planning.plan.plan import NO_EVENTS, Boundary, Event, EventKind, Plan
from pg_tensile.planning.policies import POLICIES
from pg_tensile.planning.simulator.simulator import (
    PlanChange,
    SimulatedJob,
    Stall,
    Timeline,
    Transfer,
    Transition,
    simulate,
)
from pg_tensile.planning.trace.trace import Mode, Trace
from tests.examples import examples
from tests.unit.graphs import planned, traces, valid_plans
from tests.unit.handmade import trace_of

# 1 byte a µs each way, nothing else
DEVICE = replace(RTX_A6000, out_bytes_per_s=1e6, in_bytes_per_s=1e6, transfer_latency_us=0.0, launch_us=0.0)
READ, WRITE, CREATE = Mode.READ, Mode.WRITE, Mode.CREATE
OUT, IN, RECOMPUTE, RELEASE = EventKind.SWAP_OUT, EventKind.SWAP_IN, EventKind.RECOMPUTE, EventKind.RELEASE

BATCH, WEIGHT, HIDDEN, SECOND, LOSS = range(5)


def chain() -> Trace:
    """hidden = f(batch, weight); second = g(hidden); loss = h(second); an operator that reads hidden again; update.
    100 µs each. Operators 1 … 5; hidden is idle after 2 and needed by 4."""
    return trace_of(
        (100, {BATCH: READ, WEIGHT: READ, HIDDEN: CREATE}),
        (100, {HIDDEN: READ, SECOND: CREATE}),
        (100, {SECOND: READ, LOSS: CREATE}),
        (100, {HIDDEN: READ, LOSS: READ}),
        (100, {WEIGHT: WRITE}),
        sizes=(10, 20, 80, 40, 4),
        persistent=1,
    )


def run(trace: Trace, *events: Event, device=DEVICE, **job) -> Timeline:
    (timeline,) = simulate([SimulatedJob(trace, Plan.build(events), **job)], device)
    return timeline


def swapped(trace: Trace, tensor: int, out: int, freed: int, back: int, used: int, delay_us: int = 0) -> list[Event]:
    return [Event(OUT, tensor, out, freed, delay_us=delay_us), Event(IN, tensor, back, used)]


# ---- one job ----


def test_without_events_the_operators_run_one_after_the_other():
    timeline = run(chain())
    assert timeline.iteration_us == timeline.first_iteration_us == timeline.compute_us == 500
    assert timeline.step_start_us.tolist() == [0, 0, 100, 200, 300, 400, 500]
    assert timeline.step_end_us.tolist() == [0, 100, 200, 300, 400, 500, 500]
    assert (timeline.stalls, timeline.transfers, timeline.transitions) == ((), (), ())
    assert (timeline.stall_us, timeline.bytes_out, timeline.bytes_in, timeline.recomputes) == (0, 0, 0, 0)
    # batch, weight; + hidden; + second − batch; + loss; …
    assert timeline.footprint.tolist() == [30, 110, 140, 144, 104, 20, 20]
    assert (timeline.peak_bytes, timeline.device_peak_bytes, timeline.host_arena_bytes) == (144, 144, 0)


def test_a_swap_that_fits_between_two_accesses_costs_no_time():
    """Hidden is read at 100 … 200 and at 300: 80 µs out during operator 2 (a read does not hinder the copy) and 80 µs
    in during operator 3."""
    timeline = run(chain(), *swapped(chain(), HIDDEN, out=1, freed=2, back=2, used=4))
    assert timeline.iteration_us == 500
    assert timeline.transfers == (
        Transfer(HIDDEN, Direction.OUT, 80, 100, 180, event=0, raw_bytes=80),
        Transfer(HIDDEN, Direction.IN, 80, 200, 280, event=1, raw_bytes=80),
    )
    assert timeline.stalls == ()
    assert (timeline.bytes_out, timeline.bytes_in) == (80, 80)
    assert (
        timeline.host_arena_bytes == memory.host_arena(chain(), Plan.build(swapped(chain(), 2, 1, 2, 2, 4))).bytes >= 80
    )


def test_a_swap_in_that_is_triggered_late_stalls_its_reader():
    """In by operator 3's gap, at 300, needed at once by operator 4: it starts at 380."""
    timeline = run(chain(), *swapped(chain(), HIDDEN, out=2, freed=3, back=3, used=4))
    assert timeline.stalls == (Stall(step=4, tensor=HIDDEN, us=80),)
    assert timeline.step_start_us.tolist() == [0, 0, 100, 200, 380, 480, 580]
    assert (timeline.iteration_us, timeline.stall_us, timeline.compute_us) == (580, 80, 500)


def test_a_swap_out_that_is_freed_at_once_stalls_in_the_gap_of_its_trigger():
    timeline = run(chain(), *swapped(chain(), HIDDEN, out=2, freed=2, back=2, used=4))
    assert timeline.stalls == (Stall(step=2, tensor=HIDDEN, us=80),)
    assert timeline.step_end_us.tolist() == [0, 100, 200, 380, 480, 580, 580]
    # 80 out from 200, 80 in from 280 during operator 3
    assert timeline.transfers[1] == Transfer(HIDDEN, Direction.IN, 80, 280, 360, event=1, raw_bytes=80)


def test_latency_and_rate_of_each_direction_count():
    device = replace(DEVICE, out_bytes_per_s=4e6, in_bytes_per_s=2e6, transfer_latency_us=7.0)
    timeline = run(chain(), *swapped(chain(), HIDDEN, out=1, freed=2, back=2, used=4), device=device)
    assert [(transfer.start_us, transfer.end_us) for transfer in timeline.transfers] == [(100, 127), (200, 247)]


def test_the_compute_learns_of_an_end_after_the_handover():
    """Out until 280, known at 285; in by the gap of operator 3 from 385 until 465, known at 470. A transfer that ended
    long before it is waited for costs nothing."""
    device = replace(DEVICE, handover_us=5.0)
    timeline = run(chain(), *swapped(chain(), HIDDEN, out=2, freed=2, back=3, used=4), device=device)
    assert [transfer[3:5] for transfer in timeline.transfers] == [(200, 280), (385, 465)]
    assert timeline.stalls == (Stall(2, HIDDEN, 85), Stall(4, HIDDEN, 85))
    assert timeline.iteration_us == 670
    hidden = run(chain(), *swapped(chain(), HIDDEN, out=1, freed=2, back=2, used=4), device=device)
    assert hidden.iteration_us == 500


def test_an_end_just_before_the_wait_is_still_handed_over():
    """Out from 100 until 180, waited for at 200, known at 230."""
    device = replace(DEVICE, handover_us=50.0)
    timeline = run(chain(), *swapped(chain(), HIDDEN, out=1, freed=2, back=2, used=4), device=device)
    assert timeline.stalls[0] == Stall(2, HIDDEN, 30)


def test_a_delay_moves_the_copy_and_nothing_else():
    events = swapped(chain(), HIDDEN, out=1, freed=2, back=2, used=4, delay_us=50)
    timeline = run(chain(), *events)
    assert timeline.transfers[0][3:5] == (150, 230)
    assert timeline.stalls == (Stall(step=2, tensor=HIDDEN, us=30),)
    assert (
        timeline.footprint.tolist()
        == run(chain(), *(event._replace(delay_us=0) for event in events)).footprint.tolist()
    )


def two_swaps(delay_us: int = 0) -> tuple[Trace, list[Event]]:
    """Two tensors, 30 and 50 bytes, go out after operator 1 and come back after operator 2, for operator 3 to read."""
    trace = trace_of(
        (100, {1: CREATE, 2: CREATE}), (100, {0: READ}), (100, {1: READ, 2: READ}), sizes=(0, 30, 50)
    )  # fmt: skip
    return trace, [
        Event(OUT, 1, 1, 2, delay_us=delay_us),
        Event(OUT, 2, 1, 2),
        Event(IN, 2, 2, 3),
        Event(IN, 1, 2, 3),
    ]


def test_each_lane_serves_in_the_order_of_the_plan():
    trace, events = two_swaps()
    timeline = run(trace, *events)
    assert [transfer[:2] + transfer[3:5] for transfer in timeline.transfers] == [
        (1, Direction.OUT, 100, 130),
        (2, Direction.OUT, 130, 180),
        (2, Direction.IN, 200, 250),
        (1, Direction.IN, 250, 280),
    ]
    assert timeline.stall_us == 80


def test_a_delayed_copy_holds_back_what_its_job_asks_for_after_it():
    trace, events = two_swaps(delay_us=40)
    timeline = run(trace, *events)
    assert [transfer[3:5] for transfer in timeline.transfers[:2]] == [(140, 170), (170, 220)]
    assert timeline.stalls[0] == Stall(2, 2, 20)


def test_lanes_disturb_each_other_by_the_duplex_factor():
    """Tensor 2 has gone out when operator 2 begins, and tensor 1 follows it; half-way the gap asks for 2 again."""
    trace = trace_of(
        (100, {1: CREATE, 2: CREATE}), (50, {0: READ}), (1000, {0: READ}), (0, {1: READ, 2: READ}), sizes=(0, 100, 100)
    )
    events = [Event(OUT, 2, 1, 1), Event(OUT, 1, 1, 3), Event(IN, 2, 2, 4), Event(IN, 1, 3, 4)]
    timeline = run(trace, *events, device=replace(DEVICE, duplex_factor=0.5))
    assert [transfer[:2] + transfer[3:5] for transfer in timeline.transfers] == [
        (2, Direction.OUT, 100, 200),
        (1, Direction.OUT, 200, 350),  # 50 alone, 50 at half speed
        (2, Direction.IN, 250, 400),  # 50 at half speed, 50 alone
        (1, Direction.IN, 1250, 1350),
    ]
    assert [transfer[3:5] for transfer in run(trace, *events).transfers[1:3]] == [(200, 300), (250, 350)]


def test_a_recomputation_takes_the_time_of_its_writers():
    """Hidden is dropped after operator 2 and made again before operator 4, by operator 1."""
    timeline = run(chain(), Event(RECOMPUTE, HIDDEN, 3, 4))
    assert timeline.steps.tolist() == [0, 1, 2, 3, 1, 4, 5, 6]
    assert timeline.recomputes == 1
    assert timeline.iteration_us == 600
    assert timeline.step_start_us.tolist() == [0, 0, 100, 200, 300, 400, 500, 600]
    # the batch stays for it, hidden goes after operator 2
    assert timeline.footprint.tolist() == [30, 110, 150, 74, 114, 104, 20, 20]


def test_a_release_takes_no_time():
    timeline = run(chain(), Event(RELEASE, HIDDEN, 2, 2), Event(RECOMPUTE, HIDDEN, 3, 4))
    assert timeline.iteration_us == 600


def test_a_parameter_may_be_off_the_device_between_iterations():
    """The weight comes in before operator 1 needs it and goes after its update: 20 µs each, and they wait for both."""
    timeline = run(chain(), Event(IN, WEIGHT, 0, 1), Event(OUT, WEIGHT, 5, 6))
    assert timeline.stalls == (Stall(1, WEIGHT, 20), Stall(6, WEIGHT, 20))
    assert timeline.iteration_us == 540
    assert timeline.first_iteration_us == 540
    assert timeline.transitions == ()


def test_a_swap_out_with_a_current_host_copy_takes_no_time():
    """The weight is only read until its update: the copy in is all."""
    events = [Event(OUT, WEIGHT, 1, 1), Event(IN, WEIGHT, 3, 5)]
    alone = run(chain(), *events)
    assert (alone.bytes_out, alone.bytes_in, alone.stall_us) == (20, 20, 20)
    current = run(chain(), Event(IN, WEIGHT, 0, 1), *events, Event(OUT, WEIGHT, 5, 6))
    assert [(transfer.event, transfer.direction) for transfer in current.transfers] == [(0, 1), (2, 1), (3, 0)]


def test_unknown_latencies_are_the_rooflines():
    trace = chain().with_latencies(np.zeros(7))
    timeline = run(trace, device=RTX_A6000)
    assert timeline.iteration_us == pytest.approx(roofline.estimate(trace, RTX_A6000).sum())
    assert timeline.iteration_us > 0


def test_workspaces_count_in_the_device_peak():
    trace = chain().with_latencies(np.ones(7), [0, 500, 0, 0, 0, 0, 0])
    timeline = run(trace)
    assert (timeline.peak_bytes, timeline.device_peak_bytes) == (144, 610)


# ---- changes of plan ----

AWAY = Plan.build([Event(IN, WEIGHT, 0, 1), Event(OUT, WEIGHT, 5, 6)])  # between iterations
ON_DEVICE = Boundary(frozenset([WEIGHT]), frozenset())
ON_HOST = Boundary(frozenset(), frozenset([WEIGHT]))


def test_what_a_plan_wants_on_the_host_is_copied_out_before_it_starts():
    (timeline,) = simulate([SimulatedJob(chain(), AWAY, initial_state=ON_DEVICE)], DEVICE)
    assert timeline.transitions == (Transition(0, 20, 20, 540, 0, 0),)
    assert timeline.first_iteration_us == 560
    assert timeline.iteration_us == 540


def test_what_a_plan_wants_on_the_device_comes_in_passively():
    (timeline,) = simulate([SimulatedJob(chain(), NO_EVENTS, initial_state=ON_HOST)], DEVICE)
    assert timeline.transitions == (Transition(0, 0, 0, 520, 1, 20),)
    assert timeline.first_iteration_us == 520
    assert timeline.iteration_us == 500
    assert timeline.passive_swap_ins == 0


def test_a_state_that_the_plan_starts_from_is_no_change():
    job = SimulatedJob(chain(), AWAY, initial_state=boundary(chain(), AWAY))
    assert simulate([job], DEVICE)[0].transitions == ()


def test_plans_change_between_iterations():
    """Two iterations on the device, three without the weight between them, then as at first."""
    changes = (PlanChange(2, AWAY), PlanChange(3, NO_EVENTS))
    (timeline,) = simulate([SimulatedJob(chain(), NO_EVENTS, changes=changes)], DEVICE)
    assert timeline.transitions == (Transition(2, 20, 20, 540, 0, 0), Transition(5, 0, 0, 520, 1, 20))
    assert timeline.first_iteration_us == 520
    assert timeline.iteration_us == 500
    assert timeline.footprint.tolist() == memory.footprint(chain()).bytes.tolist()


def test_a_plan_may_change_after_its_first_iteration():
    changes = (PlanChange(1, NO_EVENTS), PlanChange(1, AWAY))
    (timeline,) = simulate([SimulatedJob(chain(), AWAY, initial_state=ON_DEVICE, changes=changes)], DEVICE)
    assert [transition.iteration for transition in timeline.transitions] == [0, 1, 2]
    assert timeline.transitions[2] == Transition(2, 20, 20, 540, 0, 0)
    assert (timeline.first_iteration_us, timeline.iteration_us) == (560, 540)


def test_a_change_between_plans_with_the_same_boundary_costs_nothing():
    other = Plan.build(swapped(chain(), HIDDEN, out=1, freed=2, back=2, used=4))
    (timeline,) = simulate([SimulatedJob(chain(), NO_EVENTS, changes=(PlanChange(1, other),))], DEVICE)
    assert timeline.transitions == ()
    assert timeline.first_iteration_us == timeline.iteration_us == 500
    assert len(timeline.transfers) == 2


def test_a_state_without_the_data_is_refused():
    nowhere = Boundary(frozenset(), frozenset())
    for plan in (AWAY, NO_EVENTS):
        with pytest.raises(InvalidPlanError) as error:
            simulate([SimulatedJob(chain(), plan, initial_state=nowhere)], DEVICE)
        assert error.value.tensor == WEIGHT


# ---- several jobs ----


def burst(size: int) -> tuple[Trace, Plan]:
    """100 µs; then a tensor out, and back after another 100 µs; then 100 µs that need it."""
    trace = trace_of((100, {1: CREATE}), (100, {0: READ}), (100, {1: READ}), sizes=(0, size))
    return trace, Plan.build([Event(OUT, 1, 1, 2), Event(IN, 1, 2, 3)])


def test_jobs_queue_for_the_link_in_the_order_of_their_requests():
    """Both ask for the lane out at 100 (the first job first), for the lane in at 200 and 220."""
    trace, plan = burst(60)
    first, second = simulate([SimulatedJob(trace, plan)] * 2, DEVICE, iterations=1)
    assert [transfer[3:5] for transfer in first.transfers] == [(100, 160), (200, 260)]
    assert [transfer[3:5] for transfer in second.transfers] == [(160, 220), (260, 320)]
    assert (first.iteration_us, second.iteration_us) == (360, 420)
    assert [stall.us for stall in second.stalls] == [20, 100]


def test_jobs_that_do_not_meet_do_not_disturb_each_other():
    trace, plan = burst(60)
    first, second = simulate([SimulatedJob(trace, plan), SimulatedJob(trace, plan, start_us=1e7)], DEVICE, iterations=2)
    assert (first.iteration_us, second.iteration_us) == (360, 360)
    assert second.transfers == first.transfers


def test_jobs_without_transfers_are_alone_on_their_streams():
    trace, plan = burst(60)
    quiet, busy = simulate([SimulatedJob(chain()), SimulatedJob(trace, plan)], DEVICE)
    assert (quiet.iteration_us, busy.iteration_us) == (500, 360)


def test_a_job_of_no_time_does_not_keep_the_others_from_ending():
    """Its zero bytes cross the link in no time, for ever."""
    empty = trace_of((0, {1: CREATE}), (0, {0: READ}), (0, {1: READ}), sizes=(0, 0)).with_latencies([0, 1e-9, 0, 0, 0])
    trace, plan = burst(60)
    _, busy = simulate([SimulatedJob(empty, plan), SimulatedJob(trace, plan)], DEVICE)
    assert busy.iteration_us == 360


def test_the_link_is_shared_among_jobs_of_different_length():
    """Each iteration of a job moves 60 bytes each way; together they ask for more than the lanes can move."""
    trace, plan = burst(60)
    short = trace.with_latencies(trace.latency_us / 100)
    timelines = simulate([SimulatedJob(short, plan), SimulatedJob(short, plan), SimulatedJob(trace, plan)], DEVICE)
    assert all(timeline.iteration_us >= 123 for timeline in timelines[:2])
    assert timelines[2].iteration_us >= 360
    assert sum(60 / timeline.iteration_us for timeline in timelines) <= 1.01  # each mean is over a time of its own


# ---- bad input ----


def test_an_invalid_plan_of_any_job_is_refused_before_anything_runs():
    bad = Plan.build([Event(IN, HIDDEN, 2, 4)])
    with pytest.raises(InvalidPlanError) as error:
        simulate([SimulatedJob(chain()), SimulatedJob(chain(), bad)], DEVICE)
    assert (error.value.operator, error.value.tensor, error.value.event) == (2, HIDDEN, 0)


def test_an_invalid_plan_to_change_to_is_refused():
    changes = (PlanChange(1, Plan.build([Event(IN, 99, 2, 4)])),)
    with pytest.raises(InvalidPlanError):
        simulate([SimulatedJob(chain(), changes=changes)], DEVICE)


@pytest.mark.parametrize("start_us", [-1.0, float("nan"), float("inf")])
def test_a_start_at_no_time_is_refused(start_us):
    with pytest.raises(SimulationError):
        simulate([SimulatedJob(chain(), start_us=start_us)], DEVICE)


def test_no_iterations_are_refused():
    with pytest.raises(SimulationError):
        simulate([SimulatedJob(chain())], DEVICE, iterations=0)
    with pytest.raises(SimulationError):
        simulate([SimulatedJob(chain(), changes=(PlanChange(0, AWAY),))], DEVICE)


def test_no_jobs_take_no_time():
    assert simulate([], DEVICE) == []


# ---- what holds for every plan ----

FAST = replace(RTX_A6000, out_bytes_per_s=80e6, in_bytes_per_s=50e6, transfer_latency_us=2.0)


def latencies(trace: Trace) -> np.ndarray:
    return trace.latency_us if trace.latency_us.any() else roofline.estimate(trace, FAST)


def by_recurrence(trace: Trace, plan: Plan, profile) -> float:
    """The iteration time of a job that is alone on a link with independent lanes, action by action."""
    sequence = AccessSequence(trace, plan)
    latency, now = latencies(trace)[sequence.steps], 0.0
    free, requested, end = {0: 0.0, 1: 0.0}, {0: 0.0, 1: 0.0}, {}
    for kind, step, tensor, event in sequence.actions():
        if kind == ActionKind.RUN:
            now += latency[step]
        elif kind in (ActionKind.COPY_OUT, ActionKind.COPY_IN):
            lane = Direction(kind == ActionKind.COPY_IN)
            requested[lane] = max(requested[lane], now + int(plan.rows["delay_us"][event]))
            free[lane] = max(free[lane], requested[lane])
            free[lane] += profile.transfer_us(int(trace.tensor_bytes[tensor]), lane)
            end[tensor] = free[lane]
        elif kind in (ActionKind.WAIT_OUT, ActionKind.WAIT_IN):
            now = max(now, end[tensor] + profile.handover_us)
    return now


@given(planned(most_operators=20, most_tensors=20), st.sampled_from([0.0, 3.0]))
@examples(20)
def test_a_job_alone_takes_what_a_recurrence_says(pair, handover_us):
    trace, plan = pair
    profile = replace(FAST, handover_us=handover_us)
    timeline = run(trace, *plan.events, device=profile)
    assert timeline.iteration_us == pytest.approx(by_recurrence(trace, plan, profile))
    assert run(trace, *plan.events, device=profile).transfers == timeline.transfers


@given(planned(most_operators=20, most_tensors=20), st.sampled_from([1.0, 0.75, 0.5]))
@examples(20, long=150)
def test_timelines_are_consistent(pair, duplex_factor):
    trace, plan = pair
    profile = replace(FAST, duplex_factor=duplex_factor)
    timeline = run(trace, *plan.events, device=profile)
    latency = latencies(trace)[timeline.steps]
    assert timeline.footprint.tolist() == memory.footprint(trace, plan).bytes.tolist()
    assert timeline.peak_bytes == memory.footprint(trace, plan).peak_bytes
    assert timeline.device_peak_bytes == memory.footprint(trace, plan).device_peak_bytes
    assert np.allclose(timeline.step_end_us - timeline.step_start_us, latency)
    gaps = timeline.step_start_us - np.concatenate(([0.0], timeline.step_end_us[:-1]))
    assert (gaps >= -1e-6).all()
    assert timeline.compute_us == pytest.approx(latency.sum())
    assert timeline.stall_us == pytest.approx(sum(stall.us for stall in timeline.stalls), abs=1e-6)
    assert timeline.iteration_us == pytest.approx(timeline.compute_us + timeline.stall_us)
    for direction, moved in ((Direction.OUT, timeline.bytes_out), (Direction.IN, timeline.bytes_in)):
        lane = [transfer for transfer in timeline.transfers if transfer.direction == direction]
        alone = [profile.transfer_us(transfer.bytes, direction) for transfer in lane]
        assert sum(transfer.bytes for transfer in lane) == moved
        assert timeline.iteration_us >= sum(alone) - 1e-6
        for transfer, least in zip(lane, alone, strict=True):
            assert least - 1e-6 <= transfer.end_us - transfer.start_us <= least / duplex_factor + 1e-6
            assert 0 <= transfer.start_us <= transfer.end_us <= timeline.iteration_us + 1e-6
        assert all(first.end_us <= second.start_us + 1e-6 for first, second in pairwise(lane))


@given(planned(most_operators=16, most_tensors=16), st.sampled_from([None, "none", "swap_all"]))
@examples(20, long=150)
def test_a_faster_link_never_hurts(pair, policy):
    trace, plan = pair
    if policy is not None:
        plan = POLICIES[policy]({0: trace}, FAST, None)[0]
    trace = trace.with_latencies(latencies(trace))
    times = [
        run(
            trace, *plan.events, device=FAST.with_link(FAST.out_bytes_per_s * out, FAST.in_bytes_per_s * back)
        ).iteration_us
        for out, back in ((1, 1), (2, 1), (1, 2), (2, 2), (1000, 1000))
    ]
    assert times[0] >= max(times[1:3]) - 1e-6
    assert min(times[1:3]) >= times[3] - 1e-6
    assert times[3] >= times[4] - 1e-6


@given(planned(), planned())
@examples(20)
def test_two_jobs_on_one_link_are_never_faster_than_alone(one, two):
    jobs = [SimulatedJob(trace, plan) for trace, plan in (one, two)]
    together = simulate(jobs, FAST, iterations=3)
    for job, timeline in zip(jobs, together, strict=True):
        (alone,) = simulate([job], FAST)
        assert timeline.iteration_us >= alone.iteration_us - 1e-6
        assert timeline.footprint.tolist() == alone.footprint.tolist()
    assert [timeline.transfers for timeline in simulate(jobs, FAST, iterations=3)] == [
        timeline.transfers for timeline in together
    ]


@given(traces().flatmap(lambda trace: st.tuples(st.just(trace), valid_plans(trace), valid_plans(trace))))
@examples(20)
def test_any_plan_may_follow_any_other(drawn):
    """The steady state does not know where the job came from, and the first iteration is its plan's."""
    trace, before, after = drawn
    (timeline,) = simulate([SimulatedJob(trace, before, changes=(PlanChange(2, after),))], FAST)
    (alone,) = simulate([SimulatedJob(trace, after)], FAST)
    assert timeline.iteration_us == pytest.approx(alone.iteration_us)
    assert [transfer[:3] for transfer in timeline.transfers] == [transfer[:3] for transfer in alone.transfers]
    left, wanted = boundary(trace, before), boundary(trace, after)
    if left == wanted:
        assert timeline.transitions == ()
        assert timeline.first_iteration_us == pytest.approx(alone.iteration_us)
        return
    (transition,) = timeline.transitions
    assert transition.iteration == 2
    assert transition.bytes_out == trace.tensor_bytes[sorted(wanted.host - left.host)].sum()
    assert transition.passive_bytes <= trace.tensor_bytes[sorted(wanted.device - left.device)].sum()
    assert transition.passive_swap_ins <= len(wanted.device - left.device)
    assert transition.first_iteration_us >= alone.compute_us - 1e-6
    assert timeline.first_iteration_us == transition.us + transition.first_iteration_us
