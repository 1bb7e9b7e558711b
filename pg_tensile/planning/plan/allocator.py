"""Device memory that PyTorch's caching allocator takes for a plan, with expandable segments.

The allocator keeps what was freed for later allocations. After many blocks of different sizes were freed and allocated,
its free memory is in pieces that are too small for the next block, and it takes more from the device than the blocks'
sum. A plan says when every block is allocated and freed, so that is known beforehand.

The model has the allocator's rules for the blocks of one stream: sizes rounded up to 512 bytes; a segment for small
blocks, of up to 1 MiB, and another for larger ones, which take memory from the device in pages; the best fit of
the free blocks, and more pages only if none fits; at the limit, free pages are first given back to the device, which
makes the host wait for the device. The workspaces of an operator count as one block. All these sizes are those of the
trace's allocator (allocator_rules.py).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import islice

import numpy as np

from pg_tensile.planning.allocator_rules import DEFAULT_RULES, AllocatorRules
from pg_tensile.planning.device_types import ACCELERATORS
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.codecs import staging_bytes
from pg_tensile.planning.plan.memory import footprint_of
from pg_tensile.planning.plan.plan import NO_EVENTS, Plan
from pg_tensile.planning.trace.trace import Trace

ITERATIONS = 4  # at most; most plans take no more after the second
GIVEN_BACK = 1  # times in an iteration that the allocator may give pages back to keep to the limit
PRECISION = 64  # the least limit is found to 1 / PRECISION of the footprint
NO_LIMIT = 1 << 62

Block = tuple[int, int, int]  # segment, start, bytes


class OutOfPagesError(Exception):
    """Raised if the limit does not suffice, even after all free pages were given back."""


class _Segment:
    """Addresses from 0 on, of which some pages are mapped: their bytes are in blocks, or free."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.mapped = 0
        self._free: list[tuple[int, int]] = []  # (bytes, start), sorted
        self._end_of: dict[int, int] = {}  # start → end, of free ranges
        self._start_of: dict[int, int] = {}
        self._unmapped: list[tuple[int, int]] = [(0, NO_LIMIT)]  # (start, end), sorted; the last one has no end

    def best_fit(self, size: int) -> int | None:
        """Take memory from the smallest free range that is large enough; one that can grow counts as that large."""
        index = bisect_left(self._free, (size, 0))
        if index == len(self._free):
            return None
        best, extent = self._free[index], self._extent(self._free[index])
        for following in islice(self._free, index + 1, None):
            following_extent = self._extent(following)
            if following_extent >= extent:
                break
            best, extent = following, following_extent
        return self._take(best[1], size)

    def _extent(self, free: tuple[int, int]) -> int:
        end = sum(free)
        index = bisect_left(self._unmapped, (end, 0))
        start, limit = self._unmapped[index]
        return free[0] + (limit - start if start == end else 0)

    def grow(self, size: int, limit: int) -> int | None:
        """Take memory after mapping the pages that it needs; None if they are more than `limit` bytes."""
        for start, end in self._unmapped:
            begin = self._start_of.get(start, start)
            if end - begin >= size:
                break
        while True:
            reached = self._end_of.get(begin, begin)
            if reached - begin >= size:
                return self._take(begin, size)
            index = bisect_left(self._unmapped, (reached, 0))
            start, end = self._unmapped[index]
            nbytes = -(-min(begin + size - reached, end - start) // self.page) * self.page
            if nbytes > limit:
                return None
            limit -= nbytes
            self.mapped += nbytes
            self._unmapped[index : index + 1] = [(start + nbytes, end)] if start + nbytes < end else []
            self.free(start, nbytes)

    def give_back(self) -> None:
        """Unmap all pages that are free."""
        for size, start in list(self._free):
            end = start + size
            first, last = -(-start // self.page) * self.page, end // self.page * self.page
            if first >= last:
                continue
            self._remove(start)
            if start < first:
                self._add(start, first)
            if last < end:
                self._add(last, end)
            self.mapped -= last - first
            index = bisect_left(self._unmapped, (first, 0))
            before = index > 0 and self._unmapped[index - 1][1] == first
            after = index < len(self._unmapped) and self._unmapped[index][0] == last
            joined = (
                self._unmapped[index - 1][0] if before else first,
                self._unmapped[index][1] if after else last,
            )
            self._unmapped[index - before : index + after] = [joined]

    def free(self, start: int, size: int) -> None:
        """Make a range free, joined with the free ranges beside it."""
        if size == 0:
            return
        end = start + size
        if start in self._start_of:
            start = self._remove(self._start_of[start])
        if end in self._end_of:
            joined = self._end_of[end]
            self._remove(end)
            end = joined
        self._add(start, end)

    def _take(self, start: int, size: int) -> int:
        end = self._end_of[start]
        self._remove(start)
        if start + size < end:
            self._add(start + size, end)
        return start

    def _add(self, start: int, end: int) -> None:
        self._end_of[start], self._start_of[end] = end, start
        insort(self._free, (end - start, start))

    def _remove(self, start: int) -> int:
        end = self._end_of.pop(start)
        del self._start_of[end]
        del self._free[bisect_left(self._free, (end - start, start))]
        return start


class Allocator:
    """The allocator, for the blocks of one stream; it takes at most `limit` bytes from the device."""

    def __init__(self, limit: int = NO_LIMIT, rules: AllocatorRules = DEFAULT_RULES) -> None:
        self._rules = rules
        self._segments = tuple(_Segment(page) for page in rules.pages)
        self._limit = limit
        self.peak_bytes = 0  # taken from the device
        self.given_back = 0  # times that pages were given back because of the limit

    @property
    def device_bytes(self) -> int:
        """The bytes taken from the device."""
        return sum(segment.mapped for segment in self._segments)

    def allocate(self, nbytes: int) -> Block:
        """Take memory for a block. Raises OutOfPagesError."""
        size = -(-nbytes // self._rules.block_bytes) * self._rules.block_bytes
        large = int(size > self._rules.small_bytes)
        if size == 0:
            return large, 0, 0
        segment = self._segments[large]
        start = segment.best_fit(size)
        if start is None:
            start = segment.grow(size, self._limit - self.device_bytes)
            if start is None:
                self.given_back += 1
                for other in self._segments:
                    other.give_back()
                start = segment.grow(size, self._limit - self.device_bytes)
                if start is None:
                    raise OutOfPagesError
            self.peak_bytes = max(self.peak_bytes, self.device_bytes)
        return large, start, size

    def free(self, block: Block) -> None:
        large, start, size = block
        self._segments[large].free(start, size)


def plan_bytes(trace: Trace, plan: Plan = NO_EVENTS) -> int:
    """Return the device memory in bytes that a plan has to be granted. Raises InvalidPlanError."""
    return device_bytes(AccessSequence(trace, plan))


def device_bytes(sequence: AccessSequence) -> int:
    """Return the device memory in bytes of a sequence that starts from the boundary state.

    That is its footprint's peak, with workspaces and staging. On accelerators it is at least the smallest limit with
    which the allocator gives pages back GIVEN_BACK times in an iteration at most, less the last page of each segment,
    which is part of the margin. Raises InvalidPlanError."""
    peak = footprint_of(sequence).device_peak_bytes
    if sequence.trace.device not in ACCELERATORS:
        return peak
    rest = sum(sequence.trace.allocator.pages)
    low, high = peak, replayed(sequence).peak_bytes - rest  # what may be too little, and what is enough
    if high <= low or _suffices(sequence, low + rest):
        return low
    while high - low > max(peak // PRECISION, sequence.trace.allocator.block_bytes):
        middle = (low + high) // 2
        if _suffices(sequence, middle + rest):
            high = middle
        else:
            low = middle
    return high


def fits(sequence: AccessSequence, budget_bytes: int) -> bool:
    """Return whether a budget is enough for a sequence, on accelerators after one replay.

    It is for `device_bytes` or more, and may be for somewhat less, which bisection does not find. Raises
    InvalidPlanError."""
    if footprint_of(sequence).device_peak_bytes > budget_bytes:
        return False
    trace = sequence.trace
    return trace.device not in ACCELERATORS or _suffices(sequence, budget_bytes + sum(trace.allocator.pages))


def _suffices(sequence: AccessSequence, limit: int) -> bool:
    try:
        return replayed(sequence, limit).given_back <= GIVEN_BACK * ITERATIONS
    except OutOfPagesError:
        return False


def replayed(sequence: AccessSequence, limit: int = NO_LIMIT) -> Allocator:
    """Return the allocator after iterations of a sequence that starts from the boundary state.

    Raises InvalidPlanError, and OutOfPagesError if the limit does not suffice."""
    trace, steps = sequence.trace, len(sequence.steps)
    sizes = trace.tensor_bytes.tolist()
    begins: list[list[int]] = [[] for _ in range(steps)]
    ends: list[list[int]] = [[] for _ in range(steps)]
    columns = (sequence.interval_tensor, sequence.interval_first, sequence.interval_last)
    for tensor, first, last in zip(*(column.tolist() for column in columns), strict=True):
        begins[first].append(tensor)
        ends[last].append(tensor)
    resident = sequence.boundary.device
    ends[-1] = [tensor for tensor in ends[-1] if tensor not in resident]
    extras = np.stack([sequence.scratch_bytes, trace.workspace_bytes[sequence.steps]], axis=1).tolist()

    allocator = Allocator(limit, trace.allocator)
    allocator.allocate(staging_bytes(trace, sequence.plan))
    blocks = {tensor: allocator.allocate(sizes[tensor]) for tensor in sorted(resident)}
    before = (-1, -1)
    for _ in range(ITERATIONS):
        for begun, ended, extra in zip(begins, ends, extras, strict=True):
            for tensor in begun:
                if tensor not in blocks:
                    blocks[tensor] = allocator.allocate(sizes[tensor])
            for block in [allocator.allocate(nbytes) for nbytes in extra]:
                allocator.free(block)
            for tensor in ended:
                allocator.free(blocks.pop(tensor))
        if (allocator.peak_bytes, allocator.given_back) == before:
            break
        before = allocator.peak_bytes, allocator.given_back
    return allocator
