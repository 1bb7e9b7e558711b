"""The page about a job: its numbers, what it says where there are none, and what hostile text cannot do to it."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from pg_tensile.client.record import JobRecord
from pg_tensile.planning.bounds import least_us
from pg_tensile.planning.device.profile import RTX_A6000, Direction
from pg_tensile.planning.plan.plan import Event, EventKind, Plan
from pg_tensile.text import duration
from pg_tensile.tools.report import iteration_charts
from pg_tensile.tools.report.facts import MOST_EPOCHS, MOST_TENSORS, facts_of
from pg_tensile.tools.report.iteration import Iteration, NoIterationError, iteration_of
from pg_tensile.tools.report.iteration_charts import merged, thinned
from pg_tensile.tools.report.page import render
from pg_tensile.tools.report.submission import submission_of
from tests.unit.handmade import network
from tests.unit.records import (
    HOSTILE,
    JOB,
    NEVER_CAPTURED,
    SUBMITTED,
    facts_in,
    line,
    metrics,
    planned_of,
    record,
    relabelled,
    saving,
)

VOID = {"meta", "link", "br", "img", "input"}
LARGEST = 5_000_000  # bytes of a page about 13,000 operators


class Page(HTMLParser):
    """Page as a browser would read it, as far as a parser can tell; fails where tags do not close."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def text(self, *tags: str) -> str:
        return " ".join(part for tag in tags for part in self.texts.get(tag, []))

    def shown(self) -> str:
        """All that is text."""
        return self.text(*(tag for tag in self.texts if tag not in ("script", "style")))

    def facts(self) -> dict[str, str | None]:
        """The numbers of the summary, by their paths."""
        return {
            str(attributes["data-fact"]): attributes["data-value"]
            for _, attributes in self.tags
            if "data-fact" in attributes
        }

    def identifiers(self) -> set[str | None]:
        return {attributes["id"] for _, attributes in self.tags if "id" in attributes}


@pytest.fixture(scope="module")
def swapped():
    return saving(policy="swap_all", share=1.0)


@pytest.fixture(scope="module")
def plain(swapped):
    """The page about a job with a plan and nothing else."""
    return render(record(swapped))


def facts_without_page(held: JobRecord) -> dict[str, Any]:
    """Return the facts of a page that is not drawn, which takes longest."""
    try:
        iteration: Iteration | None = iteration_of(held)
    except NoIterationError:
        iteration = None
    facts: dict[str, Any] = json.loads(json.dumps(facts_of(held, iteration).as_json(), allow_nan=False))
    return facts


def test_the_facts_are_those_of_the_plan(swapped, plain):
    facts = facts_without_page(record(swapped, memory_budget=1 << 30))
    numbers = swapped.numbers
    summary = facts["summary"]
    assert {name: summary[name] for name in numbers} == numbers
    vanilla = int(swapped.vanilla_bytes.max())
    assert (summary["vanilla_bytes"], facts["job"]["memory_budget"]) == (vanilla, 1 << 30)
    assert summary["saved_share"] == pytest.approx(1 - numbers["planned_bytes"] / vanilla) and vanilla > 0
    assert facts["footprint"] == {
        "operator": swapped.operators.tolist(),
        "planned_bytes": swapped.planned_bytes.tolist(),
        "vanilla_bytes": swapped.vanilla_bytes.tolist(),
    }
    shown = facts["iteration"]
    assert (shown["out"]["bytes"], shown["in"]["bytes"]) == (numbers["out_bytes"], numbers["in_bytes"])
    assert shown["iteration_us"] == pytest.approx(numbers["iteration_us"])
    assert shown["compute_us"] + shown["stall_us"] == pytest.approx(shown["iteration_us"])
    budget = max(numbers["granted_bytes"], numbers["planned_bytes"])
    assert shown["bound_us"] == least_us(swapped.trace, swapped.profile, budget) <= shown["iteration_us"]
    told = f"no plan within the same memory takes less than {duration(shown['bound_us'])}"
    assert told in re.sub(r"\s+", " ", plain)


