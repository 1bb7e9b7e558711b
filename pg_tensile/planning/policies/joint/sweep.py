"""One pass over the operators of a trace that keeps the device within a budget.

Wherever the next operator would not fit, the pass takes tensors off the device that are not needed soon, cheapest
first: by a swap, or by a recomputation from tensors that are resident or can be recomputed when they are needed again.
A tensor that comes back needs room in turn; one recomputed only for another recomputation may leave at once. Prices are
in µs of the job's time: a recomputation costs the time of its operators; a swap costs the stall that remains where the
link is full, and `link_price` for each µs of link, because that time is missing for other transfers.

The pass only decides; transfer_times.py schedules the transfers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from typing import NamedTuple

from pg_tensile.planning.device.link import swap_us
from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.plan.plan import Event, EventKind
from pg_tensile.planning.policies.building_blocks.link_time import Lane
from pg_tensile.planning.policies.building_blocks.needs import Absence, Needs
from pg_tensile.planning.policies.building_blocks.repeats import Repeats
from pg_tensile.planning.trace.lists import Columns
from pg_tensile.planning.trace.trace import Mode

LONGEST_CHAIN = 24  # dropped tensors, each recomputed from the one before, of the passes that allow the longest chains
SMALLEST = 1 / 20_000  # fraction of the peak; smaller tensors stay where they are
STALE = 1.2  # a candidate whose price has risen by a larger factor is queued again
ORDER = {EventKind.SWAP_OUT: 0, EventKind.SWAP_IN: 1, EventKind.RECOMPUTE: 2}  # within a gap, events that free go first


class Prices(NamedTuple):
    """Parameters in which passes differ."""

    link_price: float  # µs of the job's time for each µs of link
    duration_weight: float  # 0: all idle intervals count alike; 1: in proportion to their length
    longest_chain: int = LONGEST_CHAIN  # dropped tensors, each recomputed from the one before
    ahead: bool = False  # parameters are swapped out while the link is idle, before they have to be


class Price(NamedTuple):
    us: float
    swap: bool
    inputs: tuple[int, ...] = ()  # of a recomputation: tensors that have to be resident


class Landing(NamedTuple):
    """Start of a swap-in: in the gap of operator `back`, with `stall_us` that do not fit into the lane."""

    back: int
    stall_us: float


class Shortage(NamedTuple):
    """Reason why there is no plan: `operator` needs `bytes` more than the budget."""

    operator: int
    bytes: int


@dataclass
class Outcome:
    """Events by trigger; after a shortage, those decided until then."""

    events: list[Event] = field(default_factory=list)
    shortage: Shortage | None = None


Dearer = Mapping[tuple[int, bool], float]  # (tensor, whether by swap) → extra µs


def sweep(
    columns: Columns, profile: DeviceProfile, budget_bytes: int, prices: Prices, dearer: Dearer | None = None
) -> Outcome:
    """Return the events that keep an iteration within `budget_bytes`, workspaces included, or a shortage.

    `dearer`: costs of taking tensors off the device beyond those that the pass computes.
    """
    return _Sweep(columns, profile, budget_bytes, prices, dearer or {}).run()


class _Sweep:
    """State of a pass; `since` and `need` are positions of needs (needs.py)."""

    def __init__(self, columns: Columns, profile: DeviceProfile, budget: int, prices: Prices, dearer: Dearer) -> None:
        self.columns = columns
        self.count = columns.operators
        self.launch_us = profile.launch_us
        self.out_us, self.in_us = (
            [profile.handover_us + us for us in swap_us(columns.trace, direction, profile)] for direction in Direction
        )
        self.budget = budget
        self.prices = prices
        self.dearer = dearer
        self.out, self.into = Lane(columns.us), Lane(columns.us)
        self.start_us = [0.0, *accumulate(columns.us)]
        self.smallest = max(1, int(max(columns.memory) * SMALLEST))
        self.needs = Needs(columns)
        self.away = self.needs.away
        self.due: list[list[int]] = [[] for _ in range(self.count)]  # [n]: tensors due back at an operator
        self.copied: set[int] = set()  # tensors with a current host copy
        self.wrapped: dict[int, int] = {}  # persistent tensors off the device at first → gap in which they are freed
        self.heap: list[tuple[float, int, int, int]] = []  # (lower bound of the key, tensor, since, need)
        self.now = 0
        self.repeats = Repeats(columns)  # right before the current operator
        self.level = 0  # bytes now, relative to the trace without a plan
        self.change = [0] * (self.count + 1)  # of the level when an operator begins
        self.outcome = Outcome()

    def run(self) -> Outcome:
        columns = self.columns
        for tensor, accesses in enumerate(columns.accesses):
            if columns.persistent[tensor] and accesses and accesses[0] > 1:
                self._offer(tensor, 2 * (accesses[-1] - self.count))
        if self.prices.ahead:
            self._leave_ahead()
        for operator in range(self.count):
            self.now = operator
            self.level += self.change[operator]
            if self.due[operator] or self.repeats.besides:
                self.repeats = self._come_back()
            fits = columns.memory[operator] + self.level + columns.workspace[operator] <= self.budget
            if (self.repeats.besides or not fits) and not self._make_room():
                return self.outcome
            for tensor, mode, _ in columns.uses[operator]:
                if mode != Mode.READ:
                    self.copied.discard(tensor)
                self._offer(tensor, 2 * operator)
            for tensor in self.needs.read_before.get(operator, ()):
                self._offer(tensor, 2 * operator - 1)
        for tensor in self.wrapped:
            absence = self.away[tensor]
            self.outcome.events.append(Event(EventKind.SWAP_OUT, tensor, (absence.since + 1) // 2, absence.freed))
        self.outcome.events.sort(key=lambda event: (event.trigger, ORDER[event.kind]))
        return self.outcome

    def _leave_ahead(self) -> None:
        """Take persistent tensors off the device across the end of the iteration, as far as the lanes have time.

        Only tensors that can be swapped once more between two of their accesses leave: their host copies are current
        then, so the second swap-out needs no link where all tensors compete for it.
        """
        columns = self.columns
        gaps: list[tuple[float, int]] = []  # (µs of the longest idle interval, tensor)
        for tensor, accesses in enumerate(columns.accesses):
            large = columns.bytes[tensor] >= self.smallest and tensor not in columns.statistics
            if large and columns.persistent[tensor] and columns.writes[tensor] and accesses[0] > 1:
                us = max([self.start_us[two] - self.start_us[one + 1] for one, two in pairwise(accesses)], default=0.0)
                if us > self.out_us[tensor] + self.in_us[tensor]:
                    gaps.append((us, tensor))
        for _, tensor in sorted(gaps, reverse=True):
            since, need = 2 * (columns.accesses[tensor][-1] - self.count), 2 * columns.accesses[tensor][0]
            leaving = self.out.earliest(self.out_us[tensor], *self._leaving(since), book=False)
            landing = self._land(tensor, since, need, book=False)
            if landing is not None and landing.stall_us + self.out_us[tensor] - leaving.us < 1e-6:
                self._take_away(tensor, since, need, Price(0.0, True))

    def _alter(self, first: int, last: int, size: int) -> None:
        """Add `size` bytes at the operators first … last, as far as they are not passed yet."""
        if first > last or last < self.now:
            return
        if first <= self.now:
            self.level += size
        else:
            self.change[first] += size
        self.change[last + 1] -= size

    # ---- candidates ----

    def _offer(self, tensor: int, since: int) -> None:
        """Queue a tensor after a use: it may leave until it is needed again."""
        if self.columns.bytes[tensor] < self.smallest or tensor in self.columns.statistics or tensor in self.away:
            return
        need = self.needs.next(tensor, since)
        if need is None:
            return
        if tensor in self.wrapped and need >= 2 * self.count:
            self._leave(tensor, since, need)
        elif (need - 1) // 2 > since // 2:  # with operators in between
            key = self._key(tensor, since, need, self._least_us(tensor, since, need))
            heappush(self.heap, (key, tensor, since, need))

    def _least_us(self, tensor: int, since: int, need: int) -> float:
        """Return a lower bound of the price in µs: on a free link, from inputs that are all resident.

        The price itself is computed when the tensor's turn comes.
        """
        least_us = self.prices.link_price * (self._out_us(tensor) + self.in_us[tensor])
        if since >= 0 and need < 2 * self.count:
            version = self.columns.version_before(tensor, since // 2 + 1)
            return min(least_us, self.columns.recomputations.us(tensor, version) + self.launch_us)
        return least_us

    def _key(self, tensor: int, since: int, need: int, us: float) -> float:
        """Return the sort key of a candidate: the price per byte, the lower the longer the tensor is off the device."""
        key = (us + 1e-3) / self.columns.bytes[tensor]
        start, total_us = self.start_us, self.start_us[-1]
        away_us = start[(need + 1) // 2 % self.count] - start[(since // 2 + 1) % self.count]
        if since < 0 or need >= 2 * self.count:
            away_us += total_us
        return key / max(away_us / max(total_us, 1e-9), 1e-6) ** self.prices.duration_weight

    # ---- prices ----

    def _price(self, tensor: int, since: int, need: int) -> Price | None:
        """Return the cheaper way to take the tensor off the device now; None if there is no way.

        A tensor used right before the current operator, by a recomputation, cannot be swapped out before it.
        """
        swap_us = None if since == 2 * self.now - 1 else self._swap_us(tensor, since, need)
        if since >= 0 and need < 2 * self.count:
            version = self.columns.version_before(tensor, since // 2 + 1)
            most_us = math.inf if swap_us is None else swap_us - self.launch_us
            if self.columns.recomputations.us(tensor, version) <= most_us:
                recipe = self.needs.recipe(tensor, version, (need + 1) // 2, self.now)
                if recipe and self.needs.chain(tensor, recipe.inputs) <= self.prices.longest_chain:
                    us = sum([self.columns.us[step] for step in recipe.steps]) + self.dearer.get((tensor, False), 0.0)
                    if us <= most_us:
                        return Price(us + self.launch_us, False, recipe.inputs)
        return None if swap_us is None else Price(swap_us, True)

    def _swap_us(self, tensor: int, since: int, need: int) -> float | None:
        """Return the price of a swap in µs; None if the tensor would not be off the device at any operator."""
        out_us = self._out_us(tensor)
        landing = self._land(tensor, since, need, book=False)
        if landing is None:
            return None
        stall_us = out_us - self.out.earliest(out_us, *self._leaving(since), book=False).us + landing.stall_us
        besides_us = self.dearer.get((tensor, True), 0.0)
        return stall_us + self.prices.link_price * (out_us + self.in_us[tensor]) + besides_us

    def _out_us(self, tensor: int) -> float:
        return 0.0 if tensor in self.copied else self.out_us[tensor]

    def _leaving(self, since: int) -> tuple[int, int]:
        """Return the first and the last operator during which a tensor used at `since` can be copied out."""
        first = (since + 1) // 2 + 1
        return (first + self.count, self.count - 1) if since < 0 else (first, self.now - 1)

    def _land(self, tensor: int, since: int, need: int, book: bool = True) -> Landing | None:
        """Return the latest swap-in that is in time; None if it would have to start before the tensor is freed."""
        in_next = since >= 0 and need >= 2 * self.count
        first = 0 if in_next else self.now
        latest = need % (2 * self.count) // 2 - 1  # operator that can be overlapped with
        if latest < first:
            return None
        us = self.in_us[tensor]
        booked = self.into.latest(us, first + 1, latest, book)
        return Landing(min(booked.first, latest + 1) - 1, us - booked.us)

    # ---- leaving ----

    def _make_room(self) -> bool:
        """Take tensors off the device until the current operator, and the recomputations right before it, fit.

        Returns False, with the shortage in the outcome, if that is impossible.
        """
        excess, step = self._excess()
        if excess > 0:
            for tensor in self.repeats.used:
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
        most, step = here + columns.workspace[now], len(self.repeats.besides)
        if step:
            besides, repeated = self.repeats.peak(self._stays)
            before = here - columns.created[now] + besides
            if before > most:
                most, step = before, repeated
        return most - self.budget, step

    def _stays(self, tensor: int) -> bool:
        """Return whether the tensor is resident at the current operator."""
        return tensor not in self.away and (self.columns.persistent[tensor] or self.needs.last[tensor] >= 2 * self.now)

    def _drop_cheapest(self, step: int) -> bool:
        """Take one tensor off the device that is resident at `step`; return False if none can leave."""
        in_use = []
        found = False
        while self.heap and not found:
            key, tensor, since, until = entry = heappop(self.heap)
            need = self.needs.next(tensor, since)
            if tensor in self.away or need is None or need <= 2 * self.now:
                continue
            if since == 2 * self.now - 1 and self.repeats.used[tensor] >= step:
                in_use.append(entry)
                continue
            price = self._price(tensor, since, need)
            if price is None:
                continue
            current = self._key(tensor, since, need, price.us)
            if (need != until or current > key * STALE) and self.heap and current > self.heap[0][0]:
                heappush(self.heap, (current, tensor, since, need))
                continue
            self._take_away(tensor, since, need, price)
            found = True
        for entry in in_use:
            heappush(self.heap, entry)
        return found

    def _wait(self) -> bool:
        """Make the job wait for a transfer; return False if none can be waited for.

        A swap-out in flight then ends before the current operator, a swap-in starts after it.
        """
        leaving, coming = [], []
        for absence in self.away.values():
            if absence.freed >= self.now:
                leaving.append(absence)
            elif absence.swap and absence.back < self.now < absence.need // 2 < self.count:
                coming.append(absence)
        if leaving:
            absence = min(leaving, key=lambda absence: absence.freed)
            last, absence.freed = absence.freed, self.now - 1
        elif coming:
            absence = max(coming, key=lambda absence: absence.need)
            last = absence.back = self.now
        else:
            return False
        self._alter(self.now, last, -self.columns.bytes[absence.tensor])
        return True

    def _take_away(self, tensor: int, since: int, need: int, price: Price) -> None:
        version = self.columns.version_before(tensor, since // 2 + 1) if since >= 0 else 0
        absence = Absence(tensor, since, need, self.now - 1, (need - 1) // 2, price.swap, version, price.inputs)
        if price.swap:
            self._book(absence)
        self.needs.leave(absence)
        if need >= 2 * self.count:  # off the device at the iteration's start as well, which has been passed
            self._alter(self.now, self.count - 1, -self.columns.bytes[tensor])
            self._emit_swap(absence)
            return
        self._alter(self.now, absence.back, -self.columns.bytes[tensor])
        operator = (need + 1) // 2
        self.due[operator].append(tensor)
        for each in price.inputs:
            self._require(each, operator)

    def _book(self, absence: Absence) -> None:
        """Book both transfers on the lanes."""
        out_us = self._out_us(absence.tensor)
        booked = self.out.earliest(out_us, *self._leaving(absence.since))
        if absence.since < 0:
            self.wrapped[absence.tensor] = booked.last if booked.us >= out_us else self.count - 1
        landing = self._land(absence.tensor, absence.since, absence.need)
        assert landing is not None
        absence.back = landing.back
        self.copied.add(absence.tensor)

    def _leave(self, tensor: int, since: int, need: int) -> None:
        """Free a tensor that started off the device, after its last use in this iteration."""
        operator = (since + 1) // 2
        freed = max(self.wrapped[tensor], operator)
        self.needs.leave(Absence(tensor, since, need, freed, 0, True, 0))
        self._alter(freed + 1, self.count - 1, -self.columns.bytes[tensor])

    def _require(self, tensor: int, operator: int) -> None:
        """Add a need: a recomputation right before `operator` reads the tensor.

        So the tensor lives at least until then, and if it is off the device, it comes back earlier.
        """
        place, size, last = 2 * operator - 1, self.columns.bytes[tensor], self.needs.last[tensor]
        self.needs.add(tensor, operator)
        if not self.columns.persistent[tensor]:
            self._alter(last // 2 + 1, operator - 1, size)
        absence = self.away.get(tensor)
        if absence is None or absence.need <= place:
            return
        back = operator - 1
        if absence.swap:
            landing = self._land(tensor, -1, place)
            back = min(absence.back, max(absence.freed, landing.back if landing else operator - 2))
        self._alter(back + 1, absence.back, size)
        absence.back, absence.need = back, place
        self.due[operator].append(tensor)
        recipe = None if absence.swap else self.needs.recipe(tensor, absence.version, operator, self.now)
        for each in recipe.inputs if recipe else ():
            self._require(each, operator)

    # ---- coming back ----

    def _come_back(self) -> Repeats:
        """Bring back the tensors due now, and return the recomputations right before the current operator."""
        repeats = Repeats(self.columns)
        away = [self.away[tensor] for tensor in dict.fromkeys(self.due[self.now]) if tensor in self.away]
        due = [absence for absence in away if 2 * self.now - 1 <= absence.need <= 2 * self.now]
        for absence in due:
            if absence.swap:
                del self.away[absence.tensor]
                self._emit_swap(absence)
        for absence in due:
            if absence.tensor in self.away:
                self._repeat(absence.tensor, absence.version, repeats)
        return repeats

    def _repeat(self, tensor: int, version: int, repeats: Repeats) -> None:
        """Recompute a tensor, after those of its inputs that are missing."""
        recomputation = self.columns.recomputations.of(tensor, version)
        assert recomputation is not None  # else the tensor would not have been dropped
        for source, seen, is_statistic in recomputation.inputs:
            if not is_statistic and source not in repeats.made and self._is_missing(source):
                self._repeat(source, seen, repeats)
        repeats.add(recomputation)
        self.away.pop(tensor, None)
        self.outcome.events.append(Event(EventKind.RECOMPUTE, tensor, self.now - 1, self.now, version))

    def _is_missing(self, tensor: int) -> bool:
        """Return whether the tensor has to be recomputed: because it was dropped to that end, or is dead."""
        if tensor in self.away:
            return not self.away[tensor].swap
        return not self.columns.persistent[tensor] and self.needs.last[tensor] < 2 * self.now - 1

    def _emit_swap(self, absence: Absence) -> None:
        deadline = absence.need % (2 * self.count) // 2
        if absence.since >= 0:  # else `run` adds it, at the last use
            operator = (absence.since + 1) // 2
            freed = max(absence.freed, operator)
            self.outcome.events.append(Event(EventKind.SWAP_OUT, absence.tensor, operator, freed))
        self.outcome.events.append(Event(EventKind.SWAP_IN, absence.tensor, min(absence.back, deadline - 1), deadline))
