"""Measurement of several training jobs at once on one device: a process each, as in the database, under joint plans.

Each process captures and measures its step alone. Then each policy plans for all jobs within one budget, and takes a
turn in every round: the processes start from their initial weights, in random order and one after another, and take
steps until each of them has taken those that count, so that all of these are taken beside the others. Costs are
relative to vanilla (policy `none`), which takes its turns together with the others as well. Processes that share a GPU
without plans alternate on it by the driver's time slices, so vanilla is also the cost of time slicing.

A peer (peers.py) is every job's step in its turns. Its memory, and whether its gradients are right, is measured before
the rounds, in each job alone. An entrant that fails in one job is dropped for all, and so is one that takes more than
HOPELESS × vanilla's time for a job's first step. The others go on.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.together.job_process import Inspection, JobError, Jobs, Measured
from pg_tensile.planning.device.profile import GB, RTX_A6000, DeviceProfile
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.memory import floor_bytes, footprint
from pg_tensile.planning.plan.plan import NO_EVENTS, Plan
from pg_tensile.planning.policies import named_policy
from pg_tensile.planning.trace.trace import Trace
from pg_tensile.tools.bench import planned
from pg_tensile.tools.bench.clone import KNOWN
from pg_tensile.tools.bench.contenders import Turn
from pg_tensile.tools.bench.options import MEMORY_BUDGET, VANILLA, BenchOptions, PolicyChoice
from pg_tensile.tools.bench.progress import Progress
from pg_tensile.tools.bench.report import message_of, rates
from pg_tensile.tools.bench.row import Row

STAGGER = 0.3  # of a step, between the starts of two jobs
HOPELESS = 4.0  # times vanilla's first step of the same job: an entrant that takes longer is dropped,
PATIENCE_S = 5.0  # unless it takes less than this, because short steps cost little time


@dataclass(frozen=True)
class TogetherRow(Row):
    """One policy's or peer's result with all jobs running; `model` is the first job's.

    Bytes are the sums of the jobs' peaks, so the jobs never hold more together. `eor`: all jobs' steps (the sum of
    their medians) against vanilla's, and of each job alone in `job_eors`; `round_ms`: the sum of the jobs' medians of
    each round; `stall_ms`: of a step of each job, summed. `floor_bytes`: the sum of the least memory of any plan for
    each job's graph; `gradient_difference`: a peer's, the largest of all jobs'. None means not known, because it
    failed, or because PyTorch does not record it (the bytes that a peer moves).
    """

    jobs: list[str] = field(default_factory=list)
    job_ms: list[float] | None = None  # of each job's step
    job_eors: list[float] | None = None
    bytes_moved: int | None = None


@dataclass(eq=False)
class Entrant:
    """A policy or a peer in the rounds of all jobs, and its results.

    `plans`: by job, empty for a peer; `error`: why it takes no further part.
    """

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
        self, processes: Jobs, steps: int, order: Sequence[int], gap_s: float, settle: bool, vanilla: Entrant
    ) -> None:
        """Take a turn as in Jobs.turn, unless it has failed. `vanilla`: the reference for its first steps."""
        first_ms = [turn.first_ms for turn in vanilla.turns[0]] if vanilla.turns else []
        limits_s = [max(HOPELESS * ms / 1e3, PATIENCE_S) for ms in first_ms]
        if self.error is None:
            try:
                self.turns.append(processes.turn(self.choice, self.plans, steps, order, gap_s, settle, limits_s))
            except JobError as error:
                self.fail(error)

    def round_ms(self) -> list[float]:
        """Return the sum of the jobs' medians for each round."""
        return [sum(statistics.median(turn.step_ms) for turn in turns) for turns in self.turns]

    def job_ms(self) -> list[float]:
        """Return the median of the rounds' medians for each job."""
        by_job = zip(*self.turns, strict=True)
        return [statistics.median(statistics.median(turn.step_ms) for turn in turns) for turns in by_job]


