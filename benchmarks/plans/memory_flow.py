"""Jobs that are each nearly as large as the device, whose memory flows; simulated.

For each network, with the memory of the paper's V100: the batch of each of two equal jobs over that of one job alone,
if the paper's pairs of groups have to fit, and the training speed of both over taking turns if each begins its next
group as soon as its memory is free (planning/memory_flow/grants.py). Beside it, `joint` with half of the memory and of
the link for each; and both together: plans of `joint` that take more than half, with the memory beyond that flowing.
How much jobs slow each other down when they compute at once depends on the device, so each speed is given for none, for
half and for all of it.

Then the same for jobs of different networks, and for three and four jobs, in 16 groups: there all jobs have the same
part of their batches alone, and pairs are formed of each two jobs while the others keep what they keep between two
iterations.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations
from multiprocessing import get_context
from typing import Any

from benchmarks.experiments.accudnn import largest
from benchmarks.experiments.networks import BERT, PAPER, RESNET50, SMALL_RESNET, UNROLLED_GRU, Network, named
from benchmarks.results import Results
from benchmarks.runner import Run, Section
from benchmarks.tables import table
from pg_tensile.planning.batchsize.traces import BatchTraces
from pg_tensile.planning.device.profile import GIB, RTX_A6000
from pg_tensile.planning.job_planner.candidate import Candidate
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.memory_flow.groups import Group, counted_groups, step_bytes
from pg_tensile.planning.memory_flow.simulation import simulate_memory_flow
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.plan import NO_EVENTS
from pg_tensile.planning.simulator.alone import evaluate
from pg_tensile.planning.trace.trace import Trace
from pg_tensile.tools.bench.simulated import captured
from pg_tensile.tools.cli.bench import parse

PROFILE = RTX_A6000
MEMORY_BYTES = 32 * GIB
NETWORKS = (*PAPER, BERT)
COUNTS = (2, 4, 8, 16)  # groups on the way to the peak
MOST_ROWS = 1 << 17  # of a batch
LARGE = 0.95  # of the batch of a job alone
CONTENTIONS = (0.0, 0.5, 1.0)
PARTS = (0.5, 0.6, 0.7, 0.8)  # of the memory that the plan of each job takes
MIXES = (
    (RESNET50, BERT),
    (RESNET50, UNROLLED_GRU),
    (BERT, UNROLLED_GRU),
    (RESNET50,) * 2,
    (RESNET50,) * 3,
    (RESNET50,) * 4,
)


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

    def largest(self) -> int:
        """Return the largest batch of a job alone on the device."""
        return largest(lambda batch: self.peak_bytes(batch) <= MEMORY_BYTES, most=MOST_ROWS)

    def pair_fits(self, count: int, batch: int) -> bool:
        return pairs_fit([self.groups(batch, count)] * 2)

    def groups(self, batch: int, count: int) -> list[Group]:
        """Return the groups of a step without a plan."""
        return counted_groups(AccessSequence(self.trace(batch), NO_EVENTS), count)


def paired_bytes(first: Sequence[Group], second: Sequence[Group]) -> int:
    """Return what two jobs take whose groups are paired: the i-th of each with the i-th after the other's peak."""
    most = 0
    for takes, gives in ((first, second), (second, first)):
        rising, falling = halves(takes)[0], halves(gives)[1]
        for pair in range(max(len(rising), len(falling))):
            taken = rising[pair].most_bytes if pair < len(rising) else rising[-1].rest_bytes
            given = falling[pair].most_bytes if pair < len(falling) else gives[-1].rest_bytes
            most = max(most, taken + given)
    return most


def halves(groups: Sequence[Group]) -> tuple[Sequence[Group], Sequence[Group]]:
    """Return the groups up to the largest footprint, and those after it."""
    peak = max(range(len(groups)), key=lambda number: groups[number].most_bytes)
    return groups[: peak + 1], groups[peak + 1 :]


def pairs_fit(jobs: Sequence[Sequence[Group]]) -> bool:
    """Return whether each two jobs can be paired while the others keep what they keep between two iterations."""
    kept = [groups[-1].rest_bytes for groups in jobs]
    return all(
        paired_bytes(jobs[first], jobs[second]) + sum(kept) - kept[first] - kept[second] <= MEMORY_BYTES
        for first, second in combinations(range(len(jobs)), 2)
    )


def speeds(jobs: Sequence[Sequence[Group]], alone_us: Sequence[float]) -> list[float] | None:
    """Return the speed of jobs over taking turns, for each of CONTENTIONS; None if they cannot all run.

    `alone_us`: the time of a step of each without a plan, alone on the device.
    """
    found: list[float] = []
    for contention in CONTENTIONS:
        flow = simulate_memory_flow(dict(enumerate(jobs)), MEMORY_BYTES, contention)
        if flow is None:
            return None
        found.append(sum(us / flow.iteration_us[job] for job, us in enumerate(alone_us)))
    return found


