"""Free time on both lanes of the link for the swaps of a pass."""

from __future__ import annotations

from typing import NamedTuple

from pg_tensile.planning.building_blocks.idle import IdleInterval
from pg_tensile.planning.building_blocks.link_time import Booking, Lane
from pg_tensile.planning.device.link import swap_us
from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.trace.lists import Columns


class SwapInSlot(NamedTuple):
    """Start of a swap-in: in the gap of operator `back`, with `stall_us` that do not fit into the lane."""

    back: int
    stall_us: float


class SwapSlots:
    """The lanes, and the tensors that need no copy out any more. `now` is the operator that a pass has reached.

    `stretch`: factor on the latencies, by which the lanes have more time; because of all that the job waits for."""

    def __init__(self, columns: Columns, profile: DeviceProfile, stretch: float = 1.0) -> None:
        self._operators = columns.operators
        self._out_us, self.in_us = (
            [profile.handover_us + us for us in swap_us(columns.trace, direction, profile)] for direction in Direction
        )
        free_us = columns.us if stretch == 1 else [us * stretch for us in columns.us]
        self._out, self._into = Lane(free_us), Lane(free_us)
        self.copied: set[int] = set()  # tensors with a current host copy

    def out_us(self, tensor: int) -> float:
        return 0.0 if tensor in self.copied else self._out_us[tensor]

    def find_swap_out(self, interval: IdleInterval, now: int, book: bool = False) -> Booking:
        """Return the earliest time for the copy out of a tensor before the current operator, or as much as is free."""
        first, last = interval.last_user + 1, now - 1
        if interval.since < 0:
            first, last = first + self._operators, self._operators - 1
        return self._out.earliest(self.out_us(interval.tensor), first, last, book)

    def find_swap_in(self, tensor: int, until: int, now: int, book: bool = False) -> SwapInSlot | None:
        """Return the latest swap-in that is in time for a use at the position `until`.

        None if it would have to start before the tensor is freed.
        """
        first = 0 if until >= 2 * self._operators else now
        latest = until % (2 * self._operators) // 2 - 1  # operator that can be overlapped with
        if latest < first:
            return None
        us = self.in_us[tensor]
        booked = self._into.latest(us, first + 1, latest, book)
        return SwapInSlot(min(booked.first, latest + 1) - 1, us - booked.us)

    def stall_us(self, interval: IdleInterval, now: int) -> float | None:
        """Return the µs of a swap's copies that the lanes have no time for; None if no operator is in between."""
        swap_in = self.find_swap_in(interval.tensor, interval.until, now)
        if swap_in is None:
            return None
        return self.out_us(interval.tensor) - self.find_swap_out(interval, now).us + swap_in.stall_us
