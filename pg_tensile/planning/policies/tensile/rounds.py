"""TENSILE: swap the largest tensor of the peak while the link allows, recompute where that is not enough.

Algorithms 2 and 3 of TENSILE (sections IV-C, IV-D), as docs/papers.md reads them. Round by round the memory
peaks of all jobs are looked at; the largest tensor that lies idle there is swapped, out as early and in as late as the
link has time, and so are its other gaps for which the host copy is good. No transfer makes anything wait. Where no
swap is left and the budget is still exceeded, the tensor with the largest MSPS (bytes saved per µs of recomputation)
is recomputed. Memory is kept in `Peaks`: a round changes a few ranges of it and asks for no new analysis.

Every job plans in its own time, by its operators' latencies, with an equal part of the link.
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

ROUNDS = 100  # after which small gains end the planning
SMALL_GAIN = 0.0005  # of the peak
GAIN_ROUNDS = 3  # that gain less than that together
OPERATORS_A_ROUND = 1000  # for larger traces than the paper's: that many more operators, one more round
SHORTEST_US = 1e-3  # of a recomputation, where MSPS would be infinite


@coded
def plan(
    traces: Mapping[int, Trace],
    profile: DeviceProfile,
    budget_bytes: int | None,
    lanes: int = 2,
) -> dict[int, Plan]:
    """Plans for jobs that run at once, each with an equal part of the link.

    `budget_bytes`: of device memory for all jobs, workspaces included; only where swaps do not reach it is anything
    recomputed, and if it cannot be met the plans come as near as they can. None: as little as swaps reach. `lanes`: 2,
    or 1 where a transfer out and one in must not overlap either, as in the paper.
    """
    link = Link.share(profile, max(len(traces), 1), lanes)
    jobs = {number: Job(roofline.timed(trace, profile), link) for number, trace in traces.items()}
    _rounds(list(jobs.values()), budget_bytes)
    return {number: job.plan() for number, job in jobs.items()}


def _rounds(jobs: list[Job], budget_bytes: int | None) -> None:
    """Algorithm 3. A round swaps or recomputes one tensor. What is within the budget is swapped on until no swap is
    found or gains are small; what exceeds it is planned on as long as anything is found, however little it gains."""
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
    """Takes the first candidate of all jobs that can be taken; False: there is none."""
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
    """A gap in which a tensor could be off the device. The smallest one is taken first."""

    order: tuple[float, float]  # swap: -bytes, then -µs of the gap; recomputation: -MSPS
    gap: Gap
    number: int  # of the look at it: no two are equal


class Job:
    """What is planned for one job so far, its memory, and what could be done next."""

    def __init__(self, trace: Trace, link: Link) -> None:
        self.columns = columns = Columns(trace)
        self._peaks = Peaks(np.array(columns.memory) + trace.workspace_bytes)
        self._above = list(columns.workspace)  # [n]: bytes that an operator's peak has above its sample
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
        """Device memory, workspaces included."""
        return self._peaks.maximum()[0]

    def plan(self) -> Plan:
        remakes = ((float("inf"), event) for event in self._remaking.events())
        events = [*self._swapping.events(), *remakes]
        events.sort(key=lambda timed: (timed[1].trigger, timed[1].kind == EventKind.RECOMPUTE, timed[0]))
        return Plan.build(event for _, event in events)

    # ---- swaps ----

    def largest(self) -> Candidate | None:
        """The largest tensor at the peak that may be swapped."""
        return self._swaps.first(self._peaks.maximum()[1])

    def swap(self, candidate: Candidate) -> bool:
        """Swaps the tensor over the peak, then over the rest of its accesses; False: there is no room on the link."""
        gap = candidate.gap
        swap = self._swapping.look(gap)
        self._swaps.remove(gap)
        if swap is None:
            return False
        away = [(first, last) for first, last in swap.away(self.columns.operators) if first <= last]
        operator = self._peaks.maximum()[1]
        if not any(first <= operator <= last for first, last in away):
            self._swaps.insert(candidate.order, gap, away)  # good for other peaks
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
        """The gaps that are long enough for both transfers."""
        for gap in gaps:
            size = self.columns.bytes[gap.tensor]
            if size and (away := self._swapping.widest(gap)):
                self._swaps.insert((-size, -self._swapping.duration_us(gap)), gap, away)

    # ---- recomputations ----

    def most_valuable(self) -> Candidate | None:
        """The tensor at the peak with the largest MSPS."""
        if not self._remakes_offered:
            self._remakes_offered = True
            for tensor, made in enumerate(self.columns.made):
                if made:
                    self._offer_remakes(self._gaps.of(tensor))
        return self._remakes.first(self._peaks.maximum()[1])

    def remake(self, candidate: Candidate) -> bool:
        """Recomputes the tensor after the peak; False: it cannot be, or is worth less than it was, or takes too much
        memory itself."""
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
        """Bytes by which the peak right before or at the operator rises."""
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
        """The operators at which a tensor that is recomputed at the end of the gap is off the device."""
        return (gap.since + 3) // 2, (gap.until - 1) // 2


class Candidates:
    """At most one for each gap, and the first of those that cover an operator."""

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
