"""Recomputation of a tensor right before it is needed: operators, inputs, time, and memory that they take meanwhile."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from pg_tensile.planning.plan.plan import Event, EventKind
from pg_tensile.planning.policies.building_blocks.gaps import Gap, Gaps
from pg_tensile.planning.trace.lists import Columns
from pg_tensile.planning.trace.recompute import Recomputation

LONGEST_RECOMPUTATION = 24  # operators that one recomputation may execute, with those of its missing inputs


class Remake(NamedTuple):
    """A recomputation at the end of the idle interval `gap`."""

    gap: Gap
    operator: int  # right before which it is done
    made: dict[int, Recomputation]  # by tensor: the gap's tensor and its missing inputs
    inputs: tuple[int, ...]  # tensors that have to be resident
    us: float
    extra_bytes: int  # of all recomputations there together, beyond the operator's sample


class Remaking:
    """The recomputations of one job.

    A tensor is recomputed from tensors that are resident then; inputs that are dead by then, or dropped to be
    recomputed themselves, are recomputed first. An input that is swapped out rules the recomputation out: it would undo
    the plan of that swap.
    """

    def __init__(self, columns: Columns, gaps: Gaps, swapped: Collection[Gap]) -> None:
        self._columns = columns
        self._gaps = gaps
        self._swapped = swapped
        self.dropped: set[Gap] = set()  # idle intervals at whose ends tensors are recomputed
        self._made: dict[int, dict[int, Recomputation]] = {}  # operator → recomputed right before it, by tensor
        self._kept_bytes: dict[int, int] = {}  # operator → their bytes that are not in its sample
        self._most_bytes: dict[int, int] = {}  # operator → the most besides that one of the steps takes

    def least_us(self, gap: Gap) -> float | None:
        """Return the µs of the operators that compute the gap's tensor; None if they cannot be executed again."""
        columns = self._columns
        if self._gaps.wraps(gap):
            return None
        recomputation = columns.recomputations.of(gap.tensor, columns.version_before(gap.tensor, gap.since // 2 + 1))
        return recomputation and recomputation.us

    def look(self, gap: Gap) -> Remake | None:
        """Return how the gap's tensor could be recomputed in the current state; None if it cannot."""
        operator = (gap.until + 1) // 2
        made: dict[int, Recomputation] = {}
        inputs: dict[int, None] = {}
        version = self._columns.version_before(gap.tensor, gap.since // 2 + 1)
        if not self._chain(gap.tensor, version, operator, made, inputs):
            return None
        us = 0.0
        kept, most = self._kept_bytes.get(operator, 0), self._most_bytes.get(operator, 0)
        for tensor, recomputation in made.items():
            kept += self._columns.bytes[tensor] * (tensor != gap.tensor)
            for step in recomputation.steps:
                us += self._columns.us[step.operator]
            most = max(most, recomputation.scratch_bytes)
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
        """Return the recompute events.

        In each gap they are in the order of the last operators executed again: inputs before the tensors computed from
        them.
        """
        events = []
        for operator, made in self._made.items():
            order = sorted(made.values(), key=lambda recomputation: recomputation.steps[-1].operator)
            events += [Event(EventKind.RECOMPUTE, each.tensor, operator - 1, operator, each.version) for each in order]
        return events

    def _chain(
        self, tensor: int, version: int, operator: int, made: dict[int, Recomputation], inputs: dict[int, None]
    ) -> bool:
        """Add to `made` and `inputs` what recomputing the tensor right before `operator` takes.

        Returns False if it cannot be recomputed, or takes too many operators.
        """
        columns, place = self._columns, 2 * operator - 1
        there = self._made.get(operator, {})
        waiting = [(tensor, version)]
        length = 0
        while waiting:
            tensor, version = waiting.pop()
            if tensor in made:
                continue
            recomputation = columns.recomputations.of(tensor, version)
            if recomputation is None or (length := length + len(recomputation.steps)) > LONGEST_RECOMPUTATION:
                return False
            if not recomputation.inputs_unchanged(lambda source: columns.version_before(source, operator)):
                return False
            made[tensor] = recomputation
            for each, _, _ in recomputation.inputs:
                if each in made or each in there or self._gaps.needed(each, place):
                    continue
                gap = self._gaps.at(each, place)
                if gap is not None and gap in self._swapped:
                    return False
                if gap is None or gap in self.dropped:
                    waiting.append((each, columns.version_before(each, operator)))
                else:
                    inputs[each] = None
        return True
