"""Who needs which tensor when, while tensors are taken off the device: operators, and recomputations before them."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import NamedTuple

from pg_tensile.policies.columns import Columns
from pg_tensile.trace import Mode

LONGEST_CHAIN = 24  # operators that one recomputation may take
SMALL_INPUT = 4  # what a recomputation reads is kept for it if the tensor that it makes is so many times as large

READ, STATS = Mode.READ.value, Mode.STATS.value


class Need(NamedTuple):
    """`early`: by a recomputation right before the operator. From n operators on: in the next iteration."""

    operator: int
    early: bool


@dataclass(slots=True)
class Absence:
    """A tensor off the device, from after `since` until `need`."""

    tensor: int
    since: int  # the operator that used it last; negative: of the iteration before
    need: Need
    freed: int  # in the gap of this operator
    back: int  # swap: from this operator's gap on
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
        self.last = [accesses[-1] if accesses else -1 for accesses in columns.accesses]  # operator, in this iteration
        self.read_before: dict[int, list[int]] = {}  # operator → tensors that recomputations before it read
        self.away: dict[int, Absence] = {}
        self._extra: dict[int, list[int]] = {}  # tensor → operators before which a recomputation reads it, ascending
        self._made_of: dict[int, set[int]] = {}  # tensor → tensors that were to be made of it

    def next(self, tensor: int, after: int) -> Need | None:
        """The first need beyond the operator `after`."""
        accesses, own = self.columns.accesses[tensor], None
        place = bisect_left(accesses, after + 1)
        if place < len(accesses):
            own = Need(accesses[place], False)
        extra = self._extra.get(tensor)
        if extra:
            place = bisect_left(extra, after + 1)
            if place < len(extra) and (own is None or extra[place] <= own.operator):
                return Need(extra[place], True)
        if own is None and self.columns.persistent[tensor] and accesses:
            return Need(accesses[0] + self.columns.operators, False)
        return own

    def add(self, tensor: int, operator: int) -> None:
        """A recomputation right before `operator` reads the tensor."""
        needs = self._extra.setdefault(tensor, [])
        place = bisect_left(needs, operator)
        if place == len(needs) or needs[place] != operator:
            insort(needs, operator)
            self.read_before.setdefault(operator, []).append(tensor)
        self.last[tensor] = max(self.last[tensor], operator)

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
            if columns.persistent[tensor] or self.last[tensor] >= operator:
                return True
            return columns.bytes[tensor] * SMALL_INPUT <= size and self.last[tensor] >= now

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
        return absence is not None and absence.need.operator >= self.columns.operators

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
