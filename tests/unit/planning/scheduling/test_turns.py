"""Jobs and predictions take turns: idle models give way to waiting jobs, and waiting predictions to no later ones."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.scheduling.decisions import Given, JobState, Kept, Planned, Refused, Waits
from pg_tensile.planning.scheduling.device_scheduler import DeviceScheduler
from tests.examples import examples
from tests.unit.handmade import network
from tests.unit.planning.scheduling.jobs import MIB, crowds, decide, device, job, most, planned, published, reason


@given(crowd=crowds(), part=st.floats(0.1, 1))
@examples(10, long=60)
def test_a_waiting_job_starts_when_models_give_up_what_it_lacks(crowd, part):
    state, jobs = crowd
    state = replace(state, ageing_s=0.0, inference_bytes=round(part * state.budget_bytes))
    schedule = decide(state, *jobs)
    ranked = sorted(jobs, key=lambda each: (-each.rank, each.job))
    waiting = [each.job for each in ranked if isinstance(schedule.decisions[each.job], Waits)]
    assert len(schedule.lacking) == len(waiting) and all(lacking > 0 for lacking in schedule.lacking)
    for number, lacking in zip(waiting, schedule.lacking, strict=True):
        if lacking > state.inference_bytes:
            continue
        without = decide(replace(state, inference_bytes=state.inference_bytes - lacking), *jobs)
        assert isinstance(without.decisions[number], Planned)
        return


def test_running_jobs_lack_what_their_plans_save():
    trace = network(6)
    state = device(most(trace) + 60, inference_bytes=100)
    assert (decide(state, job(1, trace)).lacking, decide(state, job(1, trace)).slowed_bytes) == ((), 40)
    assert decide(replace(state, inference_bytes=60), job(1, trace)).slowed_bytes == 0
    assert decide(state, job(1, trace, most_bytes=least_bytes(trace))).slowed_bytes == 0, "its own budget"
    promised = job(1, trace, max_slowdown=1.0)
    needs = DeviceScheduler().needs(state, [promised])[1]
    waits = decide(device(needs + 60, inference_bytes=61), promised)
    assert isinstance(waits.decisions[1], Waits) and waits.lacking == (1,)


def test_a_job_waits_for_a_prediction_that_has_waited_longer_and_for_no_other():
    trace = network(6)
    least = least_bytes(trace)
    state = device(least + 100, claimed_bytes=101, claimed_s=5.0)
    later = decide(state, job(1, trace, waited_s=4.0))
    assert "models for prediction" in reason(later, 1)
    assert later.lacking == (), "models that are idle give way to the prediction itself"
    assert planned(decide(state, job(1, trace, waited_s=6.0)), 1).granted_bytes == least + 100
    assert planned(decide(replace(state, claimed_bytes=100), job(1, trace, waited_s=4.0)), 1).granted_bytes
    assert planned(decide(replace(state, inference_bytes=90), job(1, trace, waited_s=6.0)), 1).granted_bytes
    assert isinstance(decide(replace(state, inference_bytes=101), job(1, trace)).decisions[1], Waits)


def test_running_jobs_make_room_for_a_prediction_unless_they_could_not_make_enough():
    trace = network(6)
    least, all_of_it = least_bytes(trace), most(trace)
    alone = device(all_of_it + all_of_it // 50)
    (running,) = published(decide(alone, job(1, trace)), job(1, trace))
    assert isinstance(decide(alone, running).decisions[1], Kept)
    room = alone.budget_bytes - least
    assert planned(decide(replace(alone, wanted_bytes=room), running), 1).granted_bytes == least
    assert isinstance(decide(replace(alone, wanted_bytes=room + 1), running).decisions[1], Kept)


def test_a_job_that_came_before_a_prediction_starts_though_that_waits():
    small, large = network(3), network(3, activation_bytes=4 * MIB)
    budget = least_bytes(small) + least_bytes(large)
    (running,) = published(decide(device(least_bytes(small)), job(1, small)), job(1, small))
    state = device(budget, wanted_bytes=MIB, claimed_bytes=MIB, claimed_s=1.0)
    assert isinstance(decide(state, running, job(2, large, waited_s=2.0)).decisions[2], Planned)
    assert isinstance(decide(state, running, job(2, large, waited_s=0.5)).decisions[2], Waits)


def test_jobs_that_turn_out_larger_wait_for_others_and_for_models_unless_that_would_be_for_ever():
    """Policy none: the first step has taken 60 bytes, which nobody knew."""
    given = Given(Plan.build([]), 40)
    first, second, other = (
        JobState(number, None, least, policy="none", given=given, stuck=least > 40, priority=-float(number))
        for number, least in ((1, 60), (2, 60), (3, 40))
    )
    waits = decide(device(150), first, second, other)
    assert not any(isinstance(decision, Refused) for decision in waits.decisions.values())
    assert waits.lacking == (10,)
    assert decide(device(160), first, second, other).lacking == ()
    models = decide(device(150, inference_bytes=31), first, second)
    assert not any(isinstance(decision, Refused) for decision in models.decisions.values())
    assert models.lacking == (1,)
    one_after_the_other = decide(device(100), first, second)
    assert not any(isinstance(decision, Refused) for decision in one_after_the_other.decisions.values())
    deadlock = decide(device(99), first, second)
    assert isinstance(deadlock.decisions[2], Refused) and planned(deadlock, 1).granted_bytes == 60
