"""The trace events in Perfetto itself: its trace processor reads them, and finds in them what the plan says."""

from __future__ import annotations

import json

import pytest

from pg_tensile.tools.report.trace_events import render
from tests.perfetto import COMPLAINTS, LANES, PLACED, Perfetto
from tests.unit.records import HOSTILE, planned_of, record, relabelled, saving
from tests.unit.trace_format import of


@pytest.fixture(scope="module")
def perfetto(browser):
    with Perfetto(browser) as perfetto:
        yield perfetto


@pytest.mark.long
@pytest.mark.parametrize("policy", ["swap_all", "recompute_all"])
def test_its_sums_are_those_of_the_plan(perfetto, policy):
    held = saving(policy=policy, share=1.0 if policy == "swap_all" else 0.5)
    perfetto.read(render(record(held)))
    assert perfetto.query(COMPLAINTS) == []
    lanes = {row["lane"]: row for row in perfetto.query(LANES)}
    timeline, computed_us = held.timeline(), held.trace.latency_us[held.operators].sum()
    assert (lanes["compute"]["slices"], lanes["compute"]["us"]) == (len(timeline.steps), pytest.approx(computed_us))
    (counter,) = perfetto.query("SELECT count(*) AS samples, max(value) AS most FROM counter")
    assert counter == {"samples": len(timeline.steps), "most": held.numbers["planned_bytes"]}
    again = perfetto.query("SELECT count(*) AS steps FROM slice WHERE category = 'computed again'")
    assert again == [{"steps": held.numbers["recomputes"]}]
    for lane, total in (("link out", "out_bytes"), ("link in", "in_bytes")):
        assert (lanes[lane]["bytes"] if lane in lanes else 0) == held.numbers[total]
    assert (held.numbers["out_bytes"] > 0) == (policy == "swap_all") != (held.numbers["recomputes"] > 0)


@pytest.mark.long
def test_its_arrows_lead_from_a_swap_out_to_the_swap_in_of_the_same_tensor(perfetto):
    """Takes seconds, as all that opens Perfetto; test_trace_events.py looks at the events themselves."""
    text = render(record(saving(policy="swap_all", share=1.0)))
    perfetto.read(text)
    ends = ("name", "lane", "tensor")
    columns = [f"slice_{end}.{name} AS {name}_{end}" for end in ("out", "in") for name in ends]
    arrows = perfetto.query(
        f"WITH placed AS ({PLACED}) SELECT {', '.join(columns)} FROM flow"
        " JOIN placed slice_out ON slice_out.id = flow.slice_out JOIN placed slice_in ON slice_in.id = flow.slice_in"
    )
    assert len(arrows) == len(of(json.loads(text), "s")) > 0
    for arrow in arrows:
        assert (arrow["lane_out"], arrow["lane_in"]) == ("link out", "link in")
        assert (arrow["name_out"], arrow["tensor_out"]) == (arrow["name_in"], arrow["tensor_in"])


@pytest.mark.long
@pytest.mark.parametrize("name", ["Größe 😀 größer", HOSTILE.replace("\0", "")], ids=("letters", "hostile"))
def test_names_are_shown_as_they_are(perfetto, name):
    """Takes seconds, as all that opens Perfetto; test_trace_events.py looks at the events themselves."""
    trace = saving().trace
    perfetto.read(render(record(planned_of(relabelled(trace, name)))))
    assert perfetto.query(COMPLAINTS) == []
    compute = [row for row in perfetto.query(LANES) if row["lane"] == "compute"]
    assert compute[0]["slices"] == trace.operator_count
    shown = perfetto.query("SELECT DISTINCT extract_arg(arg_set_id, 'args.module') AS module FROM slice")
    assert {"module": name.replace("\u202e", "\ufffd").replace("\ud800", "\ufffd")} in shown


@pytest.mark.long
def test_a_large_iteration_is_read_as_a_whole(browser):
    """Takes seconds: Perfetto reads an iteration of thirteen thousand operators."""
    held = saving(layers=3_700, share=1.0, policy="swap_all")
    with Perfetto(browser) as perfetto:
        perfetto.read(render(record(held)))
        lanes = {row["lane"]: row for row in perfetto.query(LANES)}
        assert lanes["compute"]["slices"] == len(held.operators) > 12_900
        assert perfetto.query(COMPLAINTS) == []
