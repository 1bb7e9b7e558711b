"""Needs for tensors while these are taken off the device: by operators, and by recomputations right before them.

A need has position 2i if operator i accesses the tensor, and 2i - 1 if a recomputation right before operator i reads
it. Positions from 2n on are in the next iteration.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from pg_tensile.planning.policies.building_blocks.remaking import LONGEST_RECOMPUTATION
from pg_tensile.planning.trace.lists import Columns

SMALL_INPUT = 4  # an input is kept for a recomputation if the tensor recomputed is at least this many times as large


@dataclass(slots=True)
class Absence:
    """A tensor off the device, from after the need `since` (negative if in the preceding iteration) until `need`."""

    tensor: int
    since: int
    need: int
    freed: int  # in the gap of this operator
    back: int  # the last operator without it; a swap-in starts in its gap
    swap: bool
    version: int
    inputs: tuple[int, ...] = ()  # of a recomputation: tensors that have to be resident


class Recipe(NamedTuple):
    """Operators and inputs that recompute a tensor."""

    steps: list[int]  # operators, in order
    inputs: tuple[int, ...]  # tensors that have to be resident


class Needs:
    """Needs of all tensors of a trace, and the intervals off the device that have been decided."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.last = [places[-1] if places else -1 for places in columns.places]  # [m]: last need in the iteration
        self.read_before: dict[int, list[int]] = {}  # operator → tensors that recomputations before it read
        self.away: dict[int, Absence] = {}
        self._places = columns.places.copy()
        self._made_of: dict[int, set[int]] = {}  # tensor → tensors that were to be recomputed from it

    def next(self, tensor: int, after: int) -> int | None:
        """Return the first need after `after`, or None.

        For persistent tensors it may be in the next iteration.
        """
        places = self._places[tensor]
        at = bisect_right(places, after)
        if at < len(places):
            return places[at]
        return places[0] + 2 * self.columns.operators if self.columns.persistent[tensor] and places else None

    def add(self, tensor: int, operator: int) -> None:
        """Add a need: a recomputation right before `operator` reads the tensor."""
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
        """Return how to recompute the tensor right before `operator`.

        Inputs are persistent tensors, tensors that are needed then or later, and small ones that are not dead at
        operator `now`, which are kept for it. All others are recomputed as well. None if that is impossible or takes
        too many steps.
        """
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
            recomputation = columns.recomputations.of(tensor, version)
            if recomputation is None or planned + len(recomputation.steps) > LONGEST_RECOMPUTATION:
                return False
            if not recomputation.inputs_unchanged(lambda source: columns.version_before(source, operator)):
                return False
            planned += len(recomputation.steps)
            there.add(tensor)
            for step in recomputation.steps:
                for source, seen, _ in step.inputs:
                    if source in there:
                        continue
                    if kept(source):
                        if self._gone(source):
                            return False
                        there.add(source)
                        inputs.append(source)
                    elif not make(source, seen):
                        return False
                steps.append(step.operator)
            return True

        return Recipe(steps, tuple(inputs)) if make(tensor, version) else None

    def _gone(self, tensor: int) -> bool:
        """Return whether the tensor comes back only in the next iteration."""
        absence = self.away.get(tensor)
        return absence is not None and absence.need >= 2 * self.columns.operators

    def chain(self, tensor: int, inputs: tuple[int, ...]) -> int:
        """Return the longest chain of dropped tensors, each recomputed from the one before, that `tensor` would be in.

        `inputs`: the tensors that it would be recomputed from.
        """
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
