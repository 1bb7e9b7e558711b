"""Jobs that interlock: never more than the budget, never stuck, nobody passed over for ever, alone as fast as ever."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.planning.memory_flow.grants import OVERTAKEN, Grants, GroupedJob
from pg_tensile.planning.memory_flow.groups import Group
from pg_tensile.planning.memory_flow.simulation import simulate_memory_flow
from tests.examples import examples
from tests.unit.graphs import dice


def groups(*most_and_rest: tuple[int, int], us: float = 1.0) -> list[Group]:
    return [Group(step, step, most, rest, us) for step, (most, rest) in enumerate(most_and_rest)]


def wave(peak: int, count: int, base: int = 0) -> list[Group]:
    """A job that takes `peak` above `base` in `count` equal groups and gives it back in as many."""
    rising = [(base + peak * (n + 1) // count, base + peak * (n + 1) // count) for n in range(count)]
    falling = [(base + peak * (count - n) // count, base + peak * (count - n - 1) // count) for n in range(count)]
    return groups(*rising, *falling)


@st.composite
def random_groups(draw: st.DrawFn) -> list[Group]:
    most = draw(st.lists(st.integers(1, 100), min_size=1, max_size=12))
    following = most[1:] + most[:1]
    rest = [draw(st.integers(0, min(pair))) for pair in zip(most, following, strict=True)]
    us = draw(st.lists(st.floats(0.1, 10), min_size=len(most), max_size=len(most)))
    return [Group(step, step, *columns) for step, columns in enumerate(zip(most, rest, us, strict=True))]


@given(random=dice(), jobs=st.lists(random_groups(), min_size=1, max_size=5), budget=st.integers(50, 400))
@examples(60, long=500)
def test_jobs_come_and_go_and_none_is_ever_stuck(random: Random, jobs: list[list[Group]], budget: int) -> None:
    grants = Grants(budget)
    waiting = dict(enumerate(jobs))
    for _ in range(200):
        number = random.choice(sorted([*waiting, *grants.jobs]))
        if number in waiting:
            if grants.join(number, waiting[number]):
                del waiting[number]
        elif grants.jobs[number].running:
            grants.end(number)
        elif random.random() < 0.02:
            grants.leave(number)
            waiting[number] = jobs[number]
        else:
            grants.begin(number)
        assert grants.held_bytes() <= budget
    # From wherever they are, all jobs end an iteration, whatever their turns were.
    for number in sorted(grants.jobs):
        for _ in range(len(grants.jobs) * 30 * OVERTAKEN):
            for other in sorted(grants.jobs, key=lambda _: random.random()):
                if grants.jobs[other].running:
                    grants.end(other)
                elif other == number or grants.jobs[other].begun:
                    grants.begin(other)
            if grants.jobs[number].position == len(grants.jobs[number].groups) - 1:
                break
        else:
            pytest.fail(f"job {number} is stuck")


def test_a_job_that_waits_is_not_passed_over_for_ever() -> None:
    grants = Grants(100)
    large, small = groups((90, 0)), groups((30, 0))
    for number, each in enumerate((large, small, small)):
        assert grants.join(number, each)
    assert grants.begin(1)
    began = 0
    while not grants.begin(0):
        # The small jobs take turns, so that one of them always runs.
        for number, other in ((2, 1), (1, 2)):
            if not grants.jobs[number].running and grants.begin(number):
                began += 1
            if grants.jobs[other].running:
                grants.end(other)
        assert began <= OVERTAKEN + 2


def test_a_job_that_changes_while_it_waits_keeps_its_turn() -> None:
    grants = Grants(100)
    for number, each in enumerate((groups((90, 0)), groups((30, 0)), groups((30, 0)))):
        assert grants.join(number, each)
    assert grants.begin(1)
    for passed in range(OVERTAKEN):
        assert not grants.begin(0)
        grants.change(0, groups((90 - passed % 2, 0)))
        last, following = 1 + passed % 2, 2 - passed % 2
        assert grants.begin(following)
        grants.end(last)
    assert not grants.begin(0)
    grants.end(1)
    assert not grants.begin(1), "it is the turn of the one that waits"
    assert grants.begin(0)


def test_two_jobs_that_have_waited_too_long_do_not_wait_for_each_other() -> None:
    grants = Grants(100)
    for number, each in enumerate((groups((90, 0)), groups((90, 0)), groups(*[(30, 30)] * 2 * OVERTAKEN, (30, 0)))):
        assert grants.join(number, each)
    for _ in grants.jobs[2].groups:
        assert grants.begin(2)
        assert not grants.begin(0) and not grants.begin(1)
        grants.end(2)
    assert not grants.begin(2), "both come first"
    assert grants.begin(1)
    grants.end(1)
    assert not grants.begin(2) and grants.begin(0)


def test_a_job_that_can_never_run_beside_the_others_does_not_join() -> None:
    grants = Grants(100)
    assert grants.join(1, groups((60, 30)))
    assert not grants.join(2, groups((71, 20)))
    assert not grants.join(3, groups((101, 0)))
    assert grants.join(4, groups((70, 20)))
    grants.leave(1)
    assert grants.join(2, groups((71, 20)))


def test_a_group_waits_for_memory_and_for_the_way_back() -> None:
    grants = Grants(100)
    for number in (1, 2):
        grants.join(number, wave(80, 4))
    for _ in range(2):  # the first job holds 40
        assert grants.begin(1)
        grants.end(1)
    assert grants.begin(2)  # 20; the first can still reach 80
    grants.end(2)
    assert not grants.begin(2)  # 40: then neither could
    for _ in range(4):
        assert grants.begin(1)
        grants.end(1)
    assert grants.jobs[1].held_bytes == 40
    assert grants.begin(2)


@pytest.mark.parametrize("call", ["begin", "end"])
def test_groups_begin_and_end_in_turn(call: str) -> None:
    grants = Grants(100)
    grants.join(1, wave(80, 4))
    if call == "begin":
        grants.begin(1)
    with pytest.raises(ValueError, match="job 1"):
        getattr(grants, call)(1)


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_two_equal_jobs_run_at_full_speed_if_one_more_group_fits(count: int) -> None:
    """With k groups up and k down, 1 + 1/k of one job's peak suffices for two."""
    peak = 16 * 1000
    jobs = dict.fromkeys((1, 2), wave(peak, count))
    flow = simulate_memory_flow(jobs, peak + peak // count, contention=0.0)
    assert flow is not None
    assert flow.most_bytes <= peak + peak // count
    assert flow.iteration_us == pytest.approx(dict.fromkeys(jobs, 2.0 * count))
    without = simulate_memory_flow(jobs, peak + peak // count - 1, contention=0.0)
    assert without is not None
    assert min(without.iteration_us.values()) > 2.0 * count


@given(
    jobs=st.lists(random_groups(), min_size=1, max_size=4),
    contention=st.sampled_from((0.0, 0.3, 1.0)),
    extra=st.integers(0, 200),
)
def test_simulated_jobs_stay_within_the_budget(jobs: list[list[Group]], contention: float, extra: int) -> None:
    numbered = dict(enumerate(jobs))
    budget = max(group.most_bytes for each in jobs for group in each) + extra
    flow = simulate_memory_flow(numbered, budget, contention)
    alone_us = {number: sum(group.us for group in each) for number, each in numbered.items()}
    if flow is None:
        assert not Grants(budget).fits([GroupedJob(each) for each in jobs])
        return
    assert flow.most_bytes <= budget
    assert all(flow.iteration_us[number] >= alone_us[number] * (1 - 1e-9) for number in numbered)
    if len(jobs) == 1:
        assert flow.iteration_us == pytest.approx(alone_us)


def test_the_time_of_a_job_that_waits_is_what_it_takes_alone_and_what_it_waits() -> None:
    jobs = {1: wave(80, 4), 2: wave(80, 4)}
    flow = simulate_memory_flow(jobs, 80, contention=0.0, iterations=200)
    assert flow is not None
    for number, groups_of_job in jobs.items():
        alone_us = sum(group.us for group in groups_of_job)
        assert flow.iteration_us[number] == pytest.approx(alone_us + flow.waiting_us[number], rel=0.02)
    roomy = simulate_memory_flow(jobs, 160, contention=0.0)
    assert roomy is not None and roomy.waiting_us == {1: 0.0, 2: 0.0}


def test_jobs_beside_those_whose_memory_flows_slow_them_down_and_are_slowed_down() -> None:
    jobs = {1: wave(80, 4)}
    flow = simulate_memory_flow(jobs, 80, contention=0.5, beside=2)
    assert flow is not None
    assert flow.iteration_us == {1: pytest.approx(2 * 8.0)}
    assert flow.slowdown == pytest.approx(2.0)
    turns = simulate_memory_flow({1: groups((80, 0)), 2: groups((80, 0))}, 80, contention=0.5, beside=1)
    assert turns is not None and turns.slowdown == pytest.approx(1.5)
    us = {1: 1.5 * 2.0, 2: 1.5 * 2.0}  # as long as both alone beside the third one
    assert turns.iteration_us == pytest.approx(us)
    assert turns.waiting_us == pytest.approx({number: each / 2 for number, each in us.items()})


def test_jobs_of_very_different_lengths_are_simulated_in_few_groups() -> None:
    short, long = groups((40, 0), us=1.0), groups(*[(60, 10)] * 9, (60, 0), us=1e5)
    flow = simulate_memory_flow({1: short, 2: long}, 100, contention=0.0, most_groups=500)
    assert flow is not None
    assert flow.iteration_us == {1: pytest.approx(1.0), 2: pytest.approx(1e6)}
    jobs = {1: groups((100, 0), us=1e9), 2: groups((100, 0))}
    blocked = simulate_memory_flow(jobs, 100, contention=0.0, most_groups=1)
    assert blocked is not None and blocked.iteration_us[2] == math.inf
