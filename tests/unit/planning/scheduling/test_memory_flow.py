"""Memory that flows between jobs: when it does, that it always suffices, who is let in, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.job_planner.planner import AbandonedError, JobPlanner
from pg_tensile.planning.memory_flow.grants import Grants, GroupedJob
from pg_tensile.planning.memory_flow.groups import (
    MOST_GROUPS,
    bytes_to_groups,
    counted_groups,
    cut_alike,
    groups_to_bytes,
    resting_bytes,
)
from pg_tensile.planning.memory_flow.simulation import REQUEST_US, simulate_memory_flow, with_requests
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import NO_EVENTS
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.scheduling import plan_caches
from pg_tensile.planning.scheduling.decisions import (
    DeviceState,
    Given,
    JobState,
    Kept,
    Planned,
    Refused,
    Schedule,
    Waits,
)
from pg_tensile.planning.scheduling.device_scheduler import DeviceScheduler
from pg_tensile.planning.scheduling.round_state import Plans, RoundState
from pg_tensile.planning.simulator.alone import evaluate
from pg_tensile.planning.trace.trace import Trace
from tests.examples import examples
from tests.unit.handmade import network
from tests.unit.planning.scheduling.jobs import (
    MIB,
    crowds,
    granted,
    job,
    loss,
    middle,
    most,
    planned,
    published,
    reason,
)

SLOW_LINK = replace(RTX_A6000.with_link(1e8), kind="host")
LINK = replace(RTX_A6000.with_link(5e8), kind="host")
WAVE = network(10, latency_us=2000.0)  # keeps less than a third of what it takes
PEAKED = network(9, [MIB] * 4 + [8 * MIB] + [MIB] * 4, latency_us=5000.0)  # one layer needs most of that
CONTENTION = 0.3  # so that computing at once costs something, and memory flows more often


@pytest.fixture(autouse=True, scope="module")
def contention() -> Iterator[None]:
    """Jobs that compute at once, so that memory flows more often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pg_tensile.planning.scheduling.round_state.HOST_CONTENTION", CONTENTION)
        yield


def host(budget: float, **fields: Any) -> DeviceState:
    profile = fields.pop("profile", SLOW_LINK)
    return DeviceState("cpu", profile, int(budget), **{"memory_flow": True, "ageing_s": 300.0} | fields)


def rest(trace: Trace) -> int:
    return int(resting_bytes(AccessSequence(trace, NO_EVENTS))[-1])


def flows(decisions: Iterable[Any]) -> list[bool]:
    return [isinstance(decision, Planned) and decision.groups != b"" for decision in decisions]


SCHEDULER = DeviceScheduler()  # of most tests, since it keeps what it has planned until the next round


def decide(state: DeviceState, *jobs: JobState) -> Schedule:
    return SCHEDULER.schedule(state, jobs)


def flowing(state: DeviceState, *jobs: JobState) -> list[JobState]:
    """The jobs as they are when it has been published that their memory flows."""
    schedule = decide(state, *jobs)
    assert all(flows(schedule.decisions.values()))
    return published(schedule, *jobs)


def check_flow(state: DeviceState, jobs: Iterable[JobState], others: int = 0) -> None:
    """Check that constant grants fit, and that the memory of the other jobs can flow within the rest."""
    given_now = {each.job: each.given for each in jobs if each.given is not None}
    constant = sum(grant.granted_bytes for grant in given_now.values() if not grant.groups)
    budget = state.budget_bytes - state.inference_bytes - others - constant
    wholes = {number: grant.granted_bytes for number, grant in given_now.items() if grant.groups}
    groups = {number: bytes_to_groups(given_now[number].groups) for number in wholes}
    assert budget >= 0 and len(wholes) != 1
    assert Grants(budget).fits(GroupedJob(each) for each in groups.values())
    rests = {number: each[-1].rest_bytes for number, each in groups.items()}
    assert all(sum(rests.values()) - rests[number] + whole <= budget for number, whole in wholes.items())
    assert all(max(group.most_bytes for group in each) <= wholes[number] for number, each in groups.items())


