"""Recomputation of idle tensors right before they are used, after that of their missing inputs."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from pg_tensile.planning.building_blocks.idle import IdleInterval, IdleIntervals
from pg_tensile.planning.plan.plan import Event, EventKind
from pg_tensile.planning.trace.lists import Columns
from pg_tensile.planning.trace.recomputations import Recomputation

# Operators that one recomputation may execute, with those of its missing inputs: bounds the time that planning takes.
# How the number was found is not recorded; the benchmarks' section `methods` measures its effect.
LONGEST_RECOMPUTATION = 24


class RecomputeChain(NamedTuple):
    """Recomputation of a tensor at the end of an idle interval, with those of its missing inputs."""

    interval: IdleInterval
    recomputations: dict[int, Recomputation]  # by tensor
    inputs: tuple[int, ...]  # tensors that have to be resident
    us: float
    extra_bytes: int  # of all recomputations there together, beyond the sample of the next user


class RecomputeChains:
    """The recomputations of one job.

    A tensor is recomputed from tensors that are resident then; inputs that are dead by then, or dropped to be
    recomputed themselves, are recomputed first. An input that is swapped out rules the recomputation out: it would undo
    the plan of that swap.
    """

    def __init__(self, columns: Columns, idle: IdleIntervals, swapped: Collection[IdleInterval]) -> None:
        self._columns = columns
        self._idle = idle
        self._swapped = swapped
        self._dropped: set[IdleInterval] = set()  # at whose ends tensors are recomputed
        self._before: dict[int, dict[int, Recomputation]] = {}  # operator → recomputations right before it, by tensor
        self._kept_bytes: dict[int, int] = {}  # operator → their bytes that are not in its sample
        self._scratch_bytes: dict[int, int] = {}  # operator → the most bytes that one of their steps takes besides
        self._above = list(columns.workspace)  # [n]: bytes by which the peak at each operator exceeds its sample

    def least_us(self, interval: IdleInterval) -> float | None:
        """Return the µs of the recomputation if no input is missing; None if it is impossible."""
        if self._idle.crosses_end(interval):
            return None
        recomputation = self._columns.recomputations.of(interval.tensor, interval.version(self._columns))
        return recomputation and recomputation.us

    def find(self, interval: IdleInterval) -> RecomputeChain | None:
        """Return how the tensor could be recomputed in the current state; None if it cannot."""
        operator, us = interval.next_user, 0.0
        recomputations: dict[int, Recomputation] = {}
        inputs: dict[int, None] = {}
        if not self._collect(interval, recomputations, inputs):
            return None
        kept, scratch = self._kept_bytes.get(operator, 0), self._scratch_bytes.get(operator, 0)
        for tensor, recomputation in recomputations.items():
            kept += self._columns.bytes[tensor] * (tensor != interval.tensor)
            scratch = max(scratch, recomputation.scratch_bytes)
            for step in recomputation.steps:
                us += self._columns.us[step.operator]
        return RecomputeChain(interval, recomputations, tuple(inputs), us, kept + scratch)

    def rise(self, chain: RecomputeChain) -> int:
        """Return the bytes by which the peak at the next user, or right before it, rises with the chain."""
        operator = chain.interval.next_user
        above = max(self._columns.workspace[operator], chain.extra_bytes - self._columns.created[operator])
        return above - self._above[operator]

    def add(self, chain: RecomputeChain) -> None:
        operator = chain.interval.next_user
        self._above[operator] += self.rise(chain)
        self._dropped.add(chain.interval)
        self._before.setdefault(operator, {}).update(chain.recomputations)
        inputs = (tensor for tensor in chain.recomputations if tensor != chain.interval.tensor)
        kept = self._kept_bytes.get(operator, 0) + sum(self._columns.bytes[tensor] for tensor in inputs)
        self._kept_bytes[operator] = kept
        self._scratch_bytes[operator] = chain.extra_bytes - kept

    def events(self) -> list[Event]:
        """Return the recompute events.

        In each gap they are in the order of the last operators executed: inputs before the tensors computed from them.
        """
        events = []
        for operator, recomputations in self._before.items():
            order = sorted(recomputations.values(), key=lambda recomputation: recomputation.steps[-1].operator)
            events += [Event(EventKind.RECOMPUTE, r.tensor, operator - 1, operator, r.version) for r in order]
        return events

    def _collect(
        self, interval: IdleInterval, recomputations: dict[int, Recomputation], inputs: dict[int, None]
    ) -> bool:
        """Add the recomputation of the tensor, those of its missing inputs, and the other inputs.

        Returns False if that is impossible or takes too many operators.
        """
        columns, operator = self._columns, interval.next_user
        added = self._before.get(operator, {})
        waiting = [(interval.tensor, interval.version(columns))]
        steps = 0
        while waiting:
            tensor, version = waiting.pop()
            if tensor in recomputations:
                continue
            recomputation = columns.recomputations.of(tensor, version)
            if recomputation is None or (steps := steps + len(recomputation.steps)) > LONGEST_RECOMPUTATION:
                return False
            if not recomputation.inputs_unchanged(lambda source: columns.version_before(source, operator)):
                return False
            recomputations[tensor] = recomputation
            for source in recomputation.inputs:
                tensor, position = source.tensor, 2 * operator - 1
                if tensor in recomputations or tensor in added or self._idle.is_used(tensor, position):
                    continue
                idle = self._idle.around(tensor, position)
                if idle is not None and idle in self._swapped:
                    return False
                if idle is None or idle in self._dropped:
                    waiting.append((tensor, columns.version_before(tensor, operator)))
                else:
                    inputs[tensor] = None
        return True
