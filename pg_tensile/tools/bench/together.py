"""Measures several training jobs at once on one device: a process each, as in the database, under plans made together.

Each process captures and measures its step alone. Then, in every round, each policy plans for all jobs within one
budget; the processes start from their initial weights, in random order and one after another, and go on taking steps
until each of them has taken those that count, so that all of these are taken beside the others. What a policy costs is
told against vanilla (policy `none`), which takes its turns together with the others' as well. Processes that share a
GPU without plans take turns on it by the driver's time slices, so vanilla is also what time slicing takes.

A peer (peers.py) is every job's step in its turns. What it takes, and whether its gradients are right, is found out
before the rounds, in each job alone. Who fails in one job is out, with all jobs; so is who takes many times as long as
vanilla for a job's first step (HOPELESS). The others go on.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pg_tensile.planning.bounds import smallest_peak
from pg_tensile.planning.device.profile import GB, RTX_A6000, DeviceProfile
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import NO_EVENTS, Plan
from pg_tensile.planning.policies import named_policy
from pg_tensile.planning.trace.trace import Trace
from pg_tensile.tools.bench.job_process import Inspection, JobError, Jobs, Measured, Turn
from pg_tensile.tools.bench.known import KNOWN
from pg_tensile.tools.bench.options import MEMORY_BUDGET, VANILLA, BenchOptions, PolicyChoice
from pg_tensile.tools.bench.progress import Progress
from pg_tensile.tools.bench.report import machine, message_of, rates, versions

STAGGER = 0.3  # of a step, between the starts of two jobs
HOPELESS = 4.0  # times vanilla's first step of the same job: who takes longer goes no further,
PATIENCE_S = 5.0  # and longer than that, as short steps do not take anybody's time


@dataclass(frozen=True)
class TogetherRow:
    """One policy's or peer's result with all jobs running. Bytes are the sums of the jobs' peaks, so at no time do they
    hold more; `eor`: all jobs' steps (the sum of their medians) against vanilla's, and of each job alone in `job_eors`.
    `floor_bytes`: the sum of what no plan for the jobs' graphs goes below; `gradient_difference`: a peer's, the largest
    of all jobs'. None: not known, because it failed, or because PyTorch does not tell (what a peer moves)."""

    jobs: list[str]
    policy: str
    label: str
    device: str
    batch: int
    rounds: int
    steps: int
    threads: int
    link_gbps: float
    vanilla_peak_bytes: int
    floor_bytes: int
    budget: str | None = None
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    msr: float | None = None
    eor: float | None = None
    cbr: float | None = None
    step_ms: list[float] | None = None  # of each job
    round_ms: list[float] | None = None  # of each round: the sum of the jobs' medians
    job_eors: list[float] | None = None
    stall_ms: float | None = None  # of a step of each job, summed
    bytes_moved: int | None = None
    planning_ms: float | None = None
    bit_identical: bool | None = None
    gradient_difference: float | None = None
    versions: Mapping[str, str | None] | None = None
    machine: Mapping[str, Any] | None = None
    error: str | None = None


@dataclass(eq=False)
class Contender:
    """A policy or a peer, and what came of it. `plans` by job, empty for a peer; `error`: why it takes no further
    part."""

    choice: PolicyChoice
    plans: dict[int, Plan] = field(default_factory=dict)
    budget_bytes: int | None = None
    planning_ms: float | None = None
    inspections: list[Inspection] = field(default_factory=list)  # of a peer, by job
    turns: list[list[Turn]] = field(default_factory=list)  # by round and job
    error: str | None = None

    def fail(self, error: BaseException) -> None:
        self.error = message_of(error)
        self.turns.clear()

    def take_turn(
        self, processes: Jobs, steps: int, order: Sequence[int], gap_s: float, settle: bool, vanilla: Contender
    ) -> None:
        """As Jobs.turn, unless it is out. `vanilla`: whom its first steps are compared with."""
        first_ms = [turn.first_ms for turn in vanilla.turns[0]] if vanilla.turns else []
        limits_s = [max(HOPELESS * each / 1e3, PATIENCE_S) for each in first_ms]
        if self.error is None:
            try:
                self.turns.append(processes.turn(self.choice, self.plans, steps, order, gap_s, settle, limits_s))
            except JobError as error:
                self.fail(error)

    def round_ms(self) -> list[float]:
        """Of each round: the sum of the jobs' medians."""
        return [sum(statistics.median(turn.step_ms) for turn in turns) for turns in self.turns]

    def job_ms(self) -> list[float]:
        """Of each job: the median of the rounds' medians."""
        by_job = zip(*self.turns, strict=True)
        return [statistics.median(statistics.median(turn.step_ms) for turn in turns) for turns in by_job]


