"""What is executed again right before one operator, and what that takes on the device meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from pg_tensile.planning.trace.lists import Columns
from pg_tensile.planning.trace.trace import Mode

READ = Mode.READ.value


class Repeats:
    """The operators repeated in one gap, in order, each a step. A tensor goes after the last step that uses it, unless
    it stays for what comes after the gap."""

    def __init__(self, columns: Columns) -> None:
        self.made: dict[int, int] = {}  # tensor → the step that creates it
        self.used: dict[int, int] = {}  # tensor → the last step that makes or reads it
        self.besides: list[int] = []  # of each step: bytes of its workspace, discarded outputs, copies of statistics
        self._columns = columns

    def add(self, tensor: int, version: int) -> None:
        """A tensor that is made again, after what it is made of."""
        columns = self._columns
        self.made[tensor] = len(self.besides)
        for writer in columns.writers(tensor, version):
            besides = columns.workspace[writer]
            for each, mode, _ in columns.uses[writer]:
                if each == tensor or mode == READ:
                    self.used[each] = len(self.besides)
                else:
                    besides += columns.bytes[each]
            self.besides.append(besides)

    def peak(self, stays: Callable[[int], bool]) -> tuple[int, int]:
        """(bytes, step): the most that is on the device besides what is there before the gap or stays after it, less
        what stays and is not there yet; and at which step. There has to be one."""
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
