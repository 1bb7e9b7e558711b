"""`make bench-core`: the graph core's promises at full size, on this machine.

Each scenario is a run of the command `pg-tensile bench` in a process of its own, so that nothing of one is left in
memory for the next, and its rows are what that command writes. The sections:

- overhead: how a program without events compares with eager PyTorch (ResNet-50, batch 8);
- fidelity: networks whose steps take over 200 ms, with the policies none, swap_all and recompute_all: whether the
  simulator predicts the device's step time and peak, and whether the executor's books agree with the allocator's;
- identity: whether five steps end in the same bits as eager PyTorch's, on many kinds of models;
- capture: how long capturing takes at batch 16 and full resolution (nothing is executed);
- planning: how validating, analysing and simulating plans grows to 100,000 operators (bench_planning.py).

Results go to benchmarks/results/core-<device>.json after every scenario. A run that was stopped goes on where it was,
if code, machine and device are the same; `--fresh` starts over. At the end it writes the tables of docs/benchmarks.md.
`--minutes` starts no scenario later than that; `--only WORD` takes those whose name contains it; `--quick` tries
everything on small models in a few minutes and writes to build/. Exit status 1 when something does not hold.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import bench_planning
from pg_tensile.bench.report import machine, versions
from pg_tensile.device import choose_device
from pg_tensile.errors import DeviceError

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "benchmarks.md"
ALL = "none,swap_all,recompute_all"
LONG_MS = 200.0  # steps that the simulator has to predict
FIDELITY = (-0.04, 0.12)  # (simulated − measured) / measured
ALLOCATOR = 0.03  # |device peak − allocator's| / allocator's
OVERHEAD = {"host": 1.02, "cuda": 1.00}  # vanilla / eager
CAPTURE_MS = 10_000.0
PLANNING = {
    "serialise_ms": 100.0,
    "validate_ms": 20.0,
    "footprint_ms": 20.0,
    "simulate_ms": 300.0,
}  # of 10,000 operators
TRACE_BYTES = 2_000_000
GROWTH = 15.0  # of times, from 10,000 to 100,000 operators: linear, with some room for the caches

Row = dict[str, Any]


class Scenario(NamedTuple):
    """One run of the command; `device` is added to the arguments, except where they have one."""

    section: str
    title: str
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.section}: {self.title}"


class Network(NamedTuple):
    """A model at full size, and arguments that make its steps a little longer than 200 ms on two cores."""

    title: str
    model: str
    inputs: tuple[str, ...]
    loss: tuple[str, ...] = ("--classes", "1000")
    batch: int = 1
    kwargs: str = "{}"

    def arguments(self, batch: int | None = None) -> tuple[str, ...]:
        inputs = tuple(part for each in self.inputs for part in ("--input", each))
        kwargs = ("--kwargs", self.kwargs) if self.kwargs != "{}" else ()
        return ("--model", self.model, *kwargs, *inputs, *self.loss, "--batch", str(batch or self.batch))


IMAGE, LARGE_IMAGE = ("float32:3x224x224",), ("float32:3x299x299",)
CV, OWN = "pytorchcv.models", "benchmarks.core_models"
VGG16 = Network("VGG-16", f"{CV}.vgg:vgg16", IMAGE)
INCEPTION3 = Network("Inception v3", f"{CV}.inceptionv3:inceptionv3", LARGE_IMAGE)
INCEPTION4 = Network("Inception v4", f"{CV}.inceptionv4:inceptionv4", LARGE_IMAGE)
RESNET50 = Network("ResNet-50", f"{CV}.resnet:resnet50", IMAGE, batch=2)
DENSENET121 = Network("DenseNet-121", f"{CV}.densenet:densenet121", IMAGE, batch=2)
ALEXNET = Network("AlexNet", f"{CV}.alexnet:alexnet", IMAGE, batch=4)
SQUEEZENET = Network("SqueezeNet", f"{CV}.squeezenet:squeezenet_v1_0", IMAGE, batch=4)
MOBILENET = Network("MobileNet", f"{CV}.mobilenet:mobilenet_w1", IMAGE, batch=4)
NASNET = Network("NASNet", f"{CV}.nasnet:nasnet_4a1056", IMAGE, batch=2)
BERT = Network("BERT, 6 layers", f"{OWN}:bert", ("int64<30522:128",), ("--classes", "2"), 2, '{"layers": 6}')
GPT2 = Network("GPT-2, 6 layers", f"{OWN}:gpt2", ("int64<50257:64",), ("--loss", "lm"), 1, '{"layers": 6}')
LSTM = Network("LSTM", f"{OWN}:LSTMClassifier", ("int64<1000:32",), ("--classes", "10"), batch=16)
GCN = Network("GCN", f"{OWN}:GCN", ("float32:128", "float32:256"), ("--classes", "7"), batch=256)
PAPER = (VGG16, INCEPTION3, INCEPTION4, RESNET50, DENSENET121)
SMALL_BERT = BERT._replace(kwargs='{"layers": 2, "width": 128, "vocabulary": 1000}', inputs=("int64<1000:32",))
SMALL_GPT2 = GPT2._replace(kwargs='{"layers": 2, "width": 128, "vocabulary": 1000}', inputs=("int64<1000:32",))
SMALL_RESNET = Network("ResNet-20", f"{CV}.resnet_cifar:resnet20_cifar10", ("float32:3x32x32",), ("--classes", "10"), 4)


def scenarios(device: str, quick: bool) -> list[Scenario]:
    """The cheap and the important ones first, in case time runs out."""
    rounds = ("--rounds", "1", "--warmup", "1", "--threads", "1") if quick else ("--rounds", "7", "--warmup", "2")
    long = (SMALL_RESNET, SMALL_GPT2) if quick else (RESNET50, DENSENET121, VGG16, BERT, GPT2, INCEPTION3, INCEPTION4)
    others = (SMALL_BERT, LSTM, GCN) if quick else (ALEXNET, SQUEEZENET, MOBILENET, NASNET, LSTM, GCN, *long)
    plain = (SMALL_RESNET, 8) if quick else (RESNET50, 8 if device == "host" else 32)
    link = ("--link", "2") if device == "host" else ()
    five = ("--rounds", "1", "--warmup", "0", "--iterations", "5", "--policies", ALL)
    simulated = ("--device", "sim:RTX_A6000", "--policies", "none")
    found = [Scenario("overhead", plain[0].title, (*plain[0].arguments(plain[1]), *rounds, "--iterations", "3"))]
    found += [Scenario("capture", each.title, (*each.arguments(16), *simulated)) for each in (DENSENET121, *PAPER[:-1])]
    batch = {network: None if device == "host" else 16 * network.batch for network in long}
    found += [
        Scenario(
            "fidelity",
            each.title,
            (*each.arguments(batch[each]), *rounds, *link, "--iterations", "2", "--policies", ALL),
        )
        for each in long
    ]
    found += [Scenario("identity", each.title, (*each.arguments(), *five, *link)) for each in others]
    return found


# ---- running --------------------------------------------------------------------------------------------------------


class Results:
    """The file of results. Scenarios in it are not run again while code, machine and device stay the same."""

    def __init__(self, path: Path, device: str, fresh: bool) -> None:
        self.path = path
        about = {
            "device": device,
            "code": code_fingerprint(),
            "machine": machine(torch_device(device)),
            "versions": versions(),
        }
        self.data: dict[str, Any] = {**about, "scenarios": {}, "planning": []}
        if not fresh and path.exists():
            found = json.loads(path.read_text())
            if all(found.get(key) == about[key] for key in ("device", "code", "machine")):
                self.data = found

    @property
    def scenarios(self) -> dict[str, Any]:
        return self.data["scenarios"]

    def rows(self, section: str) -> list[tuple[str, Row]]:
        """(title, row) of everything measured in a section."""
        named = [(name.partition(": "), each) for name, each in self.scenarios.items()]
        return [(title, row) for (found, _, title), each in named if found == section for row in each["rows"]]

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.data, indent=1) + "\n")
        new.replace(self.path)


def torch_device(device: str) -> torch.device:
    try:
        return choose_device("cpu" if device == "host" else device)
    except DeviceError as error:
        raise SystemExit(f"bench-core: {error.message}\nhint: {error.hint}") from None


def code_fingerprint() -> str:
    """Of everything that is measured."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "pg_tensile").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def run_scenario(scenario: Scenario, device: str) -> dict[str, Any]:
    """Its rows, or what went wrong in `error`."""
    arguments = list(scenario.arguments) + ([] if "--device" in scenario.arguments else ["--device", device])
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "pg_tensile", "bench", *arguments, "--json", file.name]
        started = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        rows = [json.loads(line) for line in Path(file.name).read_text().splitlines()]
    result = {"arguments": arguments, "seconds": round(time.perf_counter() - started, 1), "rows": rows}
    if not rows or done.returncode not in (0, 1):
        result["error"] = done.stderr.strip()[-2000:] or f"exit status {done.returncode}"
    return result


