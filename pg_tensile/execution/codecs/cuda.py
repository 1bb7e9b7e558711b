"""Coding and decoding of chunks on a GPU, with the same bytes as host.py (CSWAP, section IV-D: launches).

Words are processed in tiles. The position of a tile's values depends on all tiles before it, so coding takes two
passes: one counts the values in each tile, the counts are summed, and one writes. Each pass is one kernel in which a
program takes every `grid`-th tile. The host needs the number of coded bytes and therefore waits for the first pass.

LZ4 is nvCOMP's, where that is installed. It has its own container, which holds many small blocks for a GPU to process
at once and which only nvCOMP reads.
"""

from __future__ import annotations

import time
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

from pg_tensile.errors import CodecError
from pg_tensile.planning.compression.codec import DEFAULT_LAUNCH, ROW_WORDS, Codec, Launch, parts, word_of

_TILE = 1024  # words; a row has a whole number of tiles
_TILES_OF_ROW = ROW_WORDS // _TILE
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


@triton.jit
def _count(
    words, count, tiles, values_of_tile, runs_of_tile, bits,
    BITS: tl.constexpr, RUNS: tl.constexpr, TILE: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Count the nonzero words in each tile; write the mask (BITS), or count the runs that start there (RUNS)."""
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


@triton.jit
def _gather(
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


@triton.jit
def _count_used(mask, count, tiles, values_of_tile, BITS: tl.constexpr, TILE: tl.constexpr):
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        index = tile * TILE + tl.arange(0, TILE)
        tl.store(values_of_tile + tile, tl.sum(_used(mask, index, count, BITS), axis=0))


@triton.jit
def _scatter(mask, count, tiles, value_ends, values, words, BITS: tl.constexpr, TILE: tl.constexpr):
    """Write every word: its value, or zero."""
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        index = tile * TILE + tl.arange(0, TILE)
        used = _used(mask, index, count, BITS)
        position = tl.load(value_ends + tile) - tl.sum(used, axis=0) + tl.cumsum(used, axis=0) - 1
        tl.store(words + index, tl.load(values + position, mask=used == 1, other=0), mask=index < count)


@triton.jit
def _place(row_ends, tiles, columns, values, words, TILE: tl.constexpr, ROW: tl.constexpr):
    """Write values to their columns. Each row has as many tiles as a full row needs."""
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile // (ROW // TILE)
        begin = tl.load(row_ends + row - 1, mask=row > 0, other=0)
        item = begin + tile % (ROW // TILE) * TILE + tl.arange(0, TILE)
        inside = item < tl.load(row_ends + row)
        column = tl.load(columns + item, mask=inside, other=0).to(tl.int32) & (ROW - 1)
        value = tl.load(values + item, mask=inside, other=0)
        tl.store(words + row * ROW + column, value, mask=inside)


@triton.jit
def _mark(row_ends, tiles, columns, lengths, change, ENDS: tl.constexpr, TILE: tl.constexpr, ROW: tl.constexpr):
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


class CudaCoder:
    """`device.Coder` for CUDA. Kernels run on the current stream."""

    def __init__(self, device: torch.device, launch: Launch = DEFAULT_LAUNCH) -> None:
        self._device = device
        self._launch = launch

    def available(self, codec: Codec) -> bool:
        return codec != Codec.LZ4 or _nvcomp() is not None

    def clock(self) -> float:
        torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def encode(self, codec: Codec, source: torch.Tensor, word_bytes: int, target: torch.Tensor) -> int:
        """Code bytes on the device as `host.encode` does.

        Returns as soon as their number is known; the kernels may still be writing `target`.
        """
        if len(target) < len(source):
            raise CodecError(f"{len(source):,} bytes need a place of as many, not of {len(target):,}")
        width = word_of(word_bytes)
        if codec == Codec.NONE or len(source) < width:
            return -1
        with torch.cuda.device(self._device):
            if codec == Codec.LZ4:
                return self._encode_lz4(source, target)
            return self._encode_words(codec, source, width, target)

    def decode(self, codec: Codec, source: torch.Tensor, word_bytes: int, target: torch.Tensor) -> None:
        """Decode bytes on the device, coded there or on the host, as `host.decode` does.

        Bytes that `encode` did not write are not detected.
        """
        with torch.cuda.device(self._device):
            if codec == Codec.NONE:
                target.copy_(source)
            elif codec == Codec.LZ4:
                self._decode_lz4(source, target)
            else:
                self._decode_words(codec, source, word_of(word_bytes), target)

    def _encode_words(self, codec: Codec, source: torch.Tensor, width: int, target: torch.Tensor) -> int:
        count = len(source) // width
        words, tail = source[: count * width].view(_INTEGERS[width]), source[count * width :]
        runs_wanted = codec == Codec.RLE
        tiles = triton.cdiv(count, _TILE)
        of_tiles = torch.zeros(2, tiles, dtype=torch.int32, device=self._device)
        rules = {"TILE": _TILE, "ROW": ROW_WORDS, "num_warps": self._launch.block // 32}
        grid = (min(self._launch.grid, tiles),)
        bits = codec == Codec.ZVC
        _count[grid](words, count, tiles, of_tiles[0], of_tiles[1], target, BITS=bits, RUNS=runs_wanted, **rules)
        ends = of_tiles.cumsum(1, dtype=torch.int32)
        values, runs = ends[:, -1].tolist()
        places = parts(codec, len(source), width, values, runs)
        if places[-1].stop >= len(source):
            return -1
        for part, after in pairwise(places):
            target[part.stop : after.start] = 0
        columns = lasts = target
        if codec != Codec.ZVC:
            last_tiles = torch.arange(_TILES_OF_ROW, tiles + _TILES_OF_ROW, _TILES_OF_ROW, device=self._device) - 1
            row_ends = ends[int(runs_wanted)][last_tiles.clamp(max=tiles - 1)]
            target[places[0]].view(torch.int32).copy_(row_ends)
            columns = target[places[1]].view(torch.int16)
        if runs_wanted:
            lasts = target[places[2]].view(torch.int16)
        coded = target[places[-2]].view(_INTEGERS[width])
        _gather[grid](
            *(words, count, tiles, ends[0], ends[1], coded, columns, lasts),
            **{"COLUMNS": codec == Codec.CSR, "RUNS": runs_wanted, **rules},
        )
        if runs_wanted:
            lasts.sub_(columns)  # modulo 2^16: the number of words less one
        target[places[-1]] = tail
        return places[-1].stop

    def _decode_words(self, codec: Codec, source: torch.Tensor, width: int, target: torch.Tensor) -> None:
        count = len(target) // width
        words, tail = target[: count * width].view(_INTEGERS[width]), target[count * width :]
        if codec == Codec.CSR:
            self._decode_csr(source, len(target), width, words)
        elif codec == Codec.ZVC:
            mask, values, _ = parts(codec, len(target), width, 0, 0)
            self._write(source[mask], True, source[values.start : len(source) - len(tail)], words)
        else:
            used, start = self._between_runs(source, len(target), width, count)
            self._write(used, False, source[start : len(source) - len(tail)], words)
        tail.copy_(source[len(source) - len(tail) :])

    def _write(self, mask: torch.Tensor, bits: bool, values: torch.Tensor, words: torch.Tensor) -> None:
        tiles = triton.cdiv(len(words), _TILE)
        of_tiles = torch.empty(tiles, dtype=torch.int32, device=self._device)
        rules = {"BITS": bits, "TILE": _TILE, "num_warps": self._launch.block // 32}
        grid = (min(self._launch.grid, tiles),)
        _count_used[grid](mask, len(words), tiles, of_tiles, **rules)
        ends = of_tiles.cumsum(0, dtype=torch.int32)
        whole = values[: len(values) // words.itemsize * words.itemsize].view(words.dtype)
        _scatter[grid](mask, len(words), tiles, ends, whole, words, **rules)

    def _decode_csr(self, source: torch.Tensor, nbytes: int, width: int, words: torch.Tensor) -> None:
        row_ends, rules = self._rows(Codec.CSR, source, nbytes, width)
        _, columns, values, _ = parts(Codec.CSR, nbytes, width, int(row_ends[-1]), 0)
        words.zero_()
        tiles = len(row_ends) * _TILES_OF_ROW
        _place[(min(self._launch.grid, tiles),)](
            *(row_ends, tiles, source[columns].view(torch.int16), source[values].view(words.dtype), words), **rules
        )

    def _between_runs(self, source: torch.Tensor, nbytes: int, width: int, count: int) -> tuple[torch.Tensor, int]:
        """Return a byte for each word, 1 where it has a value, and the offset at which the values start."""
        row_ends, rules = self._rows(Codec.RLE, source, nbytes, width)
        _, columns, lengths, values, _ = parts(Codec.RLE, nbytes, width, 0, int(row_ends[-1]))
        change = torch.zeros(count + 1, dtype=torch.int8, device=self._device)
        change[0] = 1
        tiles = len(row_ends) * _TILES_OF_ROW
        for ends in (False, True):
            _mark[(min(self._launch.grid, tiles),)](
                *(row_ends, tiles, source[columns].view(torch.int16), source[lengths].view(torch.int16), change),
                **{"ENDS": ends, **rules},
            )
        return change[:count].cumsum(0, dtype=torch.int8), values.start

    def _rows(self, codec: Codec, source: torch.Tensor, nbytes: int, width: int) -> tuple[torch.Tensor, dict[str, int]]:
        row_ends = source[parts(codec, nbytes, width, 0, 0)[0]].view(torch.int32)
        return row_ends, {"TILE": _TILE, "ROW": ROW_WORDS, "num_warps": self._launch.block // 32}

    def _encode_lz4(self, source: torch.Tensor, target: torch.Tensor) -> int:
        nvcomp = _installed_nvcomp()
        stream = torch.cuda.current_stream(self._device).cuda_stream
        packed = self._lz4(stream).encode(nvcomp.as_array(source, cuda_stream=stream))
        coded = torch.as_tensor(packed, device=self._device).view(torch.uint8)
        if len(coded) >= len(source):
            return -1
        target[: len(coded)].copy_(coded)
        torch.cuda.current_stream(self._device).synchronize()  # nvCOMP frees its memory with its array
        return len(coded)

    def _decode_lz4(self, source: torch.Tensor, target: torch.Tensor) -> None:
        nvcomp = _installed_nvcomp()
        stream = torch.cuda.current_stream(self._device).cuda_stream
        unpacked = self._lz4(stream).decode(nvcomp.as_array(source, cuda_stream=stream))
        target.copy_(torch.as_tensor(unpacked, device=self._device).view(torch.uint8))
        torch.cuda.current_stream(self._device).synchronize()

    def _lz4(self, stream: int) -> Any:
        return _lz4_codec(self._device.index or 0, stream)


@cache
def _nvcomp() -> ModuleType | None:
    try:
        from nvidia import nvcomp
    except ImportError:
        return None
    return nvcomp


@cache
def _lz4_codec(device: int, stream: int) -> Any:
    return _installed_nvcomp().Codec(algorithm="LZ4", device_id=device, cuda_stream=stream)


def _installed_nvcomp() -> ModuleType:
    nvcomp = _nvcomp()
    if nvcomp is None:
        hint = 'Install the package "nvidia-nvcomp-cu12", or choose another codec.'
        raise CodecError("the codec lz4 is not available on the GPU", hint)
    return nvcomp
