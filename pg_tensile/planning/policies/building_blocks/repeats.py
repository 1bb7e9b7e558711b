"""Operators executed again right before one operator, and the memory that they take meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from pg_tensile.planning.trace.lists import Columns
from pg_tensile.planning.trace.recompute import Recomputation


class Repeats:
    """The operators executed again in one gap, in order, each a step.

    A tensor is freed after the last step that uses it, unless it stays for what comes after the gap.
    """

    def __init__(self, columns: Columns) -> None:
        self.made: dict[int, int] = {}  # tensor → the step that creates it
        self.used: dict[int, int] = {}  # tensor → the last step that writes or reads it
        self.besides: list[int] = []  # [steps]: bytes of workspace, discarded outputs, copies of statistics
        self._columns = columns

    def add(self, recomputation: Recomputation) -> None:
        """Add a recomputation, after those of its inputs."""
        self.made[recomputation.tensor] = len(self.besides)
        for step in recomputation.steps:
            self.used[recomputation.tensor] = len(self.besides)
            for source in step.inputs:
                if not source.is_statistic:
                    self.used[source.tensor] = len(self.besides)
            self.besides.append(step.scratch_bytes)

    def peak(self, stays: Callable[[int], bool]) -> tuple[int, int]:
        """Return (bytes, step): the highest memory during the steps, relative to the memory after them, and where.

        `stays`: whether a tensor is resident after the gap; memory is lower by such a tensor until it is recomputed.
        Requires at least one step.
        """
        change = [0] * (len(self.besides) + 1)
        for tensor, last in self.used.items():
            size, first = self._columns.bytes[tensor], self.made.get(tensor, 0)
            change[first] += size
            change[0 if stays(tensor) else last + 1] -= size
        level, peak = 0, (-1 << 62, 0)
        for step, besides in enumerate(self.besides):
            level += change[step]
            peak = max(peak, (level + besides, step))
        return peak
