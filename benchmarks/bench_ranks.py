"""`make bench-ranks`: jobs of up to 512 ranks with and without memory plans, simulated.

For each network and device: the largest batch of a rank without a plan, with plans of `joint` that make a step at most
SLOWDOWN times as long, with gradients accumulated over parts of the batch, and with the optimizer's states sharded over
the ranks (ZeRO stage 1). Then, for each number of ranks, link and all-reduce (planning/latency/collectives.py), the
rows per second of all ranks: without a plan, with the best of the plans, and with the best number of accumulated parts.
Collectives take their time after all else; with `hidden`, they overlap with the backward pass as well as they could.
With `limited`, the rows of all ranks together stay within a batch with which the network is known to train well.

Plans are made as if the network took no time. The devices' memory, arithmetic and links to the host are those of their
profiles; steps are AdamW's in float32, with early updates. The rows go to benchmarks/results/ranks-model.json and to
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.experiments.accudnn import largest
from benchmarks.experiments.networks import BERT, GPT2, RESNET50, VGG16, Network
from benchmarks.scenarios import RESULTS, measured_on, write_document
from benchmarks.tables import table
from pg_tensile.execution.capture import RankSpec, capture
from pg_tensile.planning.batchsize.traces import BatchTraces
from pg_tensile.planning.device.profile import A100_40GB, GB, H100_PCIE, RTX_A6000, DeviceProfile
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.latency.collectives import (
    ETHERNET_10,
    ETHERNET_100,
    INFINIBAND_400,
    NVLINK_4,
    PCIE_4,
    Link,
    collectives,
    hierarchical_us,
    reduced_bytes,
    ring_us,
    tree_us,
)
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.plan import NO_EVENTS
from pg_tensile.planning.policies.joint.candidate import Candidate
from pg_tensile.planning.policies.joint.planner import JobPlanner
from pg_tensile.planning.trace.rows import Kind, Phase
from pg_tensile.planning.trace.trace import Trace
from pg_tensile.planning.waterwave.groups import step_bytes
from pg_tensile.tools.bench.report import machine, versions
from pg_tensile.tools.bench.simulated import captured
from pg_tensile.tools.bench.workload import fake_input, make_targets
from pg_tensile.tools.cli.bench import parse

NAME, KIND = "ranks", "model"
PATH = RESULTS / f"{NAME}-{KIND}.json"
TOKENS = ("int64<50257:1024",)
# and the rows of all ranks together with which training is known to go as well as with fewer: Goyal et al. 2017, You et
# al. 2020 (LAMB, 128 tokens), and of models as large as these Brown et al. 2020 (half a million and a million tokens)
NETWORKS: dict[Network, int | None] = {
    RESNET50: 8192,
    VGG16: None,
    BERT._replace(title="BERT base", kwargs="{}"): 65536,
    GPT2._replace(title="GPT-2 medium", kwargs='{"layers": 24, "width": 1024}', inputs=TOKENS): 512,
    GPT2._replace(title="GPT-2 XL", kwargs='{"layers": 48, "width": 1600}', inputs=TOKENS): 1024,
}
WITHIN = {RTX_A6000: PCIE_4, A100_40GB: PCIE_4, H100_PCIE: NVLINK_4}  # devices, and their link within a machine
BETWEEN = (ETHERNET_10, ETHERNET_100, INFINIBAND_400)  # machines
RANKS = (8, 64, 512)
DEVICES = 8  # in a machine of a hierarchy
SLOWDOWN = 1.2  # most, of a plan over the same batch without one
MULTIPLES = (1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # of the largest batch without a plan, to be planned
MOST = 64  # times it
GRAIN = 0.05
SHARDED_BYTES = 8  # per parameter: Adam's two states in float32
TRAINED_BYTES = 16  # per parameter: weight, gradient and these
EARLY_BYTES = 12  # the same without the gradient, which early updates need for a moment only
CARDS_GB = (24, 48, 80, 141)
DIGITS = 6


class Point(NamedTuple):
    """A step of one rank without its collectives: rows, µs, and µs of the backward pass that could hide them."""

    rows: int
    us: float
    backward_us: float
    slowdown: float = 1.0  # over a step with as many rows that needs no plan


class World(NamedTuple):
    """Ranks with the time of all collectives of a step, and most rows of a step of all ranks, if there is a limit."""

    ranks: int
    collectives_us: float
    most_rows: int | None = None

    def rate(self, point: Point, hidden: bool = False) -> float:
        """Return the rows per second of all ranks; 0 if they are too many."""
        if self.most_rows is not None and self.ranks * point.rows > self.most_rows:
            return 0.0
        exposed_us = max(0.0, self.collectives_us - point.backward_us) if hidden else self.collectives_us
        return self.ranks * point.rows / (point.us + exposed_us) * 1e6

    def best(self, points: Iterable[Point], hidden: bool = False) -> Point | None:
        """Return the point with the highest rate; None if all have too many rows."""
        best = max(points, key=lambda point: self.rate(point, hidden), default=None)
        return best if best is not None and self.rate(best, hidden) else None


def accumulated(part: Point, parts: int, optimizer_us: float, adding_us: float) -> Point:
    """Return a step whose gradients are accumulated over `parts` of its batch, of which `part` is one.

    The optimizer runs once, and gradients are added between two parts. Collectives follow the last backward pass only.
    """
    us = parts * part.us + (parts - 1) * (adding_us - optimizer_us)
    return Point(parts * part.rows, us, part.backward_us)


def least_share(alone: Point, planned: Point) -> float:
    """Return the time of collectives over that of a step without a plan from which on the plan raises the rate.

    With r times the rows in r·s times the time, r / (r·s + c) exceeds 1 / (1 + c) for c > r (s − 1) / (r − 1).
    """
    more = planned.rows / alone.rows
    slower = planned.us / alone.us / more
    return max(0.0, more * (slower - 1) / (more - 1))


def sharded_bytes(parameters: int, ranks: int) -> int:
    """Return what a rank saves if each has one part of the optimizer's states (ZeRO stage 1, Rajbhandari et al. 2020).

    Gradients are then reduced and scattered and weights gathered, which takes as long as an all-reduce.
    """
    return SHARDED_BYTES * parameters * (ranks - 1) // ranks


def most_parameters(memory_bytes: float, bytes_per_parameter: float) -> float:
    """Return the parameters whose weights, gradients and states take half of the memory."""
    return memory_bytes / 2 / bytes_per_parameter


class Steps:
    """A network's training steps of all batch sizes, of a job of several ranks."""

    def __init__(self, network: Network) -> None:
        self._traces = BatchTraces(partial(captured_rank, network))
        trace = self._traces.trace_at(1)
        self.parameters = int(trace.tensor_bytes[trace.tensor_kind == Kind.PARAMETER].sum()) // 4
        self.buckets = [reduced_bytes(trace, operator) for operator in collectives(trace)]

    def trace(self, rows: int, profile: DeviceProfile) -> Trace:
        """Return the step of a batch with latencies that leave out the network."""
        trace = self._traces.trace_at(rows)
        return trace.with_latencies(roofline.on_device_us(trace, profile))

    def peak_bytes(self, rows: int) -> int:
        return int(step_bytes(AccessSequence(self._traces.trace_at(rows), NO_EVENTS)).max())

    def largest(self, memory_bytes: int) -> int:
        """Return the largest batch of a rank without a plan; 0 if there is none."""
        return largest(lambda rows: self.peak_bytes(rows) <= memory_bytes, most=1 << 17)


