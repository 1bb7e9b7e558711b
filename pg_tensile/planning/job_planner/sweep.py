"""One pass over the operators of a trace that keeps the device within a budget.

Wherever the next operator would not fit, the pass takes tensors off the device that are not needed soon, cheapest first
(prices.py): by a swap, or by a recomputation from tensors that are resident or can be recomputed when they are needed
again. A tensor that comes back needs room in turn; one recomputed only for another recomputation may leave at once.

The pass only decides; transfer_times.py schedules the transfers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from pg_tensile.planning.building_blocks.idle import IdleInterval
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.job_planner.off_device import OffDevice, OffDeviceTensors
from pg_tensile.planning.job_planner.prices import ExtraCosts, Price, Prices, Pricing
from pg_tensile.planning.job_planner.recomputed_gap import RecomputedGap
from pg_tensile.planning.job_planner.swap_slots import SwapSlots
from pg_tensile.planning.plan.plan import Event, EventKind
from pg_tensile.planning.trace.lists import Columns

# How these two were found is not recorded; see PRICES in prices.py for the command that measures their effect.
SMALLEST = 1 / 20_000  # fraction of the peak; smaller tensors stay where they are
STALE = 1.2  # a candidate whose price has risen by a larger factor is queued again
ORDER = {EventKind.SWAP_OUT: 0, EventKind.SWAP_IN: 1, EventKind.RECOMPUTE: 2}  # within a gap, events that free go first


class Shortage(NamedTuple):
    """Reason why there is no plan: `operator` needs `bytes` more than the budget."""

    operator: int
    bytes: int


@dataclass
class Outcome:
    """Events by trigger; after a shortage, those decided until then."""

    events: list[Event] = field(default_factory=list)
    shortage: Shortage | None = None


def sweep(
    columns: Columns, profile: DeviceProfile, budget_bytes: int, prices: Prices, extra_costs: ExtraCosts | None = None
) -> Outcome:
    """Return the events that keep an iteration within `budget_bytes`, workspaces included, or a shortage.

    `extra_costs`: costs of taking tensors off the device beyond those that the pass computes.
    """
    return _Sweep(columns, profile, budget_bytes, prices, extra_costs or {}).run()


class _Sweep:
    """State of a pass."""

    def __init__(
        self, columns: Columns, profile: DeviceProfile, budget: int, prices: Prices, extra_costs: ExtraCosts
    ) -> None:
        self.columns = columns
        self.count = columns.operators
        self.budget = budget
        self.early_swap_outs = prices.early_swap_outs
        self.smallest = max(1, int(max(columns.memory) * SMALLEST))
        self.stays = [size < self.smallest for size in columns.bytes]  # [m]: tensors that never leave
        for tensor in columns.statistics:
            self.stays[tensor] = True
        self.off = OffDeviceTensors(columns)
        self.slots = SwapSlots(columns, profile, prices.stretch)
        self.pricing = Pricing(columns, profile.launch_us, prices, extra_costs, self.off, self.slots)
        self.due: list[list[int]] = [[] for _ in range(self.count)]  # [n]: tensors due back at an operator
        self.freed_first: dict[
            int, int
        ] = {}  # persistent tensors off the device at first → gap in which they are freed
        self.stay_over_end: set[int] = set()  # persistent tensors that are copied out after the iteration's start
        self.heap: list[tuple[float, IdleInterval]] = []  # candidates, with a lower bound of their keys
        self.now = 0
        self.recomputed = RecomputedGap(columns)  # right before the current operator
        self.level = 0  # bytes now, relative to the trace without a plan
        self.change = [0] * (self.count + 1)  # of the level when an operator begins
        self.outcome = Outcome()

    def run(self) -> Outcome:
        columns = self.columns
        for tensor, accesses in enumerate(columns.accesses):
            if columns.persistent[tensor] and accesses and accesses[0] > 1:
                self._offer(tensor, 2 * (accesses[-1] - self.count))
        if self.early_swap_outs:
            self._swap_out_early()
        for operator in range(self.count):
            self.now = operator
            self.level += self.change[operator]
            if self.due[operator] or self.recomputed.scratch_bytes:
                self.recomputed = self._bring_back()
            fits = columns.memory[operator] + self.level + columns.workspace[operator] <= self.budget
            if (self.recomputed.scratch_bytes or not fits) and not self._make_room():
                return self.outcome
            for tensor in columns.changed[operator]:
                self.slots.copied.discard(tensor)
            for tensor in columns.leaving[operator]:
                if not self.stays[tensor]:
                    self._offer(tensor, 2 * operator)
            for tensor in self.off.extended.get(operator, ()):
                self._offer(tensor, 2 * operator)
            for tensor in self.off.read_before.get(operator, ()):
                self._offer(tensor, 2 * operator - 1)
        for tensor in self.freed_first:
            last = self.off.tensors[tensor]
            self.outcome.events.append(Event(EventKind.SWAP_OUT, tensor, last.interval.last_user, last.freed))
        self.outcome.events.sort(key=lambda event: (event.trigger, ORDER[event.kind]))
        return self.outcome

    def _swap_out_early(self) -> None:
        """Take persistent tensors off the device across the end of the iteration, as far as the lanes have time.

        Only tensors that can be swapped once more between two of their accesses leave: their host copies are current
        then, so the second swap-out needs no link where all tensors compete for it.
        """
        columns, slots = self.columns, self.slots
        start_us = self.pricing.start_us
        idle: list[tuple[float, int]] = []  # (µs of the longest idle interval, tensor)
        for tensor, accesses in enumerate(columns.accesses):
            if not self.stays[tensor] and columns.persistent[tensor] and columns.writes[tensor] and accesses[0] > 1:
                us = max([start_us[later] - start_us[sooner + 1] for sooner, later in pairwise(accesses)], default=0.0)
                if us > slots.out_us(tensor) + slots.in_us[tensor]:
                    idle.append((us, tensor))
        for _, tensor in sorted(idle, reverse=True):
            accesses = columns.accesses[tensor]
            interval = IdleInterval(tensor, 2 * (accesses[-1] - self.count), 2 * accesses[0])
            stall_us = slots.stall_us(interval, self.now)
            if stall_us is not None and stall_us < 1e-6:
                self._take_away(interval, Price(0.0, True))

    def _alter(self, first: int, last: int, size: int) -> None:
        """Add `size` bytes at the operators first … last, as far as they are not passed yet."""
        if first > last or last < self.now:
            return
        if first <= self.now:
            self.level += size
        else:
            self.change[first] += size
        self.change[last + 1] -= size

    # ---- leaving ----

    def _offer(self, tensor: int, since: int) -> None:
        """Queue a tensor after a use: it may leave until it is needed again."""
        if self.stays[tensor] or tensor in self.off.tensors:
            return
        until = self.off.idle.next_use(tensor, since)
        if until is None:
            return
        crosses_end = until >= 2 * self.count
        if crosses_end and tensor in self.stay_over_end:
            return
        if crosses_end and tensor in self.freed_first:
            self._free_at_end(IdleInterval(tensor, since, until))
        elif (until - 1) // 2 > since // 2:  # with operators in between
            interval = IdleInterval(tensor, since, until)
            heappush(self.heap, (self.pricing.key(interval, self.pricing.least_us(interval)), interval))

    def _make_room(self) -> bool:
        """Take tensors off the device until the current operator, and the recomputations right before it, fit.

        Returns False, with the shortage in the outcome, if that is impossible.
        """
        excess, step = self._excess()
        if excess > 0:
            for tensor in self.recomputed.used:
                if self.columns.made[tensor]:
                    self._offer(tensor, 2 * self.now - 1)
        while excess > 0:
            if not self._drop_cheapest(step) and not self._wait():
                self.outcome.shortage = Shortage(self.now, excess)
                return False
            excess, step = self._excess()
        return True

    def _excess(self) -> tuple[int, int]:
        """Return the bytes over the budget, and the recomputation step at which they are.

        The number of these steps stands for the current operator.
        """
        columns, now = self.columns, self.now
        here = columns.memory[now] + self.level
        most, step = here + columns.workspace[now], len(self.recomputed.scratch_bytes)
        if step:
            above, highest = self.recomputed.peak(self._stays)
            before = here - columns.created[now] + above
            if before > most:
                most, step = before, highest
        return most - self.budget, step

    def _stays(self, tensor: int) -> bool:
        """Return whether the tensor is resident at the current operator."""
        is_needed = self.columns.persistent[tensor] or self.off.last[tensor] >= 2 * self.now
        return is_needed and tensor not in self.off.tensors

    def _drop_cheapest(self, step: int) -> bool:
        """Take one tensor off the device that is resident at `step`; return False if none can leave."""
        in_use = []
        dropped = False
        while self.heap and not dropped:
            key, queued = entry = heappop(self.heap)
            tensor, since, _ = queued
            until = self.off.idle.next_use(tensor, since)
            if tensor in self.off.tensors or until is None or until <= 2 * self.now:
                continue
            if since == 2 * self.now - 1 and self.recomputed.used[tensor] >= step:
                in_use.append(entry)
                continue
            interval = IdleInterval(tensor, since, until)
            price = self.pricing.price(interval, self.now)
            if price is None:
                continue
            current = self.pricing.key(interval, price.us)
            if (interval != queued or current > key * STALE) and self.heap and current > self.heap[0][0]:
                heappush(self.heap, (current, interval))
                continue
            if since < 0:
                interval, price = self._cheaper_end(interval, price)
            self._take_away(interval, price)
            dropped = True
        for entry in in_use:
            heappush(self.heap, entry)
        return dropped

    def _cheaper_end(self, interval: IdleInterval, price: Price) -> tuple[IdleInterval, Price]:
        """Return the cheaper way to copy out a tensor that is idle across the end of the iteration: before or after it.

        Transfers do not cross that end. A tensor copied out after it is on the device there, and seems to be used by
        operator 0.
        """
        after = interval._replace(since=0)
        other = self.pricing.price(after, self.now)
        if other is None or other.us >= price.us:
            return interval, price
        self.stay_over_end.add(interval.tensor)
        return after, other

    def _wait(self) -> bool:
        """Make the job wait for a transfer; return False if none can be waited for.

        A swap-out in flight then ends before the current operator, a swap-in starts after it.
        """
        leaving, coming = [], []
        for off in self.off.tensors.values():
            if off.freed >= self.now:
                leaving.append(off)
            elif off.by_swap and off.back < self.now < off.interval.deadline < self.count:
                coming.append(off)
        if leaving:
            off = min(leaving, key=lambda off: off.freed)
            last, off.freed = off.freed, self.now - 1
        elif coming:
            off = max(coming, key=lambda off: off.interval.until)
            last = off.back = self.now
        else:
            return False
        self._alter(self.now, last, -self.columns.bytes[off.interval.tensor])
        return True

    def _take_away(self, interval: IdleInterval, price: Price) -> None:
        version = interval.version(self.columns) if interval.since >= 0 else 0
        back = (interval.until - 1) // 2
        off = OffDevice(interval, self.now - 1, back, price.by_swap, version, price.inputs)
        if price.by_swap:
            self._book(off)
        self.off.take(off)
        size = self.columns.bytes[interval.tensor]
        if interval.until >= 2 * self.count:  # off the device at the iteration's start as well, which has been passed
            self._alter(self.now, self.count - 1, -size)
            self._emit_swap(off)
            return
        self._alter(self.now, off.back, -size)
        self.due[interval.next_user].append(interval.tensor)
        for source in price.inputs:
            self._require(source, interval.next_user)

    def _book(self, off: OffDevice) -> None:
        """Book both transfers on the lanes."""
        tensor, since, until = off.interval
        swap_out = self.slots.find_swap_out(off.interval, self.now, book=True)
        if since < 0:
            self.freed_first[tensor] = swap_out.last if swap_out.us >= self.slots.out_us(tensor) else self.count - 1
        swap_in = self.slots.find_swap_in(tensor, until, self.now, book=True)
        assert swap_in is not None
        off.back = swap_in.back
        self.slots.copied.add(tensor)

    def _free_at_end(self, interval: IdleInterval) -> None:
        """Free a tensor that started off the device, after its last use in this iteration."""
        freed = max(self.freed_first[interval.tensor], interval.last_user)
        self.off.take(OffDevice(interval, freed, 0, True, 0))
        self._alter(freed + 1, self.count - 1, -self.columns.bytes[interval.tensor])

    def _require(self, tensor: int, operator: int) -> None:
        """Add a use: a recomputation right before `operator` reads the tensor.

        So the tensor lives at least until then, and if it is off the device, it comes back earlier.
        """
        position, size, last = 2 * operator - 1, self.columns.bytes[tensor], self.off.last[tensor]
        self.off.require(tensor, operator)
        if not self.columns.persistent[tensor]:
            self._alter(last // 2 + 1, operator - 1, size)
        off = self.off.tensors.get(tensor)
        if off is None or off.interval.until <= position:
            return
        back = operator - 1
        if off.by_swap:
            swap_in = self.slots.find_swap_in(tensor, position, self.now, book=True)
            back = min(off.back, max(off.freed, swap_in.back if swap_in else operator - 2))
        self._alter(back + 1, off.back, size)
        off.back, off.interval = back, off.interval._replace(until=position)
        self.due[operator].append(tensor)
        recipe = None if off.by_swap else self.off.recipe(tensor, off.version, operator, self.now)
        for source in recipe.inputs if recipe else ():
            self._require(source, operator)

    # ---- coming back ----

    def _bring_back(self) -> RecomputedGap:
        """Bring back the tensors due now, and return the recomputations right before the current operator."""
        recomputed = RecomputedGap(self.columns)
        tensors = self.off.tensors
        due = [tensors[tensor] for tensor in dict.fromkeys(self.due[self.now]) if tensor in tensors]
        due = [off for off in due if 2 * self.now - 1 <= off.interval.until <= 2 * self.now]
        for off in due:
            if off.by_swap:
                del tensors[off.interval.tensor]
                self._emit_swap(off)
        for off in due:
            if off.interval.tensor in tensors:
                self._recompute(off.interval.tensor, off.version, recomputed)
        return recomputed

    def _recompute(self, tensor: int, version: int, recomputed: RecomputedGap) -> None:
        """Recompute a tensor, after those of its inputs that are missing."""
        recomputation = self.columns.recomputations.of(tensor, version)
        assert recomputation is not None  # else the tensor would not have been dropped
        for source, seen, is_statistic in recomputation.inputs:
            if not is_statistic and source not in recomputed.created and self._is_missing(source):
                self._recompute(source, seen, recomputed)
        recomputed.add(recomputation)
        self.off.tensors.pop(tensor, None)
        self.outcome.events.append(Event(EventKind.RECOMPUTE, tensor, self.now - 1, self.now, version))

    def _is_missing(self, tensor: int) -> bool:
        """Return whether the tensor has to be recomputed: because it was dropped to that end, or is dead."""
        if tensor in self.off.tensors:
            return not self.off.tensors[tensor].by_swap
        return not self.columns.persistent[tensor] and self.off.last[tensor] < 2 * self.now - 1

    def _emit_swap(self, off: OffDevice) -> None:
        tensor, since, until = off.interval
        deadline = until % (2 * self.count) // 2
        if since >= 0:  # else `run` adds it, at the last use
            operator = off.interval.last_user
            self.outcome.events.append(Event(EventKind.SWAP_OUT, tensor, operator, max(off.freed, operator)))
        self.outcome.events.append(Event(EventKind.SWAP_IN, tensor, min(off.back, deadline - 1), deadline))
