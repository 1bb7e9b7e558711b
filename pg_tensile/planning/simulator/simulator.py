"""Discrete-event simulation of plans: the time that they take on a device, before anything runs.

Each job has its own compute stream, which executes the steps of its access sequence at the latencies of its trace (at
the roofline's if none is known yet). All jobs share one link (link.py). Copies are requested and waited for as
`AccessSequence.actions` states; waiting stops the job's compute stream. Nothing else takes time: allocating and freeing
are indexed by operators, not by the clock.

All transfers of an iteration end within it. A job alone on the link therefore repeats one iteration, so simulating one
is enough. Jobs that share the link interleave differently each time; their steady state is the mean over the second
half of the simulated iterations. Plans change between two iterations (programs.py).
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pg_tensile.errors import SimulationError
from pg_tensile.planning.device.link import Link, Request
from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.plan import memory
from pg_tensile.planning.plan.plan import NO_EVENTS, Boundary, Plan
from pg_tensile.planning.simulator.programs import Meeting, Program, Role, build_programs
from pg_tensile.planning.trace.trace import Trace

AGREEMENT = 1e-9  # relative difference up to which two successive iterations count as equal
FASTEST = 32  # multiple of the requested iterations after which a job stops, even if slower jobs continue


class PlanChange(NamedTuple):
    """A new plan, which takes over after `iterations` (≥ 1) iterations with the previous one."""

    iterations: int
    plan: Plan


class SimulatedJob(NamedTuple):
    """A job that starts at `start_us`, with its persistent tensors in `initial_state`.

    None means the boundary state of `plan`; any other state causes a change of plan before the first iteration.
    """

    trace: Trace
    plan: Plan = NO_EVENTS
    start_us: float = 0.0
    initial_state: Boundary | None = None
    changes: tuple[PlanChange, ...] = ()


class Transfer(NamedTuple):
    """One copy over the link. Times are µs since the start of the iteration.

    `bytes` are moved over the link; `raw_bytes` is the size of the tensor, which is larger if the copy is compressed.
    `event` is an index into the plan's rows, −1 for a passive swap-in.
    """

    tensor: int
    direction: Direction
    bytes: int
    start_us: float
    end_us: float
    event: int
    raw_bytes: int


class Stall(NamedTuple):
    """Time for which the compute stream waits for a transfer of `tensor`: before `step`, or in its gap (swap-outs)."""

    step: int
    tensor: int
    us: float


class Transition(NamedTuple):
    """A change of plan after `iteration` iterations of the job.

    `us` is the time from there to the start of the new plan's first iteration, for copying `bytes_out`. That iteration
    takes `first_iteration_us`, including `passive_swap_ins` of `passive_bytes`.
    """

    iteration: int
    us: float
    bytes_out: int
    first_iteration_us: float
    passive_swap_ins: int
    passive_bytes: int


@dataclass(frozen=True, eq=False)
class Timeline:
    """One job's iteration in the steady state of its last plan. Times are µs since the start of the iteration.

    With several jobs on the link, `iteration_us` and `stall_us` are means; steps, transfers and stalls show the last
    iteration.
    """

    steps: NDArray[np.int32]  # [s]: operator of each step, by its captured index
    footprint: NDArray[np.int64]  # [s]: bytes on the device, sampled at each step
    step_start_us: NDArray[np.float64]  # [s]
    step_end_us: NDArray[np.float64]  # [s]
    transfers: tuple[Transfer, ...]  # in order of request
    stalls: tuple[Stall, ...]
    transitions: tuple[Transition, ...]  # of the whole job
    first_iteration_us: float  # of the last plan, including its transition
    iteration_us: float
    compute_us: float  # iteration_us − stall_us
    stall_us: float
    peak_bytes: int
    device_peak_bytes: int  # workspaces and staging included
    host_arena_bytes: int
    bytes_out: int  # moved over the link
    bytes_in: int
    raw_bytes_out: int  # of the tensors moved
    raw_bytes_in: int
    passive_swap_ins: int
    recomputes: int  # recompute steps


def simulate(jobs: Sequence[SimulatedJob], profile: DeviceProfile, iterations: int = 8) -> list[Timeline]:
    """Return the timeline of each job; all jobs run concurrently from their start times on.

    The simulation ends when each job has either completed `iterations` in the steady state of its last plan, or taken
    equally long for its last two iterations there. Raises InvalidPlanError, before anything runs, if a plan is not
    valid on its trace or an initial state lacks data, and SimulationError for impossible numbers.
    """
    if iterations < 1:
        raise SimulationError(f"{iterations} iterations cannot be simulated", hint="Ask for one or more.")
    if not all(math.isfinite(job.start_us) and job.start_us >= 0 for job in jobs):
        raise SimulationError("a job cannot start at a negative time or at none", hint="Start the first one at 0 µs.")
    with _uncollected():
        programs = [build_programs(job.trace, job.plan, job.changes, job.initial_state, profile) for job in jobs]
        runs = [_Run(number, programs[number], job.start_us, profile.handover_us) for number, job in enumerate(jobs)]
        _execute(runs, Link(), iterations)
        return [_timeline(run) for run in runs]


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Disable the garbage collector: a simulation allocates many live objects, and collections that scan them again and
    again made its run time grow faster than its size."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


# ---- the jobs ----


class _Iteration(NamedTuple):
    begin_us: float
    requests: list[Request]
    stalls: list[tuple[Meeting, float]]  # a meeting that waits, and for how many µs


class _Run:
    """State of a job that executes its programs in turn, the last of which is its steady state."""

    def __init__(self, number: int, programs: list[Program], start_us: float, handover_us: float) -> None:
        self.number = number
        self.handover_us = handover_us
        self.programs = programs
        self.start_us = start_us
        self.durations: list[list[float]] = [[] for _ in programs]  # µs of each execution, by program
        self.latest: _Iteration | None = None
        self._current = 0  # index of the current program
        self._begin(start_us)

    def _begin(self, now: float) -> None:
        self._next = 0  # index of the next meeting
        self._requests: list[Request] = []
        self._stalls: list[tuple[Meeting, float]] = []
        self._ready = [now, now]  # ready time of the latest request, by lane
        self._begin_us = self._waiting_since = now

    @property
    def meeting(self) -> Meeting:
        """The next meeting."""
        return self.programs[self._current].meetings[self._next]

    def act(self, link: Link, now: float) -> float | None:
        """Execute the next meeting at `now`; return when the following one is reached, or None if it has to wait."""
        meeting = self.meeting
        if not meeting.waits:
            copy = self.programs[self._current].copies[meeting.copy]
            ready = max(now + copy.delay_us, self._ready[copy.direction])  # each lane is first in, first out
            self._ready[copy.direction] = ready
            self._requests.append(link.request(copy, ready))
        else:
            request, self._waiting_since = self._requests[meeting.copy], now
            if not request.ended:
                request.waiter = self.number
                return None
            if now < request.end_us + self.handover_us:
                return self.wake(request.end_us)
        self._next += 1
        return now + self.meeting.compute_us

    def wake(self, end_us: float) -> float:
        """Finish the waiting meeting, whose transfer ended at `end_us`; return when the following one is reached."""
        self._stalls.append((self.meeting, end_us + self.handover_us - self._waiting_since))
        self._next += 1
        return end_us + self.handover_us + self.meeting.compute_us

    def end(self, now: float) -> float:
        """End the iteration and begin the next one; return when its first meeting is reached."""
        self.latest = _Iteration(self._begin_us, self._requests, self._stalls)
        self.durations[self._current].append(now - self._begin_us)
        if len(self.durations[self._current]) == self.programs[self._current].repeat:
            self._current += 1
        self._begin(now)
        return now + self.meeting.compute_us

    def settled(self, iterations: int, alone: bool) -> bool:
        """Return whether further iterations would add no information, or enough have been simulated."""
        done = self.durations[-1]
        if not done or alone or not self.programs[-1].copies:
            return bool(done)
        agree = len(done) > 1 and abs(done[-1] - done[-2]) <= AGREEMENT * done[-1]
        return agree or len(done) >= iterations

    def through(self, iterations: int) -> bool:
        """Return whether the job may stop before the others: it does not use the link, or is far ahead of them."""
        done = self.durations[-1]
        return bool(done) and (not self.programs[-1].copies or len(done) >= FASTEST * iterations)


def _execute(runs: list[_Run], link: Link, iterations: int) -> None:
    """Run all jobs, always the one whose next meeting comes first, until all are settled."""
    ready = [(run.start_us + run.meeting.compute_us, run.number) for run in runs]
    heapify(ready)
    while runs:
        request = link.advance(ready[0][0] if ready else math.inf)
        if request is not None:
            if request.waiter >= 0:
                heappush(ready, (runs[request.waiter].wake(request.end_us), request.waiter))
            continue
        now, number = heappop(ready)
        run = runs[number]
        if run.meeting.copy >= 0:
            following = run.act(link, now)
        else:
            following = run.end(now)
            if all(run.settled(iterations, len(runs) == 1) for run in runs):
                return
            if run.through(iterations):
                continue
        if following is not None:
            heappush(ready, (following, number))


# ---- results ----


def _timeline(run: _Run) -> Timeline:
    program, iteration = run.programs[-1], run.latest
    assert iteration is not None
    sequence = program.sequence
    trace, steps = sequence.trace, sequence.steps
    footprint, wait_step = memory.footprint_of(sequence), sequence.transfers.wait_step.tolist()
    latency = trace.latency_us[steps]
    stalled = np.zeros(len(steps) + 1)  # µs, by number of steps executed before
    for meeting, us in iteration.stalls:
        stalled[meeting.executed] += us
    end = np.cumsum(latency + stalled[:-1])
    steady = run.durations[-1]
    iteration_us, compute_us = float(np.mean(steady[len(steady) // 2 :])), float(latency.sum())
    transitions = _transitions(run)
    waits = ((meeting.copy, us) for meeting, us in iteration.stalls)
    stalls = tuple(Stall(wait_step[copy], program.copies[copy].tensor, us) for copy, us in waits)
    changed = len(run.programs) > 1 and run.programs[-2].role is Role.FIRST
    return Timeline(
        steps=sequence.operators,
        footprint=footprint.bytes,
        step_start_us=end - latency,
        step_end_us=end,
        transfers=tuple(_transfer(request, iteration.begin_us) for request in iteration.requests),
        stalls=stalls,
        transitions=transitions,
        first_iteration_us=transitions[-1].us + transitions[-1].first_iteration_us if changed else steady[0],
        iteration_us=iteration_us,
        compute_us=compute_us,
        stall_us=max(0.0, iteration_us - compute_us),
        peak_bytes=footprint.peak_bytes,
        device_peak_bytes=footprint.device_peak_bytes,
        host_arena_bytes=memory.host_arena_of(sequence).bytes,
        bytes_out=sum(copy.bytes for copy in program.copies if copy.direction == Direction.OUT),
        bytes_in=sum(copy.bytes for copy in program.copies if copy.direction == Direction.IN),
        raw_bytes_out=sum(copy.raw_bytes for copy in program.copies if copy.direction == Direction.OUT),
        raw_bytes_in=sum(copy.raw_bytes for copy in program.copies if copy.direction == Direction.IN),
        passive_swap_ins=sum(copy.event < 0 for copy in program.copies),
        recomputes=len(steps) - trace.operator_count,
    )


def _transfer(request: Request, begin_us: float) -> Transfer:
    copy = request.copy
    start, end = request.start_us - begin_us, request.end_us - begin_us
    return Transfer(copy.tensor, copy.direction, copy.bytes, start, end, copy.event, copy.raw_bytes)


def _transitions(run: _Run) -> tuple[Transition, ...]:
    """Return the changes of plan; each is a program followed by that of the first iteration."""
    transitions: list[Transition] = []
    iterations = 0
    for index, (program, durations) in enumerate(zip(run.programs, run.durations, strict=True)):
        if program.role is Role.CHANGE:
            passive = [copy.bytes for copy in run.programs[index + 1].copies if copy.event < 0]
            copied = sum(copy.bytes for copy in program.copies)
            first_us = run.durations[index + 1][0]
            transitions.append(Transition(iterations, durations[0], copied, first_us, len(passive), sum(passive)))
        else:
            iterations += len(durations)
    return tuple(transitions)
