"""Idle intervals of every tensor: between two consecutive needs it may be off the device."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from pg_tensile.planning.trace.lists import Columns


class Gap(NamedTuple):
    """Idle interval of a tensor, between two needs.

    A need has position 2i if operator i accesses the tensor, and 2i - 1 if a recomputation right before operator i
    reads it. Where an interval crosses the end of the iteration, `until` is 2n more than the position in the next one.
    """

    tensor: int
    since: int
    until: int


class Gaps:
    """Needs of all tensors, to which recomputations add, and the idle intervals between them.

    Persistent tensors also have an interval across the end of the iteration.
    """

    def __init__(self, columns: Columns) -> None:
        self._places = [[2 * operator for operator in accesses] for accesses in columns.accesses]
        self._persistent = columns.persistent
        self._around = 2 * columns.operators

    def of(self, tensor: int, since: int = -1) -> Iterator[Gap]:
        """Yield a tensor's idle intervals that begin at `since` or later, in order.

        For persistent tensors, the one across the end of the iteration comes last.
        """
        places = self._places[tensor]
        for place in range(bisect_left(places, since), len(places) - 1):
            yield Gap(tensor, places[place], places[place + 1])
        around = self.around(tensor)
        if around is not None:
            yield around

    def around(self, tensor: int) -> Gap | None:
        """Return the interval across the end of the iteration; None for tensors that do not live as long."""
        places = self._places[tensor]
        return Gap(tensor, places[-1], places[0] + self._around) if self._persistent[tensor] and places else None

    def wraps(self, gap: Gap) -> bool:
        return gap.until >= self._around

    def needed(self, tensor: int, place: int) -> bool:
        places = self._places[tensor]
        at = bisect_left(places, place)
        return at < len(places) and places[at] == place

    def at(self, tensor: int, place: int) -> Gap | None:
        """Return the idle interval that contains `place`, which is no need of the tensor.

        None if the tensor does not exist there.
        """
        places = self._places[tensor]
        at = bisect_left(places, place)
        if 0 < at < len(places):
            return Gap(tensor, places[at - 1], places[at])
        return self.around(tensor)

    def split(self, gap: Gap, place: int) -> tuple[Gap, Gap]:
        """Add a need at `place`, inside `gap`, and return the two intervals that result."""
        places = self._places[gap.tensor]
        places.insert(bisect_left(places, place), place)
        if self.wraps(gap) and place < gap.since:
            return Gap(gap.tensor, gap.since, place + self._around), Gap(gap.tensor, place, gap.until - self._around)
        return Gap(gap.tensor, gap.since, place), Gap(gap.tensor, place, gap.until)
