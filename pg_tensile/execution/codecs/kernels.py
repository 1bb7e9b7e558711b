"""Kernels that code and decode chunks on a GPU (CSWAP, section IV-D); cuda.py launches them.

Words are processed in tiles: a program takes every `grid`-th tile. The position of a tile's values depends on all tiles
before it, so coding and decoding take two passes: one counts the values of each tile, the counts are summed, and one
writes. `count` is the number of words of a chunk, `tiles` the number of its tiles.

Triton compiles a variant for each combination of what it finds special in the arguments: pointers and integers that 16
divides, integers that are 1. `_UNSPECIAL` are those in which that would gain nothing, because the accesses are
scattered or few. So a chunk from 16-byte aligned memory, as PyTorch's allocators return it, has two variants of a
kernel for each word size: numbers of words that 16 divides, for which accesses are vectorised, and others.
"""

from __future__ import annotations

import triton
import triton.language as tl

_UNSPECIAL = (
    "tiles", "values_of_tile", "runs_of_tile", "value_ends", "run_ends", "row_ends",
    "values", "columns", "lasts", "lengths",
)  # fmt: skip


@triton.jit
def _starts_of_runs(words, index, count, used, ROW: tl.constexpr):
    """Return 1 where a run of zeros starts; the word before the first one counts as used."""
    before = tl.load(words + index - 1, mask=(index > 0) & (index < count), other=1)
    return ((index < count) & (used == 0) & ((index % ROW == 0) | (before != 0))).to(tl.int32)


@triton.jit
def _ends_of_runs(words, index, count, used, ROW: tl.constexpr):
    """Return 1 at the last word of each run of zeros."""
    after = tl.load(words + index + 1, mask=index + 1 < count, other=1)
    return ((index < count) & (used == 0) & ((index % ROW == ROW - 1) | (after != 0))).to(tl.int32)


@triton.jit(do_not_specialize=_UNSPECIAL)
def count_values(
    words, count, tiles, values_of_tile, runs_of_tile, bits,
    BITS: tl.constexpr, RUNS: tl.constexpr, TILE: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Count the nonzero words of each tile; write the mask (BITS), or count the runs that start there (RUNS)."""
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        index = tile * TILE + tl.arange(0, TILE)
        used = (tl.load(words + index, mask=index < count, other=0) != 0).to(tl.int32)
        tl.store(values_of_tile + tile, tl.sum(used, axis=0))
        if BITS:
            octets = tl.sum(tl.reshape(used << (index % 8), (TILE // 8, 8)), axis=1)
            octet = tile * (TILE // 8) + tl.arange(0, TILE // 8)
            tl.store(bits + octet, octets.to(tl.uint8), mask=octet * 8 < count)
        if RUNS:
            tl.store(runs_of_tile + tile, tl.sum(_starts_of_runs(words, index, count, used, ROW), axis=0))


@triton.jit(do_not_specialize=_UNSPECIAL)
def gather(
    words, count, tiles, value_ends, run_ends, values, columns, lasts,
    COLUMNS: tl.constexpr, RUNS: tl.constexpr, TILE: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Write the used words in a row, and their columns (COLUMNS) or those of runs' first and last words (RUNS).

    `value_ends` and `run_ends` are the cumulative counts at each tile's end.
    """
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        index = tile * TILE + tl.arange(0, TILE)
        word = tl.load(words + index, mask=index < count, other=0)
        used = (word != 0).to(tl.int32)
        position = tl.load(value_ends + tile) - tl.sum(used, axis=0) + tl.cumsum(used, axis=0) - 1
        tl.store(values + position, word, mask=used == 1)
        if COLUMNS:
            tl.store(columns + position, (index % ROW).to(tl.int16), mask=used == 1)
        if RUNS:
            starts = _starts_of_runs(words, index, count, used, ROW)
            ends = _ends_of_runs(words, index, count, used, ROW)
            before = tl.load(run_ends + tile) - tl.sum(starts, axis=0)
            # A run that crosses the tile's border started before it but has not ended.
            goes_on = (index == tile * TILE) & (index < count) & (used == 0) & (starts == 0)
            ended = before - tl.sum(goes_on.to(tl.int32), axis=0)
            column = (index % ROW).to(tl.int16)
            tl.store(columns + before + tl.cumsum(starts, axis=0) - 1, column, mask=starts == 1)
            tl.store(lasts + ended + tl.cumsum(ends, axis=0) - 1, column, mask=ends == 1)


@triton.jit
def _used(mask, index, count, BITS: tl.constexpr):
    """Return 1 for words that have a value, from a mask of bits (BITS) or bytes."""
    if BITS:
        octet = tl.load(mask + index // 8, mask=index < count, other=0).to(tl.int32)
        return (octet >> (index % 8)) & 1
    else:
        return tl.load(mask + index, mask=index < count, other=0).to(tl.int32)


@triton.jit(do_not_specialize=_UNSPECIAL)
def count_used(mask, count, tiles, values_of_tile, BITS: tl.constexpr, TILE: tl.constexpr):
    """Count the words of each tile that have a value."""
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        index = tile * TILE + tl.arange(0, TILE)
        tl.store(values_of_tile + tile, tl.sum(_used(mask, index, count, BITS), axis=0))


@triton.jit(do_not_specialize=_UNSPECIAL)
def scatter(mask, count, tiles, value_ends, values, words, BITS: tl.constexpr, TILE: tl.constexpr):
    """Write every word: its value, or zero."""
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        index = tile * TILE + tl.arange(0, TILE)
        used = _used(mask, index, count, BITS)
        position = tl.load(value_ends + tile) - tl.sum(used, axis=0) + tl.cumsum(used, axis=0) - 1
        tl.store(words + index, tl.load(values + position, mask=used == 1, other=0), mask=index < count)


@triton.jit(do_not_specialize=_UNSPECIAL)
def place(row_ends, tiles, columns, values, words, TILE: tl.constexpr, ROW: tl.constexpr):
    """Write values to their columns. Each row has as many tiles as a full row needs."""
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile // (ROW // TILE)
        begin = tl.load(row_ends + row - 1, mask=row > 0, other=0)
        item = begin + tile % (ROW // TILE) * TILE + tl.arange(0, TILE)
        inside = item < tl.load(row_ends + row)
        column = tl.load(columns + item, mask=inside, other=0).to(tl.int32) & (ROW - 1)
        value = tl.load(values + item, mask=inside, other=0)
        tl.store(words + row * ROW + column, value, mask=inside)


@triton.jit(do_not_specialize=_UNSPECIAL)
def mark(row_ends, tiles, columns, lengths, change, ENDS: tl.constexpr, TILE: tl.constexpr, ROW: tl.constexpr):
    """Subtract 1 where runs start, or add 1 after they end (ENDS). No two runs start, or end, at the same word."""
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile // (ROW // TILE)
        begin = tl.load(row_ends + row - 1, mask=row > 0, other=0)
        item = begin + tile % (ROW // TILE) * TILE + tl.arange(0, TILE)
        inside = item < tl.load(row_ends + row)
        word = row * ROW + (tl.load(columns + item, mask=inside, other=0).to(tl.int32) & (ROW - 1))
        step = -1
        if ENDS:
            word += (tl.load(lengths + item, mask=inside, other=0).to(tl.int32) & (ROW - 1)) + 1
            step = 1
        present = tl.load(change + word, mask=inside, other=0).to(tl.int32)
        tl.store(change + word, (present + step).to(tl.int8), mask=inside)