def test_the_summary_shows_the_facts(swapped, plain):
    page, facts = Page(plain), facts_in(plain)
    assert facts == facts_without_page(record(swapped))
    shown = page.facts()
    assert {"job.state", "summary.planned_bytes", "summary.granted_bytes", "summary.iteration_us"} <= shown.keys()
    for path, value in shown.items():
        section, name = path.split(".")
        expected = facts[section][name]
        assert value == (expected if isinstance(expected, str) else repr(expected)), path
    assert "job.memory_budget" not in shown  # it has none


def test_the_tensors_that_move_add_up(swapped, plain):
    facts = facts_in(plain)
    rows = facts["tensors"]
    assert sum(row["bytes"] * row["out"] for row in rows) == swapped.numbers["out_bytes"] > 0
    assert sum(row["bytes"] * row["in"] for row in rows) == swapped.numbers["in_bytes"] > 0
    assert facts["moved"]["bytes"] == sum(row["moved_bytes"] for row in rows)
    assert sum(row["stall_us"] for row in rows) == pytest.approx(swapped.timeline().stall_us)
    assert [row["moved_bytes"] for row in rows] == sorted((row["moved_bytes"] for row in rows), reverse=True)
    for row in rows:
        tensor = swapped.trace.tensor(row["tensor"])
        assert (row["name"], row["bytes"]) == (tensor.name, tensor.bytes)
        if row["out"]:
            events = [event for event in swapped.plan.events if event.tensor == row["tensor"]]
            assert row["gone_after"] in {event.trigger for event in events}
            assert row["back_before"] in {event.deadline for event in events}


def test_what_is_computed_again_is_counted():
    again = saving(policy="recompute_all", share=1.0)
    facts = facts_without_page(record(again))
    assert facts["iteration"]["repeated_steps"] == again.numbers["recomputes"] > 0
    events = int((again.plan.rows["kind"] == EventKind.RECOMPUTE).sum())
    assert sum(row["recomputed"] for row in facts["tensors"]) == events
    assert facts["moved"]["recomputed"] == len(facts["tensors"])


def test_latencies_and_their_errors(swapped):
    held = record(swapped)
    latency = facts_without_page(held)["latency"]
    for name in ("predicted_us", "measured_us", "average_us"):
        assert latency[name] == [row[name] for row in held.latency]
    measured = sum(row["measured_us"] is not None for row in held.latency)
    assert latency["measured"] == sum(latency["error_counts"]) == measured
    assert latency["median_error"] == pytest.approx(0.1)
    assert latency["error_counts"][1] + latency["error_counts"][2] == measured  # a tenth, as floats have it
    assert latency["total_us"] == pytest.approx(swapped.trace.latency_us.sum())


def test_wrong_predictions_end_in_the_last_bin(swapped):
    rows = record(swapped).latency
    rows[1] |= {"relative_error": 0.0}
    rows[2] |= {"relative_error": 37.0}
    rows[3] |= {"relative_error": float("inf")}
    latency = facts_without_page(record(swapped, latency=rows))["latency"]
    assert (latency["error_counts"][0], latency["error_counts"][-1]) == (1, 1)
    assert len(latency["error_counts"]) == len(latency["error_edges"]) == 21


def test_every_generation_says_what_triggered_it(swapped):
    log = [
        line(swapped.numbers | {"generation": number}, seconds=10.0 * number, reason=f"job {number} has come")
        for number in (1, 2)
    ]
    log.append(line({}, "waits", 25.0, reason="needs memory", details=None))
    text = render(record(swapped, log=log))
    facts = facts_in(text)
    assert [(each["generation"], each["seconds"], each["reason"]) for each in facts["log"]] == [
        (1, 10.0, "job 1 has come"),
        (2, 20.0, "job 2 has come"),
        (None, 25.0, "needs memory"),
    ]
    assert facts["log"][1]["planned_bytes"] == swapped.numbers["planned_bytes"]
    assert facts["log"][2]["planned_bytes"] is None
    for reason in ("job 1 has come", "job 2 has come", "needs memory"):
        assert reason in Page(text).shown()


