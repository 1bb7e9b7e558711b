"""Jobs whose memory flows, in reports and traces."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pg_tensile.client.record import JobRecord, MemoryFlowPlan, MemoryFlowRecord, Planned
from pg_tensile.planning.memory_flow.groups import bytes_to_groups, counted_groups, groups_to_bytes
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.plan import NO_EVENTS, Plan
from pg_tensile.tools.report import page, trace_events
from pg_tensile.tools.report.facts import facts_of
from pg_tensile.tools.report.memory_flow import memory_flow_of
from tests.unit.handmade import network
from tests.unit.records import HOSTILE, planned_of, record

WAVE = network(16, latency_us=2000.0)


def flowing(plan: Plan = NO_EVENTS) -> Planned:
    planned = planned_of(WAVE, plan)
    sequence = AccessSequence(WAVE, plan)
    return replace(planned, groups=groups_to_bytes(counted_groups(sequence, 8), sequence))


def shared_record(model: str = "other", factor: float = 1.4) -> JobRecord:
    planned = flowing()
    jobs = [MemoryFlowPlan(7, "own", planned), MemoryFlowPlan(8, model, planned)]
    peak = max(group.most_bytes for group in bytes_to_groups(planned.groups))
    return record(planned, ended_at=None, state="running", memory_flow=MemoryFlowRecord(int(factor * peak), jobs))


def test_what_jobs_hold_never_exceeds_what_they_share() -> None:
    flow = memory_flow_of(shared_record())
    assert flow is not None
    sums = [sum(moment) for moment in zip(*flow.held_bytes.values(), strict=True)]
    assert max(sums) <= flow.most_bytes <= flow.shared_bytes
    first, second = flow.jobs
    assert max(sums) > first.most_bytes, "they interlock"
    assert first.job == 7 and second.job == 8 and first.groups == second.groups > 8
    assert 0.5 < first.speed < 1
    assert flow.at_us[0] == 0 and flow.at_us == sorted(flow.at_us)
    assert 2 * first.iteration_us < flow.at_us[-1] < 5 * first.iteration_us


def test_the_page_shows_both_jobs() -> None:
    html = page.render(shared_record())
    assert "Memory flow between jobs" in html and "job 8 (other)" in html
    assert "which you may not see" not in html
    facts = facts_of(shared_record(), None).as_json()
    assert json.loads(json.dumps(facts["memory_flow"]))["jobs"][1]["model"] == "other"


def test_the_page_tells_that_jobs_are_left_out() -> None:
    told = shared_record()
    assert told.memory_flow is not None
    assert "1 more job of other roles, which you may not see, shares it" in page.render(
        replace(told, memory_flow=told.memory_flow._replace(hidden_jobs=1))
    )
    assert "2 more jobs of other roles, which you may not see, share it" in page.render(
        replace(told, memory_flow=told.memory_flow._replace(hidden_jobs=2))
    )


def test_names_of_other_jobs_are_text() -> None:
    assert "<b id=evil" not in page.render(shared_record(HOSTILE))


@pytest.mark.parametrize("case", ["nobody else", "too little", "another trace"])
def test_the_page_does_without(case: str) -> None:
    """Others may be invisible, have sent another trace, or have come while memory is short."""
    told = shared_record(factor=0.9 if case == "too little" else 1.4)
    shared = told.memory_flow
    assert shared is not None
    if case == "nobody else":
        told = replace(told, memory_flow=shared._replace(jobs=shared.jobs[:1]))
    if case == "another trace":
        other = replace(shared.jobs[1].planned, trace=network(4, latency_us=1.0))
        told = replace(told, memory_flow=shared._replace(jobs=[shared.jobs[0], MemoryFlowPlan(8, "other", other)]))
    assert memory_flow_of(told) is None
    assert "Memory flow between jobs" not in page.render(told)


def test_a_trace_has_a_lane_of_groups() -> None:
    planned = flowing()
    events = json.loads(trace_events.render(record(planned)))["traceEvents"]
    groups = bytes_to_groups(planned.groups)
    lane = [event for event in events if event.get("cat") == "group"]
    assert [event["args"]["most_bytes"] for event in lane] == [group.most_bytes for group in groups]
    ends = [event["ts"] + event["dur"] for event in lane]
    assert all(end <= following["ts"] + 1 for end, following in zip(ends, lane[1:], strict=False))
    without = json.loads(trace_events.render(record(planned_of(WAVE))))["traceEvents"]
    assert not any(event.get("tid") == trace_events.GROUPS for event in without)
