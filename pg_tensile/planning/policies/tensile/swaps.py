"""Feasible intervals and bookings of swaps on a job's part of the link (TENSILE, Algorithm 2)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from pg_tensile.planning.building_blocks.idle import IdleInterval, IdleIntervals
from pg_tensile.planning.building_blocks.link_slots import Timetable
from pg_tensile.planning.device.link import swap_us
from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.plan.plan import Event, EventKind
from pg_tensile.planning.trace.lists import Columns

Range = tuple[int, int]  # first and last operator


class Link(NamedTuple):
    """One job's part of the link."""

    profile: DeviceProfile  # at the job's rates
    lanes: int

    @classmethod
    def share(cls, profile: DeviceProfile, jobs: int, lanes: int) -> Link:
        """Return an equal part for each of `jobs` jobs. Raises ValueError unless `lanes` is 1 or 2.

        Two lanes count as slow as they are while both are busy.
        """
        if lanes not in (1, 2):
            raise ValueError(f"a link has one lane or two, not {lanes}")
        stretch = 1 / profile.duplex_factor if lanes == 2 else 1.0
        out, into = (rate / (stretch * jobs) for rate in (profile.out_bytes_per_s, profile.in_bytes_per_s))
        linked = replace(profile.with_link(out, into), transfer_latency_us=stretch * profile.transfer_latency_us)
        return cls(linked, lanes)


class Copy(NamedTuple):
    """A transfer out of one version of a tensor."""

    tensor: int
    version: int
    start_us: float
    us: float
    done: int  # the operator in whose gap the tensor can be freed


class Swap(NamedTuple):
    """An interval off the device: freed in the gap of operator `freed`, back from the gap of `back` on."""

    interval: IdleInterval
    freed: int
    back: int
    in_start_us: float
    copy: Copy | None  # None if the host copy is current

    def away(self, operators: int) -> list[Range]:
        """Return the operators at which the tensor is off the device."""
        if self.interval.until < 2 * operators:
            return [(self.freed + 1, self.back)]
        return [(self.freed + 1, operators - 1), (0, self.back)]


