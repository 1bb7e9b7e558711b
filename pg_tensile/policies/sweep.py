"""One pass over the operators of a trace that keeps the device under a budget.

Wherever the next operator would not fit, the pass takes tensors off the device that nobody needs soon, cheapest first:
by swap, if the link has time for them, or by recomputation, from what is there or can be made when they are needed
again. Whatever comes back needs room in turn. Prices are in µs of the job's time: a recomputation costs what its
operators take; a swap costs the stall that is left where the link is full, and `link_price` for each µs of link,
because link that is taken is missing elsewhere.

The pass only decides; when transfers start is decided in prefetch.py.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from pg_tensile.plan import Event, EventKind
from pg_tensile.policies.columns import Columns
from pg_tensile.policies.lanes import Lane
from pg_tensile.profile import DeviceProfile, Direction
from pg_tensile.trace import Mode

LONGEST_CHAIN = 24  # operators that one recomputation may take
SMALLEST = 1 / 20_000  # of the peak: smaller tensors stay where they are
SMALL_INPUT = 4  # what a recomputation reads is kept for it if the tensor that it makes is so many times as large
STALE = 1.02  # a price that has risen by more is looked at again

READ, STATS = Mode.READ.value, Mode.STATS.value


class Prices(NamedTuple):
    """What makes one pass differ from another."""

    link_price: float  # µs of the job's time that a µs of link is worth
    duration_weight: float  # 0: all absences count alike; 1: in proportion to their length
    longest_chain: int = 24  # absences that are made of each other, because all of them come back at once


@dataclass(slots=True)
class Absence:
    """A tensor off the device, from after `since` until `need`."""

    tensor: int
    since: int  # the operator that used it last; negative: of the iteration before
    need: int  # operator
    early: bool  # needed by a recomputation, before that operator
    freed: int  # in the gap of this operator
    back: int  # swap: from this operator's gap on
    swap: bool
    version: int
    inputs: tuple[int, ...] = ()  # recomputation: what has to be there


class Price(NamedTuple):
    us: float
    own_us: float  # without what the link is worth
    swap: bool
    back: int  # swap: as in Absence
    inputs: tuple[int, ...]  # recomputation: what has to be there


class Landing(NamedTuple):
    back: int  # the operator in whose gap the swap-in starts
    us: float
    stall_us: float


class Shortage(NamedTuple):
    """Why there is no plan: at `operator`, so many bytes more than the budget are needed."""

    operator: int
    bytes: int


@dataclass
class Outcome:
    events: list[Event] = field(default_factory=list)
    us: float = 0.0  # of the iteration, as the pass sees it
    shortage: Shortage | None = None


def sweep(columns: Columns, profile: DeviceProfile, budget_bytes: int, prices: Prices, share: float = 1.0) -> Outcome:
    """Events that keep an iteration within `budget_bytes` (workspaces included), with `share` of the link."""
    return _Sweep(columns, profile, budget_bytes, prices, share).run()


class _Sweep:
    def __init__(self, columns: Columns, profile: DeviceProfile, budget: int, prices: Prices, share: float) -> None:
        self.columns = columns
        self.budget = budget
        self.prices = prices
        self.us_a_byte = tuple(1e6 / (rate * share) for rate in (profile.out_bytes_per_s, profile.in_bytes_per_s))
        self.latency_us = profile.transfer_latency_us + profile.handover_us
        self.launch_us = profile.launch_us
        self.out, self.into = Lane(columns.us), Lane(columns.us)
        self.start_us = [0.0, *accumulate(columns.us)]
        self.total_us = max(self.start_us[-1], 1e-9)
        self.smallest = max(1, int(max(columns.memory) * SMALLEST))
        self.change = [0] * (columns.operators + 2)  # of memory, against the trace without a plan, at each operator
        self.away: dict[int, Absence] = {}
        self.due: list[list[int]] = [[] for _ in range(columns.operators + 1)]  # tensors to be back at an operator
        self.extra: dict[int, list[int]] = {}  # tensor → needs by recomputations, ascending
        self.last = [accesses[-1] if accesses else -1 for accesses in columns.accesses]  # needs
        self.made_of: dict[int, set[int]] = {}  # tensor → absences by recomputation that it is an input of
        self.copied: set[int] = set()  # tensors with a current host copy
        self.read_at: dict[int, list[int]] = {}  # operator → tensors that recomputations before it read
        self.heap: list[tuple[float, int, int, int]] = []
        self.now = 0
        self.level = 0  # of memory now, against the trace without a plan
        self.outcome = Outcome(us=self.start_us[-1])
        self.wrapped: set[int] = set()  # persistent tensors that start off the device
        self.leaving: dict[int, int] = {}  # of those: when they are freed after their last use

    def run(self) -> Outcome:
        columns = self.columns
        self._offer_persistent()
        for operator in range(columns.operators):
            self.now = operator
            self.level += self.change[operator]
            extra = self._come_back(operator) if self.due[operator] else 0
            if not self._make_room(operator, extra):
                return self.outcome
            for tensor, mode, _ in columns.uses[operator]:
                if mode != READ:
                    self.copied.discard(tensor)
                self._offer(tensor, operator)
            for tensor in self.read_at.get(operator, ()):
                self._offer(tensor, operator)
        return self._finish()

    # ---- needs ----

    def _next_need(self, tensor: int, after: int) -> tuple[int, bool] | None:
        """The first operator beyond `after` that needs it, and whether before it a recomputation does."""
        accesses = self.columns.accesses[tensor]
        place = bisect_left(accesses, after + 1)
        own = accesses[place] if place < len(accesses) else None
        extra = self.extra.get(tensor)
        if extra:
            place = bisect_left(extra, after + 1)
            if place < len(extra) and (own is None or extra[place] <= own):
                return extra[place], True
        if own is not None:
            return own, False
        if self.columns.persistent[tensor] and accesses:
            return accesses[0] + self.columns.operators, False
        return None

    def _require(self, tensor: int, operator: int) -> None:
        """A recomputation right before `operator` reads the tensor."""
        needs = self.extra.setdefault(tensor, [])
        place = bisect_left(needs, operator)
        if place == len(needs) or needs[place] != operator:
            insort(needs, operator)
            self.read_at.setdefault(operator, []).append(tensor)
        if operator > self.last[tensor]:  # it lives longer
            if not self.columns.persistent[tensor]:
                self._alter(self.last[tensor] + 1, operator - 1, self.columns.bytes[tensor])
            self.last[tensor] = operator
        absence = self.away.get(tensor)
        if absence is None or (absence.need, not absence.early) <= (operator, False):
            return
        size = self.columns.bytes[tensor]
        if absence.swap:
            back = min(absence.back, self._back(tensor, operator, True, max(absence.freed, self.now)).back)
            self._alter(back + 1, absence.back, size)
            absence.back = back
        else:
            self._alter(operator, absence.need - 1, size)
            closure = self._closure(tensor, absence.version, operator)
            for each in () if closure is None else closure[1]:
                self._require(each, operator)
        absence.need, absence.early = operator, True
        self.due[operator].append(tensor)

    def _alter(self, first: int, last: int, size: int) -> None:
        """Memory at the operators first … last."""
        if first > last or last < self.now:
            return
        if first <= self.now:
            self.level += size
        else:
            self.change[first] += size
        self.change[last + 1] -= size

    # ---- candidates ----

    def _offer_persistent(self) -> None:
        columns = self.columns
        for tensor, accesses in enumerate(columns.accesses):
            if columns.persistent[tensor] and accesses and accesses[0] > 1:
                self._offer(tensor, accesses[-1] - columns.operators)

    def _offer(self, tensor: int, since: int) -> None:
        """The tensor was used; it may go until it is needed again."""
        if self.columns.bytes[tensor] < self.smallest or tensor in self.columns.statistics:
            return
        need = self._next_need(tensor, since)
        if tensor in self.away or need is None:
            return
        if tensor in self.wrapped and need[0] >= self.columns.operators:
            self._leave(tensor, since, need[0])
            return
        if need[0] - since < 2 + need[1]:
            return
        key = self._key(tensor, since, need[0], self._least_us(tensor, since, need[0]))
        heappush(self.heap, (key, tensor, since, need[0]))

    def _least_us(self, tensor: int, since: int, need: int) -> float:
        """A lower bound of the price, which is looked at when the tensor's turn comes: on a free link, from inputs that
        are all there."""
        columns = self.columns
        moved_us = self._out_us(tensor) + self._in_us(tensor)
        least_us = self.prices.link_price * moved_us + 2 * self.launch_us
        if since >= 0 and need < columns.operators:
            writers = columns.writers(tensor, columns.version_before(tensor, since + 1))
            if writers is not None:
                return min(least_us, sum([columns.us[writer] for writer in writers]) + self.launch_us)
        return least_us

    def _key(self, tensor: int, since: int, need: int, us: float) -> float:
        weight = self.prices.duration_weight
        key = (us + 1e-3) / self.columns.bytes[tensor]
        if not weight:
            return key
        return key / max(self._span_us(since, need) / self.total_us, 1e-6) ** weight

    def _span_us(self, since: int, need: int) -> float:
        count, start = self.columns.operators, self.start_us
        if since < 0:
            return start[-1] - start[since + 1 + count] + start[need]
        if need >= count:
            return start[-1] - start[since + 1] + start[need - count]
        return start[need] - start[since + 1]

    def _price(self, tensor: int, since: int, need: tuple[int, bool], now: int) -> Price | None:
        """The cheaper way to be without the tensor from operator `now` on; None: there is none."""
        operator, early = need
        swap = self._swap_price(tensor, since, operator, early, now)
        closure = None
        if since >= 0 and operator < self.columns.operators:
            closure = self._closure(tensor, self.columns.version_before(tensor, since + 1), operator)
        if closure is not None and self._chain(tensor, closure[1]) <= self.prices.longest_chain:
            us = sum(self.columns.us[each] for each in closure[0]) + self.launch_us
            if swap is None or us <= swap.us:
                return Price(us, us, False, operator, closure[1])
        return swap

    def _chain(self, tensor: int, inputs: tuple[int, ...]) -> int:
        """The longest chain of absences by recomputation that this one would be part of."""

        known: dict[int, int] = {}

        def below(absence: Absence | None) -> int:
            if absence is None or absence.swap:
                return 0
            if absence.tensor not in known:
                known[absence.tensor] = 1 + max((below(self.away.get(each)) for each in absence.inputs), default=0)
            return known[absence.tensor]

        def above(tensor: int) -> int:
            if ~tensor not in known:
                users = [user for user in self.made_of.get(tensor, ()) if user in self.away]
                known[~tensor] = max((1 + above(user) for user in users), default=0)
            return known[~tensor]

        return max((below(self.away.get(each)) for each in inputs), default=0) + 1 + above(tensor)

    def _swap_price(self, tensor: int, since: int, need: int, early: bool, now: int) -> Price | None:
        count = self.columns.operators
        wraps = since < 0 or need >= count
        out_us = self._out_us(tensor)
        if since < 0:
            out = self.out.earliest(out_us, since + count + 1, count - 1, book=False)
        else:
            out = self.out.earliest(out_us, since + 1, min(now, count) - 1, book=False)
        first = 0 if wraps and since >= 0 else max(now, 0)
        landing = self._back(tensor, need % count if wraps else need, early, first, book=False)
        if landing.back < first:
            return None
        stall = out_us - out.us + landing.stall_us
        moved = out_us + landing.us
        own_us = stall + 2 * self.launch_us
        return Price(own_us + self.prices.link_price * moved, own_us, True, landing.back, ())

    def _out_us(self, tensor: int) -> float:
        if tensor in self.copied:
            return 0.0
        return self.latency_us + self.columns.bytes[tensor] * self.us_a_byte[Direction.OUT]

    def _in_us(self, tensor: int) -> float:
        return self.latency_us + self.columns.bytes[tensor] * self.us_a_byte[Direction.IN]

    def _back(self, tensor: int, need: int, early: bool, first: int, book: bool = True) -> Landing:
        us = self._in_us(tensor)
        latest = need - 1 - early
        booked = self.into.latest(us, first + 1, latest, book)
        back = min(booked.first, latest + 1) - 1
        return Landing(max(back, min(first, latest)), us, us - booked.us)

    def _closure(self, tensor: int, version: int, operator: int) -> tuple[list[int], tuple[int, ...]] | None:
        """Operators to execute right before `operator` to make the tensor, and what has to be on the device for them;
        None if that is not possible or takes too many."""
        columns = self.columns
        steps: list[int] = []
        inputs: list[int] = []
        there: set[int] = set()
        size = columns.bytes[tensor]
        planned = 0

        def make(tensor: int, version: int) -> bool:
            nonlocal planned
            writers = columns.writers(tensor, version)
            if writers is None:
                return False
            planned += len(writers)
            if planned > LONGEST_CHAIN:
                return False
            there.add(tensor)
            for writer in writers:
                for each, mode, seen in columns.uses[writer]:
                    if each == tensor or mode > STATS:
                        continue
                    if mode == READ and columns.version_before(each, operator) != seen:
                        return False
                    if each in there:
                        continue
                    if columns.persistent[each]:
                        absence = self.away.get(each)
                        if absence is not None and absence.need >= columns.operators:
                            return False
                    small = columns.bytes[each] * SMALL_INPUT <= size and self.last[each] >= self.now
                    if columns.persistent[each] or self.last[each] >= operator or small:
                        there.add(each)
                        inputs.append(each)
                    elif not make(each, seen):
                        return False
                steps.append(writer)
            return True

        return (steps, tuple(inputs)) if make(tensor, version) else None

    # ---- making room ----

    def _make_room(self, operator: int, extra: int) -> bool:
        """Until the operator fits, and what is executed before it, which takes `extra` bytes besides."""
        columns = self.columns
        above = max(columns.workspace[operator], extra - columns.created[operator])
        while (excess := columns.memory[operator] + self.level + above - self.budget) > 0:
            if not self._drop_cheapest(operator):
                self.outcome.shortage = Shortage(operator, excess)
                return False
        return True

    def _drop_cheapest(self, operator: int) -> bool:
        """Takes one tensor off the device before `operator`; False: there is none that can go."""
        while self.heap:
            key, tensor, since, until = heappop(self.heap)
            need = self._next_need(tensor, since)
            if tensor in self.away or need is None or need[0] <= operator:
                continue
            price = self._price(tensor, since, need, operator)
            if price is None:
                continue
            current = self._key(tensor, since, need[0], price.us)
            if (need[0] != until or current > key * STALE) and self.heap and current > self.heap[0][0]:
                heappush(self.heap, (current, tensor, since, need[0]))
                continue
            self._take_away(tensor, since, need, price, operator)
            return True
        return False

    def _take_away(self, tensor: int, since: int, need: tuple[int, bool], price: Price, operator: int) -> None:
        columns, count, size = self.columns, self.columns.operators, self.columns.bytes[tensor]
        until, early = need
        self.outcome.us += price.own_us
        version = columns.version_before(tensor, since + 1) if since >= 0 else 0
        absence = Absence(tensor, since, until, early, operator - 1, price.back, price.swap, version, price.inputs)
        if price.swap:
            self._book(absence)
        if until >= count:  # from the start on, too, which has been passed
            self._emit_swap(absence, until - count)
        else:
            self.due[until].append(tensor)
            for each in price.inputs:
                self.made_of.setdefault(each, set()).add(tensor)
                self._require(each, until)
        self.away[tensor] = absence
        self._alter(operator, min(absence.back if price.swap and until < count else until - 1, count - 1), -size)

    def _book(self, absence: Absence) -> None:
        """Takes the link's time for both transfers."""
        tensor, count = absence.tensor, self.columns.operators
        out_us = self._out_us(tensor)
        self.copied.add(tensor)
        if absence.since < 0:
            booked = self.out.earliest(out_us, absence.since + count + 1, count - 1)
            self.wrapped.add(tensor)
            self.leaving[tensor] = booked.last if booked.us >= out_us else count - 1
            absence.back = self._back(tensor, absence.need, absence.early, self.now).back
        elif absence.need >= count:
            self.out.earliest(out_us, absence.since + 1, self.now - 1)
            absence.back = self._back(tensor, absence.need - count, absence.early, 0).back
        else:
            self.out.earliest(out_us, absence.since + 1, self.now - 1)
            absence.back = self._back(tensor, absence.need, absence.early, self.now).back

    def _leave(self, tensor: int, since: int, need: int) -> None:
        """A tensor that starts off the device has been used for the last time in this iteration."""
        freed = max(self.leaving[tensor], since)
        self.away[tensor] = Absence(tensor, since, need, False, freed, 0, True, 0)
        self.outcome.events.append(Event(EventKind.SWAP_OUT, tensor, since, freed))
        self._alter(freed + 1, self.columns.operators - 1, -self.columns.bytes[tensor])

    # ---- coming back ----

    def _come_back(self, operator: int) -> int:
        """Brings back what is due at `operator`; the bytes that recomputations take besides, at most."""
        extra = 0
        temporary: set[int] = set()
        for tensor in self.due[operator]:
            absence = self.away.get(tensor)
            if absence is not None and absence.need == operator and absence.swap:
                del self.away[tensor]
                self._emit_swap(absence, operator)
        for tensor in self.due[operator]:
            absence = self.away.get(tensor)
            if absence is not None and absence.need == operator:
                extra += self._remake(tensor, absence.version, operator, temporary)
        return extra

    def _remake(self, tensor: int, version: int, operator: int, temporary: set[int]) -> int:
        """Recompute events for a tensor and what it is made of; bytes that they take besides, at most."""
        columns = self.columns
        extra = most = 0
        if self.away.pop(tensor, None) is None:
            temporary.add(tensor)
            extra = columns.bytes[tensor]
        writers = columns.writers(tensor, version)
        assert writers is not None
        for writer in writers:
            besides = columns.workspace[writer]
            for each, mode, seen in columns.uses[writer]:
                if each == tensor:
                    continue
                if mode != READ:
                    besides += columns.bytes[each]  # discarded outputs, copies of statistics
                elif each in self.away and not self.away[each].swap:
                    extra += self._remake(each, self.away[each].version, operator, temporary)
                elif each not in temporary and not columns.persistent[each]:
                    if self.last[each] < operator:
                        extra += self._remake(each, seen, operator, temporary)
                    elif self.last[each] == operator:
                        extra += columns.bytes[each]  # may have been kept for this
            most = max(most, besides)
        self.outcome.events.append(Event(EventKind.RECOMPUTE, tensor, operator - 1, operator, version))
        return extra + most

    def _emit_swap(self, absence: Absence, need: int) -> None:
        deadline = need - 1 if absence.early else need
        if absence.since >= 0:  # else: at its last use
            freed = max(absence.freed, absence.since)
            self.outcome.events.append(Event(EventKind.SWAP_OUT, absence.tensor, absence.since, freed))
        self.outcome.events.append(Event(EventKind.SWAP_IN, absence.tensor, min(absence.back, deadline - 1), deadline))

    def _finish(self) -> Outcome:
        order = {EventKind.SWAP_OUT: 0, EventKind.RELEASE: 0, EventKind.SWAP_IN: 1, EventKind.RECOMPUTE: 2}
        self.outcome.events.sort(key=lambda event: (event.trigger, order[event.kind]))
        return self.outcome
