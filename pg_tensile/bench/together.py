"""Measures several training jobs at once on one device: a process each, as in the database, under plans made together.

Each process captures and measures its step alone. Then, in every round, each policy plans for all jobs within one
budget; the processes start from their initial weights, in random order and one after another, and go on taking steps
until each of them has taken those that count, so that all of these are taken beside the others. What a policy costs is
told against vanilla (policy `none`), which takes its turns together with the others' as well.
"""

from __future__ import annotations

import hashlib
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple

import torch

from pg_tensile.bench.contenders import PlanStepper
from pg_tensile.bench.options import VANILLA, BenchOptions, PolicyChoice
from pg_tensile.bench.progress import Progress
from pg_tensile.bench.report import machine, message_of, rates, versions
from pg_tensile.errors import MeasurementError
from pg_tensile.latency import roofline
from pg_tensile.peak import footprint
from pg_tensile.plan import NO_EVENTS, Plan
from pg_tensile.policies import named_policy
from pg_tensile.profile import GB, RTX_A6000, DeviceProfile
from pg_tensile.trace import Trace

STAGGER = 0.3  # of a step, between the starts of two jobs


class Measured(NamedTuple):
    """What a job is planned with. Milliseconds of a vanilla step alone on the device."""

    vanilla: Trace
    early: Trace
    step_ms: float
    profile: DeviceProfile


class Turn(NamedTuple):
    """What one job did in one round. `digest` is of its losses and its state after the steps that count."""

    step_ms: tuple[float, ...]
    peak_bytes: int
    device_peak_bytes: int
    stall_us: float
    bytes_moved: int
    digest: str


@dataclass(frozen=True)
class TogetherRow:
    """One policy's result with all jobs running. Bytes are the sums of the jobs' peaks, so at no time do they hold
    more; `eor`: all jobs' steps (the sum of their medians) against vanilla's, and of each job alone in `job_eors`."""

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
    budget: str | None = None
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    msr: float | None = None
    eor: float | None = None
    cbr: float | None = None
    step_ms: list[float] | None = None  # of each job
    job_eors: list[float] | None = None
    stall_ms: float | None = None  # of a step of each job, summed
    bytes_moved: int | None = None
    planning_ms: float | None = None
    bit_identical: bool | None = None
    versions: Mapping[str, str | None] | None = None
    machine: Mapping[str, Any] | None = None
    error: str | None = None


# ---- a job's process ------------------------------------------------------------------------------------------------


def serve(connection: Connection, options: BenchOptions) -> None:
    """What a job's process does: answers (name, arguments) with (True, result) or (False, message)."""
    from pg_tensile.bench.run import default_threads

    torch.set_num_threads(options.threads or default_threads(options.device.kind))
    job = _Job(connection, options)
    commands: dict[str, Callable[..., Any]] = {"measure": job.measure, "load": job.load, "turn": job.turn}
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, commands[name](*arguments)))
        except Exception as error:
            connection.send((False, message_of(error)))


class _Silent(Progress):
    def say(self, text: str) -> None: ...


class _Job:
    def __init__(self, connection: Connection, options: BenchOptions) -> None:
        self._connection, self._options = connection, options
        self._stepper: PlanStepper | None = None

    def measure(self) -> tuple[bytes, bytes, float, dict[str, Any]]:
        from pg_tensile.bench.measured import Session

        self._session = session = Session(self._options, _Silent())
        step_ms = session.calibrate()
        if step_ms is None:
            raise MeasurementError("the device has not enough memory for a step without a plan")
        traces = session.workload.vanilla.trace, session.workload.early.trace
        return traces[0].to_bytes(), traces[1].to_bytes(), step_ms, asdict(session.profile)

    def load(self, plan: bytes, early: bool, profile: dict[str, Any], share: float) -> None:
        """Gets ready for a turn."""
        session = self._session
        session.profile = DeviceProfile(**profile)
        self._device = session.open_device(None)
        self._device.share_link(share)
        captured = session.workload.early if early else session.workload.vanilla
        self._stepper = PlanStepper(session.workload, captured, self._device, Plan.from_bytes(plan))

    def turn(self, steps: int) -> Turn:
        """The first step does not count. Then it says so, and goes on until it hears that nobody needs it to."""
        from pg_tensile.bench.workload import seed_everything

        assert self._stepper is not None
        stepper, batches = self._stepper, self._session.workload.batches(steps + 1)
        seed_everything(self._options.seed)
        times, losses = [], []
        for batch in batches:
            began = time.perf_counter()
            loss = stepper.step(batch)
            stepper.synchronize()
            times.append((time.perf_counter() - began) * 1e3)
            losses.append(loss.detach().cpu().clone())
        totals, digest = replace(stepper.executor.counters), _digest(stepper, losses)
        self._connection.send((True, None))
        while not self._connection.poll():
            stepper.step(batches[-1])
            stepper.synchronize()
        self._connection.recv()
        stepper.close()
        self._device.close()
        moved = (totals.bytes_out + totals.bytes_in) // totals.iterations
        stall_us = totals.stall_us / totals.iterations
        return Turn(tuple(times[1:]), totals.peak_bytes, totals.device_peak_bytes, stall_us, moved, digest)


