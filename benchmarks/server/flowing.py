"""Jobs in processes of their own whose memory flows, executed on the host.

Two to four jobs of small networks train at once on a device whose memory is `ALONE` of what the largest needs. Measured
in the same rounds: taking turns, iteration by iteration; plans of `joint` for an equal part of memory and link each;
memory that flows, in 2, 4, 8 and 16 groups on the way to the peak; both together, with plans that take more than an
equal part; and jobs with as much memory as they like, which no device of this size has. A speed is the sum of all
jobs', each relative to that job alone on the device. `held` is what all of them held together by the grants, at most.
Every job's weights and losses are compared with its own without a plan, to the bit.

Two jobs that have all the memory they like show how much jobs slow each other down by computing at once.

One of the mixes is trained a second time with jobs that come and go: each starts when the one before it has taken a
third of its steps, and leaves after its own. Its speed is the jobs' time alone, one after another, over the time until
the last one has left.
"""

from __future__ import annotations

import random
import socket
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from benchmarks.checks import Check
from benchmarks.experiments.networks import SMALL_DENSENET, SMALL_RESNET, SMALL_SERESNET, VIT, Network
from benchmarks.results import Results
from benchmarks.runner import Run, Section
from benchmarks.tables import table
from benchmarks.together.arbiter import Arbiter
from benchmarks.together.job_process import Jobs, Measured
from benchmarks.together.rounds import STAGGER, common_profile
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.job_planner.candidate import Candidate
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.memory_flow.grants import Grants, GroupedJob
from pg_tensile.planning.memory_flow.groups import Group, counted_groups, groups_of, step_bytes
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.plan import NO_EVENTS, Plan
from pg_tensile.planning.simulator.alone import evaluate
from pg_tensile.tools.bench.contenders import Turn
from pg_tensile.tools.bench.options import BenchOptions, PolicyChoice
from pg_tensile.tools.cli.bench import parse

ALONE = 1.06  # of what the largest job needs: it takes 94 % of the memory
COUNTS = (2, 4, 8, 16)  # groups on the way to the peak
PARTS = (1.2, 1.4, 1.6)  # of an equal part of the memory, that a job's plan takes if the rest flows
COMING = ("3 × ResNet-20", 1 / 3)  # a mix whose jobs also come and go, and the part of a job alone between two starts
ROUNDS, STEPS = 4, 8
CHOICE = PolicyChoice("joint", "joint", early_update=True)
RESNET, SERESNET, DENSENET, TRANSFORMER = (
    SMALL_RESNET._replace(batch=64),
    SMALL_SERESNET._replace(batch=64),
    SMALL_DENSENET._replace(batch=16),
    VIT._replace(batch=4, inputs=("float32:3x224x224",)),
)
MIXES: dict[str, tuple[Network, ...]] = {
    "2 × ResNet-20": (RESNET, RESNET),
    "2 × DenseNet-40": (DENSENET, DENSENET),
    "2 × ViT": (TRANSFORMER, TRANSFORMER),
    "ResNet-20 and DenseNet-40": (RESNET, DENSENET),
    "ResNet-20 and ViT": (RESNET, TRANSFORMER),
    "3 × ResNet-20": (RESNET,) * 3,
    "4: ResNet-20, SE-ResNet-20 twice": (RESNET, SERESNET) * 2,
}


class Work(NamedTuple):
    """A job's plan, and its groups if its memory flows."""

    plan: Plan
    groups: Sequence[Group] = ()


@dataclass
class Entrant:
    """A way to share the memory, and its results. `error`: why it takes no part."""

    name: str
    works: list[Work]  # by job; empty with an error
    budget_bytes: int | None = None  # of memory that flows
    error: str | None = None
    turns: list[list[Turn]] = field(default_factory=list)  # by round and job
    most_bytes: int = 0
    makespans_ms: list[float] = field(default_factory=list)  # by round, of jobs that come and go


def options_of(network: Network) -> BenchOptions:
    arguments = ["bench", *network.arguments(), "--device", "host", "--threads", "1", "--optimizer", "momentum"]
    return parse([*arguments, "--policies", "none,joint:early_update=true"])


def whole(sequence: AccessSequence) -> list[Group]:
    """Return a step as one group, so that jobs take turns."""
    groups = groups_of(sequence, 1 << 62)
    most = max(group.most_bytes for group in groups)
    return [Group(0, groups[-1].last, most, groups[-1].rest_bytes)]