def test_a_running_job_shows_what_its_executor_says(swapped):
    progress = dict.fromkeys(("pid", "reason", "loss", "samples_per_s", "passive_swap_ins", "plan_generation"))
    progress |= {"state": "running", "phase": "training", "epoch": 3, "step": 5, "steps": 16, "stall_us": 1500}
    progress |= {"device_bytes": 1000, "device_peak_bytes": 2000, "bytes_swapped": 3000}
    text = render(record(swapped, progress=progress, state="running", ended_at=None))
    shown = Page(text)
    assert shown.facts()["progress.device_peak_bytes"] == "2000"
    assert "epoch 3 of 20, step 5 of 16" in shown.shown()


def test_numbers_that_are_none_are_unknown():
    rows = metrics(2)
    rows[0] |= {"loss": float("nan"), "accuracy": float("inf")}
    facts = facts_in(render(record(metrics=rows)))
    assert (facts["metrics"][0]["loss"], facts["metrics"][0]["accuracy"]) == (None, None)
    assert facts["metrics"][2]["loss"] == 0.5


def test_a_job_of_a_million_epochs_has_a_page():
    facts = facts_without_page(record(metrics=metrics(3 * MOST_EPOCHS + 1)))
    epochs = sorted({row["epoch"] for row in facts["metrics"]})
    assert facts["epochs"] == 3 * MOST_EPOCHS + 1
    assert len(epochs) <= MOST_EPOCHS and epochs[-1] == facts["epochs"]
    assert len(set(np.diff(epochs).tolist())) == 1


# ---- a page ----


def test_the_page_is_whole_and_in_order(swapped):
    page = Page(render(record(swapped, error="it broke", sqlstate="53200", state="failed")))
    assert page.text("title") == "Job 7: late"
    heads = [text.strip() for text in page.texts["h2"]]
    assert [head.split()[0].strip(",") for head in heads] == [
        *("Summary", "What", "Memory", "Tensors", "Latency", "Learning", "Plans", "Settings"),
    ]
    charts = {f"chart-{name}" for name in ("footprint", "lanes", "scatter", "errors", "loss", "accuracy", "plans")}
    assert charts | {"facts", "tensors", "metrics", "plans", "settings", "versions"} <= page.identifiers()
    assert "it broke" in page.shown() and "53200" in page.shown()


def test_legends_name_what_is_drawn(swapped):
    everything = [*metrics(2), *({**row, "split": "validation"} for row in metrics(2))]
    shown = Page(render(record(swapped, metrics=everything))).texts["li"]
    assert {"transfers and their requests", "waits", "training", "validation"} <= set(shown)
    assert "computed again" not in shown
    plain = Page(render(record(planned_of(network(4)), metrics=[m for m in everything if m["split"] == "training"])))
    assert {"forward", "backward", "planned", "training"} <= set(plain.texts["li"])
    assert not {"transfers and their requests", "waits", "computed again", "validation"} & set(plain.texts["li"])


def test_a_job_that_did_well_has_no_section_about_errors(plain):
    assert "What went wrong" not in Page(plain).texts["h2"]


