"""`make bench-waterwave`: two equal jobs, each nearly as large as the device, whose memory flows between them.

For each network, with the memory of the paper's V100: the batch of each of two jobs over that of one job alone, if the
paper's pairs of groups have to fit, and the training speed of both over taking turns if each begins its next group as
soon as its memory is free (planning/waterwave/grants.py). Beside it, `joint` with half of the memory and of the link
for each; and both together: plans of `joint` that take more than half, with the memory beyond that flowing. How much
two jobs slow each other down when they compute at once depends on the device, so each speed is given for none, for half
and for all of it. Everything is simulated.

The rows go to benchmarks/results/waterwave-model.json and to docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import get_context
from typing import Any

from benchmarks.experiments.accudnn import largest
from benchmarks.experiments.networks import BERT, PAPER, Network
from benchmarks.scenarios import RESULTS, measured_on, write_document
from benchmarks.tables import table
from pg_tensile.planning.batchsize.traces import BatchTraces
from pg_tensile.planning.device.profile import GIB, RTX_A6000
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.plan import NO_EVENTS
from pg_tensile.planning.policies.joint.candidate import Candidate
from pg_tensile.planning.policies.joint.planner import JobPlanner
from pg_tensile.planning.simulator.alone import evaluate
from pg_tensile.planning.trace.trace import Trace
from pg_tensile.planning.waterwave.groups import Group, counted_groups, step_bytes
from pg_tensile.planning.waterwave.simulation import simulate_flow
from pg_tensile.tools.bench.report import machine, versions
from pg_tensile.tools.bench.simulated import captured
from pg_tensile.tools.cli.bench import parse

NAME, KIND = "waterwave", "model"
PATH = RESULTS / f"{NAME}-{KIND}.json"
PROFILE = RTX_A6000
MEMORY_BYTES = 32 * GIB
NETWORKS = (*PAPER, BERT)
COUNTS = (2, 4, 8, 16)  # groups on the way to the peak
LARGE = 0.95  # of the batch of a job alone
CONTENTIONS = (0.0, 0.5, 1.0)
PARTS = (0.5, 0.6, 0.7, 0.8)  # of the memory that the plan of each job takes


class Steps:
    """A network's training steps of all batch sizes."""

    def __init__(self, network: Network) -> None:
        def capture(size: int) -> Trace:
            options = ["bench", *network.arguments(size), "--device", f"sim:{PROFILE.name}"]
            options += ["--policies", "none,joint:early_update=true", "--optimizer", "momentum"]
            return captured(parse(options)).early.trace

        self._traces = BatchTraces(capture)

    def trace(self, batch: int) -> Trace:
        return roofline.timed(self._traces.trace_at(batch), PROFILE)

    def peak_bytes(self, batch: int) -> int:
        return int(step_bytes(AccessSequence(self.trace(batch), NO_EVENTS)).max())

    def groups(self, batch: int, count: int) -> list[Group]:
        """Return the groups of a step without a plan."""
        return counted_groups(AccessSequence(self.trace(batch), NO_EVENTS), count)


def paired_bytes(groups: Sequence[Group]) -> int:
    """Return what two jobs take whose groups are paired: the i-th one of a job with the i-th one after the peak."""
    peak = max(range(len(groups)), key=lambda number: groups[number].most_bytes)
    rising, falling = groups[: peak + 1], groups[peak + 1 :]
    most = 0
    for pair in range(max(len(rising), len(falling))):
        first = rising[pair].most_bytes if pair < len(rising) else rising[-1].rest_bytes
        second = falling[pair].most_bytes if pair < len(falling) else groups[-1].rest_bytes
        most = max(most, first + second)
    return most


def pairs_fit(steps: Steps, count: int, batch: int) -> bool:
    return paired_bytes(steps.groups(batch, count)) <= MEMORY_BYTES


def speeds(groups: Sequence[Group], alone_us: float) -> list[float] | None:
    """Return the speed of two jobs over taking turns, for each of CONTENTIONS; None if they cannot both run.

    `alone_us`: the time of a step without a plan, alone on the device.
    """
    found: list[float] = []
    for contention in CONTENTIONS:
        flow = simulate_flow({1: groups, 2: groups}, MEMORY_BYTES, contention)
        if flow is None:
            return None
        found.append(2 * alone_us / statistics.fmean(flow.iteration_us.values()))
    return found


def unplanned_speeds(groups: Sequence[Group]) -> list[float] | None:
    return speeds(groups, sum(group.us for group in groups))


def planned_speeds(planner: JobPlanner, part: float) -> list[float] | None:
    """Return the speed of two jobs with plans that take this part of the memory each; None if there is no plan.

    Of more than half of it, what both take together exceeds the memory, and flows.
    """
    best = planner.best(int(part * MEMORY_BYTES))
    if not isinstance(best, Candidate):
        return None
    sequence = AccessSequence(best.trace, best.plan)
    stalled_us = evaluate(sequence, planner.link).stalled_us
    return speeds(counted_groups(sequence, max(COUNTS), stalled_us), planner.vanilla.us)


def measure(network: Network) -> Iterator[dict[str, Any]]:
    steps = Steps(network)
    alone = largest(lambda batch: steps.peak_bytes(batch) <= MEMORY_BYTES)
    large = int(LARGE * alone)
    common = {"network": network.title, "alone": alone, "large": large, "revision": versions()["revision"]}
    for count in COUNTS:
        paired = largest(partial(pairs_fit, steps, count))
        yield common | {
            "groups": count,
            "paired": paired,
            "speeds": unplanned_speeds(steps.groups(paired, count)),
            "large_speeds": unplanned_speeds(steps.groups(large, count)),
        }
    planner = JobPlanner(steps.trace(large), PROFILE, share=0.5)
    for part in PARTS:
        yield common | {"groups": None, "part": part, "large_speeds": planned_speeds(planner, part)}


def rows_of(network: Network) -> list[dict[str, Any]]:
    return list(measure(network))


def shown_speeds(found: Sequence[float] | None) -> str:
    return "–" if found is None else " / ".join(f"{speed:.2f}" for speed in found)


def page_part(results: Mapping[str, Any]) -> str:
    """Return the generated part of the section."""
    rows = results["rows"]
    revisions = ", ".join(dict.fromkeys(row["revision"] for row in rows))
    headings = ("network", "alone", "groups", "pairs: batch", "speed", f"batch × {LARGE}: speed")
    shown = []
    for row in rows:
        batch = f"{row['paired'] / row['alone']:.0%}" if row["groups"] else ""
        cells = (
            str(row["groups"] or f"`joint` at {row['part']:.0%}"),
            batch,
            shown_speeds(row["speeds"]) if row["groups"] else "",
        )
        shown.append((row["network"], str(row["alone"]), *cells, shown_speeds(row["large_speeds"])))
    heading = measured_on(f"sim:{PROFILE.name} with 32 GiB", results["machine"], results["versions"], revisions)
    return "\n".join([heading, "", *table(headings, shown)]).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Two jobs whose memory flows between them.")
    parser.add_argument("--document", action="store_true", help="only write the document from the results")
    if not parser.parse_args().document:
        with get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
            rows = [row for rows in pool.imap(rows_of, NETWORKS) for row in rows]
        results = {"machine": machine(None), "versions": versions(), "rows": rows}
        PATH.write_text(json.dumps(results, indent=1) + "\n")
    part = page_part(json.loads(PATH.read_text()))
    write_document(NAME, KIND, part)
    print(part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
