"""The page of a part, and the list of the parts that are still to run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.checks import Check, verdicts
from benchmarks.tables import table
from scripts.first_gpu_run.parts import PARTS, Part
from scripts.first_gpu_run.steps import Outcome, Row

MIB = 1 << 20


def write(
    folder: Path, part: Part, facts: Mapping[str, str], outcomes: Sequence[Outcome], checks: Sequence[Check]
) -> None:
    """Write part-N.json, and after it the page part-N.md, which takes the parts that have run from these files."""
    results = {"part": part.number, "facts": facts, "steps": [outcome._asdict() for outcome in outcomes]}
    replace(folder / f"part-{part.number}.json", json.dumps(results, indent=1) + "\n")
    replace(folder / f"part-{part.number}.md", page(part, facts, outcomes, checks, remaining(folder, facts)))


def replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def remaining(folder: Path, facts: Mapping[str, str]) -> list[Part]:
    """Return the parts without results of this device in the folder."""
    ran = set()
    for path in folder.glob("part-*.json"):
        results = json.loads(path.read_text())
        if results["facts"].get("device") == facts.get("device"):
            ran.add(results["part"])
    return [part for part in PARTS if part.number not in ran]


def page(
    part: Part, facts: Mapping[str, str], outcomes: Sequence[Outcome], checks: Sequence[Check], left: Sequence[Part]
) -> str:
    lines = [f"# Part {part.number}: {part.title}", "", part.question, ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", verdicts(checks, [outcome.name for outcome in outcomes if outcome.verdict == "no time"]), ""]
    heads = ("step", "end", "seconds", "results", "last line")
    cells = [
        (o.name, o.verdict, f"{o.seconds:.0f}", f"{len(o.rows)}", cell(o.last[-1] if o.last else "")) for o in outcomes
    ]
    lines += table(heads, cells)
    for outcome in outcomes:
        lines += ["", f"## {outcome.name}", "", f"`{outcome.command}`", "", *details(outcome)]
    lines += ["", "## Parts that are still to run", ""]
    lines += [f"- `make first-gpu-run PART={other.number}`: {other.title}" for other in left] or ["All have run."]
    return "\n".join(lines) + "\n"


def details(outcome: Outcome) -> list[str]:
    """Return the results of a step, and the end of its output if it failed."""
    tests = [row for row in outcome.rows if "test" in row]
    benched = [row for row in outcome.rows if "policy" in row]
    others = [row for row in outcome.rows if "test" not in row and "policy" not in row]
    lines = []
    if tests:
        lines += test_lines(tests)
    if benched:
        lines += [*bench_table(benched), *bench_notes(benched)]
    if others:
        columns = list(dict.fromkeys(key for row in others for key in row))
        lines += table(columns, [[cell(row.get(column)) for column in columns] for row in others])
    if outcome.status != 0 and not tests:
        lines += ["", "```", *outcome.last, "```"]
    return lines


def test_lines(tests: Sequence[Row]) -> list[str]:
    """Return the number of tests by outcome, and of each that failed the end of its report."""
    counts = {name: sum(row["outcome"] == name for row in tests) for name in ("passed", "failed", "skipped")}
    lines = [", ".join(f"{count} {name}" for name, count in counts.items()) + "."]
    for row in tests:
        if row["outcome"] == "failed":
            lines += ["", f"### {row['test']}", "", "```", *row["report"].splitlines(), "```"]
    return lines


HEADINGS = (
    *("method", "memory", "budget, MiB", "reserved, MiB", "used", "retries", "outside, MiB", "step, ms", "scatter"),
    *("times `none`", "simulated, ms", "stall, ms", "out, GB/s", "in, GB/s", "overlap", "results"),
)


def bench_table(rows: Sequence[Row]) -> list[str]:
    return table(HEADINGS, [bench_cells(row) for row in rows])


def bench_cells(row: Row) -> tuple[str, ...]:
    start = (f"`{row['label']}`", row["budget"] or "")
    if row["error"] is not None:
        return (*start, cell(row["error"]), *[""] * (len(HEADINGS) - 3))
    budget, reserved = row["budget_bytes"], row["reserved_peak_bytes"]
    return (
        *start,
        *(number(budget, MIB, ".0f"), number(reserved, MIB, ".0f")),
        "" if not budget or reserved is None else f"{reserved / budget:.1%}",
        *(number(row["allocator_retries"], 1, "d"), number(row["context_bytes"], MIB, ".0f")),
        *(f"{row['step_ms_median']:.2f}", "" if row["scatter"] is None else f"{row['scatter']:.1%}"),
        number(row["eor"], 1, ".3f"),
        *(number(row["simulated_ms"], 1, ".2f"), number(row["stall_ms"], 1, ".2f")),
        *(number(row["out_gbps"], 1, ".1f"), number(row["in_gbps"], 1, ".1f"), number(row["overlap"], 1, ".0%")),
        {True: "identical", False: "different", None: ""}[row["bit_identical"]],
    )


def bench_notes(rows: Sequence[Row]) -> list[str]:
    """Return the conditions of each row, and why its steps may scatter."""
    conditions = [f"- {method(row)}: {text}" for row in rows if (text := conditions_of(row))]
    causes = [f"- {method(row)}: {'; '.join(row['scatter_causes'])}" for row in rows if row.get("scatter_causes")]
    lines = ["From the first step to the last:", "", *conditions, ""] if conditions else []
    return lines + (["Steps that scatter:", "", *causes, ""] if causes else [])


def method(row: Row) -> str:
    return f"`{row['label']}`" + (f" at {row['budget']}" if row["budget"] else "")


SHOWN = (("sm_clock_mhz", "MHz"), ("temperature_c", "°C"), ("power_w", "W"))


def conditions_of(row: Row) -> str:
    """Format clocks, temperature and power before the first round and after the last; empty if they are not known."""
    rounds = row.get("conditions") or []
    if not rounds or rounds[0].get("start") is None or rounds[-1].get("end") is None:
        return ""
    pairs = [(rounds[0]["start"].get(name), rounds[-1]["end"].get(name), unit) for name, unit in SHOWN]
    shown = [f"{before:.0f} → {after:.0f} {unit}" for before, after, unit in pairs if None not in (before, after)]
    reasons = sorted({reason for found in rounds for reason in found["end"].get("clocks_event_reasons") or ()})
    return ", ".join([*shown, *reasons])


def number(value: float | None, unit: float, form: str) -> str:
    return "" if value is None else f"{value / unit if unit != 1 else value:{form}}"


def cell(value: Any) -> str:
    """Format a value for a cell of a table."""
    text = f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)
    return text.replace("|", "/").replace("\n", " ")[:200]