def test_nothing_is_loaded(plain):
    page = Page(plain)
    for tag, attributes in page.tags:
        assert "src" not in attributes, tag
        assert (attributes.get("href") or "data:").startswith("data:"), tag
    policy = next(each["content"] for tag, each in page.tags if each.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and "default-src 'none'" in policy and "http" not in policy


def test_hostile_text_stays_text(plain):
    trace = relabelled(network(4), HOSTILE)
    numbers = planned_of(trace).numbers
    texts = ("model", "owner", "query", "target", "error", "hint", "detail", "traceback", "fingerprint")
    held = record(
        planned_of(trace),
        **dict.fromkeys(texts, HOSTILE),
        warnings=[HOSTILE],
        options={HOSTILE: HOSTILE},
        architecture={"type": HOSTILE},
        log=[line(numbers, reason=HOSTILE)],
        settings={"pg_tensile.python": HOSTILE},
        versions={"PostgreSQL": HOSTILE},
        progress=None,
    )
    text = render(held)
    text.encode()
    page, harmless = Page(text), Page(plain)
    assert "evil" not in page.identifiers()
    assert not any(key.startswith("on") for _, attributes in page.tags for key in attributes)
    assert [tag for tag, _ in page.tags if tag == "script"] == [tag for tag, _ in harmless.tags if tag == "script"]
    assert "</title><b id=evil" in page.text("title") and "<b id=evil" in page.text("pre")
    assert not set(page.shown()) & {"\x00", "\x1b", "\u202e", "\ud800"}
    assert facts_in(text)["job"]["model"] == HOSTILE


@pytest.mark.long
def test_a_page_about_many_operators_is_small():
    """Long: a plan for 13,000 operators."""
    held = saving(layers=3_715, share=1.0, policy="swap_all")
    assert held.trace.operator_count > 13_000
    text = render(record(held))
    assert len(text.encode()) < LARGEST
    facts = facts_in(text)
    assert facts["footprint"]["planned_bytes"] == held.planned_bytes.tolist()
    assert facts["iteration"]["out"]["bytes"] == held.numbers["out_bytes"]
    assert facts["moved"]["bytes"] == held.numbers["out_bytes"] + held.numbers["in_bytes"]
    assert len(facts["tensors"]) == MOST_TENSORS < facts["moved"]["tensors"]
    shown = Page(text).shown()
    for what in ("waits", "transfers out", "transfers in"):
        assert re.search(rf"Of [\d,]+ {what} [\d,]+ are drawn: of each stretch of time the longest", shown), what


def test_of_many_transfers_some_of_the_whole_iteration_are_drawn(monkeypatch):
    monkeypatch.setattr(iteration_charts, "MOST_TRANSFERS", 20)
    iteration = iteration_of(record(saving(layers=40, share=1.0, policy="swap_all")))
    charts, notes = iteration_charts.iteration_charts(iteration, [])
    assert len(notes) == 3
    for place, direction in ((iteration_charts.OUT, Direction.OUT), (iteration_charts.IN, Direction.IN)):
        (bars,) = (each for each in charts["lanes"].renderers if each.glyph.y == place)
        drawn = bars.data_source.data["left"]
        begins = [each.start_us / 1e3 for each in iteration.timeline.transfers if each.direction == direction]
        assert 10 < len(drawn) <= 20 < len(begins)
        gaps = np.diff([0.0, *drawn, max(begins)])
        assert gaps.max() < 3 * max(begins) / 20, "a part of the iteration is empty"


def test_operators_too_short_to_be_seen_are_drawn_together_and_the_page_says_so(plain):
    held = planned_of(network(1500))
    text = render(record(held))
    assert f"{held.trace.operator_count:,} operators are drawn as" in Page(text).shown()
    assert facts_in(text)["iteration"]["steps"] == held.trace.operator_count
    assert "are drawn as" not in Page(plain).shown()


# ---- what is drawn ----


def test_bars_cover_every_step_once_and_join_only_short_ones():
    lasts = np.tile([1.0, 1.0, 2.0, 500.0], 500)
    end = np.cumsum(lasts)
    does = np.tile([0, 0, 1, 1], 500)
    first, last = merged(end - lasts, end, does, 1000)
    assert first[0] == 0 and last[-1] == len(lasts) - 1
    assert (first[1:] == last[:-1] + 1).all()
    assert all(len(set(does[low : high + 1])) == 1 for low, high in zip(first, last, strict=True))
    assert all(low == high for low, high in zip(first, last, strict=True) if lasts[low] == 500 or lasts[high] == 500)
    assert len(first) < len(lasts)
    untouched, same = merged(end - lasts, end, does, len(lasts))
    assert (untouched == same).all() and len(same) == len(lasts)


def test_bars_do_not_bridge_waits():
    start = np.array([0.0, 1.0, 5.0, 6.0])
    first, last = merged(start, start + 1, np.zeros(4), 2)
    assert [(low, high) for low, high in zip(first, last, strict=True) if low <= 1 < high] == []


def test_levels_that_are_drawn_keep_the_highest():
    held = np.random.default_rng(1).integers(0, 10**9, 5000)
    start = np.cumsum(np.random.default_rng(2).uniform(0, 5, 5000))
    chosen = thinned(start, held, 100)
    assert len(chosen) <= 100 and (np.diff(chosen) > 0).all()
    assert held[chosen].max() == held.max()
    assert thinned(start, held, 5000).tolist() == list(range(5000))


# ---- jobs without an iteration ----

WAITING = {"state": "waiting", "ended_at": None}
QUEUED = {"state": "queued", "ended_at": None}
MISSING: dict[str, tuple[dict[str, Any], str]] = {
    "calibration": ({"kind": "calibrate", "model": None, "options": {"seconds": 60}}, "measures the device"),
    "eager": ({"planned_policy": "none"}, "executed eagerly"),
    "eager and not begun": (
        NEVER_CAPTURED | {"policy": "none", "state": "queued", "ended_at": None},
        "executed eagerly",
    ),
    "not begun": (NEVER_CAPTURED | QUEUED, "has not captured its iteration yet"),
    "waits": (WAITING | {"reason": "needs at least 73.5 MB"}, "needs at least 73.5 MB"),
    "taken over": (NEVER_CAPTURED, "a later job of its model has ended"),
    "failed early": (NEVER_CAPTURED | {"state": "failed", "error": "no such layer"}, "ended before it had a plan, or"),
    "refused": ({"state": "failed", "error": "needs too much"}, "ended before it had a plan"),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_job_without_a_plan_has_a_page_that_says_why(case):
    changes, why = MISSING[case]
    text = render(record(**changes))
    page, facts = Page(text), facts_in(text)
    assert why in page.shown()
    assert facts["iteration"] is None and facts["footprint"] is None and not facts["tensors"]
    assert not page.identifiers() & {"chart-footprint", "chart-lanes"}
    assert "chart-loss" in page.identifiers()  # what there is


def test_a_job_that_never_began_has_a_page_without_charts():
    text = render(record(**NEVER_CAPTURED, state="queued", ended_at=None, started_at=None, metrics=[]))
    assert "Bokeh" not in text.partition("<main>")[2].partition("</main>")[0]
    assert len(text) < 60_000
    assert "No epoch has ended yet." in Page(text).shown()


def test_a_plan_of_another_trace_leaves_the_numbers(swapped):
    plan = Plan.build([Event(EventKind.RELEASE, int(swapped.plan.rows["tensor"][0]), 1, 1)], 4)
    held = type(swapped)(
        swapped.trace,
        plan,
        RTX_A6000,
        swapped.operators,
        swapped.planned_bytes,
        swapped.vanilla_bytes,
        swapped.numbers,
    )
    text = render(record(held))
    assert "another trace" in Page(text).shown()
    assert Page(text).facts()["summary.planned_bytes"] == str(swapped.numbers["planned_bytes"])
    assert facts_in(text)["footprint"]["planned_bytes"] == swapped.planned_bytes.tolist()


def test_numbers_of_a_plan_that_is_not_kept_come_from_the_log(swapped):
    log = [line(swapped.numbers, seconds=3), line({}, "waits", 4)]
    summary = facts_without_page(record(log=log, **NEVER_CAPTURED))["summary"]
    assert summary["planned_bytes"] == swapped.numbers["planned_bytes"]
    assert summary["generation"] == swapped.numbers["generation"]


# ---- to do it again ----


def test_the_job_can_be_submitted_again():
    job = JOB | {"query": "SELECT 'a''b' AS a", "memory_budget": 1 << 20, "planned_policy": "joint"}
    assert submission_of(job) == (
        """SELECT register_model('late', '{"type": "mlp", "hidden": [8]}');\n"""
        "SELECT train_model('late',\n    'SELECT ''a''''b'' AS a',\n    target => 'late',\n    epochs => 20,\n"
        "    batch_size => 64,\n    optimizer => 'adamw',\n    learning_rate => 0.001,\n    validation => 0.2,\n"
        "    seed => 0,\n    policy => 'joint',\n    memory_budget => '1048576B',\n    priority => 0,\n"
        """    options => '{"task": "classification"}');"""
    )
    assert submission_of(JOB | {"kind": "calibrate", "options": {"seconds": 60}}) == (
        "SELECT calibrate_device(seconds => 60);"
    )


def test_times_are_told_from_the_submission_on(swapped):
    assert facts_without_page(record(swapped, ended_at=SUBMITTED + timedelta(seconds=90)))["seconds"] == 90
    assert facts_without_page(record(swapped, ended_at=None, state="running"))["seconds"] == 300