def run_together(
    jobs: Sequence[BenchOptions], policies: Sequence[PolicyChoice], rounds: int, steps: int, progress: Progress
) -> list[TogetherRow]:
    """A row for each policy and each peer; vanilla is measured in any case. Who fails in a job, or has no plans for the
    budget, is a row that says so. Raises MeasurementError if a job cannot be measured or its process ends."""
    first, shuffled = jobs[0], random.Random(jobs[0].seed)
    wanted = [PolicyChoice(VANILLA, VANILLA), *(each for each in policies if each.name != VANILLA)]
    with Jobs(jobs) as processes:
        progress.say("measuring each job alone")
        measured = processes.measure()
        profile = common_profile(first, measured)
        # Before the link is a slow one: a peer waits for it, and so takes the same memory over any.
        contenders = [prepared(choice, measured, profile, processes, progress) for choice in wanted]
        processes.share_link(profile)
        gap_s = STAGGER * statistics.mean(each.step_ms for each in measured) / 1e3
        for number in range(rounds):
            progress.say(f"round {number + 1} of {rounds}")
            order = shuffled.sample(range(len(jobs)), len(jobs))
            for contender in contenders[:: -1 if number % 2 else 1]:
                # Where a first step loads or compiles code, which takes many times as long, it is taken before.
                settle = first.device.kind == "cuda" or contender.choice.name == MEMORY_BUDGET
                contender.take_turn(processes, steps, order, gap_s, settle, contenders[0])
    empty = [empty_row(jobs, each.choice, rounds, steps, profile, measured) for each in contenders]
    return [filled_row(row, each, contenders[0]) for row, each in zip(empty, contenders, strict=True)]


def common_profile(options: BenchOptions, measured: Sequence[Measured]) -> DeviceProfile:
    """Of the first job's process; the host's link is the one asked for, or keeps an RTX A6000's balance over all."""
    profile = measured[0].profile
    if options.device.kind == "cuda":
        return profile
    if options.link_gbps is not None:
        return profile.with_link(options.link_gbps * GB)
    roof_us = sum(roofline.total_us(each.vanilla, RTX_A6000) for each in measured)
    return profile.scaled_link(roof_us, 1e3 * sum(each.step_ms for each in measured))


# ---- before the rounds ----------------------------------------------------------------------------------------------


def prepared(
    choice: PolicyChoice, measured: Sequence[Measured], profile: DeviceProfile, processes: Jobs, progress: Progress
) -> Contender:
    """With plans, or a peer's with what it takes."""
    if not choice.is_peer:
        return plan_for_all(choice, measured, profile)
    progress.say(f"watching a step: {choice}")
    contender = Contender(choice)
    try:
        contender.inspections = processes.inspect(choice)
    except JobError as error:
        contender.fail(error)
    return contender


def plan_for_all(choice: PolicyChoice, measured: Sequence[Measured], profile: DeviceProfile) -> Contender:
    """By the policy, for all jobs together. Plans that need more than the budget are an error."""
    budget = choice.budget.nbytes(vanilla_peak(measured)) if choice.budget else None
    contender, traces = Contender(choice, budget_bytes=budget), graphs(choice, measured)
    if choice.name == VANILLA:
        contender.plans = dict.fromkeys(traces, NO_EVENTS)
        return contender
    try:
        began = time.perf_counter()
        contender.plans = named_policy(choice.name, KNOWN)(traces, profile, budget, **dict(choice.keywords))
        contender.planning_ms = (time.perf_counter() - began) * 1e3
        needed = sum(footprint(trace, contender.plans[job]).device_peak_bytes for job, trace in traces.items())
        if budget is not None and needed > budget:
            contender.error = f"its plans need {needed:,} bytes, more than the budget of {budget:,}"
    except Exception as error:
        contender.fail(error)
    return contender