def run_all(results: Results, wanted: Sequence[Scenario], device: str, minutes: float, quick: bool) -> list[str]:
    """Runs what is not there yet. Returns the names of scenarios that the time did not suffice for."""
    ends = time.monotonic() + 60 * minutes
    left = [each for each in wanted if each.name not in results.scenarios]
    with Console(stderr=True).status("") as status:
        for number, scenario in enumerate(left, 1):
            if time.monotonic() > ends:
                return [each.name for each in left[number - 1 :]]
            status.update(f"{scenario.name} ({number} of {len(left)})")
            found = run_scenario(scenario, device)
            results.scenarios[scenario.name] = found
            results.save()
            print(f"{scenario.name}: {found['seconds']:.0f} s {found.get('error', '')}", file=sys.stderr)
        if not results.data["planning"]:
            status.update("planning")
            sizes = (1_000, 10_000) if quick else (1_000, 10_000, 100_000)
            results.data["planning"] = [row._asdict() for row in bench_planning.measure(sizes)]
            results.save()
    return []


# ---- what must hold -------------------------------------------------------------------------------------------------


class Check(NamedTuple):
    """A promise, what was found, and whether that is enough."""

    section: str
    what: str
    found: str
    asked: str
    holds: bool


def checks(results: Results) -> list[Check]:
    device = "cuda" if results.data["device"].startswith("cuda") else "host"
    found = [
        Check(name.partition(":")[0], name, each["error"].splitlines()[0], "rows", False)
        for name, each in results.scenarios.items()
        if "error" in each
    ]
    for title, row in results.rows("overhead"):
        found.append(overhead_check(title, row, OVERHEAD[device]))
    for title, row in results.rows("capture"):
        ms = row["capture_ms"]
        found.append(Check("capture", title, seconds(ms), seconds(CAPTURE_MS), ms is not None and ms < CAPTURE_MS))
    for section in ("fidelity", "identity"):
        for title, row in results.rows(section):
            found += row_checks(section, f"{title}, {row['policy']}", row)
    return found + planning_checks(results.data["planning"])


