"""Scenarios of sections of `plans`: runs of the command `pg-tensile bench`, or of functions, in their own processes.

A process of its own leaves nothing in memory for the next scenario.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

from benchmarks.checks import Check
from benchmarks.command import LIGHT, Row, run_bench
from benchmarks.results import FAILURES, Results
from benchmarks.runner import Run, Section

# of the command's rows: raw rounds, memory over time, what the file has for each run, and what the scenario says
DROPPED = (
    *("round_ms", "timeline", "versions", "machine", "device", "model", "jobs", "optimizer", "warmup", "seed"),
    "threads",
)


class Scenario(NamedTuple):
    """One run of the command.

    `device` is added to the arguments unless they have one. `seconds`: approximate duration on two otherwise idle
    cores; 0 means not known. `work`: a function of a module that yields rows, to be called with the arguments instead.
    """

    section: str
    title: str
    arguments: tuple[Any, ...] = ()
    seconds: float = 0.0
    work: Callable[..., Iterable[Row]] | None = None

    @property
    def name(self) -> str:
        return f"{self.section}: {self.title}"


Scenarios = Callable[[str, bool], list[Scenario]]  # of a kind of device ("host", "cuda", "model"), quick or not


def rounds(count: int, iterations: int = 1) -> tuple[str, ...]:
    """Return arguments of the command for so many rounds, in which all policies take turns."""
    return ("--rounds", str(count), "--warmup", "1", "--iterations", str(iterations), *LIGHT)


def run_scenario(scenario: Scenario, device: str) -> list[Row]:
    """Return the rows of a scenario; the last one is a failure if it failed."""
    if scenario.work is not None:
        try:
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                rows = pool.submit(collected, scenario.work, scenario.arguments).result()
            error = None if rows else "no rows"
        except Exception as failure:
            rows, error = [], f"{type(failure).__name__}: {failure}"
    else:
        arguments = [*scenario.arguments, *([] if "--device" in scenario.arguments else ["--device", device])]
        done, rows = run_bench(arguments)
        failed = not rows or done.returncode not in (0, 1)
        error = (done.stderr.strip()[-2000:] or f"exit status {done.returncode}") if failed else None
    named = [{"table": scenario.section} | (row if scenario.work else compact(row)) for row in rows]
    return named + ([{"table": FAILURES, "error": error}] if error else [])


def collected(work: Callable[..., Iterable[Row]], arguments: tuple[Any, ...]) -> list[Row]:
    return list(work(*arguments))


def compact(row: Row) -> Row:
    """Return a row without what is only needed while it is measured; `spread` is that of the rounds' steps."""
    ms = row.get("round_ms") or []
    spread = {"spread": (max(ms) - min(ms)) / 2 / statistics.median(ms)} if len(ms) > 1 else {}
    return {key: value for key, value in row.items() if key not in DROPPED} | spread


def scenario_section(
    title: str,
    scenarios: Scenarios,
    tables: Callable[[Results], list[str]],
    checks: Callable[[Results], list[Check]],
    device: str = "host",
    planning: Callable[[Run], Iterable[Row]] | None = None,
) -> Section:
    """Return a section of scenarios. `planning` measures first, for the table of that name, what needs no process."""

    def rows(run: Run) -> Iterator[Row]:
        if planning is not None:
            for _ in run.scenarios(("planning",)):
                yield from ({"table": "planning", **row} for row in planning(run))
        listed = {scenario.name: scenario for scenario in scenarios(run.kind, run.quick)}
        for name in run.scenarios(listed, {name: scenario.seconds for name, scenario in listed.items()}):
            yield from run_scenario(listed[name], run.device)

    def expected(kind: str) -> list[str]:
        return [scenario.name for scenario in scenarios(kind, False)]

    return Section(title, rows, tables, checks, expected, device)
