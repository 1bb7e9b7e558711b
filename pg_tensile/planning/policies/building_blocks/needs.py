"""Who needs which tensor when, while tensors are taken off the device: operators, and recomputations before them.

A need stands at 2i: operator i accesses the tensor; or at 2i - 1: a recomputation right before operator i reads it.
From 2n on it is one of the next iteration.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from pg_tensile.planning.trace.lists import Columns
from pg_tensile.planning.trace.trace import Mode

LONGEST_CHAIN = 24  # operators that one recomputation may take
SMALL_INPUT = 4  # what a recomputation reads is kept for it if the tensor that it makes is so many times as large

READ, STATS = Mode.READ.value, Mode.STATS.value


@dataclass(slots=True)
class Absence:
    """A tensor off the device, from after the need `since` (negative: of the iteration before) until `need`."""

    tensor: int
    since: int
    need: int
    freed: int  # in the gap of this operator
    back: int  # the last operator without it; a swap-in starts in its gap
    swap: bool
    version: int
    inputs: tuple[int, ...] = ()  # recomputation: what has to be there


class Recipe(NamedTuple):
    """How a tensor is made again."""

    steps: list[int]  # operators, in order
    inputs: tuple[int, ...]  # tensors that have to be on the device


class Needs:
    """The needs of all tensors of a trace, and the absences that have been decided."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.last = [places[-1] if places else -1 for places in columns.places]  # need, in this iteration
        self.read_before: dict[int, list[int]] = {}  # operator → tensors that recomputations before it read
        self.away: dict[int, Absence] = {}
        self._places = columns.places.copy()
        self._made_of: dict[int, set[int]] = {}  # tensor → tensors that were to be made of it

    def next(self, tensor: int, after: int) -> int | None:
        """The first need beyond `after`."""
        places = self._places[tensor]
        at = bisect_right(places, after)
        if at < len(places):
            return places[at]
        return places[0] + 2 * self.columns.operators if self.columns.persistent[tensor] and places else None

    def add(self, tensor: int, operator: int) -> None:
        """A recomputation right before `operator` reads the tensor."""
        places, place = self._places[tensor], 2 * operator - 1
        at = bisect_left(places, place)
        if at == len(places) or places[at] != place:
            self._places[tensor] = [*places[:at], place, *places[at:]]
            self.read_before.setdefault(operator, []).append(tensor)
            self.last[tensor] = max(self.last[tensor], place)

    def leave(self, absence: Absence) -> None:
        self.away[absence.tensor] = absence
        for each in absence.inputs:
            self._made_of.setdefault(each, set()).add(absence.tensor)

    def recipe(self, tensor: int, version: int, operator: int, now: int) -> Recipe | None:
        """How to make the tensor right before `operator`, of what is needed then or later or can be made as well; None
        if that is not possible or takes too many steps. A small tensor that is not dead `now` is kept for it."""
        columns = self.columns
        steps: list[int] = []
        inputs: list[int] = []
        there: set[int] = set()
        size, planned = columns.bytes[tensor], 0

        def kept(tensor: int) -> bool:
            if columns.persistent[tensor] or self.last[tensor] >= 2 * operator - 1:
                return True
            return columns.bytes[tensor] * SMALL_INPUT <= size and self.last[tensor] >= 2 * now - 1

        def make(tensor: int, version: int) -> bool:
            nonlocal planned
            writers = columns.writers(tensor, version)
            if not writers or planned + len(writers) > LONGEST_CHAIN:
                return False
            planned += len(writers)
            there.add(tensor)
            for writer in writers:
                for each, mode, seen in columns.uses[writer]:
                    if each == tensor or mode > STATS:
                        continue
                    if mode == READ and columns.version_before(each, operator) != seen:
                        return False
                    if each in there:
                        continue
                    if kept(each):
                        if self._gone(each):
                            return False
                        there.add(each)
                        inputs.append(each)
                    elif not make(each, seen):
                        return False
                steps.append(writer)
            return True

        return Recipe(steps, tuple(inputs)) if make(tensor, version) else None

    def _gone(self, tensor: int) -> bool:
        """Whether it comes back in the next iteration only."""
        absence = self.away.get(tensor)
        return absence is not None and absence.need >= 2 * self.columns.operators

    def chain(self, tensor: int, inputs: tuple[int, ...]) -> int:
        """The longest chain of absences by recomputation, each made of the one before, that the tensor's absence would
        be part of."""
        below: dict[int, int] = {}
        above: dict[int, int] = {}

        def height(tensor: int) -> int:
            absence = self.away.get(tensor)
            if absence is None or absence.swap:
                return 0
            if tensor not in below:
                below[tensor] = 1 + max(map(height, absence.inputs), default=0)
            return below[tensor]

        def depth(tensor: int) -> int:
            if tensor not in above:
                users = [user for user in self._made_of.get(tensor, ()) if user in self.away]
                above[tensor] = 1 + max(map(depth, users), default=0)
            return above[tensor]

        return max(map(height, inputs), default=0) + depth(tensor)