def run_together(
    jobs: Sequence[BenchOptions], policies: Sequence[PolicyChoice], rounds: int, steps: int, progress: Progress
) -> list[TogetherRow]:
    """Return a row for each policy and each peer; vanilla is measured in any case.

    One that fails in a job, or has no plans for the budget, has a row with its error. Raises MeasurementError if a job
    cannot be measured or its process ends.
    """
    first, shuffled = jobs[0], random.Random(jobs[0].seed)
    wanted = [PolicyChoice(VANILLA, VANILLA), *(choice for choice in policies if choice.name != VANILLA)]
    with Jobs(jobs) as processes:
        progress.say("measuring each job alone")
        measured = processes.measure()
        profile = common_profile(first, measured)
        # Peers are inspected before the link is slowed: they wait for it, so their memory is the same over any link.
        entrants = [prepared(choice, measured, profile, processes, progress) for choice in wanted]
        processes.share_link(profile)
        gap_s = STAGGER * statistics.mean(alone.step_ms for alone in measured) / 1e3
        for number in range(rounds):
            progress.say(f"round {number + 1} of {rounds}")
            order = shuffled.sample(range(len(jobs)), len(jobs))
            for entrant in entrants[:: -1 if number % 2 else 1]:
                # A first step that loads or compiles code takes many times as long, so it is taken before the turn.
                settle = first.device.kind == "cuda" or entrant.choice.name == MEMORY_BUDGET
                entrant.take_turn(processes, steps, order, gap_s, settle, entrants[0])
    empty = [empty_row(jobs, entrant.choice, rounds, steps, profile, measured) for entrant in entrants]
    return [filled_row(row, entrant, entrants[0]) for row, entrant in zip(empty, entrants, strict=True)]


def common_profile(options: BenchOptions, measured: Sequence[Measured]) -> DeviceProfile:
    """Return the first job's profile.

    The host's link is the requested one, or keeps an RTX A6000's balance over all jobs.
    """
    profile = measured[0].profile
    if options.device.kind == "cuda":
        return profile
    if options.link_gbps is not None:
        return profile.with_link(options.link_gbps * GB)
    roof_us = sum(roofline.total_us(job.vanilla, RTX_A6000) for job in measured)
    return profile.scaled_link(roof_us, 1e3 * sum(job.step_ms for job in measured))


# ---- before the rounds ----------------------------------------------------------------------------------------------


def prepared(
    choice: PolicyChoice, measured: Sequence[Measured], profile: DeviceProfile, processes: Jobs, progress: Progress
) -> Entrant:
    """Return an entrant with its plans, or with a peer's inspections."""
    if not choice.is_peer:
        return plan_for_all(choice, measured, profile)
    progress.say(f"watching a step: {choice}")
    entrant = Entrant(choice)
    try:
        entrant.inspections = processes.inspect(choice)
    except JobError as error:
        entrant.fail(error)
    return entrant


def plan_for_all(choice: PolicyChoice, measured: Sequence[Measured], profile: DeviceProfile) -> Entrant:
    """Plan for all jobs together by the policy. Plans that need more than the budget are an error."""
    budget = choice.budget.nbytes(vanilla_peak(measured)) if choice.budget else None
    entrant, traces = Entrant(choice, budget_bytes=budget), graphs(choice, measured)
    if choice.name == VANILLA:
        entrant.plans = dict.fromkeys(traces, NO_EVENTS)
        return entrant
    try:
        began = time.perf_counter()
        entrant.plans = named_policy(choice.name, KNOWN)(traces, profile, budget, **dict(choice.keywords))
        entrant.planning_ms = (time.perf_counter() - began) * 1e3
        needed = sum(footprint(trace, entrant.plans[job]).device_peak_bytes for job, trace in traces.items())
        if budget is not None and needed > budget:
            entrant.error = f"its plans need {needed:,} bytes, more than the budget of {budget:,}"
    except Exception as error:
        entrant.fail(error)
    return entrant


