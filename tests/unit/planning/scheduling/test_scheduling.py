"""The scheduler's decisions: who is let in, that everybody fits, who loses what, and when plans stay as they are."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.job_planner.planner import AbandonedError, JobPlanner
from pg_tensile.planning.job_planner.sweep import Outcome, sweep
from pg_tensile.planning.plan.following import host_bytes
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import Event, EventKind, Plan
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.policies.tensile import rounds
from pg_tensile.planning.scheduling import planning
from pg_tensile.planning.scheduling.decisions import (
    DeviceState,
    Failed,
    Given,
    JobState,
    Kept,
    Planned,
    Refused,
    Schedule,
    Waits,
)
from pg_tensile.planning.scheduling.device_scheduler import DeviceScheduler
from pg_tensile.planning.trace.trace import Mode, Trace
from tests.examples import examples
from tests.unit.handmade import network, trace_of
from tests.unit.planning.scheduling.jobs import (
    MIB,
    crowds,
    decide,
    device,
    granted,
    job,
    loss,
    middle,
    most,
    planned,
    published,
    reason,
)

# ---- any jobs ----


def check(state: DeviceState, jobs: list[JobState], schedule: Schedule) -> None:
    """Check the properties of every schedule of jobs without grants."""
    assert schedule.decisions.keys() == {each.job for each in jobs}
    overheads = sum(each.overhead_bytes for each in jobs)
    total = 0
    for each in jobs:
        decision = schedule.decisions[each.job]
        limit = min(state.budget_bytes - each.overhead_bytes, each.most_bytes or 1 << 62)
        assert isinstance(decision, Refused) == (each.least_bytes > limit)
        if isinstance(decision, Planned):
            total += decision.granted_bytes
            assert each.least_bytes <= decision.granted_bytes <= (each.most_bytes or 1 << 62)
            assert decision.planned_bytes <= decision.granted_bytes
            if each.trace is not None:
                validate(each.trace, decision.plan)
                assert footprint(each.trace, decision.plan).device_peak_bytes == decision.planned_bytes
                assert max(decision.footprint) == decision.planned_bytes
                assert len(decision.operators) == len(decision.footprint) == len(decision.vanilla)
        else:
            assert isinstance(decision, (Refused, Waits)), decision
    assert total == 0 or total <= state.budget_bytes - state.inference_bytes - overheads
    decisions = [decision for decision in schedule.decisions.values() if isinstance(decision, Planned)]
    assert sum(decision.link_share for decision in decisions if decision.out_bytes + decision.in_bytes) < 1 + 1e-9


@given(crowd=crowds())
@examples(10, long=30)
def test_grants_never_exceed_the_budget_and_only_what_cannot_fit_is_refused(crowd):
    state, jobs = crowd
    check(state, jobs, decide(state, *jobs))


@pytest.mark.long
@given(crowd=crowds(), lower=st.floats(0.5, 1.5))
@examples(20)
def test_what_was_decided_is_decided_again_until_something_changes(crowd, lower):
    """No flapping: with what was given, the same state asks for nothing; and so it is after every change."""
    state, jobs = crowd
    scheduler = DeviceScheduler()
    for each in (state, replace(state, budget_bytes=round(state.budget_bytes * lower)), state):
        jobs = published(scheduler.schedule(each, jobs), *jobs)
        again = scheduler.schedule(each, jobs)
        running = [one.job for one in jobs if one.given is not None]
        overheads = sum(one.overhead_bytes for one in jobs)
        enough = granted(*jobs) <= each.budget_bytes - each.inference_bytes - overheads
        if enough:
            assert all(isinstance(again.decisions[number], Kept) for number in running), again
        after = published(again, *jobs)
        assert granted(*after) <= max(granted(*jobs), each.budget_bytes - each.inference_bytes - overheads)


@given(crowd=crowds())
@examples(5)
def test_equal_questions_have_equal_answers(crowd):
    state, jobs = crowd
    one, other = decide(state, *jobs), decide(state, *reversed(jobs))
    assert one.decisions.keys() == other.decisions.keys()
    for number, decision in one.decisions.items():
        assert type(decision) is type(other.decisions[number])
        if isinstance(decision, Planned):
            twin = planned(other, number)
            assert (decision.plan, decision.granted_bytes) == (twin.plan, twin.granted_bytes)
        else:
            assert decision == other.decisions[number]


# ---- admission ----


def test_what_fits_gets_no_events_and_a_little_more_than_it_needs():
    traces = [network(6), network(8)]
    schedule = decide(device(2 * sum(map(most, traces))), *(job(n, trace) for n, trace in enumerate(traces)))
    for number, trace in enumerate(traces):
        decision = planned(schedule, number)
        assert len(decision.plan) == 0 and decision.link_share == 1.0 and decision.host_bytes == 0
        assert decision.planned_bytes == most(trace)
        assert decision.granted_bytes == most(trace) + most(trace) // 50
        assert schedule.totals_us[number] == pytest.approx(trace.latency_us.sum())


def test_a_job_that_is_larger_than_the_device_is_refused():
    trace = network(6)
    least = least_bytes(trace)
    wants = job(1, trace, operator="backward", overhead_bytes=100)
    assert decide(device(least + 99), wants).decisions[1] == Refused(least - 1, least, "backward")
    assert isinstance(decide(device(least + 100), wants).decisions[1], Planned)


def test_a_job_that_is_larger_than_its_own_budget_is_refused_whose_overhead_does_not_count():
    trace = network(6)
    least = least_bytes(trace)
    limited = job(1, trace, most_bytes=least, overhead_bytes=1000)
    assert planned(decide(device(most(trace)), limited), 1).granted_bytes == least
    refused = decide(device(most(trace)), replace(limited, most_bytes=least - 1))
    assert refused.decisions[1] == Refused(least - 1, least, "")


def test_other_graphs_of_a_job_may_need_more_than_its_training_step():
    trace = network(6)
    larger = least_bytes(trace) + MIB
    schedule = decide(device(larger), job(1, trace, least_bytes=larger))
    assert planned(schedule, 1).granted_bytes == larger >= planned(schedule, 1).planned_bytes
    assert isinstance(decide(device(larger - 1), job(1, trace, least_bytes=larger)).decisions[1], Refused)


def test_jobs_are_let_in_by_rank_and_smaller_ones_pass_until_one_has_waited_for_long():
    small, large = network(3), network(3, activation_bytes=4 * MIB)
    (running,) = published(decide(device(most(small)), job(1, small)), job(1, small))
    first, second = job(2, large, rank=5.0, waited_s=299.0), job(3, small, rank=1.0)
    enough, little = (device(least_bytes(small) + least_bytes(large) - less, ageing_s=300.0) for less in (0, 1))
    schedule = decide(enough, running, first, second)
    assert isinstance(schedule.decisions[2], Planned) and "the job before it" in reason(schedule, 3)
    schedule = decide(little, running, first, second)
    assert isinstance(schedule.decisions[3], Planned)
    assert re.match("needs at least .* of device memory; .* are not needed by the job that runs$", reason(schedule, 2))
    schedule = decide(little, running, replace(first, waited_s=300.0), second)
    assert reason(schedule, 3) == "waits behind job 2, which has waited long enough"
    assert isinstance(decide(little, running, first, replace(second, rank=6.0)).decisions[3], Planned)
    never = replace(little, ageing_s=0.0)
    assert isinstance(decide(never, running, replace(first, waited_s=1e9), second).decisions[3], Planned)


def test_models_for_prediction_and_jobs_that_end_keep_their_memory():
    trace = network(6)
    least = least_bytes(trace)
    taken = device(least + 100, inference_bytes=60, ending_bytes=41)
    assert "models for prediction and jobs that end" in reason(decide(taken, job(1, trace)), 1)
    assert planned(decide(replace(taken, ending_bytes=40), job(1, trace)), 1).granted_bytes == least


def test_eager_jobs_get_what_they_claim():
    trace = network(6)
    budget = 5 * MIB + middle(trace)
    schedule = decide(device(budget), job(1, None, least_bytes=5 * MIB, policy="none"), job(2, trace))
    claim = planned(schedule, 1)
    assert (len(claim.plan), claim.planned_bytes, claim.granted_bytes) == (0, 5 * MIB, 5 * MIB)
    assert planned(schedule, 2).granted_bytes <= budget - 5 * MIB
    assert 1 not in schedule.totals_us and len(claim.operators) == 0


# ---- who loses what ----


def test_several_jobs_share_the_budget_and_the_link():
    traces = [network(12), network(12, latency_us=300.0), network(12, latency_us=1000.0)]
    schedule = decide(device(middle(*traces, part=0.2)), *(job(n, trace) for n, trace in enumerate(traces)))
    shares = [planned(schedule, n).link_share for n in range(3) if planned(schedule, n).out_bytes]
    assert shares and min(shares) > 0 and sum(shares) <= 1 + 1e-9


@pytest.mark.usefixtures("many_divisions")
def test_a_job_that_moves_more_has_more_of_the_link():
    """One whose operators are too slow to be executed again, beside one that does without the link."""
    traces = [network(8, latency_us=latency_us) for latency_us in (400.0, 20.0, 20.0)]
    state = replace(device(middle(*traces, part=0.5)), profile=RTX_A6000.with_link(4e9))
    schedule = decide(state, *(job(number, trace) for number, trace in enumerate(traces)))
    decisions = [planned(schedule, number) for number in range(3)]
    shares = [decision.link_share if decision.out_bytes + decision.in_bytes else 0.0 for decision in decisions]
    assert sum(shares) == pytest.approx(1) and shares[0] > 0.4 > max(shares[1:])
    assert decisions[0].out_bytes > max(decision.out_bytes for decision in decisions[1:])


def test_a_job_of_higher_priority_loses_less():
    traces = [network(12), network(12)]
    slow = RTX_A6000.with_link(2e9)

    def losses(first: float, second: float) -> list[float]:
        state = replace(device(middle(*traces, part=0.4)), profile=slow)
        schedule = decide(state, job(1, traces[0], priority=first), job(2, traces[1], priority=second))
        return [loss(planned(schedule, number)) for number in (1, 2)]

    low, high = losses(0.0, 40.0)
    assert high < low
    high, low = losses(40.0, 0.0)
    assert high < low


def test_a_jobs_own_budget_holds_and_leaves_the_rest_to_others():
    traces = [network(12), network(12)]
    own = middle(traces[0], part=0.3)
    budget = own + most(traces[1])
    schedule = decide(device(budget), job(1, traces[0], most_bytes=own), job(2, traces[1]))
    assert planned(schedule, 1).granted_bytes <= own
    assert len(planned(schedule, 1).plan) > 0
    assert len(planned(schedule, 2).plan) == 0


def test_the_paper_plans_its_jobs_beside_others():
    traces = {n: network(20, latency_us=2000.0) for n in (1, 2, 3)}
    jobs = [job(n, trace, policy="joint" if n == 3 else "tensile") for n, trace in traces.items()]
    schedule = decide(device(middle(*traces.values(), part=0.6)), *jobs)
    for number, trace in traces.items():
        validate(trace, planned(schedule, number).plan)
    assert not schedule.notes
    assert planned(schedule, 1).stall_us == pytest.approx(0, abs=1)  # which joint would not promise
    assert len(planned(schedule, 1).plan) > 0


def test_the_paper_divides_the_budget_among_its_jobs(monkeypatch):
    """Without joint, whose levels would give equal jobs equal losses: the paper recomputes what saves most per µs."""
    traces = {1: network(20, latency_us=20.0), 2: network(20, latency_us=200.0)}
    budget = middle(*traces.values(), part=0.6)
    monkeypatch.setattr(planning, "share_out", None)
    schedule = decide(device(budget), *(job(number, trace, policy="tensile") for number, trace in traces.items()))
    expected = rounds.plan(traces, RTX_A6000, budget)
    for number, trace in traces.items():
        decision = planned(schedule, number)
        assert decision.plan == expected[number].with_bytes(trace)
        assert decision.link_share == 1 / 2
    assert {EventKind.RECOMPUTE, EventKind.SWAP_IN} <= {*planned(schedule, 1).plan.rows["kind"]}
    assert sum(planned(schedule, number).granted_bytes for number in traces) <= budget
    assert not schedule.notes


def test_the_paper_swaps_less_where_host_memory_is_short(monkeypatch):
    traces = {n: network(20, latency_us=2000.0) for n in (1, 2)}
    state = device(middle(*traces.values(), part=0.6))
    jobs = [job(n, trace, policy="tensile") for n, trace in traces.items()]
    monkeypatch.setattr(planning, "share_out", None)  # plans of the paper's algorithm only
    plenty = sum(planned(decide(state, *jobs), n).host_bytes for n in traces)
    schedule = decide(replace(state, host_bytes=plenty // 2), *jobs)
    assert 0 <= sum(planned(schedule, n).host_bytes for n in traces) <= plenty // 2
    assert any(planned(schedule, n).recomputes for n in traces)


def test_the_paper_plans_its_jobs_together_within_what_others_leave():
    traces = {n: network(20, latency_us=2000.0) for n in (1, 2, 3)}
    budget = middle(*traces.values(), part=0.6)
    policies = {1: "tensile", 2: "tensile", 3: "joint"}
    schedule = decide(device(budget), *(job(n, trace, policy=policies[n]) for n, trace in traces.items()))
    left = budget - max(planned(schedule, 3).planned_bytes, least_bytes(traces[3]))
    swapping = sum(planned(schedule, n).out_bytes > 0 for n in traces)
    two = {n: trace for n, trace in traces.items() if policies[n] == "tensile"}
    expected = rounds.plan(two, RTX_A6000.with_share(2 / swapping), left)
    assert all(planned(schedule, n).plan == expected[n].with_bytes(trace) for n, trace in two.items())


def test_a_budget_of_its_own_and_a_swap_share_limit_one_of_the_papers_jobs(monkeypatch):
    """Each has an effect that is not there without it, and needs no division by joint."""
    monkeypatch.setattr(planning, "share_out", None)
    trace = network(20, latency_us=2000.0)
    state = device(middle(trace, trace, part=0.9))
    plain, other = job(1, trace, policy="tensile"), job(2, trace, policy="tensile")
    free = decide(state, plain, other)
    own = planned(free, 1).planned_bytes - 1
    limited = decide(state, replace(plain, most_bytes=own), other)
    assert planned(limited, 1).granted_bytes <= own and not limited.notes
    still = decide(state, replace(plain, swap_share=0.0), other)
    assert planned(free, 1).out_bytes > 0 and planned(still, 1).out_bytes == 0
    assert planned(still, 2).out_bytes > 0 and not still.notes


def test_where_the_paper_finds_no_plan_that_fits_joint_does():
    trace = network(12)
    schedule = decide(device(least_bytes(trace)), job(1, trace, policy="tensile"))
    assert planned(schedule, 1).planned_bytes <= least_bytes(trace)
    assert [(note.job, "joint" in note.reason) for note in schedule.notes] == [(1, True)]


# ---- promised slowdowns ----


@given(crowd=crowds(), promises=st.lists(st.sampled_from((None, 1.0, 1.1, 1.5, 3.0)), min_size=5, max_size=5))
@examples(6, long=20)
def test_no_job_is_slowed_down_by_more_than_it_was_promised(crowd, promises):
    state, jobs = crowd
    jobs = [replace(each, max_slowdown=promise) for each, promise in zip(jobs, promises, strict=False)]
    schedule = decide(state, *jobs)
    assert not any("max_slowdown" in note.reason for note in schedule.notes)  # none of them runs yet
    total = 0
    for each in jobs:
        decision = schedule.decisions[each.job]
        if isinstance(decision, Planned):
            total += decision.granted_bytes
            if each.max_slowdown is not None and decision.vanilla_us:
                assert loss(decision) <= each.max_slowdown - 1 + 1e-9
        elif isinstance(decision, Refused) and decision.max_slowdown is not None:
            assert decision.max_slowdown == each.max_slowdown
            assert decision.least_bytes > decision.budget_bytes >= each.least_bytes
    overheads = sum(each.overhead_bytes for each in jobs)
    assert total <= max(0, state.budget_bytes - state.inference_bytes - overheads)


SLOW = RTX_A6000.with_link(2e9)


def promised(number: int, trace: Trace, slowdown: float | None, **fields: Any) -> JobState:
    return job(number, trace, max_slowdown=slowdown, **fields)


def with_promise(trace: Trace, share: float = 1.0) -> int:
    """The least memory with which the trace is slowed down by no more than 1.05, with a part of the link."""
    return JobPlanner(trace, SLOW, share).saving(1.05).device_peak_bytes


@pytest.mark.usefixtures("many_divisions")
def test_the_others_make_room_for_a_promise():
    trace = network(8)
    state = replace(device(with_promise(trace) + middle(trace, part=0.1)), profile=SLOW)
    alike = decide(state, job(1, trace), job(2, trace))
    assert min(loss(planned(alike, number)) for number in (1, 2)) > 0.05
    schedule = decide(state, promised(1, trace, 1.05), job(2, trace))
    assert loss(planned(schedule, 1)) <= 0.05 < loss(planned(schedule, 2))


def test_a_job_waits_until_promises_can_be_kept():
    trace = network(12)
    state = replace(device(with_promise(trace) + least_bytes(trace) - 1), profile=SLOW)
    running = published(decide(state, promised(1, trace, 1.05)), promised(1, trace, 1.05))
    assert isinstance(decide(state, *running, job(2, trace)).decisions[2], Waits)
    (careless,) = published(decide(state, job(1, trace)), job(1, trace))
    assert isinstance(decide(state, careless, job(2, trace)).decisions[2], Planned)
    assert "for its max_slowdown of 1.05" in reason(decide(state, careless, promised(2, trace, 1.05)), 2)


@pytest.mark.long
@pytest.mark.usefixtures("many_divisions")
def test_a_job_waits_while_the_link_does_not_suffice_for_all_promises():
    """Long: plans that keep a promise are found by bisection, each with its whole search."""
    trace = network(24, latency_us=1000.0)  # too slow to execute again, and swapped for nothing while it is alone
    state = replace(device(1 << 40), profile=RTX_A6000.with_link(6e9))
    alone = JobPlanner(trace, state.profile).saving(1.05).device_peak_bytes
    state = replace(state, budget_bytes=2 * alone)
    first, second = promised(1, trace, 1.05), promised(2, trace, 1.05)
    schedule = decide(state, first, second)
    assert loss(planned(schedule, 1)) <= 0.05
    why = "beside the jobs that run, job 1 and this job would get plans that cost more than max_slowdown allows"
    assert reason(schedule, 2) == why
    assert schedule.lacking == (schedule.slowed_bytes,) == (2 * most(trace) - state.budget_bytes,)
    (running,) = published(schedule, first)
    assert reason(decide(state, running, second), 2) == why
    assert isinstance(decide(state, running, replace(second, max_slowdown=4.0)).decisions[2], Planned)


def test_a_promise_that_the_device_cannot_keep_is_refused():
    trace = network(12)
    state = replace(device(middle(trace, part=0.1)), profile=SLOW)
    decision = decide(state, promised(1, trace, 1.01)).decisions[1]
    assert isinstance(decision, Refused) and decision.max_slowdown == 1.01
    assert least_bytes(trace) < decision.budget_bytes < decision.least_bytes <= most(trace)
    assert isinstance(decide(state, promised(1, trace, 50.0)).decisions[1], Planned)
    limited = promised(1, trace, 1.01, most_bytes=state.budget_bytes)
    decision = decide(replace(state, budget_bytes=most(trace)), limited).decisions[1]
    assert isinstance(decision, Refused) and decision.max_slowdown == 1.01


@pytest.mark.usefixtures("many_divisions")
def test_promises_are_broken_by_rank_where_memory_is_taken_away():
    trace = network(8)
    jobs = [promised(number, trace, 1.05, priority=float(number)) for number in range(2)]
    state = replace(device(2 * most(trace)), profile=SLOW)
    scheduler = DeviceScheduler()
    jobs = published(scheduler.schedule(state, jobs), *jobs)
    less = replace(state, budget_bytes=with_promise(trace, 0.5) + least_bytes(trace))
    schedule = scheduler.schedule(less, jobs)
    assert [note.job for note in schedule.notes if "max_slowdown of 1.05 cannot be kept" in note.reason] == [0]
    assert loss(planned(schedule, 1)) <= 0.05 < loss(planned(schedule, 0))
    after = published(schedule, *jobs)
    assert granted(*after) <= less.budget_bytes


# ---- host memory ----


def test_plans_keep_to_the_host_memory_that_there_is():
    trace = network(24, latency_us=2000.0)  # the link would be free of charge
    state = device(middle(trace))
    plenty = planned(decide(state, job(1, trace)), 1)
    assert plenty.host_bytes == host_bytes([(trace, plenty.plan)]) > 0
    limit = plenty.host_bytes * 55 // 100
    scarce = planned(decide(replace(state, host_bytes=limit), job(1, trace)), 1)
    assert host_bytes([(trace, scarce.plan)]) == scarce.host_bytes <= limit


def test_few_passes_are_not_enough_where_host_memory_is_short(monkeypatch):
    monkeypatch.setattr(planning, "BRIEF_OPERATORS", 0)
    trace = network(24, latency_us=2000.0)
    state = device(middle(trace))
    plenty = planned(DeviceScheduler().schedule(state, [job(1, trace)], True), 1)
    scarce = replace(state, host_bytes=plenty.host_bytes * 60 // 100)
    assert planned(DeviceScheduler().schedule(scarce, [job(1, trace)], True), 1).host_bytes <= scarce.host_bytes


def test_a_pinned_job_keeps_what_it_has_and_others_are_planned_into_the_rest():
    trace = network(12, latency_us=20.0)
    budget = most(trace) + middle(trace)
    state = device(budget)
    one, other = job(1, trace), job(2, trace)
    (one,) = published(decide(state, one), one)
    assert planned(decide(state, one, other), 1).granted_bytes < granted(one)
    schedule = decide(state, replace(one, pinned=True), other)
    assert schedule.decisions[1] == Kept()
    assert planned(schedule, 2).granted_bytes <= budget - granted(one)
    assert "needs at least" in reason(decide(device(granted(one) + 1), replace(one, pinned=True), other), 2)


def test_a_job_waits_where_host_memory_is_missing():
    trace = network(12)
    both = device(2 * least_bytes(trace), host_bytes=0)
    running = job(1, trace, given=Given(Plan.build([]), most(trace)))
    schedule = decide(both, running, job(2, trace))
    assert "pg_tensile.host_memory" in reason(schedule, 2)
    enough = decide(replace(both, host_bytes=1 << 40), running, job(2, trace))
    assert isinstance(enough.decisions[2], Planned)


# ---- change, or not ----


@pytest.mark.long
def test_noise_changes_no_plan_and_a_lasting_change_does():
    random = np.random.default_rng(3)
    trace = network(16, latency_us=10.0)  # recomputed in less time than it takes to move
    state = device(middle(trace, part=0.3))
    scheduler = DeviceScheduler()
    (running,) = published(scheduler.schedule(state, [job(1, trace)]), job(1, trace))
    for _ in range(10):
        noisy = trace.with_latencies(trace.latency_us * random.uniform(0.97, 1.03, trace.operator_count))
        assert scheduler.schedule(state, [replace(running, trace=noisy)]).decisions[1] == Kept()
    slower = trace.with_latencies(trace.latency_us * 100)
    changed = planned(scheduler.schedule(state, [replace(running, trace=slower)]), 1)
    assert running.given is not None and running.given.plan is not None
    before = JobPlanner(slower, RTX_A6000).candidate(running.given.plan)
    assert changed.iteration_us is not None and changed.iteration_us < 0.98 * before.us
    assert changed.recomputes < before.recomputes


def test_plans_grow_when_a_job_ends_and_shrink_when_one_comes():
    traces = [network(12, latency_us=20.0), network(12, latency_us=20.0)]
    state = device(middle(*traces, part=0.2))
    jobs = [job(1, traces[0]), job(2, traces[1])]
    scheduler = DeviceScheduler()
    (alone,) = published(scheduler.schedule(state, jobs[:1]), jobs[0])
    both = scheduler.schedule(state, [alone, jobs[1]])
    assert planned(both, 1).granted_bytes < granted(alone)
    assert planned(both, 1).granted_bytes + planned(both, 2).granted_bytes <= state.budget_bytes
    left = scheduler.schedule(state, published(both, alone, jobs[1])[:1])
    assert planned(left, 1).granted_bytes == granted(alone)


def test_a_lowered_budget_makes_all_jobs_smaller_as_far_as_they_can():
    trace = network(12)
    (running,) = published(decide(device(most(trace)), job(1, trace)), job(1, trace))
    smaller = planned(decide(device(middle(trace)), running), 1)
    assert smaller.granted_bytes <= middle(trace)
    impossible = decide(device(least_bytes(trace) // 2), running)
    assert planned(impossible, 1).granted_bytes == least_bytes(trace)  # it runs: it is not refused


def test_a_job_that_chooses_is_refused_where_it_would_wait_for_one_that_runs():
    trace, other = network(4), network(5)
    budget = least_bytes(trace) + least_bytes(other) - 1
    running = job(1, other, given=Given(None, most(other)))
    chooses = job(2, trace, given=Given(None, 1), stuck=True, choosing=True)
    decision = decide(device(budget), running, chooses).decisions[2]
    assert decision == Refused(least_bytes(trace) - 1, least_bytes(trace), "")
    assert isinstance(decide(device(budget + 1), running, chooses).decisions[2], Planned)
    assert isinstance(decide(device(budget), running, replace(chooses, choosing=False)).decisions[2], Planned)


def test_a_job_whose_executor_is_stuck_gets_a_plan_whatever_it_has():
    trace = network(6)
    (running,) = published(decide(device(most(trace)), job(1, trace)), job(1, trace))
    assert decide(device(most(trace)), running).decisions[1] == Kept()
    stuck = decide(device(most(trace)), replace(running, stuck=True))
    assert isinstance(stuck.decisions[1], Planned)
    hopeless = decide(device(least_bytes(trace) - 1), replace(running, stuck=True))
    assert isinstance(hopeless.decisions[1], Refused)


def test_measured_workspaces_make_another_plan():
    trace = network(8)
    state = device(middle(trace))
    (running,) = published(decide(state, job(1, trace)), job(1, trace))
    workspaces = np.full(trace.operator_count, MIB // 2)
    hungry = trace.with_latencies(trace.latency_us, workspaces)
    schedule = decide(state, replace(running, trace=hungry, least_bytes=least_bytes(hungry)))
    assert footprint(hungry, planned(schedule, 1).plan).device_peak_bytes <= planned(schedule, 1).granted_bytes


@pytest.mark.parametrize("plan", [None, Plan.build([Event(EventKind.SWAP_IN, 1, 2, 3)])])
def test_what_a_job_was_given_may_be_unknown_or_useless(plan):
    trace = network(6)
    schedule = decide(device(most(trace)), job(1, trace, given=Given(plan, most(trace))))
    assert planned(schedule, 1).granted_bytes == most(trace)


# ---- what goes wrong with one job ----


def test_a_plan_that_would_have_too_many_events_concerns_its_job_alone():
    traces = [network(12), network(3)]
    state = device(middle(traces[0]) + most(traces[1]) // 2, most_events=1)
    waiting, running = job(1, traces[0]), job(2, traces[1])
    (running,) = published(decide(state, running), running)
    schedule = decide(state, waiting, running)
    assert isinstance(schedule.decisions[1], Failed) and "events" in reason(schedule, 1)
    assert schedule.decisions[2] == Kept()
    limit = len(planned(decide(replace(state, most_events=None), waiting), 1).plan)
    few = planned(decide(replace(state, most_events=limit), waiting), 1)
    assert 0 < len(few.plan) <= limit


# ---- caches ----


def test_what_was_planned_once_is_not_planned_again(monkeypatch):
    traces = [network(20, latency_us=100.0 + n) for n in range(3)]
    state, jobs = device(middle(*traces)), [job(n, trace) for n, trace in enumerate(traces)]
    scheduler = DeviceScheduler()
    first = scheduler.schedule(state, jobs)
    monkeypatch.setattr(JobPlanner, "_try", lambda *_: pytest.fail("a plan was made again"))
    assert scheduler.schedule(state, jobs).decisions.keys() == first.decisions.keys()


def test_planners_of_jobs_that_ended_are_forgotten():
    trace = network(4)
    scheduler = DeviceScheduler()
    state = device(most(trace))
    scheduler.schedule(state, [job(1, trace)])
    kept = scheduler.caches.planner(trace, state)
    assert isinstance(kept, JobPlanner)
    scheduler.schedule(state, [job(1, trace)])
    assert scheduler.caches.planner(trace, state) is kept
    scheduler.schedule(state, [])
    assert scheduler.caches.planner(trace, state) is not kept


# ---- plans that a search has found ----


def branches(count: int = 8, size: int = MIB) -> tuple[Trace, list[int]]:
    """First the large half of every branch, then the small one; and an order branch by branch."""
    read, create = Mode.READ, Mode.CREATE
    large = [(20.0, {0: read, 1 + each: create}) for each in range(count)]
    small = [(20.0, {1 + each: read, 1 + count + each: create}) for each in range(count)]
    ends = [(1.0, dict.fromkeys(range(1 + count, 1 + 2 * count), read))]
    trace = trace_of(*large, *small, *ends, sizes=(64, *[size] * count, *[64] * count))
    pairs = [place for each in range(count) for place in (1 + each, 1 + count + each)]
    return trace, [0, *pairs, 1 + 2 * count, 2 + 2 * count]


def test_a_found_plan_is_taken_if_it_is_faster_and_stays():
    trace, order = branches()
    found = Plan.build([], order=order)
    state = device(4 * MIB)
    (alone,) = published(decide(state, job(1, trace, policy="swapadvisor")), job(1, trace, policy="swapadvisor"))
    assert alone.given is not None and alone.given.plan is not None and len(alone.given.plan) > 0
    better = planned(decide(state, replace(alone, found=found)), 1)
    assert better.plan.order is not None and better.plan.order.tolist() == order
    assert better.iteration_us == better.vanilla_us and better.planned_bytes <= better.granted_bytes <= 4 * MIB
    assert better.room_bytes == 4 * MIB
    assert better.operators.tolist() == order
    assert (better.footprint <= better.vanilla[np.argsort(order)].max()).all()
    kept = Given(better.plan, better.granted_bytes, better.link_share)
    for plan in (found, None):
        assert isinstance(decide(state, replace(alone, found=plan, given=kept)).decisions[1], Kept)
    first = decide(state, replace(alone, found=found, given=None))
    assert planned(first, 1).plan.order is not None


def test_a_found_plan_that_does_not_fit_is_left():
    trace, order = branches()
    found = Plan.build([], order=order)
    large = Plan.build([], order=[0, 2, 1, *range(3, trace.operator_count)])
    slow = Plan.build([Event(EventKind.SWAP_OUT, 1, 1, 1), Event(EventKind.SWAP_IN, 1, 1, 2)], order=order)
    wrong = Plan.build([], order=np.roll(order, 1))
    for plan in (slow, large, wrong):
        assert planned(decide(device(4 * MIB), job(1, trace, found=plan)), 1).plan.order is None, plan
    for most_events, taken in ((2, False), (3, True)):  # 19 operators take as much room as 3 events
        decision = decide(device(most(trace) - MIB // 2, most_events=most_events), job(1, trace, found=found))
        assert (planned(decision, 1).plan.order is not None) == taken
    (note,) = decide(device(4 * MIB), job(1, trace, found=wrong)).notes
    assert note.job == 1 and "the plan that a search has found cannot be used" in note.reason


def test_rounds_are_brief_only_where_that_is_wanted_and_traces_are_long(monkeypatch):
    trace = network(12)
    state, jobs = device(2 * middle(trace)), [job(number, trace) for number in (1, 2)]

    def is_brief(may_be_brief: bool) -> bool:
        return DeviceScheduler().schedule(state, jobs, may_be_brief).brief

    assert not is_brief(True)
    monkeypatch.setattr(planning, "BRIEF_OPERATORS", trace.operator_count - 1)
    assert is_brief(True) and not is_brief(False)
    jobs[0] = job(1, trace, max_slowdown=3.0)
    assert is_brief(True)  # the promise binds nothing
    jobs, state = [job(1, trace)], device(middle(trace))
    assert is_brief(True) and not is_brief(False)


def test_a_brief_round_keeps_promises_or_leaves_that_to_more_passes(monkeypatch):
    monkeypatch.setattr(planning, "BRIEF_OPERATORS", 0)
    trace = network(12)
    state = replace(device(with_promise(trace, 0.5) + middle(trace, part=0.2)), profile=SLOW)
    alike = DeviceScheduler().schedule(state, [job(1, trace), job(2, trace)], True)
    assert alike.brief and min(loss(planned(alike, number)) for number in (1, 2)) > 0.05
    schedule = DeviceScheduler().schedule(state, [promised(1, trace, 1.05), job(2, trace)], True)
    assert schedule.brief and loss(planned(schedule, 1)) <= 0.05 < loss(planned(schedule, 2))
    limited = replace(promised(1, trace, 1.05), most_bytes=middle(trace, part=0.1))
    assert isinstance(DeviceScheduler().schedule(state, [limited], True).decisions[1], Refused)
    impossible = DeviceScheduler().schedule(state, [promised(1, trace, 1.01), promised(2, trace, 1.01)], True)
    assert not impossible.brief and isinstance(impossible.decisions[2], Waits)


# ---- the number of passes ----


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the first element count the passes that are made."""
    made, module = [0], sys.modules[JobPlanner.__module__]

    def counted(*arguments: Any) -> Outcome:
        made[0] += 1
        return sweep(*arguments)

    monkeypatch.setattr(module, "sweep", counted)
    return made


