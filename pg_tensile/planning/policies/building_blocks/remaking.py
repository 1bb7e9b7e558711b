"""What it takes to recompute a tensor right before it is needed, and what that takes on the device meanwhile."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from pg_tensile.planning.plan.plan import Event, EventKind
from pg_tensile.planning.policies.building_blocks.gaps import Gap, Gaps
from pg_tensile.planning.trace.lists import Columns
from pg_tensile.planning.trace.trace import Mode

LONGEST_CHAIN = 24  # operators that one recomputation may take

READ, STATS = Mode.READ.value, Mode.STATS.value


class Remake(NamedTuple):
    """A tensor made again at the end of `gap`."""

    gap: Gap
    operator: int  # right before which
    made: dict[int, int]  # tensor → version: what the gap's tensor is made from and is not there, and itself
    inputs: tuple[int, ...]  # tensors that have to be there
    us: float
    extra_bytes: int  # that all recomputations there take together, besides what is in the operator's sample


class Remaking:
    """The recomputations of one job. A tensor is made again from what is there then; what is dead by then, or away to
    be recomputed itself, is made again first. What was swapped out is not: that would undo the swap's plan."""

    def __init__(self, columns: Columns, gaps: Gaps, swapped: Collection[Gap]) -> None:
        self._columns = columns
        self._gaps = gaps
        self._swapped = swapped
        self.dropped: set[Gap] = set()  # gaps at whose ends tensors are made again
        self._made: dict[int, dict[int, int]] = {}  # operator → what is made right before it: tensor → version
        self._kept_bytes: dict[int, int] = {}  # operator → of it, what is not in the operator's sample
        self._most_bytes: dict[int, int] = {}  # operator → the most that one of the repeated operators takes besides

    def least_us(self, gap: Gap) -> float | None:
        """µs of the operators that make the gap's tensor; None: they cannot be repeated."""
        columns = self._columns
        if self._gaps.wraps(gap):
            return None
        us = columns.writers_us(gap.tensor, columns.version_before(gap.tensor, gap.since // 2 + 1))
        return us if us < math.inf else None

    def look(self, gap: Gap) -> Remake | None:
        """How the gap's tensor could be made again as things are; None: it cannot."""
        operator = (gap.until + 1) // 2
        made: dict[int, int] = {}
        inputs: dict[int, None] = {}
        version = self._columns.version_before(gap.tensor, gap.since // 2 + 1)
        if not self._chain(gap.tensor, version, operator, made, inputs):
            return None
        us = 0.0
        kept, most = self._kept_bytes.get(operator, 0), self._most_bytes.get(operator, 0)
        for tensor, version in made.items():
            kept += self._columns.bytes[tensor] * (tensor != gap.tensor)
            for writer in self._columns.writers(tensor, version):
                us += self._columns.us[writer]
                most = max(most, self._besides(writer, tensor))
        return Remake(gap, operator, made, tuple(inputs), us, kept + most)

    def apply(self, remake: Remake) -> None:
        columns = self._columns
        operator = remake.operator
        self.dropped.add(remake.gap)
        self._made.setdefault(operator, {}).update(remake.made)
        kept = sum(columns.bytes[tensor] for tensor in remake.made if tensor != remake.gap.tensor)
        self._kept_bytes[operator] = kept = self._kept_bytes.get(operator, 0) + kept
        self._most_bytes[operator] = remake.extra_bytes - kept

    def events(self) -> list[Event]:
        """In each gap in the order of the last operators repeated: what is read is made before that which reads it."""
        events = []
        for operator, made in self._made.items():
            order = sorted(made, key=lambda tensor: self._columns.writers(tensor, made[tensor])[-1])
            events += [Event(EventKind.RECOMPUTE, each, operator - 1, operator, made[each]) for each in order]
        return events

    def _besides(self, writer: int, tensor: int) -> int:
        """Bytes that repeating an operator takes: its workspace, discarded outputs, copies of statistics."""
        other = sum(
            self._columns.bytes[use.tensor]
            for use in self._columns.uses[writer]
            if use.mode != READ and use.tensor != tensor
        )
        return self._columns.workspace[writer] + other

    def _chain(self, tensor: int, version: int, operator: int, made: dict[int, int], inputs: dict[int, None]) -> bool:
        """Adds to `made` and `inputs` what making the tensor right before `operator` takes; False: it cannot be made,
        or takes too many operators."""
        columns, place = self._columns, 2 * operator - 1
        there = self._made.get(operator, {})
        waiting = [(tensor, version)]
        length = 0
        while waiting:
            tensor, version = waiting.pop()
            if tensor in made:
                continue
            writers = columns.writers(tensor, version)
            if not writers or (length := length + len(writers)) > LONGEST_CHAIN:
                return False
            made[tensor] = version
            for each, mode, seen in (use for writer in writers for use in columns.uses[writer]):
                current = columns.version_before(each, operator)
                if mode == READ and seen != current:
                    return False
                if mode > STATS or each in made or each in there or self._gaps.needed(each, place):
                    continue
                gap = self._gaps.at(each, place)
                if gap is not None and gap in self._swapped:
                    return False
                if gap is None or gap in self.dropped:
                    waiting.append((each, current))
                else:
                    inputs[each] = None
        return True
