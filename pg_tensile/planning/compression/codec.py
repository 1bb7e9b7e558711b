"""Codecs of swapped tensors (CSWAP, section V-C), and the layout of a coded tensor on the host.

A tensor is coded chunk by chunk, so that the link moves one chunk while the next is coded. Each chunk's coded bytes
begin where its raw bytes would (`chunks`), so the host memory of a tensor keeps its raw size. The bytes have no header:
their writer keeps a `CodedChunk` for each chunk. A chunk that does not shrink is stored unchanged.

A chunk is treated as words of the tensor's element size; elements of other sizes as the largest words that divide them
(`word_of`). A zero is a word whose bits are all zero, so −0.0, subnormals and NaN payloads are values like any other.
The parts of a coded chunk (`parts`) begin at multiples of 8 bytes, so that a GPU can read them as words:

- ZVC: one bit for each word, the first in the lowest; the nonzero words.
- CSR: for each row the number of nonzero words up to its end (uint32); the column of each (uint16); the words.
- RLE: for each row the number of runs of zeros up to its end (uint32); the column of each run's first word (uint16);
  the length of each run in words, less one (uint16); the nonzero words. A run ends with its row.
- LZ4: a block without its size.

Rows have ROW_WORDS words. The bytes of a chunk after its last whole word come last, unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from functools import cache
from types import ModuleType
from typing import NamedTuple

from pg_tensile.errors import CodecError

CHUNK_BYTES = 4 << 20  # raw size of the largest chunks
CHUNK_MULTIPLE = 1 << 19  # chunk sizes are multiples of it: whole rows of the widest words
ROW_WORDS = 1 << 16  # columns are uint16
WIDTHS = (8, 4, 2, 1)  # bytes of a word
TILE_WORDS = 1 << 10  # what a program of a GPU's kernels processes at once; a row has a whole number of tiles


class Codec(IntEnum):
    """Coding of swapped bytes; the numbers are those in a plan's events."""

    NONE = 0
    ZVC = 1  # zero-value compression: a bit for every word, then the nonzero words
    RLE = 2  # run-length encoding: the runs of zeros, then the nonzero words
    CSR = 3  # compressed sparse rows: the number of words in each row, their columns, the words
    LZ4 = 4


COUNTED = (Codec.ZVC, Codec.RLE, Codec.CSR)  # those that code by counting zeros; they have `parts`


class CodedChunk(NamedTuple):
    """Result of coding one chunk: its codec, NONE if it did not shrink, and the number of bytes it takes.

    With `values` and `runs`, the arguments of `parts`, a decoder finds the parts without reading the bytes: on a GPU
    the host would have to wait for them. They are 0 for codecs without such parts.
    """

    codec: Codec
    coded_bytes: int
    values: int = 0
    runs: int = 0


def named_codec(name: str) -> Codec:
    """Return the codec of that name, in any case. Raises CodecError if no codec has it."""
    try:
        return Codec[name.upper()]
    except KeyError:
        names = ", ".join(codec.name.lower() for codec in Codec)
        raise CodecError(f'there is no codec "{name}"', hint=f"Codecs are: {names}.") from None


class Launch(NamedTuple):
    """Launch parameters of a GPU's kernels: `grid` programs with `block` threads each."""

    grid: int = 512
    block: int = 128


DEFAULT_LAUNCH = Launch()


@cache
def lz4_package() -> ModuleType | None:
    """Return the module that codes LZ4 on the host, or None if it is not installed."""
    try:
        import lz4.block
    except ImportError:
        return None
    return lz4.block


def available(codec: Codec) -> bool:
    """Return whether this machine's CPU can code with the codec: LZ4 needs a package."""
    return codec != Codec.LZ4 or lz4_package() is not None


def chunks(nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[slice]:
    """Return the slices of a tensor's chunks in order, all of `chunk_bytes` but the last.

    Raises CodecError if chunks of that size exceed the staging memory or split rows.
    """
    if not 0 < chunk_bytes <= CHUNK_BYTES or chunk_bytes % CHUNK_MULTIPLE:
        message = f"a chunk cannot have {chunk_bytes:,} bytes"
        raise CodecError(message, hint=f"Choose a multiple of {CHUNK_MULTIPLE:,}, {CHUNK_BYTES:,} at most.")
    return (slice(start, min(start + chunk_bytes, nbytes)) for start in range(0, nbytes, chunk_bytes))


def word_of(word_bytes: int) -> int:
    """Return the word size (8, 4, 2 or 1 bytes) as which elements of `word_bytes` are treated."""
    if word_bytes < 1:
        raise CodecError(f"an element cannot have {word_bytes} bytes")
    return next(width for width in WIDTHS if word_bytes % width == 0)


def parts(codec: Codec, nbytes: int, word_bytes: int, values: int, runs: int) -> tuple[slice, ...]:
    """Return the slices of a coded chunk's parts; the last stop is the coded size.

    `nbytes` is the raw size, `values` the number of nonzero words, `runs` the number of runs of zeros (a run ends with
    its row). Raises CodecError for LZ4 and NONE, which have no parts.
    """
    words, tail = divmod(nbytes, word_bytes)
    table = -(-words // ROW_WORDS) * 4
    if codec == Codec.ZVC:
        sizes = [-(-words // 8)]
    elif codec == Codec.CSR:
        sizes = [table, 2 * values]
    elif codec == Codec.RLE:
        sizes = [table, 2 * runs, 2 * runs]
    else:
        raise CodecError(f"{codec.name} has no parts")
    slices, end = [], 0
    for size in (*sizes, values * word_bytes, tail):
        start = -(-end // 8) * 8
        end = start + size
        slices.append(slice(start, end))
    return tuple(slices)
