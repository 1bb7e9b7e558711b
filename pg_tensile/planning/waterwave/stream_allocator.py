"""Allocator of one pool of device memory for several streams (Waterwave, section 4.2 and Listing 1).

The host gives work to streams long before it is executed, and memory is freed when the last work on it has been given.
So what a stream has freed may still be in use when it is allocated again: the same stream may have it at once, because
its work is in order, another one only after the two were synchronised. Free memory therefore is of two kinds: chunks
that one stream may use (unsynced), and chunks that every stream may use (synced). At first all is synced.

Where this differs from the paper:

- A freed chunk belongs to the stream of its *last use*. The paper takes the stream that it was allocated for, which is
  unsafe once another stream goes on with a tensor. A chunk that several streams used at once belongs to none of them
  until all are synchronised.
- The best fit is looked for among the chunks that a stream may use *as they lie*: neighbouring chunks of its own and
  synced ones count as one. What is left of each keeps its kind. The paper looks at own chunks first, at synced ones
  only if none of those fits, and never at both together: that leaves more memory in pieces of no use.
- Streams of even numbers take the beginning of what fits, the others the end, so that what two jobs hold for long,
  weights and feature maps, gathers at opposite ends of the pool.
- Streams are not synchronised where that would not make enough memory usable.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterator
from itertools import permutations
from typing import NamedTuple

SYNCED = -1  # owner of chunks that every stream may use
SHARED = -2  # owner of chunks that no stream may use before a synchronisation, as several have used them
ALIGNMENT_BYTES = 512  # of PyTorch's allocator, too


class Chunk(NamedTuple):
    """A range of the pool, in bytes, and who owns it: a stream, SYNCED or SHARED."""

    start: int
    size: int
    owner: int

    @property
    def end(self) -> int:
        return self.start + self.size


class PoolMemoryError(MemoryError):
    """The pool has no free range of the size asked for, whichever streams are synchronised. All sizes are in bytes."""

    def __init__(self, stream: int, requested: int, free: int, largest: int, capacity: int) -> None:
        super().__init__(
            f"stream {stream} needs {requested:,} bytes of a pool of {capacity:,}: {free:,} are free, "
            f"at most {largest:,} in one piece"
        )
        self.requested, self.free, self.largest = requested, free, largest


class StreamAllocator:
    """A pool of `capacity_bytes` for streams 0 … `streams` − 1. Addresses are bytes from the beginning of the pool.

    `order(waiting, awaited)` makes one stream wait, on the device, for all work that was given to another one until
    now; it is called where chunks become usable by more streams. Addresses and sizes of blocks are multiples of
    `alignment_bytes`, as `capacity_bytes` must be. Not for several threads at once.

    The best fit is taken, of equal ones the one at the lowest address; so equal calls give equal addresses. Raises
    ValueError for numbers that make no pool."""

    def __init__(
        self,
        capacity_bytes: int,
        streams: int,
        order: Callable[[int, int], None],
        alignment_bytes: int = ALIGNMENT_BYTES,
    ) -> None:
        if streams < 1 or alignment_bytes < 1:
            raise ValueError(f"a pool for {streams} streams with blocks of {alignment_bytes} bytes is not possible")
        if capacity_bytes < alignment_bytes or capacity_bytes % alignment_bytes:
            raise ValueError(f"{capacity_bytes:,} bytes of memory are no multiple of {alignment_bytes:,}")
        self.capacity_bytes = self.free_bytes = capacity_bytes
        self.alignment_bytes = alignment_bytes
        self.synchronizations = 0  # of all streams with each other, asked for or by `allocate`
        self._streams = streams
        self._order = order
        self._blocks: dict[int, tuple[int, set[int]]] = {}  # address → bytes, streams that use it
        self._free: dict[int, Chunk] = {}  # by start
        self._starts: list[int] = []  # of these, sorted
        self._start_of: dict[int, int] = {}  # end → start
        self._add(Chunk(0, capacity_bytes, SYNCED))

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def allocate(self, size_bytes: int, stream: int) -> int:
        """Return the address of a new block, which `stream` uses until `free`.

        If no memory fits that the stream may use, all streams are synchronised. Raises PoolMemoryError, and changes
        nothing, if not even that would do."""
        self._check(stream)
        if size_bytes < 1:
            raise ValueError(f"a block of {size_bytes} bytes is not possible")
        size = -(-size_bytes // self.alignment_bytes) * self.alignment_bytes
        run = self._best_run(size, (stream, SYNCED))
        if run is None:
            if self._best_run(size) is None:
                raise PoolMemoryError(stream, size_bytes, self.free_bytes, self._largest(), self.capacity_bytes)
            self.synchronize()
            run = self._best_run(size, (SYNCED,))
            assert run is not None
        start = run[1] - size if stream % 2 else run[0]
        self._take(start, start + size)
        self._blocks[start] = size, {stream}
        return start

    def use(self, address: int, stream: int) -> None:
        """Let another stream use a block, too, until `free`.

        The caller orders what the streams do with the block among each other, as it needs."""
        self._check(stream)
        self._block(address)[1].add(stream)

    def hand_over(self, address: int, stream: int) -> None:
        """Let `stream`, and no other any more, use a block; it waits for those that have used it."""
        self._check(stream)
        _, users = self._block(address)
        for user in sorted(users - {stream}):
            self._order(stream, user)
        users.clear()
        users.add(stream)

    def free(self, address: int) -> None:
        """Free a block, on which all work has been given. Raises ValueError if there is none at that address."""
        size, users = self._block(address)
        del self._blocks[address]
        self.free_bytes += size
        self._add(Chunk(address, size, users.pop() if len(users) == 1 else SHARED))

    # ---- synchronisation ---------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Make all streams wait for each other: all free memory is synced then, and in as few chunks as possible."""
        for waiting, awaited in permutations(range(self._streams), 2):
            self._order(waiting, awaited)
        self.synchronizations += 1
        self._sync((*range(self._streams), SHARED))

    def end_iteration(self, stream: int) -> None:
        """Make all other streams wait for this one, whose free chunks are synced then."""
        self._check(stream)
        for waiting in range(self._streams):
            if waiting != stream:
                self._order(waiting, stream)
        self._sync((stream,))

    # ---- what is where -----------------------------------------------------------------------------------------------

    def chunks(self) -> list[Chunk]:
        """Return the free chunks by address."""
        return [self._free[start] for start in self._starts]

    def blocks(self) -> list[tuple[int, int]]:
        """Return address and bytes of each block that is not free, by address."""
        return sorted((address, size) for address, (size, _) in self._blocks.items())

    # ---- free chunks -------------------------------------------------------------------------------------------------

    def _add(self, chunk: Chunk) -> None:
        """Add a free chunk, joined with neighbours of the same owner."""
        start, end, owner = chunk.start, chunk.end, chunk.owner
        before, after = self._free.get(self._start_of.get(start, -1)), self._free.get(end)
        if before is not None and before.owner == owner:
            self._remove(before)
            start = before.start
        if after is not None and after.owner == owner:
            self._remove(after)
            end = after.end
        self._free[start] = Chunk(start, end - start, owner)
        self._start_of[end] = start
        insort(self._starts, start)

    def _sync(self, owners: Collection[int]) -> None:
        """Make the chunks of these owners synced."""
        for chunk in self.chunks():
            if chunk.owner in owners:
                self._remove(chunk)
                self._add(chunk._replace(owner=SYNCED))

    def _remove(self, chunk: Chunk) -> None:
        del self._free[chunk.start]
        del self._start_of[chunk.end]
        del self._starts[bisect_left(self._starts, chunk.start)]

    def _best_run(self, size: int, owners: Collection[int] | None = None) -> tuple[int, int] | None:
        """Return start and end of the smallest range of these owners, or any, that is large enough; see `_runs`."""
        fitting = ((end - start, start, end) for start, end in self._runs(owners) if end - start >= size)
        best = min(fitting, default=None)
        return None if best is None else best[1:]

    def _runs(self, owners: Collection[int] | None = None) -> Iterator[tuple[int, int]]:
        """Yield start and end of each range of neighbouring free chunks of these owners, or any."""
        start = end = -1
        for chunk in self.chunks():
            if owners is not None and chunk.owner not in owners:
                continue
            if chunk.start != end:
                if end > start:
                    yield start, end
                start = chunk.start
            end = chunk.end
        if end > start:
            yield start, end

    def _largest(self) -> int:
        return max((end - start for start, end in self._runs()), default=0)

    def _take(self, start: int, end: int) -> None:
        """Take a range of free memory; what is left of its first and last chunk stays free."""
        self.free_bytes -= end - start
        index = bisect_right(self._starts, start) - 1
        while index < len(self._starts) and self._starts[index] < end:
            chunk = self._free[self._starts[index]]
            self._remove(chunk)
            if chunk.start < start:
                self._add(Chunk(chunk.start, start - chunk.start, chunk.owner))
                index += 1
            if chunk.end > end:
                self._add(Chunk(end, chunk.end - end, chunk.owner))
                index += 1

    def _block(self, address: int) -> tuple[int, set[int]]:
        block = self._blocks.get(address)
        if block is None:
            raise ValueError(f"no block begins at {address:,}")
        return block

    def _check(self, stream: int) -> None:
        if not 0 <= stream < self._streams:
            raise ValueError(f"there is no stream {stream}, only {self._streams} of them from 0 on")
