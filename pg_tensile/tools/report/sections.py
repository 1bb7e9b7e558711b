"""The sections of the page as HTML: text and tables around the charts. Each says what is missing, and why."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from pg_tensile.text import duration, size
from pg_tensile.tools.report.chart_style import BLUE, GREEN, GREY, ORANGE, PHASES, PURPLE, RED
from pg_tensile.tools.report.facts import Facts
from pg_tensile.tools.report.figures import SPLITS
from pg_tensile.tools.report.iteration import NoIterationError, is_eager
from pg_tensile.tools.report.iteration_charts import Limit
from pg_tensile.tools.report.tables import Cell, Column, escape, pairs, table

Places = Mapping[str, str]  # name of a chart → its HTML element

SHOWN_EPOCHS = 20
SHOWN_LINES = 300  # of the scheduler's log
MEMORY_LEGEND = (("planned", BLUE), ("without a plan", GREY))
PLANS_LEGEND = (("planned", BLUE), ("granted", RED), ("without a plan", GREY))
PROFILE = {  # titles of the numbers of a device profile
    "memory_bytes": "memory",
    "out_bytes_per_s": "link out, as far as the job has it",
    "in_bytes_per_s": "link in, as far as the job has it",
    "duplex_factor": "speed of each direction while both are busy",
    "flops_per_s": "operations a second",
    "bytes_per_s": "memory bandwidth",
    "transfer_latency_us": "latency of a transfer",
    "launch_us": "launch of an operator",
    "handover_us": "handing a transfer over to the compute",
}


def limits_of(facts: Facts) -> list[Limit]:
    """Return the lines of the memory chart that limit the job: its grant and its budget."""
    granted, budget = facts["summary"]["granted_bytes"], facts["job"]["memory_budget"]
    found = [] if granted is None else [Limit(granted, RED, "dashed")]
    return found if budget is None else [*found, Limit(budget, PURPLE, "dotted")]


# ---- summary ---------------------------------------------------------------------------------------------------------


def summary(facts: Facts) -> str:
    job, plan = facts["job"], facts["summary"]
    budget, planned, granted = job["memory_budget"], plan["planned_bytes"], "what the job may take under this plan"
    if is_eager(job):
        planned, granted = None, "what the job claims; nobody looks whether it takes more"
        plan = dict.fromkeys(plan) | {"granted_bytes": plan["granted_bytes"]}
    cards = [
        _card("State", "job.state", job["state"], _state_note(facts), text=str),
        _card("Memory without a plan", "summary.vanilla_bytes", plan["vanilla_bytes"], "of a training step"),
        _card("Memory with the plan", "summary.planned_bytes", planned, _plan_note(plan)),
        _card("Granted", "summary.granted_bytes", plan["granted_bytes"], granted),
        _card("Budget of the job", "job.memory_budget", budget, "memory_budget of train_model"),
        _card("Least possible", "summary.least_bytes", plan["least_bytes"], "no plan goes below that"),
        _card("Saved", "summary.saved_share", plan["saved_share"], "of the memory without a plan", text=_percent),
        _card("Iteration", "summary.iteration_us", plan["iteration_us"], _time_note(plan), text=duration),
        _card("Waits for transfers", "summary.stall_us", plan["stall_us"], "of an iteration", text=duration),
        _card("Swapped out", "summary.out_bytes", plan["out_bytes"], "an iteration"),
        _card("Swapped in", "summary.in_bytes", plan["in_bytes"], "an iteration"),
        _card("On the host", "summary.host_bytes", plan["host_bytes"], "for what is swapped"),
        _card("Computed again", "summary.recomputes", plan["recomputes"], "operators an iteration", text=_number),
        *_live_cards(facts["progress"]),
    ]
    return f'<dl class="cards">\n{"".join(cards)}</dl>'


def _card(title: str, fact: str, value: Any, note: str, text: Any = size) -> str:
    """Return a card with a value, or "" if the value is None. `fact` is its path in the facts."""
    if value is None:
        return ""
    number = escape(repr(value)) if isinstance(value, (int, float)) else escape(value)
    return (
        f'<div><dt>{escape(title)}</dt><dd><b data-fact="{fact}" data-value="{number}">{escape(text(value))}</b>'
        f"<small>{escape(note)}</small></dd></div>\n"
    )


def _live_cards(progress: Facts | None) -> list[str]:
    """Return the cards of a running job, with the numbers that its executor has reported."""
    if progress is None or progress["phase"] is None:
        return []
    return [
        _card("Between two steps", "progress.device_bytes", progress["device_bytes"], "measured, on the device"),
        _card("At most so far", "progress.device_peak_bytes", progress["device_peak_bytes"], "measured"),
        _card("Swapped so far", "progress.bytes_swapped", progress["bytes_swapped"], "measured, both ways"),
        _card("Waited so far", "progress.stall_us", progress["stall_us"], "measured", text=duration),
    ]


def _state_note(facts: Facts) -> str:
    job, progress = facts["job"], facts["progress"]
    if job["error"]:
        return str(job["error"])
    if job["reason"]:
        return str(job["reason"])
    if progress is not None and progress["epoch"] is not None:
        step = f"step {progress['step'] or 0:,} of {progress['steps'] or 0:,}"
        return f"epoch {progress['epoch']:,} of {job['epochs']:,}, {step}"
    last = max((row["epoch"] for row in facts["metrics"]), default=0)
    return f"{last:,} of {job['epochs']:,} epochs"


def _plan_note(plan: Facts) -> str:
    return "" if plan["generation"] is None else f"generation {plan['generation']}"


def _time_note(plan: Facts) -> str:
    if plan["slower"] is None:
        return ""
    return f"planned; {duration(plan['vanilla_us'])} without a plan, {plan['slower']:+.1%}"


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _number(count: int) -> str:
    return f"{count:,}"


# ---- the iteration ---------------------------------------------------------------------------------------------------


def missing(error: NoIterationError) -> str:
    detail = f" ({error.detail})" if error.detail else ""
    return f'<p class="missing">{escape(f"{error.message}{detail}.")} {escape(error.hint or "")}</p>'


def iteration(facts: Facts, places: Places, notes: Sequence[str]) -> str:
    found, plan = facts["iteration"], facts["summary"]
    us = found["iteration_us"]
    lanes = [
        f"{way} {_count(lane['transfers'], 'transfer')}, {size(lane['bytes'])}, busy {_share(lane['busy_us'], us)}"
        for way, lane in (("out", found["out"]), ("in", found["in"]))
    ]
    again = f", {_number(found['repeated_steps'])} of them computed again in {duration(found['repeated_us'])}"
    text = (
        f"One iteration as it repeats itself, with the link to itself and the latencies measured so far:"
        f" {duration(us)}, of which {duration(found['stall_us'])} wait for transfers;"
        f" {duration(found['vanilla_us'])} without a plan. {_count(found['steps'], 'step')}"
        f"{again if found['repeated_steps'] else ''}."
        f" Link: {'; '.join(lanes)}. Memory is what was planned at each operator; while the compute waits, that of the"
        f" operator before is drawn. Drag to zoom both charts; the arrow in a circle goes back."
    )
    limits = [("granted", RED)] if plan["granted_bytes"] is not None else []
    limits += [("memory_budget", PURPLE)] if facts["job"]["memory_budget"] is not None else []
    lanes_legend = list(PHASES.items())
    lanes_legend += [("computed again", ORANGE)] if found["repeated_steps"] else []
    lanes_legend += [("waits", RED)] if found["stall_us"] else []
    moves = found["out"]["transfers"] + found["in"]["transfers"]
    lanes_legend += [("transfers and their requests", GREEN)] if moves else []
    return (
        f"<p>{escape(text)}</p>\n{_chart('footprint', places)}{_legend((*MEMORY_LEGEND, *limits))}"
        f"{_chart('lanes', places)}{_legend(lanes_legend)}{_notes(notes)}"
    )


def tensors(facts: Facts) -> str:
    moved, rows = facts["moved"], facts["tensors"]
    if not rows:
        return "<p>No tensor moves: under this plan everything stays on the device until nothing needs it.</p>"
    more = f" The {len(rows):,} that move the most bytes are shown." if len(rows) < moved["tensors"] else ""
    text = (
        f"{_count(moved['swapped'], 'tensor')} swapped, {size(moved['bytes'])} an iteration both ways;"
        f" {_count(moved['recomputed'], 'tensor')} computed again.{more}"
    )
    columns = (
        Column("tensor", True),
        Column("name"),
        Column("kind"),
        Column("type"),
        Column("shape"),
        Column("bytes", True),
        Column("out", True, "times an iteration"),
        Column("in", True, "times an iteration"),
        Column("moved", True, "bytes an iteration, both ways"),
        Column("again", True, "times an iteration that it is computed again"),
        Column("waited for", True, "of an iteration"),
        Column("gone after", True, "operator; the first time"),
        Column("back before", True, "operator; maybe in the next iteration"),
    )
    return f"<p>{escape(text)}</p>\n{table('tensors', columns, map(_tensor_row, rows))}"


def _tensor_row(row: Facts) -> list[Cell]:
    return [
        _plain(row["tensor"]),
        Cell(row["name"]),
        Cell(row["kind"].replace("_", " ")),
        Cell(row["dtype"]),
        Cell(" × ".join(map(str, row["shape"]))),
        _bytes(row["bytes"]),
        _plain(row["out"]),
        _plain(row["in"]),
        _bytes(row["moved_bytes"]),
        _plain(row["recomputed"]),
        Cell(duration(row["stall_us"]) if row["stall_us"] else "", row["stall_us"]),
        _plain(row["gone_after"]),
        _plain(row["back_before"]),
    ]


# ---- the job's life --------------------------------------------------------------------------------------------------


def latency(facts: Facts, places: Places, notes: Sequence[str]) -> str:
    found = facts["latency"]
    if not found["operators"]:
        return '<p class="missing">There are no operators: the iteration of this job is not known.</p>'
    if not found["measured"]:
        return '<p class="missing">No operator was measured yet.</p>'
    text = (
        f"{_number(found['measured'])} of {_count(found['operators'], 'operator')} measured,"
        f" {_count(found['samples'], 'iteration')} looked at. Their predictions were off by"
        f" {_percent(found['median_error'])} in the median. All averages together: {duration(found['total_us'] or 0)}."
    )
    charts = "".join(f"<div>{_chart(name, places)}</div>" for name in ("scatter", "errors"))
    return f'<p>{escape(text)}</p>\n<div class="beside">{charts}</div>{_legend(PHASES.items())}{_notes(notes)}'


def learning(facts: Facts, places: Places, names: Sequence[str]) -> str:
    """Return the section of learning curves. `names` are those of the charts."""
    rows = facts["metrics"]
    if not rows:
        return '<p class="missing">No epoch has ended yet.</p>'
    charts = "".join(f"<div>{_chart(name, places)}</div>" for name in names)
    shown = sorted({row["epoch"] for row in rows})[-SHOWN_EPOCHS:]
    thin = len({row["epoch"] for row in rows}) < facts["epochs"]
    notes = [f"Of {facts['epochs']:,} epochs some are shown, equally far from each other."] if thin else []
    columns = [Column("epoch", True), Column("split"), Column("samples", True)]
    columns += [Column(name, True) for name in (*names, "seconds")]
    cells = [_metric_row(row, names) for row in rows if row["epoch"] in shown]
    splits = {row["split"] for row in rows}
    legend = _legend((name, colour) for name, colour in SPLITS.items() if name in splits)
    return f'<div class="beside">{charts}</div>{legend}{_notes(notes)}{table("metrics", columns, cells)}'


def _metric_row(row: Facts, names: Sequence[str]) -> list[Cell]:
    cells = [_plain(row["epoch"]), Cell(row["split"]), _plain(row["samples"])]
    return cells + [Cell("" if row[name] is None else f"{row[name]:.4g}", row[name]) for name in (*names, "seconds")]


def plans(facts: Facts, places: Places) -> str:
    lines = facts["log"]
    if not lines:
        return '<p class="missing">The scheduler’s log has nothing about this job; it keeps its last 10,000 lines.</p>'
    notes = [f"The last {SHOWN_LINES:,} of {len(lines):,} lines are shown."] if len(lines) > SHOWN_LINES else []
    columns = (
        Column("time"),
        Column("after", True, "seconds since the job was submitted"),
        Column("event"),
        Column("generation", True),
        Column("because"),
        Column("planned", True),
        Column("granted", True),
        Column("iteration", True),
        Column("waits", True),
        Column("out", True),
        Column("in", True),
        Column("again", True, "operators computed again"),
    )
    chart = _chart("plans", places) + _legend(PLANS_LEGEND) if "plans" in places else ""
    return f"{chart}{_notes(notes)}{table('plans', columns, map(_plan_row, lines[-SHOWN_LINES:]))}"


def _plan_row(line: Facts) -> list[Cell]:
    return [
        Cell(moment(line["at"])),
        Cell(f"{line['seconds']:,.1f} s", line["seconds"]),
        Cell(line["event"]),
        _plain(line["generation"]),
        Cell(line["reason"] or ""),
        _bytes(line["planned_bytes"]),
        _bytes(line["granted_bytes"]),
        _time(line["iteration_us"]),
        _time(line["stall_us"]),
        _bytes(line["out_bytes"]),
        _bytes(line["in_bytes"]),
        _plain(line["recomputes"]),
    ]


# ---- settings --------------------------------------------------------------------------------------------------------


def settings(facts: Facts) -> str:
    job, profile = facts["job"], facts["profile"]
    dates = ("submitted_at", "started_at", "ended_at", "captured_at")
    about = [
        ("owner", job["owner_name"]),
        ("policy that planned", job["planned_policy"]),
        ("device", job["device"] or None),
        ("parameters of the model", None if job["parameters"] is None else _number(job["parameters"])),
        ("rows", None if job["rows"] is None else _number(job["rows"])),
        ("fingerprint of the rows", job["fingerprint"]),
        ("attempts", job["attempts"]),
        ("version of the model that it made", job["version"]),
        *((name, job[name] and moment(job[name])) for name in dates),
    ]
    parts = [
        f"<h3>To do it again</h3>\n<pre>{escape(call(job))}</pre>",
        f"<h3>The job</h3>\n{pairs('job', about)}",
        f"<h3>Settings of the session that submitted it</h3>\n{pairs('session', job['settings'].items())}",
        f"<h3>Settings of the server, when this was read</h3>\n{pairs('settings', facts['settings'].items())}",
        f"<h3>Versions</h3>\n{pairs('versions', facts['versions'].items())}",
    ]
    if profile is not None:
        known = [("name", profile["name"]), ("kind", profile["kind"])]
        known += [(title, _rate(name, profile[name])) for name, title in PROFILE.items()]
        parts.insert(2, f"<h3>The device</h3>\n{pairs('device', known)}")
    return "\n".join(parts)


def _rate(name: str, number: float) -> str:
    if name.endswith("bytes"):
        return size(number)
    if name.endswith("bytes_per_s"):
        return f"{size(number)}/s"
    return f"{number:,.4g} µs" if name.endswith("_us") else f"{number:,.4g}"


def call(job: Facts) -> str:
    """Return the SQL that submits the same job."""
    if job["kind"] == "calibrate":
        return f"SELECT tensile.calibrate(device_seconds => {job['options'].get('seconds', 240)});"
    budget, policy = job["memory_budget"], job["policy"] or job["planned_policy"]
    arguments: dict[str, object] = {
        "target": _literal(job["target"]),
        **{name: job[name] for name in ("epochs", "batch_size")},
        "optimizer": _literal(job["optimizer"]),
        **{name: job[name] for name in ("learning_rate", "validation", "seed")},
        "policy": None if policy is None else _literal(policy),
        "memory_budget": None if budget is None else _literal(f"{budget}B"),
        "priority": job["priority"],
        "options": _literal(json.dumps(job["options"], ensure_ascii=False)),
    }
    named = "".join(f",\n    {name} => {value}" for name, value in arguments.items() if value is not None)
    model = _literal(job["model_name"])
    made = ""
    if job.get("architecture") is not None:
        made = f"SELECT register_model({model}, {_literal(json.dumps(job['architecture'], ensure_ascii=False))});\n"
    return f"{made}SELECT train_model({model},\n    {_literal(job['query'])}{named});"


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


# ---- what went wrong -------------------------------------------------------------------------------------------------


def error(facts: Facts) -> str:
    """Return the section about warnings and the error, or "" if the job has neither."""
    job = facts["job"]
    parts = [f"<p>{escape(warning)}</p>" for warning in job["warnings"] or []]
    if job["error"] is not None or job["sqlstate"] is not None:
        rows = [(name, job[name]) for name in ("sqlstate", "error", "detail", "hint") if job[name] is not None]
        parts.append(pairs("failure", rows))
    if job["traceback"] is not None:
        parts.append(f"<pre>{escape(job['traceback'])}</pre>")
    return "\n".join(parts)


# ---- pieces ----------------------------------------------------------------------------------------------------------


def _chart(name: str, places: Places) -> str:
    return f'<div class="chart" id="chart-{name}">{places[name]}</div>' if name in places else ""


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    items = "".join(f'<li><i style="background:{colour}"></i>{escape(name)}</li>' for name, colour in entries)
    return f'<ul class="legend">{items}</ul>\n'


def _notes(notes: Iterable[str]) -> str:
    return "".join(f'<p class="note">{escape(note)}</p>\n' for note in notes)


def moment(text: str) -> str:
    """Return a moment without fractions of a second: "2026-05-04 12:00:00+00:00"."""
    return datetime.fromisoformat(text).isoformat(" ", "seconds")


def _plain(number: int | None) -> Cell:
    return Cell("" if number is None else f"{number:,}", number)


def _bytes(number: int | None) -> Cell:
    return Cell("" if number is None else size(number), number)


def _time(us: float | None) -> Cell:
    return Cell("" if us is None else duration(us), us)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _share(part_us: float, whole_us: float) -> str:
    return _percent(part_us / whole_us if whole_us else 0.0)
