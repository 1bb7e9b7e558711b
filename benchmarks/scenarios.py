"""Benchmarks that run scenarios of the command `pg-tensile bench`, check promises against their rows and write tables.

Each scenario is a run of the command in a process of its own, so that it leaves nothing in memory for the next one, and
its rows are the command's output. Results go to benchmarks/results/<name>-<device>.json after every scenario. A run
that was stopped continues where it was if code, machine and device are the same; `--keep` continues with other code
(each row names its revision), `--fresh` starts over. At the end the tables go to docs/benchmarks.md; `--document`
writes them again from the file of results, and measures nothing. `--minutes` starts no scenario later than that;
`--only WORD` selects those whose name contains it; `--quick` tries everything on small models in a few minutes and
writes to build/. The exit status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.command import ROOT, Row, run_bench, run_program
from pg_tensile.errors import DeviceError
from pg_tensile.execution.device_choice import choose_device
from pg_tensile.tools.bench.report import machine, versions

DOCUMENT = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
LONG_MS = 200.0  # the simulator's time is checked for longer steps only
FIDELITY = (-0.04, 0.12)  # (simulated − measured) / measured of one step
TYPICAL, WORST = 0.05, 0.12  # most deviation of simulated times, in the median and at worst


class Scenario(NamedTuple):
    """One run of the command.

    `device` is added to the arguments unless they have one. `seconds`: approximate duration on two otherwise idle
    cores; 0 means not known. `program`: a module to run instead, which prints its rows as lines of JSON; its arguments
    stay as they are.
    """

    section: str
    title: str
    arguments: tuple[str, ...]
    seconds: float = 0.0
    program: str | None = None

    @property
    def name(self) -> str:
        return f"{self.section}: {self.title}"


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


class Benchmark(NamedTuple):
    """The parts of one benchmark.

    `name` is in the names of its files, its marks in the document and its target of make. `scenarios` takes a kind of
    device ("host", "cuda", "model") and whether the run is quick; the cheap and the important ones come first, in case
    time runs out. `planning` takes a device and whether the run is quick, and measures, before the scenarios, what
    needs no process of its own. `device`: the one that is measured unless another is named.
    """

    name: str
    description: str
    scenarios: Callable[[str, bool], list[Scenario]]
    planning: Callable[[str, bool], list[Row]]
    checks: Callable[[Results], list[Check]]
    tables: Callable[[Results], list[str]]
    device: str = "host"


class Results:
    """The file of results. Its scenarios are not run again while code, machine and device stay the same."""

    def __init__(self, path: Path, device: str, fresh: bool, keep: bool = False) -> None:
        self.path = path
        about = {
            "device": device,
            "code": code_fingerprint(),
            "machine": machine(torch_device(device)),
            "versions": versions(),
        }
        self.data: dict[str, Any] = {**about, "scenarios": {}, "planning": []}
        if not fresh and path.exists():
            stored = json.loads(path.read_text())
            if all(stored.get(key) == about[key] for key in ("device", "machine", *([] if keep else ["code"]))):
                self.data = stored | {"code": about["code"]}
        self.figures = (ROOT / "build" if self.is_quick else DOCUMENT.parent) / "plots" / self.kind

    @classmethod
    def read(cls, path: Path, figures: Path) -> Results:
        """Read a file of any machine and code. Figures go to the folder `figures`."""
        results = cls.__new__(cls)
        results.path, results.data, results.figures = path, json.loads(path.read_text()), figures
        return results

    @property
    def kind(self) -> str:
        return kind_of(self.data["device"])

    @property
    def is_quick(self) -> bool:
        return self.path.parent == ROOT / "build"

    @property
    def scenarios(self) -> dict[str, Any]:
        return self.data["scenarios"]

    @property
    def planning(self) -> list[Row]:
        return self.data["planning"]

    def rows(self, section: str) -> list[tuple[str, Row]]:
        """Return (title, row) of everything measured in a section."""
        mine = [(name.partition(": "), scenario["rows"]) for name, scenario in self.scenarios.items()]
        return [(title, row) for (of_section, _, title), rows in mine if of_section == section for row in rows]

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.data, indent=1) + "\n")
        new.replace(self.path)


def kind_of(device: str) -> str:
    """Return the device's kind in the names of files: "model" for simulated ones."""
    kind = device.partition(":")[0]
    return "model" if kind == "sim" else kind


def torch_device(device: str) -> torch.device:
    try:
        return choose_device("cpu" if kind_of(device) in ("host", "model") else device)
    except DeviceError as error:
        raise SystemExit(f"{error.message}\nhint: {error.hint}") from None