def overhead_check(title: str, row: Row, limit: float) -> Check:
    vanilla, eager = row["vanilla_step_ms_median"], row["eager_step_ms_median"]
    ratio = vanilla / eager if vanilla and eager else float("inf")
    return Check("overhead", f"{title}, vanilla / eager", f"{ratio:.3f}", f"≤ {limit:.2f}", ratio <= limit)


def row_checks(section: str, what: str, row: Row) -> list[Check]:
    """Of one policy's run. The allocator's record and the simulator's time are asked of the long steps only."""
    if row["error"] is not None:
        return [Check(section, what, row["error"], "no error", False)]
    same = "identical" if row["bit_identical"] else "different"
    exact = row["peak_bytes"] == row["predicted_peak_bytes"]
    found = [
        Check(section, f"{what}: results", same, "identical", row["bit_identical"] is True),
        Check(section, f"{what}: peak", f"{row['peak_bytes']:,}", f"{row['predicted_peak_bytes']:,}", exact),
    ]
    if section == "fidelity":
        off = deviation(row["device_peak_bytes"], row["allocator_peak_bytes"])
        found.append(Check(section, f"{what}: device peak", f"{off:+.1%}", "± 3 %", abs(off) <= ALLOCATOR))
        if row["step_ms_median"] > LONG_MS:
            off = deviation(row["simulated_ms"], row["step_ms_median"])
            holds = FIDELITY[0] <= off <= FIDELITY[1]
            found.append(Check(section, f"{what}: simulated time", f"{off:+.1%}", "−4 … +12 %", holds))
    return found


