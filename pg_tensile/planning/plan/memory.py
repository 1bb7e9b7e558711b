"""GPU memory peak analysis (TENSILE, section IV-B, Algorithm 1): footprint of a plan, and its memory on the host.

Algorithm 1 is interpreted as in docs/library.md: it starts from the plan's boundary state, a swap-in counts from its
trigger on, a swap-out until its deadline, and tensors freed after an operator are subtracted after the operator's
outputs are counted. Persistent tensors count. Every function raises InvalidPlanError if the plan cannot be executed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from pg_tensile.planning.device_types import ACCELERATORS
from pg_tensile.planning.plan.access_sequence import AccessSequence, HostCopies
from pg_tensile.planning.plan.codecs import staging_bytes
from pg_tensile.planning.plan.plan import NO_EVENTS, Plan
from pg_tensile.planning.trace.trace import Int32s, Int64s, Trace

ALIGNMENT = {"cpu": 64} | dict.fromkeys(ACCELERATORS, 512)  # of host copies in bytes, by the device


class Footprint(NamedTuple):
    """Footprint of a plan: bytes on the device after each of s steps, before dead tensors are freed."""

    bytes: Int64s  # [s]
    steps: Int32s  # [s]: the operator executed in each step, by its captured index
    peak_bytes: int
    peak_step: int  # the first step with that footprint
    device_peak_bytes: int  # with each operator's workspace, and staging: the least budget for the plan


def footprint(trace: Trace, plan: Plan = NO_EVENTS) -> Footprint:
    """Return the footprint of an iteration of `plan` in its steady state."""
    return footprint_of(AccessSequence(trace, plan))


def footprint_of(sequence: AccessSequence) -> Footprint:
    """Return the footprint of an existing sequence, whatever its initial state."""
    samples, steps = sequence.footprint, sequence.steps
    peak = int(np.argmax(samples))
    device_peak = int(np.max(samples + sequence.trace.workspace_bytes[steps]))
    device_peak += staging_bytes(sequence.trace, sequence.plan)
    return Footprint(samples, sequence.operators, int(samples[peak]), peak, device_peak)


def floor_bytes(trace: Trace) -> int:
    """Return the largest working set of one operator in bytes. No device peak, whatever the plan, is below it.

    It is a bound only. Known plans need more: `building_blocks.keep.least_bytes` is what swapping everything takes, and
    `shares.least_bytes` what evicting the least recently used tensors takes.
    """
    return int(trace.working_set_bytes.max())


class HostCopy(NamedTuple):
    """A block of the host arena, occupied from the gap after step `first` until the wait before step `last`.

    With `last` < `first` it is occupied across the end of the iteration, with `last` = `first` all the time.
    """

    first: int
    last: int
    offset: int  # bytes


class Arena(NamedTuple):
    """Host memory for all copies of a plan. `offsets`: tensor → its copies, in the order of their first steps."""

    bytes: int
    offsets: dict[int, list[HostCopy]]


def host_arena(trace: Trace, plan: Plan) -> Arena:
    """Return an arena for all host copies of the plan's steady state, in which no two copies held at once overlap.

    The cycle of steps is cut where the fewest bytes are held across the cut. The copies held there are laid side by
    side and share their memory with no other; all others are allocated by best fit, in the order of their first steps.
    Blocks are aligned to 512 bytes on CUDA, to 64 otherwise. A persistent tensor's copy that is current between two
    iterations keeps its block.
    """
    return host_arena_of(AccessSequence(trace, plan))


def host_arena_of(sequence: AccessSequence) -> Arena:
    """Return the arena of an existing sequence that starts from the boundary state."""
    return _arena(sequence, sequence.host_copies)


def transient_arena(sequence: AccessSequence) -> Arena:
    """Return the arena of such a sequence for the copies of tensors that are not persistent.

    It is all that an executor's arena holds: each persistent tensor that is swapped has host memory of its own.
    """
    copies = sequence.host_copies
    transient = ~sequence.trace.persistent[copies.tensor]
    return _arena(sequence, HostCopies(*(column[transient] for column in copies)))


def _arena(sequence: AccessSequence, copies: HostCopies) -> Arena:
    trace, steps = sequence.trace, len(sequence.steps)
    align = ALIGNMENT[trace.device]
    size = -(-trace.tensor_bytes[copies.tensor] // align) * align
    cut = _cut(copies, size, steps)
    first, last = (copies.first - cut) % steps, (copies.last - cut) % steps
    last[last == 0] = steps
    across = first >= last
    offset = np.zeros(len(size), np.int64)
    offset[across] = np.cumsum(size[across]) - size[across]
    base = int(size[across].sum())
    offset[~across], height = _lay_out(first[~across], last[~across], size[~across])
    offset[~across] += base
    offsets: dict[int, list[HostCopy]] = {}
    order = np.lexsort((copies.first, copies.tensor))
    rows = zip(*(column[order].tolist() for column in (*copies, offset)), strict=True)
    for tensor, begin, end, start in rows:
        offsets.setdefault(tensor, []).append(HostCopy(begin, end, start))
    return Arena(base + height, offsets)


def _cut(copies: HostCopies, size: Int64s, steps: int) -> int:
    """Return the step before which a cut crosses the fewest bytes."""
    partial = copies.first != copies.last
    first, last, size = copies.first[partial], copies.last[partial], size[partial]
    held = np.zeros(steps + 1, np.int64)  # both in the gap before each step and in the one after it
    np.add.at(held, first + 1, size)
    np.subtract.at(held, last, size)
    around = first >= last
    return int(np.argmin(np.cumsum(held)[:steps] + size[around].sum()))


def _lay_out(first: Int64s, last: Int64s, size: Int64s) -> tuple[Int64s, int]:
    """Return the offsets of the intervals first … last - 1, by best fit in order of time, and the total height."""
    holes = Holes()
    offsets = [0] * len(size)
    sizes, ends = size.tolist(), last.tolist()
    busy: list[tuple[int, int]] = []  # (end, interval), a heap
    for interval in np.lexsort((-size, first)).tolist():
        while busy and busy[0][0] <= first[interval]:
            done = heappop(busy)[1]
            holes.free(offsets[done], sizes[done])
        offsets[interval] = holes.allocate(sizes[interval])
        heappush(busy, (ends[interval], interval))
    return np.array(offsets, np.int64), holes.height


class Holes:
    """Best-fit allocator: the holes below `height`. Adjacent holes are joined when they are freed."""

    def __init__(self) -> None:
        self.height = 0
        self.by_size: list[tuple[int, int]] = []  # (bytes, offset), sorted
        self.start_of: dict[int, int] = {}  # end → start
        self.end_of: dict[int, int] = {}  # start → end

    def allocate(self, size: int) -> int:
        if size == 0:
            return 0
        index = bisect_left(self.by_size, (size, 0))
        if index < len(self.by_size):
            start = self.by_size[index][1]
        else:  # grow, from the hole at the end if there is one
            start = self.start_of.get(self.height, self.height)
            if start == self.height:
                self.height += size
                return start
            self._grow(start, start + size)
        end = self._remove(start)
        if start + size < end:
            self._add(start + size, end)
        return start

    def free(self, start: int, size: int) -> None:
        if size == 0:
            return
        end = start + size
        if start in self.start_of:
            start = self.start_of[start]
            self._remove(start)
        if end in self.end_of:
            end = self._remove(end)
        self._add(start, end)

    def _grow(self, start: int, end: int) -> None:
        self._remove(start)
        self._add(start, end)
        self.height = end

    def _add(self, start: int, end: int) -> None:
        self.start_of[end] = start
        self.end_of[start] = end
        insort(self.by_size, (end - start, start))

    def _remove(self, start: int) -> int:
        end = self.end_of.pop(start)
        del self.start_of[end]
        del self.by_size[bisect_left(self.by_size, (end - start, start))]
        return end