def unplanned_speeds(jobs: Sequence[Sequence[Group]]) -> list[float] | None:
    return speeds(jobs, [sum(group.us for group in groups) for groups in jobs])


def planned_speeds(planner: JobPlanner, part: float) -> list[float] | None:
    """Return the speed of two jobs with plans that take this part of the memory each; None if there is no plan.

    Of more than half of it, what both take together exceeds the memory, and flows.
    """
    best = planner.best(int(part * MEMORY_BYTES))
    if not isinstance(best, Candidate):
        return None
    sequence = AccessSequence(best.trace, best.plan)
    stalled_us = evaluate(sequence, planner.link).stalled_us
    groups = counted_groups(sequence, max(COUNTS), stalled_us)
    return speeds([groups] * 2, [planner.vanilla.us] * 2)


def measure(network: Network) -> Iterator[dict[str, Any]]:
    steps = Steps(network)
    alone = steps.largest()
    large = int(LARGE * alone)
    common = {"network": network.title, "alone": alone, "large": large}
    for count in COUNTS:
        paired = largest(partial(steps.pair_fits, count))
        yield common | {
            "groups": count,
            "paired": paired,
            "speeds": unplanned_speeds([steps.groups(paired, count)] * 2),
            "large_speeds": unplanned_speeds([steps.groups(large, count)] * 2),
        }
    planner = JobPlanner(steps.trace(large), PROFILE, share=0.5)
    for part in PARTS:
        yield common | {"groups": None, "part": part, "large_speeds": planned_speeds(planner, part)}


def rows_of(network: Network) -> list[dict[str, Any]]:
    return list(measure(network))


def mix_row(networks: Sequence[Network]) -> dict[str, Any]:
    """Return the results of jobs that all have the same part of their largest batches alone."""
    steps = {network: Steps(network) for network in networks}
    alone = {network: own.largest() for network, own in steps.items()}

    def groups(percent: float) -> list[list[Group]]:
        batches = {network: max(1, int(percent / 100 * alone[network])) for network in steps}
        return [steps[network].groups(batches[network], max(COUNTS)) for network in networks]

    paired = largest(lambda percent: pairs_fit(groups(percent)), most=100)
    return {
        "networks": [network.title for network in networks],
        "alone": [alone[network] for network in networks],
        "paired_percent": paired,
        "batches": [int(paired / 100 * alone[network]) for network in networks],
        "speeds": unplanned_speeds(groups(paired)),
        "large_speeds": unplanned_speeds(groups(100 * LARGE)),
    }


def shown_speeds(found: Sequence[float] | None) -> str:
    return "–" if found is None else " / ".join(f"{speed:.2f}" for speed in found)


def rows(run: Run) -> Iterator[dict[str, Any]]:
    """Simulate all networks and mixes, in as many processes as there are cores; `quick`: one small network."""
    networks, mixes = (NETWORKS, MIXES) if not run.quick else ((SMALL_RESNET,), ())
    wanted = run.wanted([network.title for network in networks])
    titled = {shown_mix([network.title for network in mix]): mix for mix in mixes}
    wanted_mixes = run.wanted(titled)
    with get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        measured = pool.imap(rows_of, [named(networks, title) for title in wanted])
        mixed = pool.imap(mix_row, [titled[title] for title in wanted_mixes])
        for _ in run.scenarios(wanted):
            yield from next(measured)
        for _ in run.scenarios(wanted_mixes):
            yield {"table": "mixes", **next(mixed)}


def tables(results: Results) -> list[str]:
    shown = []
    for row in results.rows():
        batch = f"{row['paired'] / row['alone']:.0%}" if row["groups"] else ""
        cells = (
            str(row["groups"] or f"`joint` at {row['part']:.0%}"),
            batch,
            shown_speeds(row["speeds"]) if row["groups"] else "",
        )
        shown.append((row["network"], str(row["alone"]), *cells, shown_speeds(row["large_speeds"])))
    mixes = [
        (
            shown_mix(row["networks"]),
            " + ".join(map(str, row["alone"])),
            " + ".join(map(str, row["batches"])),
            f"{row['paired_percent']}%",
            shown_speeds(row["speeds"]),
            shown_speeds(row["large_speeds"]),
        )
        for row in results.rows("mixes")
    ]
    headings = ("network", "alone", "groups", "pairs: batch", "speed", f"batch × {LARGE}: speed")
    mixes_headings = ("jobs", "alone", "pairs: batches", "of alone", "speed", f"batches × {LARGE}: speed")
    return [*table(headings, shown), *table(mixes_headings, mixes)]


def shown_mix(networks: Sequence[str]) -> str:
    if len(set(networks)) == 1:
        return f"{len(networks)} × {networks[0]}"
    return " + ".join(networks)


def expected(_kind: str) -> list[str]:
    return [*(network.title for network in NETWORKS), *(shown_mix([network.title for network in mix]) for mix in MIXES)]


BENCHMARK = Section(
    "Jobs whose memory flows, simulated", rows, tables, expected=expected, device=f"sim:{PROFILE.name} with 32 GiB"
)
