"""Capuchin (Peng et al., ASPLOS 2020): swap what hides behind the computation, then whatever costs least per byte.

A baseline for comparisons (TENSILE, section V-A). Its first iteration is passive, as in `lru`; after it, accesses and
times are known, and a plan is made once, for a single job, within a single iteration.

*Candidates* (its section 4.3) are tensors that are accessed before and after a time at which memory exceeds the budget.
*Swaps* are ordered by free time: from the end of the swap-out, if it starts right after the preceding access, to the
start of the swap-in, if it ends right before the following access. The largest comes first, as long as both transfers
find time on their lanes, until memory meets the budget.
*The rest* is ordered by memory saved per second of overhead, the largest first. The overhead of a swap is the time for
which its transfers make the job wait; that of a recomputation is its own time (MSPS), including the operators that
recompute missing inputs, and it is computed again as other tensors are dropped. The smaller overhead decides between
both ways for each tensor.
*Waiting.* Capuchin waits for a swap-out when it needs the memory before the copy has ended, the oldest one first, and
triggers no swap-in while memory is short; a swap-in that came late is triggered earlier in the next iteration. Here the
times are known beforehand, and transfer_times.py does the latter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from pg_tensile.planning.building_blocks.coded import coded
from pg_tensile.planning.building_blocks.idle import IdleInterval, IdleIntervals
from pg_tensile.planning.building_blocks.link_time import Lane
from pg_tensile.planning.building_blocks.recompute_chains import RecomputeChain, RecomputeChains
from pg_tensile.planning.building_blocks.shares import shares
from pg_tensile.planning.building_blocks.transfer_times import schedule
from pg_tensile.planning.device.link import swap_us
from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.memory import footprint_of
from pg_tensile.planning.plan.plan import NO_EVENTS, Event, EventKind, Plan
from pg_tensile.planning.trace.lists import Columns
from pg_tensile.planning.trace.trace import Trace

HIDDEN_US = 1e-6  # waiting that a swap may cost and still count as hidden
SHORTEST_US = 1e-3  # lower bound of an overhead, which saved bytes are divided by


@coded
def plan(traces: Mapping[int, Trace], profile: DeviceProfile, budget_bytes: int | None) -> dict[int, Plan]:
    """Return a plan for each job within its `shares` of the budget, as if it had the link to itself.

    `budget_bytes`: workspaces included; None means the device's memory. A plan that cannot meet its share comes as near
    to it as possible.
    """
    granted = shares(traces, profile, budget_bytes)
    return {job: _plan(roofline.timed(trace, profile), profile, granted[job]) for job, trace in traces.items()}


def _plan(trace: Trace, profile: DeviceProfile, budget: int) -> Plan:
    job = _Job(trace, profile, budget)
    job.swap_hidden()
    job.take_cheapest()
    job.wait()
    events = job.events()
    if not events:
        return NO_EVENTS
    sequence = AccessSequence(trace, Plan.build(events))
    return schedule(sequence, profile, max(budget, footprint_of(sequence).device_peak_bytes))


class _Swap(NamedTuple):
    """Transfers of an idle interval: freed in the gap of operator `freed`, back from the gap of `back` on."""

    interval: IdleInterval
    freed: int
    back: int
    us: float  # transfer time that the lanes have no room for: the job waits


class _Job:
    """The plan of one job so far, and its memory."""

    def __init__(self, trace: Trace, profile: DeviceProfile, budget: int) -> None:
        self._columns = columns = Columns(trace)
        self._budget = budget
        self._memory = np.array(columns.memory) + trace.workspace_bytes  # [n]: bytes, without transfers in flight
        self._idle = IdleIntervals(columns)
        self._out, self._into = Lane(columns.us), Lane(columns.us)
        self._start_us = [0.0, *accumulate(columns.us)]
        self._out_us, self._in_us = (
            [profile.handover_us + us for us in swap_us(trace, direction, profile)] for direction in Direction
        )
        self._swaps: dict[IdleInterval, _Swap] = {}
        self._chains = RecomputeChains(columns, self._idle, ())
        self._copied: dict[tuple[int, int], int] = {}  # (tensor, version) → the `since` of its first swap
        self._swapped: set[int] = set()  # tensors
        self._recomputed: set[int] = set()  # tensors
        self._open = {interval: None for tensor in range(trace.tensor_count) for interval in self._candidates(tensor)}

    def events(self) -> list[Event]:
        events = []
        for swap in self._swaps.values():
            events.append(Event(EventKind.SWAP_OUT, swap.interval.tensor, swap.interval.last_user, swap.freed))
            events.append(Event(EventKind.SWAP_IN, swap.interval.tensor, swap.back, swap.interval.deadline))
        return [*sorted(events, key=lambda event: event.deadline), *self._chains.events()]

    # ---- hidden swaps ----

    def swap_hidden(self) -> None:
        """Take the swaps with free time for which nothing waits, the most free time first, until the budget is met."""
        free_us = {interval: self._free_us(interval) for interval in self._open}
        for interval in sorted(self._open, key=lambda interval: -free_us[interval]):
            if free_us[interval] <= 0:
                return
            swap = self._find_swap(interval)
            if swap is not None and swap.us <= HIDDEN_US:
                self._swap(interval)

    def _free_us(self, interval: IdleInterval) -> float:
        evicted_us = self._start_us[interval.since // 2 + 1]
        needed_us = self._start_us[interval.deadline]
        return needed_us - self._in_us[interval.tensor] - evicted_us - self._copy_us(interval)

    # ---- swaps and recomputations with overhead ----

    def take_cheapest(self) -> None:
        """Swap or recompute, the most bytes per µs of overhead first, until the budget is met or no candidate is left.

        Candidates that cannot be taken are reconsidered after others have been taken.
        """
        heap: list[tuple[float, IdleInterval]] = [(-math.inf, interval) for interval in self._open]
        waiting: list[IdleInterval] = []
        progress = False
        while self._exceeds() and (heap or (progress and waiting)):
            if not heap:
                heap, waiting, progress = [(-math.inf, interval) for interval in sorted(waiting)], [], False
            before, interval = heappop(heap)
            if interval not in self._open:
                continue
            way = self._cheaper(interval)
            if way is None:
                waiting.append(interval)
                continue
            order = -self._columns.bytes[interval.tensor] / max(way.us, SHORTEST_US)
            if heap and order > before and (order, interval) > heap[0]:
                heappush(heap, (order, interval))
                continue
            progress = True
            if isinstance(way, _Swap):
                self._swap(interval)
                continue
            for part in self._recompute(way):
                heappush(heap, (-math.inf, part))

    def _cheaper(self, interval: IdleInterval) -> _Swap | RecomputeChain | None:
        swap, chain = self._find_swap(interval), self._find_recomputation(interval)
        if swap is None or chain is None:
            return swap or chain
        return swap if swap.us <= chain.us else chain

    # ---- swaps ----

    def _find_swap(self, interval: IdleInterval, book: bool = False) -> _Swap | None:
        """Return the swap of an idle interval, out as early and in as late as the lanes have time.

        None if the tensor cannot leave, or need not. `book` takes the time from the lanes.
        """
        trigger, deadline = interval.last_user, interval.deadline
        if interval.tensor in self._recomputed or not self._exceeds(trigger + 1, deadline - 1):
            return None
        out_us, in_us = self._copy_us(interval), self._in_us[interval.tensor]
        out = self._out.earliest(out_us, trigger + 1, deadline - 1, book)
        freed = out.last if out_us - out.us <= HIDDEN_US else deadline - 1
        into = self._into.latest(in_us, freed + 1, deadline - 1, book)
        back = into.first - 1 if in_us - into.us <= HIDDEN_US else deadline - 1
        return _Swap(interval, freed, back, out_us - out.us + in_us - into.us)

    def _swap(self, interval: IdleInterval) -> None:
        swap = self._find_swap(interval, book=True)
        assert swap is not None
        del self._open[interval]
        self._swaps[interval] = swap
        self._swapped.add(interval.tensor)
        key = interval.tensor, interval.version(self._columns)
        self._copied[key] = min(interval.since, self._copied.get(key, interval.since))
        self._memory[swap.interval.last_user + 1 : swap.interval.deadline] -= self._columns.bytes[interval.tensor]

    def wait(self) -> None:
        """Start swap-ins later, and end swap-outs sooner, where tensors in flight make memory exceed the budget."""
        memory, size = self._memory.copy(), self._columns.bytes
        for swap in self._swaps.values():
            for first, last in ((swap.interval.last_user + 1, swap.freed), (swap.back + 1, swap.interval.deadline - 1)):
                memory[first : last + 1] += size[swap.interval.tensor]
        ins = sorted(self._swaps.values(), key=lambda swap: (swap.interval.deadline, swap))
        for operator in reversed(np.flatnonzero(memory > self._budget).tolist()):
            while memory[operator] > self._budget and ins and ins[-1].interval.deadline > operator:
                swap = ins.pop()
                if swap.back < operator:
                    memory[swap.back + 1 : operator + 1] -= size[swap.interval.tensor]
                    self._swaps[swap.interval] = swap._replace(back=operator)
        outs = sorted(self._swaps.values(), key=lambda swap: (-swap.interval.last_user, swap))
        for operator in np.flatnonzero(memory > self._budget).tolist():
            while memory[operator] > self._budget and outs and outs[-1].interval.last_user < operator:
                swap = outs.pop()
                if swap.freed >= operator:
                    memory[operator : swap.freed + 1] -= size[swap.interval.tensor]
                    self._swaps[swap.interval] = swap._replace(freed=operator - 1)

    def _copy_us(self, interval: IdleInterval) -> float:
        """Return the µs of the copy out: 0 if the host copy is current.

        It is current if nothing ever writes a persistent tensor, or if an earlier swap has copied the same version.
        """
        columns, tensor = self._columns, interval.tensor
        if columns.persistent[tensor] and not columns.writes[tensor]:
            return 0.0
        first = self._copied.get((tensor, interval.version(columns)), interval.since)
        return 0.0 if first < interval.since else self._out_us[tensor]

    # ---- recomputations ----

    def _find_recomputation(self, interval: IdleInterval) -> RecomputeChain | None:
        """Return how the tensor of the idle interval would be recomputed.

        None if that is impossible, unnecessary or takes memory that is not free. The time includes waits for inputs
        that have to be swapped in earlier.
        """
        if interval.tensor in self._swapped or not self._exceeds(*interval.away_if_recomputed):
            return None
        if self._chains.least_us(interval) is None or (chain := self._chains.find(interval)) is None:
            return None
        rise = self._chains.rise(chain)
        if rise > 0 and self._memory[chain.interval.next_user] + rise > self._budget:
            return None
        wait_us = 0.0
        for swap in self._sources(chain):
            if (us := self._earlier_us(swap, chain.interval.next_user)) is None:
                return None
            wait_us += us
        return chain._replace(us=chain.us + wait_us)

    def _recompute(self, chain: RecomputeChain) -> Iterator[IdleInterval]:
        """Recompute the tensor, and yield new candidates: idle intervals of its inputs, which have one more use."""
        interval, operator, rise = chain.interval, chain.interval.next_user, self._chains.rise(chain)
        first, last = interval.away_if_recomputed
        for swap in self._sources(chain):
            self._bring_earlier(swap, operator)
        del self._open[interval]
        self._recomputed.add(interval.tensor)
        self._memory[first : last + 1] -= self._columns.bytes[interval.tensor]
        self._memory[operator] += rise
        self._chains.add(chain)
        for tensor in chain.inputs:
            whole = self._idle.around(tensor, 2 * operator - 1)
            assert whole is not None
            self._open.pop(whole, None)
            for part in self._idle.split(whole, 2 * operator - 1):
                if part not in self._swaps and self._is_candidate(part):
                    self._open[part] = None
                    yield part

    def _sources(self, chain: RecomputeChain) -> list[_Swap]:
        """Return the swaps of those inputs that are on the host when the recomputation reads them."""
        position = 2 * chain.interval.next_user - 1
        intervals = (self._idle.around(tensor, position) for tensor in chain.inputs)
        return [self._swaps[interval] for interval in intervals if interval in self._swaps]

    def _earlier_us(self, swap: _Swap, operator: int) -> float | None:
        """Return the µs that the job waits if the tensor is back before operator - 1; None if there is no room."""
        tensor, deadline = swap.interval.tensor, swap.interval.deadline
        highest = self._memory[operator - 1 : deadline].max() + self._columns.bytes[tensor]
        if operator - 2 < swap.interval.last_user or highest > self._budget:
            return None
        in_us = self._in_us[tensor]
        return in_us - self._into.latest(in_us, swap.freed + 1, operator - 2, book=False).us

    def _bring_earlier(self, swap: _Swap, operator: int) -> None:
        in_us = self._in_us[swap.interval.tensor]
        self._memory[operator - 1 : swap.interval.deadline] += self._columns.bytes[swap.interval.tensor]
        freed = min(swap.freed, operator - 2)
        into = self._into.latest(in_us, freed + 1, operator - 2)
        back = into.first - 1 if in_us - into.us <= HIDDEN_US else operator - 2
        del self._swaps[swap.interval]
        interval = swap.interval._replace(until=2 * operator - 1)
        self._swaps[interval] = swap._replace(interval=interval, freed=freed, back=back)

    # ---- memory ----

    def _exceeds(self, first: int = 0, last: int | None = None) -> bool:
        """Return whether memory exceeds the budget at an operator from `first` to `last` (None means the last one)."""
        end = self._columns.operators if last is None else last + 1
        return bool((self._memory[first:end] > self._budget).any())

    def _candidates(self, tensor: int) -> Iterator[IdleInterval]:
        return filter(self._is_candidate, self._idle.of(tensor))

    def _is_candidate(self, interval: IdleInterval) -> bool:
        """Return whether taking the tensor off the device in this idle interval helps.

        Nothing leaves across the end of the iteration.
        """
        if self._idle.crosses_end(interval) or not self._columns.bytes[interval.tensor]:
            return False
        return self._exceeds(*interval.away_if_recomputed)