def planning_checks(rows: Iterable[Row]) -> list[Check]:
    """Limits at 10,000 operators, and growth from there to 100,000."""
    by_size = {round(row["operators"], -3): row for row in rows}
    found = []
    if ten := by_size.get(10_000):
        size = ten["trace_bytes"]
        found.append(Check("planning", "10,000 operators: bytes", f"{size:,}", "< 2,000,000", size < TRACE_BYTES))
        for name, limit in PLANNING.items():
            value = ten[name]
            found.append(
                Check("planning", f"10,000 operators: {name}", f"{value:.1f}", f"< {limit:.0f}", value < limit)
            )
    if ten and (hundred := by_size.get(100_000)):
        for name in PLANNING:
            growth = hundred[name] / ten[name]
            found.append(Check("planning", f"10 × as many: {name}", f"{growth:.1f} ×", "≤ 15 ×", growth <= GROWTH))
    return found


def deviation(found: float, reference: float) -> float:
    return (found - reference) / reference if reference else float("inf")


def seconds(ms: float | None) -> str:
    return "–" if ms is None else f"{ms / 1e3:.2f} s"


# ---- the document ---------------------------------------------------------------------------------------------------


def markdown(results: Results, found: Sequence[Check], missing: Sequence[str]) -> str:
    """The section's generated part."""
    data, run = results.data, results.data["machine"]
    broken = [each for each in found if not each.holds]
    lines = [
        f"Measured on `{data['device']}`: {run.get('gpu') or run['cpu']}, {run['cores']} cores, "
        f"{run['memory_bytes'] / 2**30:.0f} GiB, PyTorch {data['versions']['torch']}, "
        f"Python {data['versions']['python']}, revision {data['versions']['revision']}.",
        "",
        f"{len(found) - len(broken)} of {len(found)} checks hold."
        + "".join(f"\n- **does not hold**: {each.what}: {each.found}, asked for {each.asked}" for each in broken)
        + "".join(f"\n- not measured: {name}" for name in missing),
        "",
        *overhead_table(results),
        *fidelity_table(results),
        *identity_table(results),
        *capture_table(results),
        *planning_table(results),
    ]
    return "\n".join(lines).rstrip() + "\n"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings), *lines, ""] if lines else []


def overhead_table(results: Results) -> list[str]:
    rows = []
    for title, row in results.rows("overhead"):
        if row["error"] is None:
            eager, vanilla = row["eager_step_ms_median"], row["vanilla_step_ms_median"]
            rows.append((title, str(row["batch"]), f"{eager:.0f}", f"{vanilla:.0f}", f"{vanilla / eager:.3f}"))
    return table(("network", "batch", "eager, ms", "vanilla, ms", "ratio"), rows)


def fidelity_table(results: Results) -> list[str]:
    headings = (
        "network",
        "batch",
        "policy",
        "step, ms",
        "simulated",
        "off by",
        "peak, MiB",
        "predicted",
        "device peak",
    )
    rows = []
    for title, row in results.rows("fidelity"):
        start = (title, str(row["batch"]), f"`{row['policy']}`")
        if row["error"] is not None:
            rows.append((*start, row["error"], *[""] * 5))
            continue
        step, simulated = row["step_ms_median"], row["simulated_ms"]
        span = f"{step:.0f} ({row['step_ms_min']:.0f} … {row['step_ms_max']:.0f})"
        exact = "exact" if row["peak_bytes"] == row["predicted_peak_bytes"] else f"{row['predicted_peak_bytes']:,}"
        off = f"{deviation(row['device_peak_bytes'], row['allocator_peak_bytes']):+.2%}"
        peak = f"{row['peak_bytes'] / 2**20:.1f}"
        rows.append((*start, span, f"{simulated:.0f}", f"{deviation(simulated, step):+.1%}", peak, exact, off))
    return table((*headings[:-1], "device peak against the allocator's"), rows)