# ---- when memory flows ----


def test_two_jobs_of_nine_tenths_each_flow_where_halves_are_worse():
    state = host(1.1 * most(WAVE))
    schedule = decide(state, job(1, WAVE), job(2, WAVE))
    constant = decide(replace(state, memory_flow=False), job(1, WAVE), job(2, WAVE))
    timed = {}
    for number in (1, 2):
        decision = planned(schedule, number)
        groups = bytes_to_groups(decision.groups)
        assert 4 <= len(groups) <= MOST_GROUPS
        assert decision.planned_bytes == decision.granted_bytes == max(group.most_bytes for group in groups)
        assert decision.granted_bytes > 0.6 * state.budget_bytes > planned(constant, number).granted_bytes
        sequence = AccessSequence(WAVE, decision.plan)
        assert groups[-1].last == len(sequence.steps) - 1
        # The job waits for the other one, and requests each of its groups.
        assert decision.iteration_us is not None and decision.vanilla_us is not None
        planner = JobPlanner(WAVE, SLOW_LINK, decision.link_share)
        bare = planner.candidate(decision.plan)
        assert decision.iteration_us - bare.us == pytest.approx(decision.stall_us - bare.stall_us)
        assert decision.stall_us - bare.stall_us >= REQUEST_US * len(groups)
        timed[number] = with_requests(cut_alike(groups, sequence, evaluate(sequence, planner.link).stalled_us))
    flow = simulate_memory_flow(timed, state.budget_bytes, CONTENTION)
    assert flow is not None
    us = [planned(constant, number).iteration_us or 0.0 for number in (1, 2)]
    assert sum(flow.iteration_us.values()) < (1 + CONTENTION) * sum(us)
    check_flow(state, published(schedule, job(1, WAVE), job(2, WAVE)))


def test_two_jobs_of_nine_tenths_each_do_not_flow_where_halves_lose_little():
    state = host(1.1 * most(WAVE), profile=LINK)
    schedule = decide(state, job(1, WAVE), job(2, WAVE))
    assert flows(schedule.decisions.values()) == [False, False]
    assert granted(*published(schedule, job(1, WAVE), job(2, WAVE))) <= state.budget_bytes
    roomy = decide(host(3 * most(WAVE)), job(1, WAVE), job(2, WAVE))
    assert flows(roomy.decisions.values()) == [False, False]


def test_three_jobs_flow():
    trace = network(8, latency_us=2000.0)
    state, jobs = host(1.5 * most(trace)), [job(number, trace) for number in (1, 2, 3)]
    running = flowing(state, *jobs)
    assert granted(*running) > state.budget_bytes
    check_flow(state, running)
    assert set(decide(state, *running).decisions.values()) == {Kept()}


