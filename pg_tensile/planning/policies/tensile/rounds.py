"""TENSILE: swap the largest tensor at the peak while the link allows, recompute where that is not enough.

Algorithms 2 and 3 of TENSILE (sections IV-C, IV-D), as docs/papers.md reads them. Each round looks at the memory peaks
of all jobs. The largest tensor that is idle there is swapped, out as early and in as late as the link has time, and so
are its other idle intervals for which the host copy is current. No transfer makes anything wait. Where no swap is left
and the budget is still exceeded, the tensor with the largest MSPS (bytes saved per µs of recomputation) is recomputed.
Memory is kept in `Peaks`: a round updates a few ranges and needs no new analysis.

Every job is planned in its own time, by its operators' latencies, with an equal part of the link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

import numpy as np

from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.plan import EventKind, Plan
from pg_tensile.planning.policies.building_blocks.gaps import Gap, Gaps
from pg_tensile.planning.policies.building_blocks.intervals import Cover
from pg_tensile.planning.policies.building_blocks.memory_profile import Peaks
from pg_tensile.planning.policies.building_blocks.remaking import Remake, Remaking
from pg_tensile.planning.policies.coded import coded
from pg_tensile.planning.policies.tensile.swaps import Link, Range, Swap, Swapping
from pg_tensile.planning.trace.lists import Columns
from pg_tensile.planning.trace.trace import Trace

ROUNDS = 100  # number of rounds after which small gains end the planning
SMALL_GAIN = 0.0005  # fraction of the peak
GAIN_ROUNDS = 3  # rounds whose gain together is compared with it
OPERATORS_A_ROUND = 1000  # for traces larger than the paper's: one of these rounds per this many operators
SHORTEST_US = 1e-3  # lower bound of a recomputation's time: MSPS stays finite


@coded
def plan(
    traces: Mapping[int, Trace],
    profile: DeviceProfile,
    budget_bytes: int | None,
    lanes: int = 2,
) -> dict[int, Plan]:
    """Return plans for jobs that run at once, each with an equal part of the link.

    `budget_bytes`: device memory for all jobs, workspaces included. Only where swaps do not reach it is anything
    recomputed; if it cannot be met, the plans come as near to it as they can. None means as little as swaps reach.
    `lanes`: 2, or 1 where a transfer out and one in must not overlap either, as in the paper; ValueError for any other
    number.
    """
    link = Link.share(profile, max(len(traces), 1), lanes)
    jobs = {number: Job(roofline.timed(trace, profile), link) for number, trace in traces.items()}
    _rounds(list(jobs.values()), budget_bytes)
    return {number: job.plan() for number, job in jobs.items()}


def _rounds(jobs: list[Job], budget_bytes: int | None) -> None:
    """Run Algorithm 3, in which a round swaps or recomputes one tensor.

    Within the budget, rounds go on until no swap is found or gains are small; beyond it, as long as anything is found,
    however little it gains.
    """
    together = max(GAIN_ROUNDS, sum(job.columns.operators for job in jobs) // OPERATORS_A_ROUND)
    peaks = [sum(job.peak_bytes for job in jobs)]
    while jobs:
        fits = budget_bytes is None or peaks[-1] <= budget_bytes
        if fits and len(peaks) > max(ROUNDS, together):
            before = peaks[-1 - together]
            if before - peaks[-1] < SMALL_GAIN * before:
                return
        swapped = _take_first(jobs, Job.largest, Job.swap)
        if not swapped and (fits or not _take_first(jobs, Job.most_valuable, Job.remake)):
            return
        peaks.append(sum(job.peak_bytes for job in jobs))


def _take_first(
    jobs: list[Job], first: Callable[[Job], Candidate | None], take: Callable[[Job, Candidate], bool]
) -> bool:
    """Take the first candidate of all jobs that can be taken; return False if none can."""
    found = [(candidate, number) for number, job in enumerate(jobs) if (candidate := first(job)) is not None]
    heapify(found)
    while found:
        candidate, number = found[0]
        if take(jobs[number], candidate):
            return True
        following = first(jobs[number])
        if following is None:
            heappop(found)
        else:
            heapreplace(found, (following, number))
    return False


class Candidate(NamedTuple):
    """An idle interval in which a tensor could be off the device. The smallest candidate is taken first."""

    order: tuple[float, float]  # of a swap: -bytes, -µs of the interval; of a recomputation: -MSPS, 0
    gap: Gap
    number: int  # unique, so that no two candidates are equal


class Job:
    """The plan of one job so far, its memory, and the candidates for more."""

    def __init__(self, trace: Trace, link: Link) -> None:
        self.columns = columns = Columns(trace)
        self._peaks = Peaks(np.array(columns.memory) + trace.workspace_bytes)
        self._above = list(columns.workspace)  # [n]: bytes by which an operator's peak exceeds its sample
        self._gaps = Gaps(columns)
        self._swapping = Swapping(columns, self._gaps, link)
        self._remaking = Remaking(columns, self._gaps, self._swapping.swaps)
        self._swaps, self._remakes = Candidates(columns.operators), Candidates(columns.operators)
        self._remakes_offered = False
        self._swapped: set[int] = set()  # tensors
        self._remade: set[int] = set()  # tensors
        for tensor in range(len(columns.bytes)):
            self._offer_swaps(self._gaps.of(tensor))

    @property
    def peak_bytes(self) -> int:
        """Peak of the device memory, workspaces included."""
        return self._peaks.maximum()[0]

    def plan(self) -> Plan:
        remakes = ((float("inf"), event) for event in self._remaking.events())
        events = [*self._swapping.events(), *remakes]
        events.sort(key=lambda timed: (timed[1].trigger, timed[1].kind == EventKind.RECOMPUTE, timed[0]))
        return Plan.build(event for _, event in events)

    # ---- swaps ----

    def largest(self) -> Candidate | None:
        """Return the largest tensor at the peak that may be swapped, or None."""
        return self._swaps.first(self._peaks.maximum()[1])

    def swap(self, candidate: Candidate) -> bool:
        """Swap the tensor at the peak, then in its following idle intervals; return False if the link has no room.

        A swap that does not reach the peak is not taken either, but stays a candidate.
        """
        gap = candidate.gap
        swap = self._swapping.look(gap)
        self._swaps.remove(gap)
        if swap is None:
            return False
        away = [(first, last) for first, last in swap.away(self.columns.operators) if first <= last]
        operator = self._peaks.maximum()[1]
        if not any(first <= operator <= last for first, last in away):
            self._swaps.insert(candidate.order, gap, away)  # for another peak
            return False
        self._take(swap)
        for each in self._swapping.rest(gap):
            if each in self._swaps:
                self._swaps.remove(each)
                if (swap := self._swapping.look(each)) is not None:
                    self._take(swap)
        return True

    def _take(self, swap: Swap) -> None:
        self._swapped.add(swap.gap.tensor)
        size = self.columns.bytes[swap.gap.tensor]
        for first, last in self._swapping.book(swap):
            self._peaks.add(first, last, -size)

    def _offer_swaps(self, gaps: Iterable[Gap]) -> None:
        """Add as candidates the idle intervals that are long enough for both transfers."""
        for gap in gaps:
            size = self.columns.bytes[gap.tensor]
            if size and (away := self._swapping.widest(gap)):
                self._swaps.insert((-size, -self._swapping.duration_us(gap)), gap, away)

    # ---- recomputations ----

    def most_valuable(self) -> Candidate | None:
        """Return the tensor at the peak with the largest MSPS, or None."""
        if not self._remakes_offered:
            self._remakes_offered = True
            for tensor, made in enumerate(self.columns.made):
                if made:
                    self._offer_remakes(self._gaps.of(tensor))
        return self._remakes.first(self._peaks.maximum()[1])

    def remake(self, candidate: Candidate) -> bool:
        """Recompute the tensor after the peak.

        Returns False if that is impossible, saves less per µs than before (it stays a candidate), or takes too much
        memory itself.
        """
        gap = candidate.gap
        self._remakes.remove(gap)
        remake = None if gap.tensor in self._swapped else self._remaking.look(gap)
        if remake is None:
            return False
        order = (self._minus_msps(gap, remake.us), 0.0)
        if order > candidate.order:
            self._remakes.insert(order, gap, [self._absence(gap)])
            return False
        rise = self._rise(remake)
        if self._peaks.maximum_in(remake.operator, remake.operator)[0] + rise >= self.peak_bytes:
            return False
        self._apply(remake, rise)
        return True

    def _apply(self, remake: Remake, rise: int) -> None:
        tensor = remake.gap.tensor
        self._remade.add(tensor)
        for gap in self._gaps.of(tensor):
            self._swaps.remove(gap)
        self._peaks.add(*self._absence(remake.gap), -self.columns.bytes[tensor])
        self._peaks.add(remake.operator, remake.operator, rise)
        self._above[remake.operator] += rise
        self._remaking.apply(remake)
        place = 2 * remake.operator - 1
        for each in remake.inputs:
            whole = self._gaps.at(each, place)
            assert whole is not None
            self._swaps.remove(whole)
            self._remakes.remove(whole)
            parts = self._gaps.split(whole, place)
            if each not in self._remade:
                self._offer_swaps(parts)
            self._offer_remakes(parts)

    def _rise(self, remake: Remake) -> int:
        """Return the bytes by which the peak right before or at the operator rises."""
        operator = remake.operator
        above = max(self.columns.workspace[operator], remake.extra_bytes - self.columns.created[operator])
        return above - self._above[operator]

    def _offer_remakes(self, gaps: Iterable[Gap]) -> None:
        for gap in gaps:
            us = self._remaking.least_us(gap)
            first, last = self._absence(gap)
            if us is not None and self.columns.bytes[gap.tensor] and first <= last:
                self._remakes.insert((self._minus_msps(gap, us), 0.0), gap, [(first, last)])

    def _minus_msps(self, gap: Gap, us: float) -> float:
        return -self.columns.bytes[gap.tensor] / max(us, SHORTEST_US)

    def _absence(self, gap: Gap) -> Range:
        """Return the operators at which a tensor that is recomputed at the end of the interval is off the device."""
        return (gap.since + 3) // 2, (gap.until - 1) // 2


class Candidates:
    """At most one candidate for each idle interval, and the first of those that cover an operator."""

    def __init__(self, operators: int) -> None:
        self._cover = Cover[Candidate](operators)
        self._of: dict[Gap, Candidate] = {}
        self._number = 0

    def __contains__(self, gap: Gap) -> bool:
        return gap in self._of

    def insert(self, order: tuple[float, float], gap: Gap, ranges: Iterable[Range]) -> None:
        self._number += 1
        self._of[gap] = candidate = Candidate(order, gap, self._number)
        self._cover.insert(candidate, ranges)

    def remove(self, gap: Gap) -> None:
        if gap in self._of:
            self._cover.remove(self._of.pop(gap))

    def first(self, operator: int) -> Candidate | None:
        return self._cover.first(operator)
