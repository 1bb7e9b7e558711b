"""The graph core's promises at full size, on this machine.

The sections:

- overhead: the time of a program without events against eager PyTorch (ResNet-50, batch 8);
- fidelity: networks whose steps take over 200 ms, with the policies none, swap_all and recompute_all: whether the
  simulator predicts the device's step time and peak, and whether the executor's records agree with the allocator's;
- identity: whether five steps end in the same bits as eager PyTorch's, on many kinds of models;
- capture: the time of capturing at batch 16 and full resolution (nothing is executed);
- planning: the growth of validating, analysing and simulating plans up to 100,000 operators (planning_speed.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks import planning_speed
from benchmarks.checks import Check, deviation, fidelity_checks, simulator_checks, timings_of
from benchmarks.command import Row
from benchmarks.experiments.networks import (
    ALEXNET,
    BERT,
    DENSENET121,
    GCN,
    GPT2,
    INCEPTION3,
    INCEPTION4,
    LSTM,
    MOBILENET,
    NASNET,
    PAPER,
    RESNET50,
    SMALL_BERT,
    SMALL_GPT2,
    SMALL_RESNET,
    SQUEEZENET,
    VGG16,
)
from benchmarks.results import Results
from benchmarks.runner import Run
from benchmarks.scenarios import Scenario, scenario_section
from benchmarks.tables import table

ALL = "none,swap_all,recompute_all"
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
GROWTH = 15.0  # of times, from 10,000 to 100,000 operators: linear, with a margin for cache effects


def scenarios(device: str, quick: bool) -> list[Scenario]:
    rounds = ("--rounds", "1", "--warmup", "1", "--threads", "1") if quick else ("--rounds", "7", "--warmup", "2")
    long = (SMALL_RESNET, SMALL_GPT2) if quick else (RESNET50, DENSENET121, VGG16, BERT, GPT2, INCEPTION3, INCEPTION4)
    others = (SMALL_BERT, LSTM, GCN) if quick else (ALEXNET, SQUEEZENET, MOBILENET, NASNET, LSTM, GCN, *long)
    plain = (SMALL_RESNET, 8) if quick else (RESNET50, 8 if device == "host" else 32)
    link = ("--link", "2") if device == "host" else ()
    five = ("--rounds", "1", "--warmup", "0", "--iterations", "5", "--policies", ALL)
    simulated = ("--device", "sim:RTX_A6000", "--policies", "none")
    listed = [Scenario("overhead", plain[0].title, (*plain[0].arguments(plain[1]), *rounds, "--iterations", "3"))]
    listed += [Scenario("capture", network.title, (*network.arguments(16), *simulated)) for network in PAPER]
    batch = {network: None if device == "host" else 16 * network.batch for network in long}
    listed += [
        Scenario(
            "fidelity",
            network.title,
            (*network.arguments(batch[network]), *rounds, *link, "--iterations", "2", "--policies", ALL),
        )
        for network in long
    ]
    listed += [Scenario("identity", network.title, (*network.arguments(), *five, *link)) for network in others]
    return listed


def seconds(ms: float | None) -> str:
    return "–" if ms is None else f"{ms / 1e3:.2f} s"


# ---- what must hold -------------------------------------------------------------------------------------------------


def checks(results: Results) -> list[Check]:
    checked = [overhead_check(title, row, OVERHEAD[results.kind]) for title, row in results.titled("overhead")]
    for title, row in results.titled("capture"):
        ms = row["capture_ms"]
        checked.append(Check("capture", title, seconds(ms), seconds(CAPTURE_MS), ms is not None and ms < CAPTURE_MS))
    checked += simulator_checks("fidelity", timings_of(results.titled("fidelity")))
    for section in ("fidelity", "identity"):
        for title, row in results.titled(section):
            checked += row_checks(section, f"{title}, {row['policy']}", row)
    return checked + planning_checks(results.rows("planning"))


def overhead_check(title: str, row: Row, limit: float) -> Check:
    vanilla, eager = row["vanilla_step_ms_median"], row["eager_step_ms_median"]
    ratio = vanilla / eager if vanilla and eager else float("inf")
    return Check("overhead", f"{title}, vanilla / eager", f"{ratio:.3f}", f"≤ {limit:.2f}", ratio <= limit)


def row_checks(section: str, what: str, row: Row) -> list[Check]:
    """Check one policy's run; the allocator's record and the simulator's time for the long steps only."""
    if row["error"] is not None:
        return [Check(section, what, row["error"], "no error", False)]
    same = "identical" if row["bit_identical"] else "different"
    exact = row["peak_bytes"] == row["predicted_peak_bytes"]
    checked = [
        Check(section, f"{what}: results", same, "identical", row["bit_identical"] is True),
        Check(section, f"{what}: peak", f"{row['peak_bytes']:,}", f"{row['predicted_peak_bytes']:,}", exact),
    ]
    if section == "fidelity":
        off = deviation(row["device_peak_bytes"], row["allocator_peak_bytes"])
        checked.append(Check(section, f"{what}: device peak", f"{off:+.1%}", "± 3 %", abs(off) <= ALLOCATOR))
        checked += fidelity_checks(section, what, row["simulated_ms"], row["step_ms_median"])
    return checked


def planning_checks(rows: Iterable[Row]) -> list[Check]:
    """Check the limits at 10,000 operators, and the growth from there to 100,000."""
    by_size = {round(row["operators"], -3): row for row in rows}
    checked = []
    if ten := by_size.get(10_000):
        size = ten["trace_bytes"]
        checked.append(Check("planning", "10,000 operators: bytes", f"{size:,}", "< 2,000,000", size < TRACE_BYTES))
        for name, limit in PLANNING.items():
            value = ten[name]
            checked.append(
                Check("planning", f"10,000 operators: {name}", f"{value:.1f}", f"< {limit:.0f}", value < limit)
            )
    if ten and (hundred := by_size.get(100_000)):
        for name in PLANNING:
            growth = hundred[name] / ten[name]
            checked.append(Check("planning", f"10 × as many: {name}", f"{growth:.1f} ×", "≤ 15 ×", growth <= GROWTH))
    return checked


# ---- the document ---------------------------------------------------------------------------------------------------


def overhead_table(results: Results) -> list[str]:
    rows = []
    for title, row in results.titled("overhead"):
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
    for title, row in results.titled("fidelity"):
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
    for title, row in results.titled("identity"):
        grouped.setdefault(title, []).append(row)
    rows = []
    for title, group in grouped.items():
        cells = ["failed" if row["error"] else "identical" if row["bit_identical"] else "DIFFERENT" for row in group]
        rows.append((title, str(group[0]["batch"]), str(group[0]["operators"]), *cells))
    return table(("five steps of", "batch", "operators", *(f"`{name}`" for name in ALL.split(","))), rows)


def capture_table(results: Results) -> list[str]:
    rows = [
        (title, str(row["batch"]), f"{row['operators']:,}", f"{row['tensors']:,}", seconds(row["capture_ms"]))
        for title, row in results.titled("capture")
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
        for row in results.rows("planning")
    ]
    return table(headings, rows)


def tables(results: Results) -> list[str]:
    return [
        *overhead_table(results),
        *fidelity_table(results),
        *identity_table(results),
        *capture_table(results),
        *planning_table(results),
    ]


def planning(run: Run) -> list[Row]:
    sizes = (1_000, 10_000) if run.quick else (1_000, 10_000, 100_000)
    return [row._asdict() for row in planning_speed.measure(sizes)]


BENCHMARK = scenario_section("The graph core at full size", scenarios, tables, checks, planning=planning)