def graphs(choice: PolicyChoice, measured: Sequence[Measured]) -> dict[int, Trace]:
    """Return the traces that are planned for and executed, by job."""
    return {job: alone.early if choice.early_update else alone.vanilla for job, alone in enumerate(measured)}


def vanilla_peak(measured: Sequence[Measured]) -> int:
    return sum(footprint(job.vanilla).peak_bytes for job in measured)


# ---- the result -----------------------------------------------------------------------------------------------------


def empty_row(
    jobs: Sequence[BenchOptions],
    choice: PolicyChoice,
    rounds: int,
    steps: int,
    profile: DeviceProfile,
    measured: Sequence[Measured],
) -> TogetherRow:
    """Return the row with the values known in advance."""
    asked = planned.empty_row(jobs[0], choice).with_values(rounds=rounds, iterations=steps, threads=jobs[0].threads)
    complete = asked.with_values(
        link_gbps=profile.out_bytes_per_s / GB,
        vanilla_peak_bytes=vanilla_peak(measured),
        floor_bytes=sum(floor_bytes(trace) for trace in graphs(choice, measured).values()),
    )
    return TogetherRow(**vars(complete), jobs=[options.model for options in jobs])


def filled_row(row: TogetherRow, mine: Entrant, vanilla: Entrant) -> TogetherRow:
    row = replace(row, budget_bytes=mine.budget_bytes, planning_ms=mine.planning_ms, error=mine.error)
    if mine.error is not None:
        return row
    peak, device_peak = peaks(mine)
    job_ms, vanilla_ms = mine.job_ms(), vanilla.job_ms()
    msr, eor, cbr = rates(row.vanilla_peak_bytes or 0, peak, sum(vanilla_ms), sum(job_ms))
    expected = [turn.digest for turn in vanilla.turns[0]] if vanilla.turns else None
    return replace(
        with_transfers(row, mine.turns),
        peak_bytes=peak,
        device_peak_bytes=device_peak,
        msr=msr,
        eor=eor,
        cbr=cbr,
        job_ms=job_ms,
        round_ms=mine.round_ms(),
        job_eors=[ms / reference_ms for ms, reference_ms in zip(job_ms, vanilla_ms, strict=True)]
        if vanilla_ms
        else None,
        bit_identical=all([turn.digest for turn in turns] == expected for turns in mine.turns) if expected else None,
        gradient_difference=max((inspection.gradient_difference for inspection in mine.inspections), default=None),
    )


def peaks(entrant: Entrant) -> tuple[int, int]:
    """Return the peaks of the storages, and with workspaces.

    They are the sums over the jobs; for a policy the largest of its rounds.
    """
    if entrant.inspections:
        peaks = [(inspection.peak_bytes, inspection.device_peak_bytes) for inspection in entrant.inspections]
        return sum(peak for peak, _ in peaks), sum(device_peak for _, device_peak in peaks)
    rounds = [[turn.totals for turn in turns if turn.totals] for turns in entrant.turns]
    peak = max(sum(counters.peak_bytes for counters in totals) for totals in rounds)
    return peak, max(sum(counters.device_peak_bytes for counters in totals) for totals in rounds)


def with_transfers(row: TogetherRow, turns: list[list[Turn]]) -> TogetherRow:
    """Add bytes moved and stalls of one step of each job, if they are counted. On CUDA stalls are not timed."""
    rounds = [[turn.totals for turn in own if turn.totals] for own in turns]
    if not all(rounds):
        return row
    moved = [
        sum((counters.bytes_out + counters.bytes_in) // counters.iterations for counters in totals) for totals in rounds
    ]
    stalls = [sum(counters.stall_us / counters.iterations / 1e3 for counters in totals) for totals in rounds]
    stall_ms = None if row.device.startswith("cuda") else statistics.median(stalls)
    return replace(row, bytes_moved=round(statistics.mean(moved)), stall_ms=stall_ms)
