"""Idle intervals of tensors: between two consecutive uses, a tensor may be off the device.

A use has a position in the iteration: 2i if operator i accesses the tensor, 2i - 1 if a recomputation right before
operator i reads it. Where an interval crosses the end of an iteration of n operators, its ends are 2n apart from those
within one iteration: `until` is 2n or more, or `since` is negative.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pg_tensile.planning.trace.lists import Columns
from pg_tensile.planning.trace.trace import Int64s, Trace


class IdleInterval(NamedTuple):
    """A tensor between two consecutive uses, at the positions `since` and `until`."""

    tensor: int
    since: int
    until: int

    @property
    def last_user(self) -> int:
        """Operator that uses the tensor, or right before which it is used; in its gap the tensor can leave."""
        return (self.since + 1) // 2

    @property
    def next_user(self) -> int:
        """Operator that uses the tensor next, or right before which it is used."""
        return (self.until + 1) // 2

    @property
    def deadline(self) -> int:
        """Operator before which a swap-in has to end."""
        return self.until // 2

    @property
    def away_if_recomputed(self) -> tuple[int, int]:
        """First and last operator at which the tensor is off the device if it is recomputed in the end."""
        return (self.since + 3) // 2, (self.until - 1) // 2

    def version(self, columns: Columns) -> int:
        """Return the version that the tensor has meanwhile."""
        return columns.version_before(self.tensor, self.since // 2 + 1)


class IdleIntervals:
    """The uses of all tensors, to which recomputations add, and the idle intervals between them.

    Persistent tensors also have an interval across the end of the iteration.
    """

    def __init__(self, columns: Columns) -> None:
        self._positions = columns.positions.copy()  # [m]; the lists in it are shared, and replaced when uses are added
        self._persistent = columns.persistent
        self._end = 2 * columns.operators

    def of(self, tensor: int, since: int = -1) -> Iterator[IdleInterval]:
        """Yield a tensor's idle intervals that begin at `since` or later, in order.

        For persistent tensors, the one across the end of the iteration comes last.
        """
        positions = self._positions[tensor]
        for index in range(bisect_left(positions, since), len(positions) - 1):
            yield IdleInterval(tensor, positions[index], positions[index + 1])
        across = self.across_end(tensor)
        if across is not None:
            yield across

    def across_end(self, tensor: int) -> IdleInterval | None:
        """Return the interval across the end of the iteration; None for tensors that do not live as long."""
        positions = self._positions[tensor]
        if not self._persistent[tensor] or not positions:
            return None
        return IdleInterval(tensor, positions[-1], positions[0] + self._end)

    def crosses_end(self, interval: IdleInterval) -> bool:
        return interval.until >= self._end or interval.since < 0

    def is_used(self, tensor: int, position: int) -> bool:
        positions = self._positions[tensor]
        index = bisect_left(positions, position)
        return index < len(positions) and positions[index] == position

    def next_use(self, tensor: int, position: int) -> int | None:
        """Return the first use after `position`, for persistent tensors also in the next iteration, or None."""
        positions = self._positions[tensor]
        index = bisect_right(positions, position)
        if index < len(positions):
            return positions[index]
        return positions[0] + self._end if self._persistent[tensor] and positions else None

    def around(self, tensor: int, position: int) -> IdleInterval | None:
        """Return the idle interval that contains `position`, at which the tensor is not used.

        None if the tensor does not exist there.
        """
        positions = self._positions[tensor]
        index = bisect_left(positions, position)
        if 0 < index < len(positions):
            return IdleInterval(tensor, positions[index - 1], positions[index])
        return self.across_end(tensor)

    def add_use(self, tensor: int, position: int) -> None:
        """Add a use at `position`, at which there is none yet."""
        positions = self._positions[tensor]
        index = bisect_left(positions, position)
        self._positions[tensor] = [*positions[:index], position, *positions[index:]]

    def split(self, interval: IdleInterval, position: int) -> tuple[IdleInterval, IdleInterval]:
        """Add a use at `position`, inside `interval`, and return the two intervals that result."""
        tensor, since, until = interval
        self.add_use(tensor, position)
        if until >= self._end and position < since:
            return IdleInterval(tensor, since, position + self._end), IdleInterval(tensor, position, until - self._end)
        return IdleInterval(tensor, since, position), IdleInterval(tensor, position, until)


def idle_intervals(trace: Trace) -> Int64s:
    """Return the idle intervals of all tensors with bytes, by tensor, then by position: int64[k, 3], `IdleInterval`s.

    For persistent tensors, the one across the end of the iteration comes last.
    """
    order = trace.access_by_tensor
    tensor, since = trace.access_tensor[order].astype(np.int64), trace.access_operator[order].astype(np.int64)
    until = np.roll(since, -1)
    last = np.diff(tensor, append=-1) != 0
    until[last] = trace.tensor_first[tensor[last]] + trace.operator_count
    exists = (trace.tensor_bytes[tensor] > 0) & (~last | trace.persistent[tensor])
    return np.stack([tensor, 2 * since, 2 * until], axis=1)[exists]