def entrants_of(measured: Sequence[Measured], profile: DeviceProfile, budget_bytes: int) -> Iterator[Entrant]:
    """Yield the ways to share `budget_bytes` between the jobs."""
    count = len(measured)
    vanilla = [AccessSequence(job.early, NO_EVENTS) for job in measured]
    plain = [Work(NO_EVENTS)] * count
    yield Entrant("room for all", plain)
    # One iteration at a time: a budget that two of them exceed.
    turns = [whole(sequence) for sequence in vanilla]
    kept = [groups[-1].rest_bytes for groups in turns]
    least = max(groups[0].most_bytes + sum(kept) - groups[-1].rest_bytes for groups in turns)
    yield Entrant("turns", [Work(NO_EVENTS, groups) for groups in turns], least)
    planners = [JobPlanner(job.early, profile, share=1 / count) for job in measured]
    yield planned(planners, "`joint`, equal parts", [budget_bytes // count] * count, None)
    for groups in COUNTS:
        works = [Work(NO_EVENTS, counted_groups(sequence, groups)) for sequence in vanilla]
        yield Entrant(f"flowing, {groups} groups", works, budget_bytes)
    for part in PARTS:
        limits = [int(part * budget_bytes / count)] * count
        yield planned(planners, f"`joint` for {part / count:.0%}, flowing", limits, budget_bytes)


def planned(planners: Sequence[JobPlanner], name: str, limits: Sequence[int], flowing_bytes: int | None) -> Entrant:
    """Return an entrant with plans of `joint` within the limits, with groups if memory flows within `flowing_bytes`."""
    works = []
    for planner, limit in zip(planners, limits, strict=True):
        best = planner.best(limit)
        if not isinstance(best, Candidate):
            return Entrant(name, [], error="no plan")
        groups: Sequence[Group] = ()
        if flowing_bytes is not None:
            sequence = AccessSequence(best.trace, best.plan)
            groups = counted_groups(sequence, max(COUNTS), evaluate(sequence, planner.link).stalled_us)
        works.append(Work(best.plan, groups))
    return Entrant(name, works, flowing_bytes)


def can_flow(entrant: Entrant) -> bool:
    """Return whether each job's most fits beside what the others keep between two iterations."""
    budget_bytes = entrant.budget_bytes
    return budget_bytes is None or Grants(budget_bytes).fits(GroupedJob(work.groups) for work in entrant.works)


def take_turn(
    processes: Jobs, entrant: Entrant, order: Sequence[int], gap_s: float, steps: int, stay: bool = True
) -> list[Turn]:
    """Let all jobs train in an entrant's way, started in `order` and `gap_s` after each other; see Jobs.turn."""
    plans = {job: work.plan for job, work in enumerate(entrant.works)}
    turn = partial(processes.turn, CHOICE, plans, steps, order, gap_s, True, stay=stay)
    if entrant.budget_bytes is None:
        return turn()
    groups = {job: work.groups for job, work in enumerate(entrant.works)}
    with ExitStack() as stack:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in entrant.works]
        for pair in pairs:
            for end in pair:
                stack.enter_context(end)
        ours = {job: pair[0] for job, pair in enumerate(pairs)}
        arbiter = stack.enter_context(Arbiter(entrant.budget_bytes, ours, groups))
        turns = turn(groups=groups, granting={job: pair[1] for job, pair in enumerate(pairs)})
        entrant.most_bytes = max(entrant.most_bytes, arbiter.most_bytes)
        return turns


def makespan_ms(turns: Sequence[Turn], order: Sequence[int], gap_s: float) -> float:
    """Return the time until the last job has left, of jobs that started `gap_s` after each other."""
    ends = [gap_s * 1e3 * place + turns[job].first_ms + sum(turns[job].step_ms) for place, job in enumerate(order)]
    return max(ends)


def measure(title: str, networks: Sequence[Network], rounds: int, steps: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each way to share the memory of a device that is hardly larger than the largest job."""
    options = [options_of(network) for network in networks]
    shuffled = random.Random(0)
    with Jobs(options) as processes:
        measured = processes.measure()
        profile = common_profile(options[0], measured)
        processes.share_link(profile)
        peaks = [int(step_bytes(AccessSequence(job.early, NO_EVENTS)).max()) for job in measured]
        budget_bytes = int(ALONE * max(peaks))
        entrants = list(entrants_of(measured, profile, budget_bytes))
        gap_s = STAGGER * statistics.mean(job.step_ms for job in measured) / 1e3
        running = [entrant for entrant in entrants if entrant.error is None and can_flow(entrant)]
        for number in range(rounds):
            order = shuffled.sample(range(len(networks)), len(networks))
            for entrant in running[:: -1 if number % 2 else 1]:
                entrant.turns.append(take_turn(processes, entrant, order, gap_s, steps))
                if title == COMING[0]:
                    apart_s = COMING[1] * measured[0].step_ms * steps / 1e3
                    turns = take_turn(processes, entrant, order, apart_s, steps, stay=False)
                    entrant.makespans_ms.append(makespan_ms(turns, order, apart_s))
    alone_ms = [job.step_ms for job in measured]
    digests = [turn.digest for turn in entrants[0].turns[0]]
    for entrant in entrants:
        step_ms = [
            statistics.median(statistics.median(turn.step_ms) for turn in turns)
            for turns in zip(*entrant.turns, strict=True)
        ]
        yield {
            "mix": title,
            "jobs": len(networks),
            "way": entrant.name,
            "budget_bytes": budget_bytes,
            "peak_bytes": peaks,
            "alone_ms": alone_ms,
            "step_ms": step_ms,
            "speed": sum(alone / ms for alone, ms in zip(alone_ms, step_ms, strict=True)) if step_ms else None,
            "coming_and_going": coming(entrant, alone_ms, steps),
            "held_bytes": entrant.most_bytes or None,
            "same_bits": all([turn.digest for turn in turns] == digests for turns in entrant.turns),
            "error": entrant.error or (None if step_ms else "they cannot run together"),
            "rounds": rounds,
            "steps": steps,
        }


def coming(entrant: Entrant, alone_ms: Sequence[float], steps: int) -> float | None:
    """Return the speed of jobs that come and go; None if none did."""
    if not entrant.makespans_ms:
        return None
    return sum(alone_ms) * (steps + 1) / statistics.median(entrant.makespans_ms)


def rows(run: Run) -> Iterator[dict[str, Any]]:
    """Measure all mixes; `quick`: the first one, in one round."""
    rounds, steps = (1, 2) if run.quick else (ROUNDS, STEPS)
    for title in run.scenarios([*MIXES][: 1 if run.quick else None]):
        yield from measure(title, MIXES[title], rounds, steps)


def checks(results: Results) -> list[Check]:
    other = sorted({row["mix"] for row in results.rows() if not row["same_bits"]})
    what = "mixes with other bits than without a plan"
    return [Check("flowing", what, ", ".join(other) or "none", "none", not other)]


def tables(results: Results) -> list[str]:
    rows = results.rows()
    ways = list(dict.fromkeys(row["way"] for row in rows))
    mixes = list(dict.fromkeys(row["mix"] for row in rows))
    by_cell = {(row["mix"], row["way"]): row for row in rows}
    comes = f"{COMING[0]}, coming and going"
    for row in rows:
        if row["coming_and_going"] is not None:
            by_cell[comes, row["way"]] = row | {"speed": row["coming_and_going"], "held_bytes": None}
    if any(mix == comes for mix, _ in by_cell):
        mixes.append(comes)
    # The parts that plans take depend on the number of jobs, so not every mix has each of them.
    shown = [(way, *(shown_cell(by_cell.get((mix, way)), by_cell[mix, "turns"]) for mix in mixes)) for way in ways]
    return [f"{rows[0]['rounds']} rounds of {rows[0]['steps']} steps.", "", *table(("", *mixes), shown)]


def shown_cell(row: Mapping[str, Any] | None, turns: Mapping[str, Any]) -> str:
    """Return the speed over turns, and what all jobs held together of the memory."""
    if row is None or row["speed"] is None:
        return "–"
    held = f" ({row['held_bytes'] / row['budget_bytes']:.0%})" if row["held_bytes"] else ""
    return f"{row['speed'] / turns['speed']:.2f}{held}"


def expected(_kind: str) -> list[str]:
    return [*MIXES]


BENCHMARK = Section("Jobs in processes of their own whose memory flows", rows, tables, checks, expected)