def _digest(stepper: PlanStepper, losses: Sequence[torch.Tensor]) -> str:
    digest, state = hashlib.sha256(), stepper.state()
    optimizer = [tensor for kept in state.optimizer.values() for tensor in kept.values()]
    for tensor in (*losses, *state.model.values(), *optimizer):
        if isinstance(tensor, torch.Tensor):
            digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# ---- all of them ----------------------------------------------------------------------------------------------------


class Jobs:
    """The processes; they end with the `with` block."""

    def __init__(self, options: Sequence[BenchOptions]) -> None:
        context = get_context("spawn")
        pairs = [context.Pipe() for _ in options]
        self._pipes = [mine for mine, _ in pairs]
        self._processes = [
            context.Process(target=serve, args=(theirs, each), daemon=True)
            for (_, theirs), each in zip(pairs, options, strict=True)
        ]
        self._theirs = [theirs for _, theirs in pairs]

    def __enter__(self) -> Jobs:
        for process, theirs in zip(self._processes, self._theirs, strict=True):
            process.start()
            theirs.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()

    def measure(self) -> list[Measured]:
        """One after another: each alone on the device."""
        found = []
        for job in range(len(self._pipes)):
            self._ask(job, "measure")
            vanilla, early, step_ms, profile = self._answer(job)
            found.append(
                Measured(Trace.from_bytes(vanilla), Trace.from_bytes(early), step_ms, DeviceProfile(**profile))
            )
        return found

    def turn(
        self,
        plans: Mapping[int, Plan],
        early: bool,
        profile: DeviceProfile,
        steps: int,
        order: Sequence[int],
        gap_s: float,
    ) -> list[Turn]:
        """One of each job: started in that order, so many seconds after each other. Raises MeasurementError."""
        for job in order:
            self._ask(job, "load", plans[job].to_bytes(), early, asdict(profile), 1 / len(order))
        for job in order:
            self._answer(job)
        for job in order:
            self._ask(job, "turn", steps)
            time.sleep(gap_s)
        for job in order:
            self._answer(job)  # has taken the steps that count
        for job in order:
            self._pipes[job].send(None)
        return [self._answer(job) for job in range(len(order))]

    def _ask(self, job: int, name: str, *arguments: Any) -> None:
        self._pipes[job].send((name, arguments))

    def _answer(self, job: int) -> Any:
        try:
            good, result = self._pipes[job].recv()
        except (EOFError, ConnectionError):
            raise MeasurementError(f"the process of job {job + 1} ended unexpectedly") from None
        if not good:
            raise MeasurementError(f"job {job + 1} failed: {result}")
        return result


def run_together(
    jobs: Sequence[BenchOptions], policies: Sequence[PolicyChoice], rounds: int, steps: int, progress: Progress
) -> list[TogetherRow]:
    """A row for each policy; vanilla is measured in any case. A policy without plans for the budget is a row that says
    so. Raises MeasurementError if a job fails."""
    first, shuffled = jobs[0], random.Random(jobs[0].seed)
    wanted = [PolicyChoice(VANILLA, VANILLA), *(each for each in policies if each.name != VANILLA)]
    turns: dict[PolicyChoice, list[list[Turn]]] = {choice: [] for choice in wanted}
    with Jobs(jobs) as processes:
        progress.say("measuring each job alone")
        measured = processes.measure()
        profile = common_profile(first, measured)
        planned = {choice: plan_for_all(choice, measured, profile) for choice in wanted}
        for number in range(rounds):
            progress.say(f"round {number + 1} of {rounds}")
            order = shuffled.sample(range(len(jobs)), len(jobs))
            gap_s = STAGGER * statistics.mean(each.step_ms for each in measured) / 1e3
            for choice in wanted[:: -1 if number % 2 else 1]:
                plan = planned[choice]
                if plan.error is None:
                    found = processes.turn(plan.plans, choice.early_update, profile, steps, order, gap_s)
                    turns[choice].append(found)
    rows = []
    for choice in wanted:
        empty = empty_row(jobs, choice, rounds, steps, profile, measured)
        rows.append(filled_row(empty, planned[choice], turns[choice], turns[wanted[0]]))
    return rows


