"""Operators recomputed in one gap, right before one operator, and the memory that they take meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from pg_tensile.planning.trace.lists import Columns
from pg_tensile.planning.trace.recomputations import Recomputation


class RecomputedGap:
    """The operators recomputed in one gap, in order, each a step.

    A tensor is freed after the last step that uses it, unless it stays for what comes after the gap.
    """

    def __init__(self, columns: Columns) -> None:
        self.created: dict[int, int] = {}  # tensor → the step that creates it
        self.used: dict[int, int] = {}  # tensor → the last step that writes or reads it
        self.scratch_bytes: list[int] = []  # [steps]
        self._columns = columns

    def add(self, recomputation: Recomputation) -> None:
        """Add a recomputation, after those of its inputs."""
        self.created[recomputation.tensor] = len(self.scratch_bytes)
        for step in recomputation.steps:
            self.used[recomputation.tensor] = len(self.scratch_bytes)
            for source in step.inputs:
                if not source.is_statistic:
                    self.used[source.tensor] = len(self.scratch_bytes)
            self.scratch_bytes.append(step.scratch_bytes)

    def peak(self, stays: Callable[[int], bool]) -> tuple[int, int]:
        """Return (bytes, step): the highest memory during the steps, relative to the memory after them, and where.

        `stays`: whether a tensor is resident after the gap; memory is lower by such a tensor until it is recomputed.
        Requires at least one step.
        """
        change = [0] * (len(self.scratch_bytes) + 1)
        for tensor, last in self.used.items():
            size, first = self._columns.bytes[tensor], self.created.get(tensor, 0)
            change[first] += size
            change[0 if stays(tensor) else last + 1] -= size
        level, peak = 0, (-1 << 62, 0)
        for step, scratch in enumerate(self.scratch_bytes):
            level += change[step]
            peak = max(peak, (level + scratch, step))
        return peak
