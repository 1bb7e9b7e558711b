"""TENSILE: swap the largest tensor at the peak while the link allows, recompute where that is not enough.

Algorithms 2 and 3 of TENSILE (sections IV-C, IV-D), as docs/papers.md reads them. Each round looks at the memory peaks
of all jobs. The largest tensor that is idle there is swapped, out as early and in as late as the link has time, and so
are its other idle intervals for which the host copy is current. No transfer makes anything wait. Where no swap is left
and the budget is still exceeded, the tensor with the largest MSPS (bytes saved per µs of recomputation) is recomputed.
Memory is kept in `Peaks`: a round updates a few ranges and needs no new analysis.

A job may be limited to a part of its swaps (`swap_share`). Swaps may take longer than planned, because the link and the
device are shared, so a job that swaps less loses less to the others: the limit acts as a priority.

Every job is planned in its own time, by its operators' latencies, with an equal part of the link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heapreplace
from math import inf
from typing import NamedTuple

import numpy as np

from pg_tensile.planning.building_blocks.coded import coded
from pg_tensile.planning.building_blocks.cover import Cover
from pg_tensile.planning.building_blocks.idle import IdleInterval, IdleIntervals
from pg_tensile.planning.building_blocks.memory_profile import Peaks
from pg_tensile.planning.building_blocks.recompute_chains import RecomputeChains
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.plan import EventKind, Plan
from pg_tensile.planning.policies.tensile.swaps import Link, Range, Swap, Swapping
from pg_tensile.planning.trace.lists import Columns
from pg_tensile.planning.trace.trace import Trace

ROUNDS = 100  # number of rounds after which small gains end the planning
SMALL_GAIN = 0.0005  # fraction of the peak
GAIN_ROUNDS = 3  # rounds whose gain together is compared with it
OPERATORS_A_ROUND = 1000  # for traces larger than the paper's: one of these rounds per this many operators
SHORTEST_US = 1e-3  # lower bound of a recomputation's time: MSPS stays finite


class Limits(NamedTuple):
    """Limits of one job besides the budget of all jobs.

    `swap_share`: the bytes of the tensors that it swaps are at most this part, 0 … 1, of the bytes of those that it
    could swap if the link were idle. The job counts with at least `least_bytes` of device memory, and may take
    `most_bytes` at most.
    """

    swap_share: float = 1.0
    least_bytes: int = 0
    most_bytes: float = inf


@coded
def plan(
    traces: Mapping[int, Trace],
    profile: DeviceProfile,
    budget_bytes: int | None,
    lanes: int = 2,
    swap_share: float = 1.0,
) -> dict[int, Plan]:
    """Return plans for jobs that run at once, each with an equal part of the link.

    `budget_bytes`: device memory for all jobs, workspaces included. Only where swaps do not reach it is anything
    recomputed; if it cannot be met, the plans come as near to it as they can. None means as little as swaps reach.
    `lanes`: 2, or 1 where a transfer out and one in must not overlap either, as in the paper; ValueError for any other
    number. `swap_share`: of each job, as in `Limits`; ValueError outside of 0 … 1.
    """
    return _plan(traces, profile, budget_bytes, dict.fromkeys(traces, Limits(swap_share)), lanes)


@coded
def plan_limited(
    traces: Mapping[int, Trace], profile: DeviceProfile, budget_bytes: int | None, limits: Mapping[int, Limits]
) -> dict[int, Plan]:
    """Return plans as `plan` does, with limits for each job. If they cannot be met, the plans come near to them."""
    return _plan(traces, profile, budget_bytes, limits, 2)


def _plan(
    traces: Mapping[int, Trace],
    profile: DeviceProfile,
    budget_bytes: int | None,
    limits: Mapping[int, Limits],
    lanes: int,
) -> dict[int, Plan]:
    link = Link.share(profile, max(len(traces), 1), lanes)
    jobs = {number: Job(roofline.timed(trace, profile), link, limits[number]) for number, trace in traces.items()}
    _rounds(list(jobs.values()), inf if budget_bytes is None else budget_bytes)
    return {number: job.plan() for number, job in jobs.items()}


def _rounds(jobs: list[Job], budget_bytes: float) -> None:
    """Run Algorithm 3, in which a round swaps or recomputes one tensor.

    Within the budget and the jobs' limits, rounds continue until no swap is found or gains are small; beyond them, as
    long as anything is found, however little it gains.
    """
    together = max(GAIN_ROUNDS, sum(job.columns.operators for job in jobs) // OPERATORS_A_ROUND)
    peaks = [sum(job.peak_bytes for job in jobs)]
    while jobs:
        exceeding = _exceeding(jobs, budget_bytes)
        if not exceeding and len(peaks) > max(ROUNDS, together):
            before = peaks[-1 - together]
            if before - peaks[-1] < SMALL_GAIN * before:
                return
        if not _take_first(jobs, Job.largest, Job.swap) and not any(
            _take_first(some, Job.most_valuable, Job.recompute) for some in exceeding
        ):
            return
        peaks.append(sum(job.peak_bytes for job in jobs))


def _exceeding(jobs: list[Job], budget_bytes: float) -> list[list[Job]]:
    """Return in which jobs to save memory by recomputation: those beyond their limits, then those that fill the budget.

    The list is empty if the memory suffices.
    """
    exceeding = []
    if over := [job for job in jobs if job.peak_bytes > job.limits.most_bytes]:
        exceeding.append(over)
    if sum(max(job.peak_bytes, job.limits.least_bytes) for job in jobs) > budget_bytes:
        exceeding.append([job for job in jobs if job.peak_bytes > job.limits.least_bytes])
    return exceeding


def _take_first(
    jobs: list[Job], first: Callable[[Job], Candidate | None], take: Callable[[Job, Candidate], bool]
) -> bool:
    """Take the first candidate of all jobs that can be taken; return False if none can."""
    candidates = [(candidate, number) for number, job in enumerate(jobs) if (candidate := first(job)) is not None]
    heapify(candidates)
    while candidates:
        candidate, number = candidates[0]
        if take(jobs[number], candidate):
            return True
        following = first(jobs[number])
        if following is None:
            heappop(candidates)
        else:
            heapreplace(candidates, (following, number))
    return False


class Candidate(NamedTuple):
    """An idle interval in which a tensor could be off the device. The smallest candidate is taken first."""

    order: tuple[float, float]  # of a swap: -bytes, -µs of the interval; of a recomputation: -MSPS, 0
    interval: IdleInterval
    number: int  # unique, so that no two candidates are equal


class Job:
    """The plan of one job so far, its memory, and the candidates for more."""

    def __init__(self, trace: Trace, link: Link, limits: Limits) -> None:
        if not 0 <= limits.swap_share <= 1:
            raise ValueError(f"a swap_share is from 0 to 1, not {limits.swap_share}")
        self.limits = limits
        self.columns = columns = Columns(trace)
        self._peaks = Peaks(np.array(columns.memory) + trace.workspace_bytes)
        self._idle = IdleIntervals(columns)
        self._swapping = Swapping(columns, self._idle, link)
        self._chains = RecomputeChains(columns, self._idle, self._swapping.swaps)
        self._swap_candidates, self._recompute_candidates = Candidates(columns.operators), Candidates(columns.operators)
        self._recomputes_offered = False
        self.swappable_bytes = 0  # of the tensors that were candidates for a swap
        self.swapped_bytes = 0  # of those that are swapped
        self._swappable: set[int] = set()  # tensors
        self._swapped: set[int] = set()  # tensors
        self._recomputed: set[int] = set()  # tensors
        for tensor in range(len(columns.bytes)):
            self._offer_swaps(self._idle.of(tensor))

    @property
    def peak_bytes(self) -> int:
        """Peak of the device memory, workspaces included."""
        return self._peaks.maximum()[0]

    def plan(self) -> Plan:
        recomputes = ((float("inf"), event) for event in self._chains.events())
        events = [*self._swapping.events(), *recomputes]
        events.sort(key=lambda timed: (timed[1].trigger, timed[1].kind == EventKind.RECOMPUTE, timed[0]))
        return Plan.build(event for _, event in events)

    # ---- swaps ----

    def largest(self) -> Candidate | None:
        """Return the largest tensor at the peak that may be swapped, or None."""
        return self._swap_candidates.first(self._peaks.maximum()[1])

    def swap(self, candidate: Candidate) -> bool:
        """Swap the tensor at the peak, then in its following idle intervals.

        Returns False if the link has no room for it, or `swap_share` no bytes. A swap that does not reach the peak is
        not taken either, but stays a candidate.
        """
        interval = candidate.interval
        swap = None if self._exceeds_share(interval.tensor) else self._swapping.find(interval)
        self._swap_candidates.remove(interval)
        if swap is None:
            return False
        away = [(first, last) for first, last in swap.away(self.columns.operators) if first <= last]
        operator = self._peaks.maximum()[1]
        if not any(first <= operator <= last for first, last in away):
            self._swap_candidates.insert(candidate.order, interval, away)  # for another peak
            return False
        self._take(swap)
        for later in self._swapping.rest(interval):
            if later in self._swap_candidates:
                self._swap_candidates.remove(later)
                if (swap := self._swapping.find(later)) is not None:
                    self._take(swap)
        return True

    def _exceeds_share(self, tensor: int) -> bool:
        """Return whether the job would swap more than its `swap_share` with this tensor (Algorithm 2, line 29)."""
        more = 0 if tensor in self._swapped else self.columns.bytes[tensor]
        return self.swapped_bytes + more > self.limits.swap_share * self.swappable_bytes

    def _take(self, swap: Swap) -> None:
        tensor = swap.interval.tensor
        size = self.columns.bytes[tensor]
        if tensor not in self._swapped:
            self._swapped.add(tensor)
            self.swapped_bytes += size
        for first, last in self._swapping.book(swap):
            self._peaks.add(first, last, -size)

    def _offer_swaps(self, intervals: Iterable[IdleInterval]) -> None:
        """Add as candidates the idle intervals that are long enough for both transfers."""
        for interval in intervals:
            size = self.columns.bytes[interval.tensor]
            if size and (away := self._swapping.widest(interval)):
                if interval.tensor not in self._swappable:
                    self._swappable.add(interval.tensor)
                    self.swappable_bytes += size
                self._swap_candidates.insert((-size, -self._swapping.duration_us(interval)), interval, away)

    # ---- recomputations ----

    def most_valuable(self) -> Candidate | None:
        """Return the tensor at the peak with the largest MSPS, or None."""
        if not self._recomputes_offered:
            self._recomputes_offered = True
            for tensor, is_computed in enumerate(self.columns.made):
                if is_computed:
                    self._offer_recomputes(self._idle.of(tensor))
        return self._recompute_candidates.first(self._peaks.maximum()[1])

    def recompute(self, candidate: Candidate) -> bool:
        """Recompute the tensor after the peak.

        Returns False if that is impossible, saves less per µs than before (it stays a candidate), or takes too much
        memory itself.
        """
        interval = candidate.interval
        self._recompute_candidates.remove(interval)
        chain = None if interval.tensor in self._swapped else self._chains.find(interval)
        if chain is None:
            return False
        order = (self._minus_msps(interval, chain.us), 0.0)
        if order > candidate.order:
            self._recompute_candidates.insert(order, interval, [interval.away_if_recomputed])
            return False
        operator, rise = interval.next_user, self._chains.rise(chain)
        if self._peaks.maximum_in(operator, operator)[0] + rise >= self.peak_bytes:
            return False
        self._recomputed.add(interval.tensor)
        for idle in self._idle.of(interval.tensor):
            self._swap_candidates.remove(idle)
        self._peaks.add(*interval.away_if_recomputed, -self.columns.bytes[interval.tensor])
        self._peaks.add(operator, operator, rise)
        self._chains.add(chain)
        for tensor in chain.inputs:
            self._split(tensor, 2 * operator - 1)
        return True

    def _split(self, tensor: int, position: int) -> None:
        """Replace the candidates for an idle interval by those for its parts before and after a new use."""
        whole = self._idle.around(tensor, position)
        assert whole is not None
        self._swap_candidates.remove(whole)
        self._recompute_candidates.remove(whole)
        parts = self._idle.split(whole, position)
        if tensor not in self._recomputed:
            self._offer_swaps(parts)
        self._offer_recomputes(parts)

    def _offer_recomputes(self, intervals: Iterable[IdleInterval]) -> None:
        for interval in intervals:
            us = self._chains.least_us(interval)
            first, last = interval.away_if_recomputed
            if us is not None and self.columns.bytes[interval.tensor] and first <= last:
                self._recompute_candidates.insert((self._minus_msps(interval, us), 0.0), interval, [(first, last)])

    def _minus_msps(self, interval: IdleInterval, us: float) -> float:
        return -self.columns.bytes[interval.tensor] / max(us, SHORTEST_US)


class Candidates:
    """At most one candidate for each idle interval, and the first of those that cover an operator."""

    def __init__(self, operators: int) -> None:
        self._cover = Cover[Candidate](operators)
        self._of: dict[IdleInterval, Candidate] = {}
        self._number = 0

    def __contains__(self, interval: IdleInterval) -> bool:
        return interval in self._of

    def insert(self, order: tuple[float, float], interval: IdleInterval, ranges: Iterable[Range]) -> None:
        self._number += 1
        self._of[interval] = candidate = Candidate(order, interval, self._number)
        self._cover.insert(candidate, ranges)

    def remove(self, interval: IdleInterval) -> None:
        if interval in self._of:
            self._cover.remove(self._of.pop(interval))

    def first(self, operator: int) -> Candidate | None:
        return self._cover.first(operator)