def common_profile(options: BenchOptions, measured: Sequence[Measured]) -> DeviceProfile:
    """Of the first job's process; the host's link is the one asked for, or keeps an RTX A6000's balance over all."""
    profile = measured[0].profile
    if options.device.kind == "cuda":
        return profile
    if options.link_gbps is not None:
        return profile.with_link(options.link_gbps * GB)
    roof_us = sum(roofline.total_us(each.vanilla, RTX_A6000) for each in measured)
    return profile.scaled_link(roof_us, 1e3 * sum(each.step_ms for each in measured))


class PlannedJobs(NamedTuple):
    """Plans by job. `error`: why there are none."""

    plans: dict[int, Plan]
    budget_bytes: int | None
    planning_ms: float | None = None
    error: str | None = None


def plan_for_all(choice: PolicyChoice, measured: Sequence[Measured], profile: DeviceProfile) -> PlannedJobs:
    """By the policy, for all jobs together. A plan that needs more than the budget is an error."""
    vanilla = sum(footprint(each.vanilla).peak_bytes for each in measured)
    budget = choice.budget.nbytes(vanilla) if choice.budget else None
    traces = {job: each.early if choice.early_update else each.vanilla for job, each in enumerate(measured)}
    if choice.name == VANILLA:
        return PlannedJobs(dict.fromkeys(traces, NO_EVENTS), budget)
    try:
        began = time.perf_counter()
        plans = named_policy(choice.name)(traces, profile, budget, **dict(choice.keywords))
        planning_ms = (time.perf_counter() - began) * 1e3
        needed = sum(footprint(trace, plans[job]).device_peak_bytes for job, trace in traces.items())
    except Exception as error:
        return PlannedJobs({}, budget, error=message_of(error))
    if budget is not None and needed > budget:
        reason = f"its plans need {needed:,} bytes, more than the budget of {budget:,}"
        return PlannedJobs(plans, budget, planning_ms, reason)
    return PlannedJobs(plans, budget, planning_ms)


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
        vanilla_peak_bytes=sum(footprint(each.vanilla).peak_bytes for each in measured),
        budget=str(choice.budget) if choice.budget else None,
        versions=versions(),
        machine=machine(None),
    )


def filled_row(
    row: TogetherRow, planned: PlannedJobs, mine: list[list[Turn]], vanilla: list[list[Turn]]
) -> TogetherRow:
    row = replace(row, budget_bytes=planned.budget_bytes, planning_ms=planned.planning_ms, error=planned.error)
    if not mine:
        return row
    step_ms, vanilla_ms = job_times(mine), job_times(vanilla)
    peak = max(sum(turn.peak_bytes for turn in turns) for turns in mine)
    msr, eor, cbr = rates(row.vanilla_peak_bytes, peak, sum(vanilla_ms), sum(step_ms))
    return replace(
        row,
        peak_bytes=peak,
        device_peak_bytes=max(sum(turn.device_peak_bytes for turn in turns) for turns in mine),
        msr=msr,
        eor=eor,
        cbr=cbr,
        step_ms=step_ms,
        job_eors=[one / other for one, other in zip(step_ms, vanilla_ms, strict=True)],
        stall_ms=statistics.median(sum(turn.stall_us for turn in turns) / 1e3 for turns in mine),
        bytes_moved=round(statistics.mean(sum(turn.bytes_moved for turn in turns) for turns in mine)),
        bit_identical=all(
            turn.digest == other.digest for turns in mine for turn, other in zip(turns, vanilla[0], strict=True)
        ),
    )


def job_times(turns: list[list[Turn]]) -> list[float]:
    """Of each job: the median of the rounds' medians, milliseconds."""
    return [statistics.median(statistics.median(turn.step_ms) for turn in each) for each in zip(*turns, strict=True)]
