"""Tensors that a pass has taken off the device, and the uses that decide when each has to be back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pg_tensile.planning.building_blocks.idle import IdleInterval, IdleIntervals
from pg_tensile.planning.building_blocks.recompute_chains import LONGEST_RECOMPUTATION
from pg_tensile.planning.trace.lists import Columns

SMALL_INPUT = 4  # an input is kept for a recomputation if the tensor recomputed is at least this many times as large


@dataclass(slots=True)
class OffDevice:
    """A tensor off the device during an idle interval, at whose end it is swapped in or recomputed."""

    interval: IdleInterval  # ends earlier once a recomputation needs the tensor
    freed: int  # in the gap of this operator
    back: int  # the last operator without it; a swap-in starts in its gap
    by_swap: bool
    version: int
    inputs: tuple[int, ...] = ()  # of a recomputation: tensors that have to be resident


class Recipe(NamedTuple):
    """Recomputation of a tensor together with those of its missing inputs."""

    us: float
    inputs: tuple[int, ...]  # tensors that have to be resident


class OffDeviceTensors:
    """The tensors off the device in a pass, and the uses of all tensors, to which recomputations add."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.idle = IdleIntervals(columns)
        self.last = [positions[-1] if positions else -1 for positions in columns.positions]  # [m]: last use
        self.read_before: dict[int, list[int]] = {}  # operator → tensors that recomputations before it read
        self.extended: dict[int, list[int]] = {}  # operator → tensors whose last use it was, until one was added
        self.tensors: dict[int, OffDevice] = {}
        self._dependents: dict[int, set[int]] = {}  # tensor → tensors that were to be recomputed from it

    def require(self, tensor: int, operator: int) -> None:
        """Add a use: a recomputation right before `operator` reads the tensor."""
        position = 2 * operator - 1
        if not self.idle.is_used(tensor, position):
            self.idle.add_use(tensor, position)
            self.read_before.setdefault(operator, []).append(tensor)
            last = self.last[tensor]
            if position > last:
                if last % 2 == 0:
                    self.extended.setdefault(last // 2, []).append(tensor)
                self.last[tensor] = position

    def take(self, off: OffDevice) -> None:
        self.tensors[off.interval.tensor] = off
        for source in off.inputs:
            self._dependents.setdefault(source, set()).add(off.interval.tensor)

    def recipe(self, tensor: int, version: int, operator: int, now: int) -> Recipe | None:
        """Return how to recompute the tensor right before `operator`.

        Inputs are persistent tensors, tensors that are needed then or later, and small ones that are not dead at
        operator `now`, which are kept for it. All others are recomputed as well. None if that is impossible or takes
        too many steps.
        """
        columns = self.columns
        steps_us: list[float] = []
        inputs: list[int] = []
        resident: set[int] = set()
        size, steps = columns.bytes[tensor], 0

        def kept(tensor: int) -> bool:
            last = self.last[tensor]
            if columns.persistent[tensor] or last >= 2 * operator - 1:
                return True
            return columns.bytes[tensor] * SMALL_INPUT <= size and last >= 2 * now - 1

        def recompute(tensor: int, version: int) -> bool:
            nonlocal steps
            recomputation = columns.recomputations.of(tensor, version)
            if recomputation is None or (steps := steps + len(recomputation.steps)) > LONGEST_RECOMPUTATION:
                return False
            if not recomputation.inputs_unchanged(lambda source: columns.version_before(source, operator)):
                return False
            resident.add(tensor)
            for step in recomputation.steps:
                for source, seen, _ in step.inputs:
                    if source in resident:
                        continue
                    if kept(source):
                        if self._is_off_until_next_iteration(source):
                            return False
                        resident.add(source)
                        inputs.append(source)
                    elif not recompute(source, seen):
                        return False
                steps_us.append(columns.us[step.operator])
            return True

        return Recipe(sum(steps_us), tuple(inputs)) if recompute(tensor, version) else None

    def _is_off_until_next_iteration(self, tensor: int) -> bool:
        off = self.tensors.get(tensor)
        return off is not None and off.interval.until >= 2 * self.columns.operators

    def chain_length(self, tensor: int, inputs: tuple[int, ...]) -> int:
        """Return the longest chain of dropped tensors, each recomputed from the one before, that `tensor` would be in.

        `inputs`: the tensors that it would be recomputed from.
        """
        below: dict[int, int] = {}
        above: dict[int, int] = {}

        def height(tensor: int) -> int:
            off = self.tensors.get(tensor)
            if off is None or off.by_swap:
                return 0
            if tensor not in below:
                below[tensor] = 1 + max(map(height, off.inputs), default=0)
            return below[tensor]

        def depth(tensor: int) -> int:
            if tensor not in above:
                users = [user for user in self._dependents.get(tensor, ()) if user in self.tensors]
                above[tensor] = 1 + max(map(depth, users), default=0)
            return above[tensor]

        return max(map(height, inputs), default=0) + depth(tensor)