@pytest.mark.parametrize("may_be_brief", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.usefixtures("many_divisions")
def test_a_promise_that_binds_nothing_costs_no_pass(monkeypatch, passes, count, may_be_brief):
    monkeypatch.setattr(planning, "BRIEF_OPERATORS", 0)
    traces = [network(5 + number) for number in range(count)]
    state = device(middle(*traces))
    rounds = []
    for promise in (None, 10.0):
        passes[0] = 0
        jobs = [job(number, trace, max_slowdown=promise) for number, trace in enumerate(traces)]
        schedule = DeviceScheduler().schedule(state, jobs, may_be_brief)
        rounds.append(([planned(schedule, number).plan for number in range(count)], passes[0]))
    assert rounds[0] == rounds[1] and rounds[0][1] > 0


def test_a_first_plan_takes_one_pass_for_each_job(monkeypatch, passes):
    monkeypatch.setattr(planning, "BRIEF_OPERATORS", 0)
    traces = [network(12, latency_us=latency_us) for latency_us in (20.0, 30.0, 40.0)]
    for count in (1, 3):
        passes[0] = 0
        jobs = [job(number, trace) for number, trace in enumerate(traces[:count])]
        DeviceScheduler().schedule(device(middle(*traces[:count])), jobs, True)
        assert passes[0] <= 4 * count  # a pass whose plan takes more than estimated is repeated


def test_a_promise_that_cannot_be_kept_is_refused_also_while_the_job_waits():
    trace = network(12)
    state = replace(device(middle(trace, part=0.1)), profile=SLOW)
    running = published(decide(state, job(1, trace)), job(1, trace))
    assert isinstance(decide(state, *running, job(2, trace)).decisions[2], Waits)
    assert isinstance(decide(state, *running, promised(2, trace, 1.01)).decisions[2], Refused)


def test_a_round_ends_before_the_next_pass_when_it_is_not_wanted_any_more(passes):
    trace = network(12)
    state = replace(device(middle(trace, part=0.2)), profile=SLOW)
    with pytest.raises(AbandonedError):
        DeviceScheduler().schedule(state, [job(1, trace)], over=lambda: passes[0] >= 2)
    assert passes[0] == 2