@pytest.mark.parametrize(
    "fields",
    [
        {"policy": "tensile"},
        {"policy": "none"},
        {"compression": "auto"},
        {"choosing": True},
        {"pinned": True, "given": Given(NO_EVENTS, most(WAVE) // 2)},
    ],
)
def test_jobs_whose_memory_cannot_flow_have_constant_grants(fields: dict[str, Any]):
    state = host(1.1 * most(WAVE) + (most(WAVE) if fields.get("policy") == "none" else 0))
    odd = job(2, WAVE, least_bytes=least_bytes(WAVE), **fields)
    assert not any(flows(decide(state, job(1, WAVE), odd).decisions.values()))
    both = decide(replace(state, budget_bytes=state.budget_bytes + MIB), job(1, WAVE), odd, job(3, WAVE))
    assert flows([both.decisions[2]]) == [False]


def test_memory_does_not_flow_on_other_devices_nor_unless_it_is_wanted():
    state, jobs = host(1.1 * most(WAVE)), (job(1, WAVE), job(2, WAVE))
    for other in (replace(state, memory_flow=False), replace(state, profile=replace(SLOW_LINK, kind="cuda"))):
        schedule = decide(other, *jobs)
        assert not any(flows(schedule.decisions.values()))
        same = decide(replace(other, memory_flow=not other.memory_flow, profile=RTX_A6000.with_link(1e8)), *jobs)
        for number in (1, 2):
            one, twin = planned(schedule, number), planned(same, number)
            assert (one.plan, one.granted_bytes, one.iteration_us) == (twin.plan, twin.granted_bytes, twin.iteration_us)


def test_jobs_whose_memory_cannot_flow_keep_theirs_beside_those_whose_does():
    eager = job(3, None, least_bytes=5 * MIB, policy="none")
    state = host(1.1 * most(WAVE) + 5 * MIB)
    schedule = decide(state, job(1, WAVE), job(2, WAVE), eager)
    assert flows(schedule.decisions.values()) == [True, True, False]
    assert planned(schedule, 3).granted_bytes == 5 * MIB
    running = published(schedule, job(1, WAVE), job(2, WAVE), eager)
    check_flow(state, running)
    assert set(decide(state, *running).decisions.values()) == {Kept()}


def test_memory_flows_beside_a_job_of_the_paper():
    fixed = job(3, WAVE, policy="tensile")
    state = host(middle(PEAKED) + middle(WAVE) + rest(PEAKED), profile=LINK)
    jobs = [job(1, PEAKED), job(2, PEAKED), fixed]
    schedule = decide(state, *jobs)
    assert flows(schedule.decisions.values()) == [True, True, False]
    running = published(schedule, *jobs)
    check_flow(state, running)
    users = [each for each in schedule.decisions.values() if isinstance(each, Planned) and each.out_bytes]
    assert sum(each.link_share for each in users) < 1 + 1e-9
    assert set(decide(state, *running).decisions.values()) == {Kept()}


# ---- admission ----


def test_a_job_that_would_wait_is_admitted_if_memory_can_flow():
    least = least_bytes(PEAKED)
    enough = least + rest(PEAKED)
    assert enough < 1.7 * least
    state = host(enough, profile=LINK)
    (running,) = published(decide(state, job(1, PEAKED)), job(1, PEAKED))
    assert isinstance(decide(replace(state, memory_flow=False), running, job(2, PEAKED)).decisions[2], Waits)
    schedule = decide(state, running, job(2, PEAKED))
    assert flows(schedule.decisions.values()) == [True, True]
    both = published(schedule, running, job(2, PEAKED))
    check_flow(state, both)
    assert set(decide(state, *both).decisions.values()) == {Kept()}


def test_a_job_waits_if_all_would_be_too_slow_at_once(monkeypatch):
    """Two jobs that interlock on a device that each of them fills train no faster than one after the other."""
    trace = network(3, [MIB, 8 * MIB, MIB], latency_us=5000.0)
    state = host(most(trace) + rest(trace), profile=LINK)
    (running,) = published(decide(state, job(1, trace)), job(1, trace))
    assert flows(decide(state, running, job(2, trace)).decisions.values()) == [True, True]
    monkeypatch.setattr("pg_tensile.planning.scheduling.round_state.HOST_CONTENTION", 1.0)
    assert flows(decide(state, running, job(2, trace)).decisions.values()) == [True, True]
    monkeypatch.setattr("pg_tensile.planning.scheduling.planning.LEAST_SPEED", 1.0)
    schedule = decide(state, running, job(2, trace))
    assert schedule.decisions[1] == Kept() and "needs at least" in reason(schedule, 2)


def test_jobs_that_can_only_flow_go_on_when_it_is_not_wanted_any_more():
    state = host(least_bytes(PEAKED) + rest(PEAKED), profile=LINK)
    both = flowing(state, job(1, PEAKED), job(2, PEAKED))
    unwanted = replace(state, memory_flow=False)
    assert set(decide(unwanted, *both).decisions.values()) == {Kept()}
    assert planned(decide(unwanted, both[1]), 2).groups == b""  # until one of them has ended
    schedule = decide(unwanted, *both, job(3, PEAKED))
    assert isinstance(schedule.decisions[3], Waits)


def test_a_job_waits_if_it_does_not_fit_beside_what_others_keep():
    state = host(least_bytes(PEAKED) + rest(PEAKED) - 1, profile=LINK)
    (running,) = published(decide(state, job(1, PEAKED)), job(1, PEAKED))
    schedule = decide(state, running, job(2, PEAKED))
    assert schedule.decisions[1] == Kept()
    assert "needs at least" in reason(schedule, 2) and "the job that runs" in reason(schedule, 2)
    small = replace(state, budget_bytes=least_bytes(PEAKED) - 1)
    assert isinstance(decide(small, job(2, PEAKED)).decisions[2], Refused)


def test_a_job_waits_with_its_reason_if_no_plan_lets_memory_flow():
    """Host memory for the least that jobs need is missing, which admission does not know."""
    state = host(least_bytes(PEAKED) + rest(PEAKED), profile=LINK, host_bytes=0)
    running = job(1, PEAKED, given=Given(NO_EVENTS, state.budget_bytes))
    schedule = decide(state, running, job(2, PEAKED))
    assert "needs at least" in reason(schedule, 2)


def test_a_small_eager_job_is_admitted_beside_jobs_that_can_only_flow():
    state = host(least_bytes(PEAKED) + rest(PEAKED) + MIB, profile=LINK)
    both = flowing(state, job(1, PEAKED), job(2, PEAKED))
    schedule = decide(state, *both, job(3, None, least_bytes=MIB, policy="none"))
    assert isinstance(schedule.decisions[3], Planned)
    check_flow(state, published(schedule, *both, job(3, None, least_bytes=MIB, policy="none")))
    larger = decide(state, *both, job(3, None, least_bytes=MIB + 1, policy="none"))
    assert isinstance(larger.decisions[3], Waits)


# ---- change, or not ----


def test_the_last_job_has_a_constant_grant_again():
    state = host(1.1 * most(WAVE))
    first, second = flowing(state, job(1, WAVE), job(2, WAVE))
    assert set(decide(state, first, second).decisions.values()) == {Kept()}
    alone = planned(decide(state, first), 1)
    assert alone.groups == b"" and len(alone.plan) == 0
    tight = host(least_bytes(PEAKED) + rest(PEAKED), profile=LINK)
    _, second = flowing(tight, job(1, PEAKED), job(2, PEAKED))
    assert planned(decide(tight, second), 2).groups == b""


def test_one_job_does_not_flow_even_if_that_costs_it_hardly_anything():
    sequence = AccessSequence(WAVE, NO_EVENTS)
    rows = groups_to_bytes(counted_groups(sequence, 4), sequence)
    left = job(1, WAVE, given=Given(NO_EVENTS, most(WAVE), 1.0, rows))
    assert planned(decide(host(1.1 * most(WAVE)), left), 1).groups == b""


def test_a_flow_leaves_room_for_the_other_graphs_of_each_job():
    """They are executed between two iterations, when the others may keep what they keep then."""
    sequence, needs = AccessSequence(WAVE, NO_EVENTS), most(WAVE) + MIB
    rows = groups_to_bytes(counted_groups(sequence, 4), sequence)
    both = [job(n, WAVE, least_bytes=needs, given=Given(NO_EVENTS, needs, 1.0, rows)) for n in (1, 2)]
    state = host(needs + rest(WAVE))
    assert decide(state, *both).decisions == {1: Kept(), 2: Kept()}
    round_state = RoundState(SCHEDULER.caches, state, both)
    round_state.least |= {1: needs, 2: needs}
    vanilla = round_state.planner(1).vanilla
    groups = dict.fromkeys((1, 2), tuple(bytes_to_groups(rows)))
    plans = Plans({1: vanilla, 2: vanilla}, {1: 1.0, 2: 1.0}, groups, state.budget_bytes)
    assert round_state.can_run(plans)
    assert not round_state.can_run(plans._replace(flow_bytes=state.budget_bytes - 1))
    short = decide(replace(state, budget_bytes=state.budget_bytes - 1), *both)
    assert not any(flows(short.decisions.values())) and Kept() not in short.decisions.values()


def test_a_flow_changes_when_a_job_comes_and_when_there_is_less_memory():
    trace = network(8, latency_us=2000.0)
    state = host(1.5 * most(trace))
    both = flowing(replace(state, budget_bytes=int(1.2 * most(trace))), job(1, trace), job(2, trace))
    schedule = decide(state, *both, job(3, trace))
    assert flows(schedule.decisions.values()) == [True, True, True]
    three = published(schedule, *both, job(3, trace))
    check_flow(state, three)
    less = replace(state, budget_bytes=int(1.2 * most(trace)))
    smaller = decide(less, *three)
    assert isinstance(smaller.decisions[1], Planned)
    check_flow(less, published(smaller, *three))


def test_a_flow_ends_when_it_is_not_wanted_any_more_or_takes_other_memory():
    state = host(1.1 * most(WAVE))
    both = flowing(state, job(1, WAVE), job(2, WAVE))
    ended = decide(replace(state, memory_flow=False), *both)
    assert not any(flows(ended.decisions.values()))
    assert granted(*published(ended, *both)) <= state.budget_bytes
    grant = both[0].given
    assert grant is not None and grant.plan is not None
    sequence = AccessSequence(WAVE, grant.plan)
    other = [group._replace(most_bytes=group.most_bytes + 1) for group in bytes_to_groups(grant.groups)]
    for rows in (grant.groups[:-1], grant.groups[:-32], groups_to_bytes(other, sequence)):
        damaged = replace(both[0], given=replace(grant, groups=rows))
        assert isinstance(decide(state, damaged, both[1]).decisions[1], Planned)
    claimed = replace(both[0], given=replace(grant, granted_bytes=grant.granted_bytes + 1))
    assert planned(decide(state, claimed, both[1]), 1).granted_bytes == grant.granted_bytes


def test_a_flow_ends_when_memory_suffices_for_all_even_if_it_costs_hardly_anything(monkeypatch):
    state = host(1.1 * most(WAVE))
    both = flowing(state, job(1, WAVE), job(2, WAVE))
    monkeypatch.setattr("pg_tensile.planning.scheduling.keeping.GAIN", 1.0)  # nothing is clearly better
    assert set(decide(host(1.2 * most(WAVE)), *both).decisions.values()) == {Kept()}
    schedule = decide(host(2.2 * most(WAVE)), *both)
    assert flows(schedule.decisions.values()) == [False, False]
    assert [planned(schedule, number).planned_bytes for number in (1, 2)] == [most(WAVE)] * 2


def test_a_constant_plan_that_is_hardly_worse_stays(monkeypatch):
    """And a flow that is hardly worse than constant plans does, so that nothing changes back and forth."""
    state, jobs = host(1.1 * most(WAVE)), (job(1, WAVE), job(2, WAVE))
    constant = published(decide(replace(state, memory_flow=False), *jobs), *jobs)
    both = flowing(state, *constant)
    assert set(decide(state, *both).decisions.values()) == {Kept()}
    for margin, changes in ((0.5, False), (0.0, True)):
        for module in ("keeping", "memory_flow"):
            monkeypatch.setattr(f"pg_tensile.planning.scheduling.{module}.GAIN", margin)
        assert any(flows(decide(state, *constant).decisions.values())) == changes
        assert decide(state, *both).decisions == {1: Kept(), 2: Kept()}


# ---- promises and limits ----


@pytest.mark.parametrize("promise", [1.5, 3.0])
def test_promised_slowdowns_hold_in_the_flow(promise: float):
    state = host(1.1 * most(WAVE))
    jobs = [job(1, WAVE, max_slowdown=promise), job(2, WAVE)]
    schedule = decide(state, *jobs)
    first = schedule.decisions[1]
    assert isinstance(first, Planned) and loss(first) <= promise - 1 + 1e-9
    assert all(flows(schedule.decisions.values())) == (promise == 3.0)
    running = published(schedule, *(each for each in jobs if isinstance(schedule.decisions[each.job], Planned)))
    assert not any(note.reason for note in decide(state, *running).notes)
    check_flow(state, running)


def test_a_flow_keeps_to_the_jobs_own_budgets_and_to_their_other_graphs():
    state = host(1.1 * most(WAVE))
    own, needs = int(0.7 * most(WAVE)), int(0.75 * most(WAVE))
    jobs = [job(1, WAVE, most_bytes=own), job(2, WAVE, least_bytes=needs)]
    schedule = decide(state, *jobs)
    assert flows(schedule.decisions.values()) == [True, True]
    assert planned(schedule, 1).granted_bytes <= own
    assert planned(schedule, 2).granted_bytes >= needs
    check_flow(state, published(schedule, *jobs))


def test_the_groups_count_among_the_events_of_a_plan():
    state, jobs = host(1.1 * most(WAVE)), (job(1, WAVE), job(2, WAVE))
    free = planned(decide(state, *jobs), 1)
    limit = len(free.plan) + len(bytes_to_groups(free.groups)) - 1
    for decision in decide(replace(state, most_events=limit), *jobs).decisions.values():
        if isinstance(decision, Planned):
            assert len(decision.plan) + len(bytes_to_groups(decision.groups)) <= limit


def test_equal_jobs_of_any_length_flow_without_long_planning(monkeypatch):
    simulated: list[int] = []
    simulate = plan_caches.simulate_memory_flow

    def counted(*arguments: Any) -> Any:
        simulated.append(arguments[-1])
        return simulate(*arguments)

    monkeypatch.setattr(plan_caches, "simulate_memory_flow", counted)
    long = network(10, latency_us=2e5)
    state = host(1.1 * most(WAVE), profile=replace(RTX_A6000.with_link(1e6), kind="host"))
    decide(state, job(1, WAVE), job(2, long))
    assert simulated and len(simulated) < 20 and max(simulated) <= 2000


# ---- time ----


def test_a_flow_that_was_planned_once_is_not_planned_again(monkeypatch):
    state, jobs = host(1.1 * most(WAVE)), (job(1, WAVE), job(2, WAVE))
    scheduler = DeviceScheduler()
    first = scheduler.schedule(state, jobs)
    assert all(flows(first.decisions.values()))
    assert set(scheduler.schedule(state, published(first, *jobs)).decisions.values()) == {Kept()}
    monkeypatch.setattr(JobPlanner, "_try", lambda *_: pytest.fail("a plan was made again"))
    monkeypatch.setattr(plan_caches, "simulate_memory_flow", lambda *_: pytest.fail("a flow was simulated again"))
    monkeypatch.setattr(plan_caches, "evaluate", lambda *_: pytest.fail("groups were made again"))
    again = scheduler.schedule(state, jobs)
    assert [planned(again, n).groups for n in (1, 2)] == [planned(first, n).groups for n in (1, 2)]
    assert set(scheduler.schedule(state, published(first, *jobs)).decisions.values()) == {Kept()}


def test_constant_plans_are_used_when_time_is_up():
    """Where they are impossible, there is nothing to decide."""
    state, jobs = host(1.1 * most(WAVE)), (job(1, WAVE), job(2, WAVE))
    calls = count()
    DeviceScheduler().schedule(replace(state, memory_flow=False), jobs, over=lambda: next(calls) < 0)
    asked = iter(range(next(calls)))
    schedule = DeviceScheduler().schedule(state, jobs, over=lambda: next(asked, None) is None)
    assert flows(schedule.decisions.values()) == [False, False]
    tight = host(least_bytes(PEAKED) + rest(PEAKED), profile=LINK)
    with pytest.raises(AbandonedError):
        DeviceScheduler().schedule(tight, [job(1, PEAKED), job(2, PEAKED)], over=lambda: True)


def test_a_brief_round_lets_memory_flow_as_well(monkeypatch):
    monkeypatch.setattr("pg_tensile.planning.scheduling.planning.BRIEF_OPERATORS", WAVE.operator_count)
    state, jobs = host(1.1 * most(WAVE)), (job(1, WAVE), job(2, WAVE))
    schedule = DeviceScheduler().schedule(state, jobs, may_be_brief=True)
    assert schedule.brief and flows(schedule.decisions.values()) == [True, True]
    check_flow(state, published(schedule, *jobs))


# ---- any jobs ----


@given(crowd=crowds(), link=st.sampled_from((1e6, 1e8, 25e9)))
@examples(10, long=40)
def test_whatever_is_decided_constant_grants_fit_and_the_rest_flows(crowd, link: float):
    state, jobs = crowd
    state = replace(state, memory_flow=True, profile=replace(RTX_A6000.with_link(link), kind="host"))
    scheduler = DeviceScheduler()
    overheads = sum(each.overhead_bytes for each in jobs)
    schedule = scheduler.schedule(state, jobs)
    users = []
    for each in jobs:
        decision = schedule.decisions[each.job]
        limit = min(state.budget_bytes - each.overhead_bytes, each.limit_bytes)
        assert isinstance(decision, Refused) == (each.least_bytes > limit)
        if isinstance(decision, Planned):
            assert each.least_bytes <= decision.granted_bytes <= each.limit_bytes
            users += [decision] if decision.out_bytes + decision.in_bytes else []
            if each.trace is not None:
                validate(each.trace, decision.plan)
                assert footprint(each.trace, decision.plan).device_peak_bytes <= decision.granted_bytes
                assert decision.iteration_us is not None and math.isfinite(decision.iteration_us)
            assert not decision.groups or each.policy == "joint"
    assert sum(decision.link_share for decision in users) < 1 + 1e-9
    running = published(schedule, *jobs)
    if any(each.given is not None for each in running):
        check_flow(state, running, overheads)
    again = scheduler.schedule(state, running)
    for each in running:
        assert each.given is None or again.decisions[each.job] == Kept(), again


@given(crowd=crowds(), link=st.sampled_from((1e6, 1e8)))
@examples(10)
def test_equal_questions_about_flows_have_equal_answers(crowd, link: float):
    state, jobs = crowd
    state = replace(state, memory_flow=True, profile=replace(RTX_A6000.with_link(link), kind="host"))
    one, other = decide(state, *jobs), decide(state, *reversed(jobs))
    for number, decision in one.decisions.items():
        assert type(decision) is type(other.decisions[number])
        if isinstance(decision, Planned):
            twin = planned(other, number)
            assert (decision.plan, decision.granted_bytes) == (twin.plan, twin.granted_bytes)
            assert (decision.groups, decision.iteration_us) == (twin.groups, twin.iteration_us)


@given(crowd=crowds(), lower=st.floats(0.5, 1.5))
@examples(5, long=10)
def test_flows_follow_every_change_of_the_budget(crowd, lower: float):
    """Jobs that cannot fit any more are as small as they can be; everything else fits, and stays."""
    state, jobs = crowd
    state = replace(state, memory_flow=True, profile=replace(RTX_A6000.with_link(1e6), kind="host"))
    scheduler = DeviceScheduler()
    for each in (state, replace(state, budget_bytes=round(state.budget_bytes * lower)), state):
        jobs = published(scheduler.schedule(each, jobs), *jobs)
        running = [one for one in jobs if one.given is not None]
        overheads = sum(one.overhead_bytes for one in jobs)
        if granted(*running) <= each.budget_bytes - each.inference_bytes - overheads or any(
            one.given and one.given.groups for one in running
        ):
            check_flow(each, running, overheads)
            again = scheduler.schedule(each, jobs)
            assert all(again.decisions[one.job] == Kept() for one in running), again
