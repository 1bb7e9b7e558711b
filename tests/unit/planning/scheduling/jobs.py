"""Devices and jobs for tests of the scheduler, and what it decided about them."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import strategies as st

from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.scheduling.decisions import (
    DeviceState,
    Failed,
    Given,
    JobState,
    Planned,
    Schedule,
    Waits,
)
from pg_tensile.planning.scheduling.device_scheduler import DeviceScheduler
from pg_tensile.planning.trace.trace import Trace
from tests.unit.graphs import random_trace

MIB = 1 << 20


def most(trace: Trace) -> int:
    return footprint(trace).device_peak_bytes


def middle(*traces: Trace, part: float = 0.5) -> int:
    """A budget between the least that the traces need and what they take without plans."""
    return sum(least_bytes(trace) + round((most(trace) - least_bytes(trace)) * part) for trace in traces)


def job(number: int, trace: Trace | None, **fields) -> JobState:
    return JobState(number, trace, fields.pop("least_bytes", 0 if trace is None else least_bytes(trace)), **fields)


def device(budget: int, **fields) -> DeviceState:
    return DeviceState("cpu", RTX_A6000, budget, **fields)


def decide(state: DeviceState, *jobs: JobState) -> Schedule:
    return DeviceScheduler().schedule(state, jobs)


def published(schedule: Schedule, *jobs: JobState) -> list[JobState]:
    """The jobs as they are when everything was published."""
    found = []
    for each in jobs:
        decision = schedule.decisions[each.job]
        if isinstance(decision, Planned):
            given = Given(decision.plan, decision.granted_bytes, decision.link_share, decision.groups)
            found.append(replace(each, given=given, stuck=False))
        else:
            found.append(each)
    return found


def planned(schedule: Schedule, number: int) -> Planned:
    decision = schedule.decisions[number]
    assert isinstance(decision, Planned), decision
    return decision


def reason(schedule: Schedule, number: int) -> str:
    decision = schedule.decisions[number]
    assert isinstance(decision, Waits | Failed), decision
    return decision.reason


def granted(*jobs: JobState) -> int:
    return sum(each.given.granted_bytes for each in jobs if each.given is not None)


def loss(decision: Planned) -> float:
    assert decision.iteration_us is not None and decision.vanilla_us is not None
    return decision.iteration_us / decision.vanilla_us - 1


@st.composite
def crowds(draw: st.DrawFn) -> tuple[DeviceState, list[JobState]]:
    """A device and up to five jobs, some of which run already with whatever they were given."""
    random = Random(draw(st.integers(0, 1 << 32)))
    jobs = []
    for number in range(1, draw(st.integers(1, 5)) + 1):
        trace = None if draw(st.integers(0, 5)) == 0 else random_trace(random, 16, 20)
        needs = random.randrange(1, 400) if trace is None else least_bytes(trace)
        limit = None if draw(st.integers(0, 3)) else round(needs * draw(st.floats(0.8, 2)))
        policy = "none" if trace is None else draw(st.sampled_from(("joint", "joint", "tensile")))
        fields: dict[str, Any] = {
            "policy": policy,
            "most_bytes": limit,
            "overhead_bytes": draw(st.sampled_from((0, 50))),
            "swap_share": draw(st.sampled_from((1.0, 0.3))),
        }
        fields |= {"priority": float(draw(st.integers(-20, 20))), "waited_s": draw(st.floats(0, 600))}
        jobs.append(job(number, trace, least_bytes=needs, rank=fields["priority"], **fields))
    whole = sum(each.least_bytes + each.overhead_bytes for each in jobs)
    budget = round(whole * draw(st.floats(0.3, 2)))
    inference = draw(st.sampled_from((0, budget // 10)))
    return device(budget, inference_bytes=inference, ageing_s=300.0), jobs