def captured_rank(network: Network, rows: int) -> Trace:
    """Capture the step of a rank, with the buckets of its gradients."""
    options = parse(["bench", *network.arguments(rows), "--optimizer", "adamw"])
    workload = captured(options)
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = tuple(fake_input(spec, rows) for spec in options.inputs)
        targets = make_targets(options, workload.output, inputs, None)
    spec = replace(workload.spec, ranks=RankSpec(2))
    return capture(workload.model, inputs, targets, spec, True, torch.device("cpu")).trace


class Rank:
    """Steps of one rank of a job on a device: without a plan, with plans, and with accumulated gradients."""

    def __init__(self, steps: Steps, profile: DeviceProfile, most_rows: int | None) -> None:
        self.steps, self.profile = steps, profile
        self.gradient_bytes = sum(steps.buckets)
        self.alone = steps.largest(profile.memory_bytes)
        self._planned: dict[int, Point | None] = {}
        limits = [] if most_rows is None else [most_rows // ranks for ranks in RANKS]
        least = max(1, self.alone)
        self.most = largest(self._has_plan, least, MOST * least, GRAIN)
        self.most_part = steps.largest(profile.memory_bytes - self.gradient_bytes)
        tried = [*(int(multiple * least) for multiple in MULTIPLES), *limits]
        for rows in tried:
            if self.alone < rows <= self.most:
                self._has_plan(rows)
        self.vanilla = [self._vanilla(rows) for rows in sorted({self.alone, *limits}) if 0 < rows <= self.alone]
        self.planned = [point for _, point in sorted(self._planned.items()) if point and point.rows > self.alone]
        self.accumulated = [*self._accumulated()]

    def _vanilla(self, rows: int) -> Point:
        trace = self.steps.trace(rows, self.profile)
        backward_us = float(trace.latency_us[trace.phase == Phase.BACKWARD].sum())
        return Point(rows, float(trace.latency_us.sum()), backward_us)

    def _has_plan(self, rows: int) -> bool:
        if rows not in self._planned:
            self._planned[rows] = self._plan(rows)
        return self._planned[rows] is not None

    def _plan(self, rows: int) -> Point | None:
        """Return the step under the best plan of a batch; None if it takes more than SLOWDOWN times as long."""
        planner = JobPlanner(self.steps.trace(rows, self.profile), self.profile)
        best = planner.best(self.profile.memory_bytes)
        if not isinstance(best, Candidate) or best.us > SLOWDOWN * planner.vanilla.us:
            return None
        slowdown = best.us / planner.vanilla.us
        return Point(rows, best.us, slowdown * self._vanilla(rows).backward_us, slowdown)

    def _accumulated(self) -> Iterator[Point]:
        """Yield steps with as many rows as those that have a plan, in as few parts as fit beside all gradients."""
        for rows in [point.rows for point in self.planned] if self.most_part else []:
            parts = -(-rows // self.most_part)
            trace = self.steps.trace(rows // parts, self.profile)
            optimizer_us = float(trace.latency_us[trace.phase == Phase.OPTIMIZER].sum())
            adding_us = 3 * self.gradient_bytes / self.profile.bytes_per_s * 1e6  # two are read, one is written
            yield accumulated(self._vanilla(rows // parts), parts, optimizer_us, adding_us)


Time = Callable[[float], float]  # µs of an all-reduce of bytes


def layouts(ranks: int, link: Link, within: Link) -> dict[str, Time]:
    """Return all-reduces among ranks: those on machines of their own, and those on DEVICES of each machine."""
    return {
        "ring": partial(ring_us, ranks=ranks, link=link),
        "tree": partial(tree_us, ranks=ranks, link=link),
        "hierarchy": partial(hierarchical_us, machines=ranks // DEVICES, devices=DEVICES, within=within, between=link),
    }


def gain(more: float | None, less: float | None) -> float | None:
    return more / less if more and less else None


def world_row(rank: Rank, ranks: int, collectives_us: float, most_rows: int | None) -> dict[str, Any]:
    """Return the rates of a world, and what plans gain."""
    row: dict[str, Any] = {"ranks": ranks, "collectives_us": collectives_us}
    free, limited = World(ranks, collectives_us), World(ranks, collectives_us, most_rows)
    for name, world, hidden in (("", free, False), ("hidden_", free, True), ("limited_", limited, False)):
        if name == "limited_" and most_rows is None:
            continue
        known = {"alone": rank.vanilla, "plan": rank.planned, "parts": rank.accumulated}
        best = {key: world.best([*rank.vanilla, *points], hidden) for key, points in known.items()}
        rates = {key: None if point is None else world.rate(point, hidden) for key, point in best.items()}
        row |= {f"{name}{key}_rate": rate for key, rate in rates.items()}
        row |= {
            f"{name}gain": gain(rates["plan"], rates["alone"]),
            f"{name}over_parts": gain(rates["plan"], rates["parts"]),
        }
        if plan := best["plan"]:
            row |= {f"{name}plan_rows": plan.rows, f"{name}plan_slowdown": plan.slowdown}
    return row


def worlds(rank: Rank, most_rows: int | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of all worlds, with their efficiency over a rank alone."""
    single = world_row(rank, 1, 0.0, most_rows)
    base = single["alone_rate"] or single["plan_rate"]
    yield {"link": "none", "layout": "alone"} | single
    for ranks in RANKS:
        for link in BETWEEN:
            for layout, us in layouts(ranks, link, WITHIN[rank.profile]).items():
                row = world_row(rank, ranks, sum(map(us, rank.steps.buckets)), most_rows)
                efficiency = {f"{key}_efficiency": gain(row[f"{key}_rate"], ranks * base) for key in ("alone", "plan")}
                yield {"link": link.name, "layout": layout} | row | efficiency


def rank_row(rank: Rank) -> dict[str, Any]:
    """Return the largest batches of a rank, and where its memory goes."""
    steps, memory_bytes = rank.steps, rank.profile.memory_bytes
    largest_plan = rank.planned[-1] if rank.planned else None
    shares = [least_share(rank.vanilla[-1], point) for point in rank.planned] if rank.alone else []
    return {
        "parameters": steps.parameters,
        "buckets": len(steps.buckets),
        "state_share": TRAINED_BYTES * steps.parameters / memory_bytes,
        "alone": rank.alone,
        "alone_us": rank.vanilla[-1].us if rank.vanilla else None,
        "plan": rank.most,
        "plan_slowdown": largest_plan.slowdown if largest_plan else None,
        "part": rank.most_part,
        "least_share": min(shares, default=None),
        "planned": [[point.rows, point.slowdown] for point in rank.planned],
        "sharded": {
            str(ranks): steps.largest(memory_bytes + sharded_bytes(steps.parameters, ranks)) for ranks in RANKS
        },
    }


def measure(network: Network) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of a network's ranks and of its worlds."""
    steps, most_rows, ranks, found = Steps(network), NETWORKS[network], [], []
    for profile in WITHIN:
        rank = Rank(steps, profile, most_rows)
        about = {"network": network.title, "device": profile.name}
        ranks.append(about | rank_row(rank) | {"most_rows": most_rows, "revision": versions()["revision"]})
        found += [about | row for row in worlds(rank, most_rows)]
    return rounded(ranks), rounded(found)


def rounded(value: Any) -> Any:
    """Return results with fractions of DIGITS digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def card_rows() -> list[dict[str, Any]]:
    """Return the parameters, in millions, that take half of a device's memory with Adam in float32."""
    kept = TRAINED_BYTES - SHARDED_BYTES
    per_parameter = {"whole": float(TRAINED_BYTES), "early": float(EARLY_BYTES)}
    per_parameter |= {f"sharded_{ranks}": kept + SHARDED_BYTES / ranks for ranks in RANKS}
    return [
        {"gb": gb} | {name: most_parameters(gb * GB, nbytes) / 1e6 for name, nbytes in per_parameter.items()}
        for gb in CARDS_GB
    ]


# ---- the document ---------------------------------------------------------------------------------------------------


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def memory_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    headings = ("network", "device", "parameters, M", "16 bytes each", "rows", "with a plan", "times as long")
    more = ("of a part", "sharded over 8", "over 512", "pays from", "most ranks")
    shown = []
    for row in rows:
        limit = row["most_rows"] // row["alone"] if row["most_rows"] and row["alone"] else None
        shown.append(
            (
                row["network"],
                row["device"],
                f"{row['parameters'] / 1e6:,.1f}",
                percent(row["state_share"]),
                *(f"{row[key]:,}" for key in ("alone", "plan")),
                times(row["plan_slowdown"]),
                *(f"{rows:,}" for rows in (row["part"], row["sharded"]["8"], row["sharded"]["512"])),
                percent(row["least_share"]),
                "–" if limit is None else f"{limit:,}",
            )
        )
    return table((*headings, *more), shown)


def collectives_table(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the time of a step's collectives, in ms; a hierarchy's with the last device's link within."""
    last = found[-1]["device"]
    cells: dict[tuple[str, str], dict[int, list[str]]] = {}
    for row in found:
        if row["device"] == last and row["ranks"] > 1:
            by_ranks = cells.setdefault((row["network"], row["link"]), {})
            by_ranks.setdefault(row["ranks"], []).append(f"{row['collectives_us'] / 1e3:,.1f}")
    rows = [(*key, *(" / ".join(by_ranks[ranks]) for ranks in RANKS)) for key, by_ranks in cells.items()]
    return table(("network", "link", *(f"{ranks} ranks, ms" for ranks in RANKS)), rows)


def gains_table(found: Sequence[Mapping[str, Any]], layout_names: Sequence[str]) -> list[str]:
    """Return efficiencies and gains of worlds, of the layout that is fastest for each number of ranks."""
    cells: dict[tuple[str, str, str], dict[int, Mapping[str, Any]]] = {}
    for row in found:
        if row["layout"] in layout_names:
            by_ranks = cells.setdefault((row["network"], row["device"], row["link"]), {})
            best = by_ranks.get(row["ranks"])
            if best is None or row["collectives_us"] < best["collectives_us"]:
                by_ranks[row["ranks"]] = row
    rows = [(*key, *(gains_cell(by_ranks[ranks]) for ranks in RANKS)) for key, by_ranks in cells.items()]
    return table(("network", "device", "link", *(f"{ranks} ranks" for ranks in RANKS)), rows)


def gains_cell(row: Mapping[str, Any]) -> str:
    gains = " / ".join(times(row.get(f"{name}gain")) for name in ("", "hidden_", "limited_"))
    return f"{percent(row['alone_efficiency'] or row['plan_efficiency'])}, {gains}"


def parts_table(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the range, over all worlds, of the rate with plans over that with accumulated gradients."""
    over: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in found:
        ranges = over.setdefault((row["network"], row["device"]), {"": [], "limited_": []})
        for name, values in ranges.items():
            if row["ranks"] > 1 and row.get(f"{name}over_parts"):
                values.append(row[f"{name}over_parts"])
    shown = [(*key, *map(shown_range, ranges.values())) for key, ranges in over.items()]
    return table(("network", "device", "plan over parts", "limited"), shown)


def shown_range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} … {max(values):.2f}" if values else "–"


def cards_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    headings = ("GB", "16 bytes", "early updates", *(f"sharded over {ranks}" for ranks in RANKS))
    names = ("whole", "early", *(f"sharded_{ranks}" for ranks in RANKS))
    return table(headings, [(str(row["gb"]), *(f"{row[name]:,.0f}" for name in names)) for row in rows])


def page_part(results: Mapping[str, Any]) -> str:
    """Return the generated part of the section."""
    devices = ", ".join(f"sim:{profile.name}" for profile in WITHIN)
    revisions = ", ".join(dict.fromkeys(row["revision"] for row in results["rows"]))
    found = results["worlds"]
    parts = [
        measured_on(devices, results["machine"], results["versions"], revisions),
        "",
        "Rows of a rank:",
        "",
        *memory_table(results["rows"]),
        "All collectives of a step, on a ring / on trees / in a hierarchy:",
        "",
        *collectives_table(found),
        "Eight ranks on each machine:",
        "",
        *gains_table(found, ("hierarchy",)),
        "Each rank on a machine of its own, on a ring or on trees:",
        "",
        *gains_table(found, ("ring", "tree")),
        "Plans over accumulated gradients:",
        "",
        *parts_table(found),
        "Millions of parameters that take half of a device:",
        "",
        *cards_table(results["cards"]),
    ]
    return "\n".join(parts).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Jobs of many ranks with and without memory plans, simulated.")
    parser.add_argument("--document", action="store_true", help="only write the document from the results")
    if not parser.parse_args().document:
        with get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
            measured = pool.map(measure, NETWORKS, chunksize=1)
        results = {
            "machine": machine(None),
            "versions": versions(),
            "rows": [row for rows, _ in measured for row in rows],
            "worlds": [row for _, rows in measured for row in rows],
            "cards": rounded(card_rows()),
        }
        PATH.write_text(json.dumps(results, indent=1) + "\n")
    part = page_part(json.loads(PATH.read_text()))
    write_document(NAME, KIND, part)
    print(part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
