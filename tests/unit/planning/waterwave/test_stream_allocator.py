"""One pool for several streams: no memory in use by one is given to another, none is lost, no wait is needless."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.planning.waterwave.stream_allocator import SHARED, SYNCED, Chunk, PoolMemoryError, StreamAllocator
from tests.examples import examples
from tests.unit.graphs import dice

UNIT = 8  # bytes, the alignment of most pools here


class Streams:
    """Streams as vector clocks, and the work on each unit of a pool, independently of what the allocator believes.

    Work is known to a stream if it has waited for it. A stream may use memory if it knows all work on it that was given
    for earlier blocks."""

    def __init__(self, streams: int, units: int) -> None:
        self.clocks = [[0] * streams for _ in range(streams)]
        self.earlier: list[dict[int, int]] = [{} for _ in range(units)]  # stream → time of its last work, of old blocks
        self.current: list[dict[int, int]] = [{} for _ in range(units)]  # the same of the block that is there now
        self.orders: list[tuple[int, int]] = []

    def order(self, waiting: int, awaited: int) -> None:
        assert waiting != awaited
        self.orders.append((waiting, awaited))
        self.clocks[waiting] = [max(pair) for pair in zip(self.clocks[waiting], self.clocks[awaited], strict=True)]

    def work(self, stream: int, units: range) -> None:
        clock = self.clocks[stream]
        clock[stream] += 1
        for unit in units:
            late = {other for other, time in self.earlier[unit].items() if clock[other] < time}
            assert not late, f"unit {unit} is used by stream {stream} while streams {late} may still use it"
            self.current[unit][stream] = clock[stream]

    def freed(self, units: range) -> None:
        for unit in units:
            self.earlier[unit] |= self.current[unit]
            self.current[unit] = {}


class Pool:
    """An allocator with the streams that it serves; checks all that must hold after each call."""

    def __init__(self, units: int, streams: int) -> None:
        self.units, self.count = units, streams
        self.streams = Streams(streams, units)
        self.allocator = StreamAllocator(units * UNIT, streams, self.streams.order, UNIT)
        self.live: dict[int, tuple[range, set[int]]] = {}  # address → units, streams that may work there

    def free_runs(self, owners: set[int] | None = None) -> list[int]:
        """Return the units of each run of free memory, of some owners or all, from the chunks laid out unit by unit."""
        owner_of: list[int | None] = [None] * self.units
        for chunk in self.allocator.chunks():
            for unit in range(chunk.start // UNIT, chunk.end // UNIT):
                assert owner_of[unit] is None
                owner_of[unit] = chunk.owner
        for units, _ in self.live.values():
            for unit in units:
                assert owner_of[unit] is None
        assert owner_of.count(None) == sum(len(units) for units, _ in self.live.values()), "memory is lost"
        runs = [0]
        for owner in owner_of:
            usable = owner is not None and (owners is None or owner in owners)
            runs = [*runs[:-1], runs[-1] + 1] if usable else [*runs, 0]
        return runs

    def allocate(self, size: int, stream: int) -> None:
        units, before = -(-size // UNIT), len(self.streams.orders)
        fits = max(self.free_runs()) >= units
        fits_at_once = max(self.free_runs({stream, SYNCED})) >= units
        chunks = self.allocator.chunks()
        try:
            address = self.allocator.allocate(size, stream)
        except PoolMemoryError as error:
            assert not fits and self.allocator.chunks() == chunks
            assert (error.free, error.largest) == (sum(self.free_runs()) * UNIT, max(self.free_runs()) * UNIT)
            assert len(self.streams.orders) == before
            return
        assert fits and address % UNIT == 0
        waited = len(self.streams.orders) > before
        assert waited == (not fits_at_once and self.count > 1)
        self.live[address] = range(address // UNIT, address // UNIT + units), {stream}
        self.streams.work(stream, self.live[address][0])

    def free(self, address: int) -> None:
        units, _ = self.live.pop(address)
        self.allocator.free(address)
        self.streams.freed(units)

    def use(self, address: int, stream: int) -> None:
        """Add a stream as careful callers do: it waits for the others first."""
        units, users = self.live[address]
        for user in users - {stream}:
            self.streams.order(stream, user)
        users.add(stream)
        self.allocator.use(address, stream)
        self.streams.work(stream, units)

    def hand_over(self, address: int, stream: int) -> None:
        units, _ = self.live[address]
        self.allocator.hand_over(address, stream)
        self.live[address] = units, {stream}
        self.streams.work(stream, units)

    def synchronize(self) -> None:
        self.allocator.synchronize()
        chunks = self.allocator.chunks()
        assert {chunk.owner for chunk in chunks} <= {SYNCED}
        assert all(one.end < other.start for one, other in pairwise(chunks))

    def end_iteration(self, stream: int) -> None:
        self.allocator.end_iteration(stream)
        assert stream not in {chunk.owner for chunk in self.allocator.chunks()}

    def check(self) -> None:
        """Check that blocks and free chunks tile the pool, and that each chunk's owners may really use it."""
        self.free_runs()
        assert self.allocator.blocks() == [(a, len(self.live[a][0]) * UNIT) for a in sorted(self.live)]
        chunks = self.allocator.chunks()
        assert self.allocator.free_bytes == sum(chunk.size for chunk in chunks)
        for one, other in pairwise(chunks):
            assert one.end < other.start or one.owner != other.owner, "neighbours of one owner are apart"
        for chunk in chunks:
            owners = {SYNCED: range(self.count), SHARED: ()}.get(chunk.owner, (chunk.owner,))
            for owner in owners:
                clock = self.streams.clocks[owner]
                for unit in range(chunk.start // UNIT, chunk.end // UNIT):
                    assert all(clock[stream] >= time for stream, time in self.streams.earlier[unit].items())


def play(random: Random, units: int, streams: int, calls: int) -> tuple[Pool, list[Chunk]]:
    """Call the allocator at random, and free everything; return the pool and a record of its chunks after each call."""
    pool, record = Pool(units, streams), []
    for _ in range(calls):
        stream, kind = random.randrange(streams), random.random()
        address = random.choice(sorted(pool.live)) if pool.live else None
        if address is None or kind < 0.45:
            pool.allocate(random.randint(1, random.choice([2, 6, units]) * UNIT), stream)
        elif kind < 0.8:
            pool.free(address)
        elif kind < 0.86:
            pool.use(address, stream)
        elif kind < 0.92:
            pool.hand_over(address, stream)
        elif kind < 0.97:
            units_of, users = pool.live[address]
            pool.streams.work(random.choice(sorted(users)), units_of)
        elif kind < 0.99:
            pool.end_iteration(stream)
        else:
            pool.synchronize()
        pool.check()
        record += pool.allocator.chunks()
    for address in random.sample(sorted(pool.live), len(pool.live)):
        pool.free(address)
        pool.check()
    return pool, record


@given(random=dice(), units=st.integers(1, 40), streams=st.integers(1, 4))
@examples(50, long=400)
def test_no_memory_is_given_while_another_stream_may_use_it(random: Random, units: int, streams: int) -> None:
    pool, _ = play(random, units, streams, 120)
    assert pool.allocator.free_bytes == units * UNIT
    pool.synchronize()
    assert pool.allocator.chunks() == [Chunk(0, units * UNIT, SYNCED)]
    pool.allocate(units * UNIT, 0)


@given(seed=st.integers(0, 2**32 - 1))
@examples(10)
def test_equal_calls_give_equal_addresses(seed: int) -> None:
    (one, record), (other, same) = (play(Random(seed), 30, 3, 100) for _ in range(2))
    assert record == same and one.streams.orders == other.streams.orders


# ---- what Listing 1 says, case by case ----


def allocator(units: int = 10, streams: int = 2) -> tuple[StreamAllocator, list[tuple[int, int]]]:
    orders: list[tuple[int, int]] = []
    return StreamAllocator(units * UNIT, streams, lambda *pair: orders.append(pair), UNIT), orders


def blocks(pool: StreamAllocator, *streams: int) -> list[int]:
    return [pool.allocate(UNIT, stream) for stream in streams]


def test_the_best_fit_is_taken_and_the_lowest_of_equal_ones() -> None:
    pool, _ = allocator(16, 1)
    sizes = [4, 1, 2, 1, 2, 1, 3, 2]
    starts = [pool.allocate(size * UNIT, 0) for size in sizes]
    for index in (0, 2, 4, 6):
        pool.free(starts[index])
    assert pool.allocate(2 * UNIT, 0) == starts[2]
    assert pool.allocate(2 * UNIT, 0) == starts[4]
    assert pool.allocate(2 * UNIT, 0) == starts[6]


def test_every_other_stream_allocates_from_the_end() -> None:
    pool, _ = allocator(10, streams=3)
    assert blocks(pool, 0, 1, 2, 1) == [0, 9 * UNIT, UNIT, 8 * UNIT]


def test_memory_that_another_stream_has_freed_is_left_to_it_while_there_is_other() -> None:
    pool, orders = allocator(3)
    (first,) = blocks(pool, 0)
    pool.free(first)
    assert blocks(pool, 1, 1) == [2 * UNIT, UNIT]
    assert blocks(pool, 0) == [first]
    assert orders == []


def test_chunks_of_two_streams_are_joined_only_after_a_synchronisation() -> None:
    pool, orders = allocator(2)
    for address in blocks(pool, 0, 1):
        pool.free(address)
    assert [chunk.owner for chunk in pool.chunks()] == [0, 1]
    assert pool.allocate(2 * UNIT, 0) == 0
    assert sorted(orders) == [(0, 1), (1, 0)] and pool.synchronizations == 1


def test_own_chunks_and_synced_neighbours_serve_a_block_without_a_synchronisation() -> None:
    pool, orders = allocator(4)
    (first,) = blocks(pool, 0)
    pool.free(first)
    assert pool.allocate(3 * UNIT, 1) == UNIT
    pool.free(UNIT)
    pool.end_iteration(1)
    orders.clear()
    assert pool.allocate(4 * UNIT - UNIT // 2, 0) == 0
    assert orders == [] and pool.chunks() == []


def test_a_block_is_of_the_stream_of_its_last_use() -> None:
    """A feature map: one stream computes it, another one reads it last and frees it."""
    pool, orders = allocator(1)
    (feature_map,) = blocks(pool, 0)
    pool.hand_over(feature_map, 1)
    assert orders == [(1, 0)]
    pool.free(feature_map)
    assert pool.chunks() == [Chunk(0, UNIT, 1)]
    assert pool.allocate(UNIT, 1) == 0
    assert orders == [(1, 0)]


def test_a_block_of_several_streams_is_of_none_before_they_are_synchronised() -> None:
    pool, orders = allocator(1)
    (block,) = blocks(pool, 0)
    pool.use(block, 1)
    pool.free(block)
    assert pool.chunks() == [Chunk(0, UNIT, SHARED)]
    pool.end_iteration(0)
    assert pool.chunks() == [Chunk(0, UNIT, SHARED)]
    orders.clear()
    assert pool.allocate(UNIT, 0) == 0
    assert sorted(orders) == [(0, 1), (1, 0)]


def test_at_the_end_of_an_iteration_the_others_wait_and_its_chunks_are_synced() -> None:
    pool, orders = allocator(3, streams=3)
    one, two, three = blocks(pool, 0, 1, 2)
    for address in (one, two, three):
        pool.free(address)
    pool.end_iteration(0)
    assert sorted(orders) == [(1, 0), (2, 0)]
    assert pool.chunks() == [Chunk(one, UNIT, SYNCED), Chunk(three, UNIT, 2), Chunk(two, UNIT, 1)]


def test_a_block_that_no_synchronisation_would_make_fit_is_refused_without_one() -> None:
    pool, orders = allocator(4)
    one, other, _, _ = blocks(pool, 0, 1, 0, 1)
    pool.free(one)
    pool.free(other)
    with pytest.raises(PoolMemoryError, match="stream 1 needs 16 bytes of a pool of 32: 16 are free, at most 8 in one"):
        pool.allocate(2 * UNIT, 1)
    assert orders == []


def test_calls_that_make_no_sense_are_refused() -> None:
    pool, _ = allocator()
    (block,) = blocks(pool, 0)
    for streams, size, alignment in ((0, 512, 512), (2, 512, 0), (2, 0, 512), (2, 700, 512)):
        with pytest.raises(ValueError, match=r"not possible|no multiple"):
            StreamAllocator(size, streams, lambda waiting, awaited: None, alignment)
    with pytest.raises(ValueError, match="0 bytes"):
        pool.allocate(0, 0)
    for call in (pool.use, pool.hand_over, pool.allocate):
        with pytest.raises(ValueError, match="no stream 2"):
            call(block if call != pool.allocate else UNIT, 2)
    with pytest.raises(ValueError, match="no stream -1"):
        pool.end_iteration(-1)
    pool.free(block)
    for unknown in (pool.free, lambda address: pool.use(address, 1), lambda address: pool.hand_over(address, 1)):
        with pytest.raises(ValueError, match="no block begins at 0"):
            unknown(block)