def graphs(choice: PolicyChoice, measured: Sequence[Measured]) -> dict[int, Trace]:
    """What is planned for and executed, by job."""
    return {job: each.early if choice.early_update else each.vanilla for job, each in enumerate(measured)}


def vanilla_peak(measured: Sequence[Measured]) -> int:
    return sum(footprint(each.vanilla).peak_bytes for each in measured)


# ---- the result -----------------------------------------------------------------------------------------------------


def empty_row(
    jobs: Sequence[BenchOptions],
    choice: PolicyChoice,
    rounds: int,
    steps: int,
    profile: DeviceProfile,
    measured: Sequence[Measured],
) -> TogetherRow:
    return TogetherRow(
        jobs=[each.model for each in jobs],
        policy=choice.name,
        label=choice.label,
        device=str(jobs[0].device),
        batch=jobs[0].batch,
        rounds=rounds,
        steps=steps,
        threads=jobs[0].threads,
        link_gbps=profile.out_bytes_per_s / GB,
        vanilla_peak_bytes=vanilla_peak(measured),
        floor_bytes=sum(smallest_peak(trace) for trace in graphs(choice, measured).values()),
        budget=str(choice.budget) if choice.budget else None,
        versions=versions(),
        machine=machine(None),
    )


def filled_row(row: TogetherRow, mine: Contender, vanilla: Contender) -> TogetherRow:
    row = replace(row, budget_bytes=mine.budget_bytes, planning_ms=mine.planning_ms, error=mine.error)
    if mine.error is not None:
        return row
    peak, device_peak = peaks(mine)
    step_ms, vanilla_ms = mine.job_ms(), vanilla.job_ms()
    msr, eor, cbr = rates(row.vanilla_peak_bytes, peak, sum(vanilla_ms), sum(step_ms))
    expected = [turn.digest for turn in vanilla.turns[0]] if vanilla.turns else None
    return replace(
        with_transfers(row, mine.turns),
        peak_bytes=peak,
        device_peak_bytes=device_peak,
        msr=msr,
        eor=eor,
        cbr=cbr,
        step_ms=step_ms,
        round_ms=mine.round_ms(),
        job_eors=[one / other for one, other in zip(step_ms, vanilla_ms, strict=True)] if vanilla_ms else None,
        bit_identical=all([turn.digest for turn in turns] == expected for turns in mine.turns) if expected else None,
        gradient_difference=max((each.gradient_difference for each in mine.inspections), default=None),
    )


def peaks(contender: Contender) -> tuple[int, int]:
    """Of the storages, and with workspaces: the sums over the jobs; of a policy's rounds the largest."""
    if contender.inspections:
        found = contender.inspections
        return sum(each.peak_bytes for each in found), sum(each.device_peak_bytes for each in found)
    rounds = [[turn.totals for turn in turns if turn.totals] for turns in contender.turns]
    peak = max(sum(each.peak_bytes for each in totals) for totals in rounds)
    return peak, max(sum(each.device_peak_bytes for each in totals) for totals in rounds)


def with_transfers(row: TogetherRow, turns: list[list[Turn]]) -> TogetherRow:
    """For one step of each job, where somebody counts. On CUDA nobody times stalls."""
    rounds = [[turn.totals for turn in each if turn.totals] for each in turns]
    if not all(rounds):
        return row
    moved = [sum((each.bytes_out + each.bytes_in) // each.iterations for each in totals) for totals in rounds]
    stalls = [sum(each.stall_us / each.iterations / 1e3 for each in totals) for totals in rounds]
    stall_ms = None if row.device.startswith("cuda") else statistics.median(stalls)
    return replace(row, bytes_moved=round(statistics.mean(moved)), stall_ms=stall_ms)
