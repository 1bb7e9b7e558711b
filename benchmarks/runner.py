"""The one runner of all sections: it measures, writes results, and goes on where it was.

A section (Section) has a title and a function that yields rows, in scenarios that are measured as a whole or not at
all.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import NamedTuple

from benchmarks.checks import Check, Goal
from benchmarks.command import Row
from benchmarks.results import Results, is_alike, kind_of, rounded, text, this_run
from benchmarks.tables import table


class Options(NamedTuple):
    """Options of the command line; see __main__.py."""

    device: str | None = None
    quick: bool = False
    resume: bool = False
    keep: bool = False
    only: str = ""
    minutes: float = inf
    seeds: int | None = None
    beside: str | None = None
    jobs: int | None = None
    phase_minutes: float | None = None
    rows: Path | None = None


class Section(NamedTuple):
    """One subject of measurements.

    `rows` measures (see Run); `tables` returns the lines of its page. `expected`: names of the scenarios for a kind of
    device, to say which were not measured. `device`: the one that is measured unless another is asked for. `draw`
    writes the figures that the page links to a folder.
    """

    title: str
    rows: Callable[[Run], Iterable[Row]]
    tables: Callable[[Results], list[str]]
    checks: Callable[[Results], Sequence[Check]] = lambda _: ()
    expected: Callable[[str], Sequence[str]] = lambda _: ()
    device: str = "host"
    draw: Callable[[Results, Path], object] = lambda _results, _folder: None


class Run:
    """A run of a section: its device and options, the scenarios that are wanted, and the rows of the present one."""

    def __init__(self, results: Results, device: str, options: Options) -> None:
        self.results, self.device, self.options = results, device, options
        self.kind, self.quick = kind_of(device), options.quick
        self.about = this_run(device)
        self._ends = time.monotonic() + 60 * options.minutes
        self._rows: list[Row] = []

    def wanted(self, names: Iterable[str]) -> list[str]:
        """Return those of the scenarios that are asked for, and not there if the run goes on."""
        there = {
            name
            for name, runs in self.results.measured().items()
            if self.options.keep or (self.options.resume and all(is_alike(run, self.about) for run in runs))
        }
        return [name for name in names if self.options.only in name and name not in there]

    def scenarios(self, names: Iterable[str], seconds: Mapping[str, float] | None = None) -> Iterator[str]:
        """Yield the scenarios that are wanted, as long as there is time.

        The rows that a section yields until it asks for the next one are those of the scenario; they are written then.
        `seconds`: how long each is expected to take, as far as that is known.
        """
        expected, waiting = seconds or {}, self.wanted(names)
        spent = planned = 0.0
        for number, name in enumerate(waiting):
            if time.monotonic() > self._ends:
                say(f"no time for {', '.join(waiting[number:])}")
                return
            began = time.monotonic()
            yield name
            self.results.replace(name, self._rows, self.about)
            self.results.write()
            took, count, self._rows = time.monotonic() - began, len(self._rows), []
            spent, planned = spent + took, planned + expected.get(name, 0.0)
            ahead = time_left(sum(expected.get(other, 0.0) for other in waiting[number + 1 :]), spent, planned)
            say(f"{name}: {count} rows in {took:.0f} s{ahead}")

    def add(self, row: Row) -> None:
        """Add a row of the present scenario; it is also written at once to the file that was asked for, if any."""
        self._rows.append(row)
        if self.options.rows is not None:
            with self.options.rows.open("a") as file:
                file.write(text(rounded(row)) + "\n")


def once(name: str, measure: Callable[[Run], Iterable[Row]]) -> Callable[[Run], Iterator[Row]]:
    """Return the function of a section that has one scenario."""

    def rows(run: Run) -> Iterator[Row]:
        for _ in run.scenarios((name,)):
            yield from measure(run)

    return rows


def goals_section(title: str, name: str, measure: Callable[[Run], Row], goals: Sequence[Goal]) -> Section:
    """Return a section of one scenario with one row, and a goal or a line of the table for each of its numbers."""

    def checks(results: Results) -> list[Check]:
        asked = [goal for goal in goals if goal.least is not None or goal.most is not None]
        return [goal.check(name, row) for row in results.rows() for goal in asked]

    def tables(results: Results) -> list[str]:
        checked = [goal.check(name, row) for row in results.rows() for goal in goals]
        cells = [(check.what, check.found, check.asked, "" if check.holds else "**missed**") for check in checked]
        return table(("what", "found", "asked for", ""), cells)

    return Section(title, once(name, lambda run: [measure(run)]), tables, checks)


def time_left(expected_s: float, spent_s: float, planned_s: float) -> str:
    """Describe the time left, at the pace of the scenarios that took `spent_s`."""
    minutes = (spent_s / planned_s if planned_s else 1.0) * expected_s / 60
    return f", about {minutes:.0f} min left" if minutes >= 1 else ""


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