def identity_table(results: Results) -> list[str]:
    grouped: dict[str, list[Row]] = {}
    for title, row in results.rows("identity"):
        grouped.setdefault(title, []).append(row)
    rows = []
    for title, group in grouped.items():
        cells = ["failed" if row["error"] else "identical" if row["bit_identical"] else "DIFFERENT" for row in group]
        rows.append((title, str(group[0]["batch"]), str(group[0]["operators"]), *cells))
    return table(("five steps of", "batch", "operators", *(f"`{name}`" for name in ALL.split(","))), rows)


def capture_table(results: Results) -> list[str]:
    rows = [
        (title, str(row["batch"]), f"{row['operators']:,}", f"{row['tensors']:,}", seconds(row["capture_ms"]))
        for title, row in results.rows("capture")
        if row["error"] is None
    ]
    return table(("captured", "batch", "operators", "tensors", "time"), rows)


def planning_table(results: Results) -> list[str]:
    names = ("trace_bytes", "serialise_ms", "read_ms", "validate_ms", "footprint_ms", "simulate_ms")
    headings = ("operators", "events", "bytes", "serialise, ms", "read", "validate", "peak", "simulate")
    rows = [
        (
            f"{row['operators']:,}",
            f"{row['events']:,}",
            f"{row[names[0]]:,}",
            *(f"{row[name]:,.1f}" for name in names[1:]),
        )
        for row in results.data["planning"]
    ]
    return table(headings, rows)


def write_document(text: str, device: str) -> None:
    """Between the marks of that device."""
    kind = device.partition(":")[0]
    begin, end = f"<!-- core-{kind}: begin, written by make bench-core -->\n", f"<!-- core-{kind}: end -->"
    page = DOCUMENT.read_text()
    before, found, rest = page.partition(begin)
    if not found:
        raise SystemExit(f"bench-core: {DOCUMENT} has no place for core-{kind}")
    DOCUMENT.write_text(before + begin + "\n" + text + "\n" + end + rest.partition(end)[2])


def print_checks(found: Sequence[Check], missing: Sequence[str]) -> None:
    shown = Table("section", "what", "found", "asked for", "", box=None, pad_edge=False)
    for each in found:
        shown.add_row(each.section, each.what, each.found, each.asked, "" if each.holds else "[red]NO[/red]")
    Console(width=120).print(shown)
    print(
        f"{sum(each.holds for each in found)} of {len(found)} checks hold"
        + f", {len(missing)} scenarios not measured" * bool(missing)
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench_core", description="The graph core's promises at full size.")
    parser.add_argument("--device", default="host", help="host (default), cuda or cuda:N")
    parser.add_argument("--quick", action="store_true", help="small models, one round; results to build/")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    parser.add_argument("--minutes", type=float, default=60.0, help="start nothing later than that (60)")
    parser.add_argument("--only", default="", help="scenarios with this word in their names")
    options = parser.parse_args()
    kind = options.device.partition(":")[0]
    folder = ROOT / "build" if options.quick else ROOT / "benchmarks" / "results"
    results = Results(folder / f"core-{kind}.json", options.device, options.fresh)
    wanted = [each for each in scenarios(kind, options.quick) if options.only in each.name]
    missing = run_all(results, wanted, options.device, options.minutes, options.quick)
    found = checks(results)
    text = markdown(results, found, missing)
    if options.quick:
        (folder / f"core-{kind}.md").write_text(text)
    else:
        write_document(text, options.device)
    print_checks(found, missing)
    return int(not all(each.holds for each in found))


if __name__ == "__main__":
    sys.exit(main())
