"""Promises of benchmarks, and whether the measurements keep them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.command import Row

LONG_MS = 200.0  # the simulator's time is checked for longer steps only
FIDELITY = (-0.04, 0.12)  # (simulated − measured) / measured of one step
TYPICAL, WORST = 0.05, 0.12  # most deviation of simulated times, in the median and at worst


class Check(NamedTuple):
    """A promise, the finding, and whether the promise holds."""

    section: str
    what: str
    found: str
    asked: str
    holds: bool


class Timing(NamedTuple):
    """A step's time by the simulator, with the latencies measured in the same rounds, and by the clock, in ms."""

    what: str
    simulated_ms: float | None
    measured_ms: float | None


class Goal(NamedTuple):
    """A promise about one number of a row: its key, words and format of the table, and the least or the most."""

    key: str
    what: str
    form: str
    least: float | None = None
    most: float | None = None

    def check(self, section: str, row: Row) -> Check:
        value = row[self.key]
        holds = (self.least is None or value >= self.least) and (self.most is None or value < self.most)
        asked = f"at least {self.least:,}" if self.least is not None else ""
        asked = f"below {self.most:,}" if self.most is not None else asked
        return Check(section, self.what, f"{value:{self.form}}", asked, holds)


def deviation(value: float, reference: float) -> float:
    return (value - reference) / reference if reference else float("inf")


def fidelity_checks(section: str, what: str, simulated_ms: float | None, measured_ms: float | None) -> Iterator[Check]:
    """Check the simulator's time against the measured one, for long steps; none if one of both is not known."""
    if simulated_ms is not None and measured_ms is not None and measured_ms > LONG_MS:
        off = deviation(simulated_ms, measured_ms)
        holds = FIDELITY[0] <= off <= FIDELITY[1]
        yield Check(section, f"{what}: simulated time", f"{off:+.2%}", "−4 … +12 %", holds)


def name_of(title: str, row: Row) -> str:
    """Return the network and the policy of a row, with its budget."""
    return f"{title}, {row['label']}" + (f" at {row['budget']}" if row["budget"] else "")


def timings_of(rows: Iterable[tuple[str, Row]]) -> Iterator[Timing]:
    """Yield the times of the rows of the command, each with its network's title; a row that failed has none."""
    for title, row in rows:
        yield Timing(name_of(title, row), row.get("simulated_ms"), row.get("step_ms_median"))


def simulator_checks(section: str, timings: Iterable[Timing], longer_ms: float = LONG_MS) -> Iterator[Check]:
    """Check the median and the largest deviation of the simulator's times over all steps of a benchmark.

    Only steps longer than `longer_ms` count, and only those with both times; without any there are no checks.
    """
    deviations = sorted(
        (abs(deviation(simulated_ms, measured_ms)), what)
        for what, simulated_ms, measured_ms in timings
        if simulated_ms is not None and measured_ms is not None and measured_ms > longer_ms
    )
    if deviations:
        typical, (most, what) = statistics.median(off for off, _ in deviations), deviations[-1]
        name = f"simulated time, {len(deviations)} steps"
        yield Check(section, f"{name}, median", f"{typical:.1%} off", f"≤ {TYPICAL:.0%}", typical <= TYPICAL)
        yield Check(section, f"{name}, worst", f"{most:.1%} off ({what})", f"≤ {WORST:.0%}", most <= WORST)


def plan_checks(section: str, what: str, row: Row) -> Iterator[Check]:
    """Check that a plan's results are those of eager PyTorch to the bit, and that its peak is within the budget."""
    same = "identical" if row["bit_identical"] else "different"
    yield Check(section, f"{what}: results", same, "identical", row["bit_identical"] is True)
    peak, budget = row["device_peak_bytes"], row["budget_bytes"]
    if budget is not None:
        yield Check(section, f"{what}: device peak", f"{peak:,}", f"≤ {budget:,}", peak <= budget)


def verdicts(checks: Sequence[Check], missing: Sequence[str]) -> str:
    """Describe the number of checks that hold, each that does not, and what was not measured."""
    broken = [check for check in checks if not check.holds]
    return (
        f"{len(checks) - len(broken)} of {len(checks)} checks hold."
        + "".join(f"\n- **does not hold**: {check.what}: {check.found}, asked for {check.asked}" for check in broken)
        + "".join(f"\n- not measured: {name}" for name in missing)
    )


def print_checks(checks: Sequence[Check], missing: Sequence[str] = ()) -> None:
    shown = Table("section", "what", "found", "asked for", "", box=None, pad_edge=False)
    for check in checks:
        shown.add_row(check.section, check.what, check.found, check.asked, "" if check.holds else "[red]NO[/red]")
    console = Console(width=120)
    console.print(shown)
    holding = f"{sum(check.holds for check in checks)} of {len(checks)} checks hold"
    console.print(holding + f", {len(missing)} scenarios not measured" * bool(missing), highlight=False)
