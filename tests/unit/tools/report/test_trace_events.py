"""Trace events: what readers of the format see, and that it is what the plan and the simulator say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from pg_tensile.errors import TensileError
from pg_tensile.planning.latency.collectives import ALL_REDUCE, WAIT
from pg_tensile.planning.plan.plan import Event, EventKind, Plan
from pg_tensile.tools.report.iteration import NoIterationError
from pg_tensile.tools.report.trace_events import render
from tests.examples import examples
from tests.unit import trace_format
from tests.unit.graphs import planned
from tests.unit.handmade import network
from tests.unit.records import RANK, fractional, planned_of, record, reduced, relabelled, saving
from tests.unit.trace_format import of


@pytest.fixture(scope="module")
def swapped():
    """A chain of layers in as little memory as swapping can do with."""
    return saving(policy="swap_all", share=1.0)


def test_the_counter_is_the_footprint_of_sql(swapped):
    document = trace_format.read(render(record(swapped)))
    counters = of(document, "C")
    assert [event["args"]["bytes"] for event in counters] == swapped.planned_bytes.tolist()
    assert [event["ts"] for event in counters] == sorted(event["ts"] for event in counters)
    assert {event["name"] for event in counters} == {"device memory"}


def test_the_compute_lane_has_every_operator_in_its_time():
    held = saving(share=0.5, policy="recompute_all")
    held = planned_of(fractional(held.trace), held.plan)
    document = trace_format.read(render(record(held)))
    lane = of(document, "X", "compute")
    assert [event["args"]["operator"] for event in lane] == held.operators.tolist()
    assert sum(event["dur"] for event in lane) == pytest.approx(held.trace.latency_us[held.operators].sum(), abs=0.25)
    assert lane[-1]["ts"] + lane[-1]["dur"] == pytest.approx(held.numbers["iteration_us"], abs=0.25)
    again = [event for event in lane if event["cat"] == "computed again"]
    assert len(again) == held.numbers["recomputes"] > 0
    for event in lane:
        operator = held.trace.operator(event["args"]["operator"])
        assert (event["args"]["target"], event["args"]["module"]) == (operator.target, operator.module)
        assert event["dur"] == pytest.approx(operator.latency_us, abs=0.13)


def test_the_links_lanes_have_what_is_swapped(swapped):
    document = trace_format.read(render(record(swapped)))
    timeline = swapped.timeline()
    for lane, direction, total in (("link out", 0, "out_bytes"), ("link in", 1, "in_bytes")):
        transfers = of(document, "X", lane)
        assert sum(event["args"]["bytes"] for event in transfers) == swapped.numbers[total] > 0
        expected = [each for each in timeline.transfers if each.direction == direction]
        assert [event["args"]["tensor"] for event in transfers] == [each.tensor for each in expected]
        for event, each in zip(transfers, expected, strict=True):
            assert event["ts"] == pytest.approx(each.start_us, abs=0.07)
            assert event["ts"] + event["dur"] == pytest.approx(each.end_us, abs=0.07)


def test_the_executor_requests_waits_and_frees(swapped):
    document = trace_format.read(render(record(swapped)))
    timeline = swapped.timeline()
    waits = of(document, "X", "swap executor")
    assert sum(event["dur"] for event in waits) == pytest.approx(timeline.stall_us, abs=0.13 * len(waits))
    marks = of(document, "i", "swap executor")
    requests = [event for event in marks if event["cat"] == "request"]
    assert len(requests) == len(timeline.transfers)
    assert {event["name"].partition(":")[0] for event in marks} <= {"request out", "request in", "free"}
    transfers = of(document, "X", "link out") + of(document, "X", "link in")
    begins = {event["args"]["event"]: event["ts"] for event in transfers}
    assert all(event["ts"] <= begins[event["args"]["event"]] + 0.125 for event in requests)


def test_the_compute_stands_still_while_the_executor_waits(swapped):
    document = trace_format.read(render(record(swapped)))
    computes = [(event["ts"], event["ts"] + event["dur"]) for event in of(document, "X", "compute")]
    for wait in of(document, "X", "swap executor"):
        begin, end = wait["ts"] + 0.25, wait["ts"] + wait["dur"] - 0.25
        assert not any(start < end and begin < stop for start, stop in computes), wait


def test_an_arrow_leads_from_each_swap_out_to_the_swap_in_that_reads_its_copy(swapped):
    document = trace_format.read(render(record(swapped)))
    heads = {event["id"]: event for event in of(document, "f", "link in")}
    tails = {event["id"]: event for event in of(document, "s", "link out")}
    assert heads.keys() == tails.keys() and heads
    outs = {event["ts"]: event["args"]["tensor"] for event in of(document, "X", "link out")}
    ins = {event["ts"]: event["args"]["tensor"] for event in of(document, "X", "link in")}
    assert [outs[tails[number]["ts"]] for number in heads] == [ins[head["ts"]] for head in heads.values()]
    timeline = swapped.timeline()
    away = {each.tensor: each.end_us for each in reversed(timeline.transfers) if each.direction == 0}  # at first
    back = [each for each in timeline.transfers if each.direction == 1 and each.start_us >= away.get(each.tensor, 1e99)]
    assert len(heads) == len(back)


def test_collectives_have_a_lane_of_their_own(swapped):
    assert "collectives" not in render(record(swapped))
    held = planned_of(fractional(reduced(network(16), ranks=3)))
    document = trace_format.read(render(record(held)))
    lane = of(document, "X", "collectives")
    expected = [index for index, operator in enumerate(held.trace.operators) if operator.target == ALL_REDUCE]
    assert [event["args"]["operator"] for event in lane] == expected and len(expected) == 4
    computed = {event["args"]["operator"]: event for event in of(document, "X", "compute")}
    waits = [computed[index] for index, operator in enumerate(held.trace.operators) if operator.target == WAIT]
    before = 0.0
    for event, wait in zip(lane, waits, strict=True):
        begin, end = computed[event["args"]["operator"]], wait["ts"] + wait["dur"]
        assert event["ts"] == pytest.approx(max(before, begin["ts"] + begin["dur"]), abs=0.01)
        before = event["ts"] + event["dur"]
        assert before == pytest.approx(end, abs=0.01)
        operator = held.trace.operator(event["args"]["operator"])
        tensors = [access.tensor for access in operator.accesses]
        assert event["args"]["bytes"] == sum(held.trace.tensor_bytes[tensors]) > 0
        assert event["args"]["ranks"] == 3


def test_each_rank_that_reports_has_a_lane(swapped):
    starting = RANK | {"rank": 1, "state": None, "step": None, "samples_per_s": None}
    document = trace_format.read(render(record(swapped, ranks=[RANK, starting])))
    (first,), (second,) = of(document, "X", "rank 0"), of(document, "X", "rank 1")
    assert (first["name"], second["name"], first["args"]["samples_per_s"]) == ("training", "–", 1204.5)
    assert first["args"] == {name: value for name, value in RANK.items() if name != "job"}
    assert first["ts"] == second["ts"] == 0
    assert first["dur"] == pytest.approx(swapped.timeline().iteration_us, abs=0.13)


def test_it_says_what_it_shows(swapped):
    about = trace_format.read(render(record(swapped)))["otherData"]
    assert (about["job"], about["model"], about["generation"]) == (7, "late", 3)
    assert "one iteration" in about["note"]
    assert about["versions"] == {"PostgreSQL": "15.4", "pg_tensile": "0.1.0"}
    assert about["planned_bytes"] == swapped.planned_bytes.max() < about["vanilla_bytes"]


def test_a_plan_without_events_is_an_iteration_too():
    document = trace_format.read(render(record(planned_of(network(3)))))
    assert len(of(document, "X")) == network(3).operator_count
    assert not of(document, "s") and not of(document, "i", "link out")


def test_hostile_names_stay_text():
    label = '</script>\x00\x1b"\\\ud800\u202e\n'
    document = trace_format.read(render(record(planned_of(relabelled(network(2), label)), model=label)))
    shown = label.replace("\u202e", "\ufffd").replace(
        "\ud800", "\ufffd"
    )  # what no file of UTF-8 holds, or turns text around
    assert document["otherData"]["model"] == shown
    assert of(document, "X", "compute")[1]["args"]["module"] == shown


@examples(10)
@given(planned(most_operators=16))
def test_any_plan_of_any_trace_keeps_to_the_format(case):
    trace, plan = case
    held = planned_of(fractional(trace), plan)
    document = trace_format.read(render(record(held)))
    assert len(of(document, "X", "compute")) == len(held.operators)
    moved = sum(event["args"]["bytes"] for lane in ("link out", "link in") for event in of(document, "X", lane))
    assert moved == held.numbers["out_bytes"] + held.numbers["in_bytes"]


# ---- jobs without an iteration ----


def test_without_a_plan_it_says_why_and_what_helps():
    with pytest.raises(NoIterationError, match="executed eagerly") as refused:
        render(record(planned_policy="none"))
    assert isinstance(refused.value, TensileError)
    assert "policy => 'joint'" in (refused.value.hint or "")


def test_a_plan_of_another_trace_is_refused():
    held = saving()
    broken = Plan.build([Event(EventKind.RELEASE, int(held.plan.rows["tensor"][0]), 1, 1)], 4)
    with pytest.raises(NoIterationError, match="another trace") as refused:
        render(record(replace(held, plan=broken)))
    assert "another plan" in (refused.value.hint or "")


def test_arrays_that_are_not_the_traces_are_refused():
    held = planned_of(network(4))
    shorter = replace(
        held,
        operators=held.operators[:-1],
        planned_bytes=held.planned_bytes[:-1],
        vanilla_bytes=held.vanilla_bytes[:-1],
    )
    with pytest.raises(NoIterationError, match="another trace"):
        render(record(shorter))
    turned = np.roll(held.operators, 1)
    with pytest.raises(NoIterationError, match="another trace"):
        render(record(replace(held, operators=turned)))