class Swapping:
    """The swaps of one job.

    Nothing that is booked makes anything wait as long as operators and link keep their times: a swap-out ends before
    its tensor is freed, a swap-in before its tensor is needed, one transfer at a time.
    """

    def __init__(self, columns: Columns, idle: IdleIntervals, link: Link) -> None:
        self._columns = columns
        self._idle = idle
        self._handover_us = link.profile.handover_us
        self._out_us, self._in_us = (swap_us(columns.trace, direction, link.profile) for direction in Direction)
        self._ends_us: Sequence[float] = list(accumulate(columns.us))
        shortest_us = link.profile.transfer_latency_us
        self._out = Timetable(self._ends_us, shortest_us)
        self._into = self._out if link.lanes == 1 else Timetable(self._ends_us, shortest_us)
        self._copies: dict[tuple[int, int], Copy] = {}  # by tensor and version
        self.swaps: dict[IdleInterval, Swap] = {}

    def duration_us(self, interval: IdleInterval) -> float:
        ends = self._ends_us
        if self._idle.crosses_end(interval):
            return ends[-1] - ends[interval.since // 2] + ends[self._deadline(interval)]
        return ends[interval.deadline] - ends[interval.since // 2]

    def widest(self, interval: IdleInterval) -> list[Range]:
        """Return where the tensor could be off the device if the link were idle; an empty list means nowhere."""
        columns, ends = self._columns, self._ends_us
        deadline, operators = self._deadline(interval), columns.operators
        if deadline == 0:
            return []
        freed, version = interval.last_user, interval.version(columns)
        if version > 0 or not columns.persistent[interval.tensor]:
            out_end_us = ends[self._maker(interval, version)] + self._out_us[interval.tensor] + self._handover_us
            freed = max(freed, bisect_left(ends, out_end_us))
        back = bisect_right(ends, ends[deadline - 1] - self._handover_us - self._in_us[interval.tensor]) - 1
        if not self._idle.crosses_end(interval):
            return [(freed + 1, back)] if freed < back else []
        if freed >= operators or back < 0:
            return []
        return [(freed + 1, operators - 1), (0, back)] if freed + 1 < operators else [(0, back)]

    def find(self, interval: IdleInterval) -> Swap | None:
        """Return the swap of an idle interval, out as early and in as late as possible; None if it does not fit."""
        columns, ends = self._columns, self._ends_us
        deadline, crosses_end = self._deadline(interval), self._idle.crosses_end(interval)
        latest_us = ends[deadline - 1] - self._handover_us
        copy, freed = None, interval.last_user
        if not self._on_host(interval):
            us, version = self._out_us[interval.tensor], interval.version(self._columns)
            earlier = self._copies.get((interval.tensor, version))
            if earlier is None:
                until_us = ends[-1] - self._handover_us if crosses_end else latest_us
                start_us = self._out.earliest(us, ends[self._maker(interval, version)], until_us)
                if start_us is None:
                    return None
                done = bisect_left(ends, start_us + us + self._handover_us)
                earlier = copy = Copy(interval.tensor, version, start_us, us, done)
            freed = max(freed, earlier.done)
        first_us = ends[0] if crosses_end else ends[min(freed + 1, columns.operators - 1)]
        start_us = self._into.latest(self._in_us[interval.tensor], first_us, latest_us)
        if start_us is None:
            return None
        return Swap(interval, freed, bisect_right(ends, start_us) - 1, start_us, copy)

    def book(self, swap: Swap) -> list[Range]:
        """Book the swap, and return the ranges of operators at which the tensor is newly off the device."""
        away = swap.away(self._columns.operators)
        if swap.copy is not None:
            self._out.book(swap.copy.start_us, swap.copy.us)
            self._copies[swap.copy.tensor, swap.copy.version] = swap.copy
        self._into.book(swap.in_start_us, self._in_us[swap.interval.tensor])
        self.swaps[swap.interval] = swap
        return away + self._drop_second_copy(swap.interval) if self._idle.crosses_end(swap.interval) else away

    def rest(self, interval: IdleInterval) -> list[IdleInterval]:
        """Return the other idle intervals up to the next write: once `interval` is swapped, they need no copy out."""
        crosses_end = self._idle.crosses_end(interval)
        version = 0 if crosses_end else interval.version(self._columns)
        candidates = self._idle.of(interval.tensor, -1 if crosses_end else interval.until)
        return [later for later in candidates if later.version(self._columns) == version and later != interval]

    def events(self) -> list[tuple[float, Event]]:
        """Return the events with the times in µs at which they start."""
        events = []
        copied: set[tuple[int, int]] = set()
        for swap in sorted(self.swaps.values()):
            tensor, key = swap.interval.tensor, (swap.interval.tensor, swap.interval.version(self._columns))
            copy = self._copies.get(key)
            if copy is not None and key not in copied:  # the first swap of this version; later ones use its copy
                copied.add(key)
                trigger, delay_us = self._out.trigger(copy.start_us)
                event = Event(EventKind.SWAP_OUT, tensor, trigger, swap.freed, delay_us=delay_us)
                events.append((copy.start_us, event))
            trigger, delay_us = self._into.trigger(swap.in_start_us)
            event = Event(EventKind.SWAP_IN, tensor, trigger, self._deadline(swap.interval), delay_us=delay_us)
            events.append((swap.in_start_us, event))
        return events

    def _drop_second_copy(self, across_end: IdleInterval) -> list[Range]:
        """Cancel a copy out that is not needed because the tensor starts off the device; return ranges newly off it.

        Such a tensor has a current host copy until it is written. The swap for which the copy was made then frees
        sooner.
        """
        copy = self._copies.get((across_end.tensor, 0)) if self._columns.writes[across_end.tensor] else None
        if copy is None:
            return []
        del self._copies[copy.tensor, 0]
        self._out.cancel(copy.start_us, copy.us)
        interval = next(interval for interval in self._idle.of(copy.tensor) if interval in self.swaps)
        swap = self.swaps[interval]
        self.swaps[interval] = swap._replace(freed=interval.last_user, copy=None)
        return [(interval.last_user + 1, swap.freed)]

    def _on_host(self, interval: IdleInterval) -> bool:
        """Return whether the host copy is current without a transfer."""
        columns, tensor = self._columns, interval.tensor
        if not columns.persistent[tensor]:
            return False
        if not columns.writes[tensor]:
            return True
        return interval.version(self._columns) == 0 and self._idle.across_end(tensor) in self.swaps

    def _maker(self, interval: IdleInterval, version: int) -> int:
        """Return the operator that made the interval's version; 0 if that was in the preceding iteration."""
        columns = self._columns
        if columns.persistent[interval.tensor]:
            return columns.writes[interval.tensor][version - 1] if version else 0
        return columns.makers[interval.tensor][version]

    def _deadline(self, interval: IdleInterval) -> int:
        """Return the operator before which the tensor has to be back."""
        return interval.until % (2 * self._columns.operators) // 2