def code_fingerprint() -> str:
    """Return a digest of all code that is measured."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "pg_tensile").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


# ---- running --------------------------------------------------------------------------------------------------------


def run_scenario(scenario: Scenario, device: str) -> dict[str, Any]:
    """Run a scenario and return its rows, with `error` if it failed."""
    started = time.perf_counter()
    arguments = list(scenario.arguments)
    if scenario.program is not None:
        done, rows = run_program(scenario.program, arguments)
    else:
        arguments += [] if "--device" in arguments else ["--device", device]
        done, rows = run_bench(arguments)
    seconds, revision = round(time.perf_counter() - started, 1), versions()["revision"]
    result = {"arguments": arguments, "seconds": seconds, "revision": revision, "rows": rows}
    if not rows or done.returncode not in (0, 1):
        result["error"] = done.stderr.strip()[-2000:] or f"exit status {done.returncode}"
    return result


def run_all(results: Results, wanted: Sequence[Scenario], minutes: float) -> list[str]:
    """Run the scenarios without results, and return the names of those for which the time did not suffice."""
    ends = time.monotonic() + 60 * minutes
    waiting = [scenario for scenario in wanted if scenario.name not in results.scenarios]
    done: list[tuple[float, float]] = []  # (seconds, those expected) of each scenario
    console = Console(stderr=True)
    columns = (SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "{task.description}")
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(wanted), completed=len(wanted) - len(waiting))
        for number, scenario in enumerate(waiting):
            if time.monotonic() > ends:
                return [scenario.name for scenario in waiting[number:]]
            progress.update(bar, description=f"{scenario.name}{time_left(waiting[number:], done)}")
            result = run_scenario(scenario, results.data["device"])
            results.scenarios[scenario.name] = result
            results.save()
            done.append((result["seconds"], scenario.seconds))
            ahead = time_left(waiting[number + 1 :], done)
            progress.advance(bar)
            console.print(f"{scenario.name}: {result['seconds']:.0f} s{ahead} {result.get('error', '')}", markup=False)
    return []


def time_left(waiting: Sequence[Scenario], done: Sequence[tuple[float, float]]) -> str:
    """Describe the time left, at the pace of the scenarios run so far."""
    spent, expected = (sum(part) for part in zip((0.0, 0.0), *done, strict=True))
    pace = spent / expected if expected else 1.0
    minutes = pace * sum(scenario.seconds for scenario in waiting) / 60
    return f", about {minutes:.0f} min left" if minutes >= 1 else ""


# ---- the findings ---------------------------------------------------------------------------------------------------


def failures(results: Results) -> list[Check]:
    """Return a failed check for each scenario that could not be run."""
    return [
        Check(name.partition(":")[0], name, result["error"].splitlines()[0], "rows", False)
        for name, result in results.scenarios.items()
        if "error" in result
    ]


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


def seconds(ms: float | None) -> str:
    return "–" if ms is None else f"{ms / 1e3:.2f} s"


def markdown(benchmark: Benchmark, results: Results, checks: Sequence[Check], missing: Sequence[str]) -> str:
    """Return the generated part of the section."""
    data = results.data
    measured = ", ".join(revisions(results)) or data["versions"]["revision"]
    lines = [
        *(measured_on(data["device"], data["machine"], data["versions"], measured), ""),
        *(verdicts(checks, missing), ""),
        *benchmark.tables(results),
    ]
    return "\n".join(lines).rstrip() + "\n"


def measured_on(device: str, run: Mapping[str, Any], versions: Mapping[str, Any], revision: str) -> str:
    return (
        f"Measured on `{device}`: {run.get('gpu') or run['cpu']}, {run['cores']} cores, "
        f"{run['memory_bytes'] / 2**30:.0f} GiB, PyTorch {versions['torch']}, "
        f"Python {versions['python']}, revision {revision}."
    )


def verdicts(checks: Sequence[Check], missing: Sequence[str]) -> str:
    """Describe the number of checks that hold, each that does not, and what was not measured."""
    broken = [check for check in checks if not check.holds]
    return (
        f"{len(checks) - len(broken)} of {len(checks)} checks hold."
        + "".join(f"\n- **does not hold**: {check.what}: {check.found}, asked for {check.asked}" for check in broken)
        + "".join(f"\n- not measured: {name}" for name in missing)
    )


def revisions(results: Results) -> list[str]:
    """Return the revisions of the code that measured the rows: several after --keep; + marks uncommitted changes."""
    scenarios = results.scenarios.values()
    rows = {row["versions"]["revision"] for scenario in scenarios for row in scenario["rows"] if row.get("versions")}
    return sorted(rows or {scenario.get("revision", results.data["versions"]["revision"]) for scenario in scenarios})


def page_part(benchmark: Benchmark, path: Path, figures: Path) -> str:
    """Return the generated part of the section from the file of results."""
    results = Results.read(path, figures)
    names = [scenario.name for scenario in benchmark.scenarios(results.kind, False)]
    missing = [name for name in names if name not in results.scenarios]
    return markdown(benchmark, results, failures(results) + benchmark.checks(results), missing)


def write_document(name: str, kind: str, text: str) -> None:
    """Write the text between the marks of that benchmark and device."""
    begin, end = marks(name, kind)
    page = DOCUMENT.read_text()
    before, mark, rest = page.partition(begin)
    if not mark:
        raise SystemExit(f"{DOCUMENT} has no place for {name}-{kind}")
    DOCUMENT.write_text(before + begin + "\n" + text + "\n" + end + rest.partition(end)[2])


def marks(name: str, kind: str) -> tuple[str, str]:
    return f"<!-- {name}-{kind}: begin, written by benchmarks/bench_{name}.py -->\n", f"<!-- {name}-{kind}: end -->"


def print_checks(checks: Sequence[Check], missing: Sequence[str] = (), stderr: bool = False) -> None:
    shown = Table("section", "what", "found", "asked for", "", box=None, pad_edge=False)
    for check in checks:
        shown.add_row(check.section, check.what, check.found, check.asked, "" if check.holds else "[red]NO[/red]")
    console = Console(width=120, stderr=stderr)
    console.print(shown)
    holding = f"{sum(check.holds for check in checks)} of {len(checks)} checks hold"
    console.print(holding + f", {len(missing)} scenarios not measured" * bool(missing), highlight=False)


def end(rows: Iterable[Row], checks: Callable[[list[Row]], Sequence[Check]]) -> int:
    """End a program of a scenario: print its rows, as they are measured, and its checks; return the exit status."""
    measured = []
    for row in rows:
        print(json.dumps(row), flush=True)
        measured.append(row)
    checked = checks(measured)
    print_checks(checked, stderr=True)
    return int(not all(check.holds for check in checked))


def main(benchmark: Benchmark) -> int:
    """Run the benchmark from the command line, write its results, and return the exit status."""
    parser = argparse.ArgumentParser(prog=f"bench_{benchmark.name}", description=benchmark.description)
    what = f"host, cuda, cuda:N or sim:PROFILE ({benchmark.device})"
    parser.add_argument("--device", default=benchmark.device, help=what)
    parser.add_argument("--quick", action="store_true", help="small models, one round; results to build/")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    parser.add_argument("--keep", action="store_true", help="keep what was measured with other code")
    parser.add_argument("--minutes", type=float, default=inf, help="start nothing later than that (no limit)")
    parser.add_argument("--only", default="", help="scenarios with this word in their names")
    parser.add_argument("--document", action="store_true", help="write the tables of the results that there are")
    options = parser.parse_args()
    kind = kind_of(options.device)
    folder = ROOT / "build" if options.quick else RESULTS
    if options.document:
        with tempfile.TemporaryDirectory() as figures:  # discarded: those of the document stay as they are
            text = page_part(benchmark, folder / f"{benchmark.name}-{kind}.json", Path(figures) / kind)
        write_document(benchmark.name, kind, text)
        return 0
    results = Results(folder / f"{benchmark.name}-{kind}.json", options.device, options.fresh, options.keep)
    if not results.planning and options.only in "planning":
        results.data["planning"] = benchmark.planning(options.device, options.quick)
        results.save()
    wanted = [scenario for scenario in benchmark.scenarios(kind, options.quick) if options.only in scenario.name]
    waiting = [scenario for scenario in wanted if scenario.name not in results.scenarios]
    print(f"{len(waiting)} scenarios of {len(wanted)} to run{time_left(waiting, ())}", file=sys.stderr)
    missing = run_all(results, wanted, options.minutes)
    checked = failures(results) + benchmark.checks(results)
    text = markdown(benchmark, results, checked, missing)
    if options.quick:
        (folder / f"{benchmark.name}-{kind}.md").write_text(text)
    else:
        write_document(benchmark.name, kind, text)
    print_checks(checked, missing)
    return int(not all(check.holds for check in checked))
