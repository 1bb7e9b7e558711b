"""Coding and decoding of chunks on a GPU, with the same bytes as host.py (CSWAP, section IV-D: launches).

Each of the two passes of kernels.py is one kernel. To encode, the host needs the number of coded bytes and therefore
waits for the first pass. To decode, it waits for nothing: it decodes on the thread that trains, which has to run ahead
of the device, and a `CodedChunk` has the numbers from which the places of the parts follow.

LZ4 is nvCOMP's, where that is installed. It has its own container, which holds many small blocks for a GPU to process
at once and which only nvCOMP reads. Its decoding makes the host wait: nvCOMP reads the container's header unless it is
given the configuration of the very codec object that encoded, but that object belongs to the stream of the other
direction.

What coding allocates is in coding.workspace_bytes. Nothing here but nvCOMP needs CUDA: under Triton's interpreter,
tensors of the CPU are coded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import pairwise, product
from types import ModuleType
from typing import Any

import torch
import triton

from pg_tensile.errors import CodecError
from pg_tensile.execution.codecs import kernels
from pg_tensile.planning.compression.codec import (
    COUNTED,
    DEFAULT_LAUNCH,
    ROW_WORDS,
    TILE_WORDS,
    WIDTHS,
    Codec,
    CodedChunk,
    Launch,
    parts,
    word_of,
)

_TILES_OF_ROW = ROW_WORDS // TILE_WORDS
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WARP_THREADS = 32


class CudaCoder:
    """`device.Coder` for CUDA. Kernels run on the current stream."""

    def __init__(self, device: torch.device, launch: Launch = DEFAULT_LAUNCH) -> None:
        self._device = device
        self._launch = launch
        # Kernels compute with integers only; said, because newer versions of Triton warn where fusion is left open.
        self._options = {"num_warps": launch.block // _WARP_THREADS, "enable_fp_fusion": False}

    def available(self, codec: Codec) -> bool:
        return codec != Codec.LZ4 or _nvcomp() is not None

    def clock(self) -> float:
        torch.get_device_module(self._device).synchronize(self._device)
        return time.perf_counter()

    def warm_up(self, codecs: Sequence[Codec] = COUNTED, widths: Sequence[int] = WIDTHS) -> None:
        """Compile the kernels that chunks of these codecs and word sizes need, or load them from Triton's cache.

        Zeros are coded and decoded once for each variant of the kernels. Only chunks whose bytes begin at an address
        that 16 does not divide need others.
        """
        for codec, width, words in product(codecs, widths, (2 * TILE_WORDS, 2 * TILE_WORDS + 1)):
            zeros = torch.zeros(words * width, dtype=torch.uint8, device=self._device)
            coded = torch.empty_like(zeros)
            chunk = self.encode(codec, zeros, width, coded)
            self.decode(chunk, coded[: chunk.coded_bytes], width, zeros)

    def encode(self, codec: Codec, source: torch.Tensor, word_bytes: int, target: torch.Tensor) -> CodedChunk:
        """Code bytes on the device as `host.encode` does.

        Returns as soon as their number is known; the kernels may still be writing `target`.
        """
        if len(target) < len(source):
            raise CodecError(f"{len(source):,} bytes need a place of as many, not of {len(target):,}")
        width = word_of(word_bytes)
        plain = CodedChunk(Codec.NONE, len(source))
        if codec == Codec.NONE or len(source) < 2 * width:  # no codec shrinks a single word
            return plain
        with self._current():
            if codec == Codec.LZ4:
                return self._encode_lz4(source, target) or plain
            return self._encode_words(codec, source, width, target) or plain

    def decode(self, chunk: CodedChunk, source: torch.Tensor, word_bytes: int, target: torch.Tensor) -> None:
        """Decode bytes on the device, coded there or on the host, as `host.decode` does.

        The host waits for nothing, except with LZ4. Bytes that `encode` did not write are not detected.
        """
        with self._current():
            if chunk.codec == Codec.NONE:
                target.copy_(source)
            elif chunk.codec == Codec.LZ4:
                self._decode_lz4(source, target)
            else:
                self._decode_words(chunk, source, word_of(word_bytes), target)

    def _current(self) -> AbstractContextManager[object]:
        """Return a context in which this coder's device is the current one."""
        return nullcontext() if self._device.index is None else torch.accelerator.device_index(self._device.index)

    def _grid(self, tiles: int) -> tuple[int]:
        return (min(self._launch.grid, tiles),)

    def _encode_words(self, codec: Codec, source: torch.Tensor, width: int, target: torch.Tensor) -> CodedChunk | None:
        count = len(source) // width
        words, tail = source[: count * width].view(_INTEGERS[width]), source[count * width :]
        runs_wanted = codec == Codec.RLE
        tiles = triton.cdiv(count, TILE_WORDS)
        of_tiles = torch.zeros(2, tiles, dtype=torch.int32, device=self._device)
        rules = {"RUNS": runs_wanted, "TILE": TILE_WORDS, "ROW": ROW_WORDS, **self._options}
        grid = self._grid(tiles)
        kernels.count_values[grid](
            words, count, tiles, of_tiles[0], of_tiles[1], target, BITS=codec == Codec.ZVC, **rules
        )
        ends = of_tiles.cumsum(1, dtype=torch.int32)
        values, runs = ends[:, -1].tolist()
        places = parts(codec, len(source), width, values, runs)
        if places[-1].stop >= len(source):
            return None
        for part, after in pairwise(places):
            target[part.stop : after.start] = 0
        columns = lasts = target
        if codec != Codec.ZVC:
            last = _TILES_OF_ROW - 1
            last_tiles = torch.arange(last, tiles + last, _TILES_OF_ROW, device=self._device).clamp_(max=tiles - 1)
            row_ends = ends[int(runs_wanted)][last_tiles]
            target[places[0]].view(torch.int32).copy_(row_ends)
            columns = target[places[1]].view(torch.int16)
        if runs_wanted:
            lasts = target[places[2]].view(torch.int16)
        coded = target[places[-2]].view(_INTEGERS[width])
        kernels.gather[grid](
            words, count, tiles, ends[0], ends[1], coded, columns, lasts, COLUMNS=codec == Codec.CSR, **rules
        )
        if runs_wanted:
            lasts.sub_(columns)  # modulo 2^16: the number of words less one
        target[places[-1]] = tail
        return CodedChunk(codec, places[-1].stop, values, runs)

    def _decode_words(self, chunk: CodedChunk, source: torch.Tensor, width: int, target: torch.Tensor) -> None:
        count = len(target) // width
        words, tail = target[: count * width].view(_INTEGERS[width]), target[count * width :]
        places = parts(chunk.codec, len(target), width, chunk.values, chunk.runs)
        values = source[places[-2]].view(words.dtype)
        if chunk.codec == Codec.ZVC:
            self._scatter(source[places[0]], values, words, bits=True)
        elif chunk.codec == Codec.RLE:
            self._scatter(self._between_runs(source, places, count), values, words, bits=False)
        else:
            words.zero_()
            columns = source[places[1]].view(torch.int16)
            self._for_rows(kernels.place, source[places[0]], columns, values, words)
        tail.copy_(source[places[-1]])

    def _scatter(self, mask: torch.Tensor, values: torch.Tensor, words: torch.Tensor, bits: bool) -> None:
        tiles = triton.cdiv(len(words), TILE_WORDS)
        of_tiles = torch.empty(tiles, dtype=torch.int32, device=self._device)
        rules = {"BITS": bits, "TILE": TILE_WORDS, **self._options}
        kernels.count_used[self._grid(tiles)](mask, len(words), tiles, of_tiles, **rules)
        ends = of_tiles.cumsum_(0)
        kernels.scatter[self._grid(tiles)](mask, len(words), tiles, ends, values, words, **rules)

    def _between_runs(self, source: torch.Tensor, places: tuple[slice, ...], count: int) -> torch.Tensor:
        """Return a byte for each word, 1 where it has a value."""
        columns, lengths = source[places[1]].view(torch.int16), source[places[2]].view(torch.int16)
        change = torch.zeros(count + 1, dtype=torch.int8, device=self._device)
        change[0] = 1
        for ends in (False, True):
            self._for_rows(kernels.mark, source[places[0]], columns, lengths, change, ENDS=ends)
        return change[:count].cumsum_(0)

    def _for_rows(self, kernel: Any, row_ends: torch.Tensor, *arguments: torch.Tensor, **rules: bool) -> None:
        """Launch a kernel whose tiles are those of full rows."""
        tiles = len(row_ends) // torch.int32.itemsize * _TILES_OF_ROW
        kernel[self._grid(tiles)](
            row_ends.view(torch.int32), tiles, *arguments, TILE=TILE_WORDS, ROW=ROW_WORDS, **rules, **self._options
        )

    def _encode_lz4(self, source: torch.Tensor, target: torch.Tensor) -> CodedChunk | None:
        nvcomp = _installed_nvcomp()
        stream = torch.cuda.current_stream(self._device).cuda_stream
        packed = self._lz4(stream).encode(nvcomp.as_array(source, cuda_stream=stream))
        coded = torch.as_tensor(packed, device=self._device).view(torch.uint8)
        if len(coded) >= len(source):
            return None
        target[: len(coded)].copy_(coded)
        torch.cuda.current_stream(self._device).synchronize()  # nvCOMP frees its memory with its array
        return CodedChunk(Codec.LZ4, len(coded))

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
