"""The codecs of swapped tensors (CSWAP, section V-C), and how a coded tensor lies on the host.

A tensor is coded chunk by chunk, so that the link moves one chunk while the next is coded. Each chunk's coded bytes
begin where its raw bytes would (`chunks`), so a place on the host keeps the tensor's raw size. The bytes carry no
header: who wrote them keeps a `CodedChunk` for each beside them. A chunk that does not shrink is stored as it is.

A chunk is seen as words of the tensor's element size; elements of other sizes as the largest words that fit
(`word_of`). A zero is a word whose bits are all zero, so that −0.0, subnormals and NaN payloads are values like any
other. The parts of a coded chunk (`parts`) begin at multiples of 8 bytes, so that a GPU can read them in words:

- ZVC: a bit for each word, the first in the lowest; the words that are not zero.
- CSR: for each row how many words up to its end are not zero (uint32); the column of each (uint16); the words.
- RLE: for each row how many runs of zeros up to its end (uint32); the column of each run's first word (uint16); of all
  runs the number of words less one (uint16); the words between them. A run ends with its row.
- LZ4: a block without its size.

Rows have ROW_WORDS words. What is left of a chunk after its last whole word comes last, as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from functools import cache
from types import ModuleType
from typing import NamedTuple

from pg_tensile.errors import CodecError

CHUNK_BYTES = 4 << 20  # raw; the largest
CHUNK_MULTIPLE = 1 << 19  # of smaller ones: whole rows of the widest words
ROW_WORDS = 1 << 16  # columns are uint16


class Codec(IntEnum):
    """How swapped bytes are coded; the numbers are those of a plan's events."""

    NONE = 0
    ZVC = 1  # zero-value compression: a bit for every word, then the words that are not zero
    RLE = 2  # run-length encoding: the runs of zero words, then the words between them
    CSR = 3  # compressed sparse rows: the number of words in each row, their columns, the words
    LZ4 = 4


class CodedChunk(NamedTuple):
    """What became of one chunk: NONE if it did not shrink, and how many bytes it takes."""

    codec: Codec
    coded_bytes: int


def named_codec(name: str) -> Codec:
    """The codec of that name in any case. CodecError: there is none."""
    try:
        return Codec[name.upper()]
    except KeyError:
        names = ", ".join(codec.name.lower() for codec in Codec)
        raise CodecError(f'there is no codec "{name}"', hint=f"Codecs are: {names}.") from None


class Launch(NamedTuple):
    """How a GPU's kernels are launched: `grid` programs, each with `block` threads."""

    grid: int = 512
    block: int = 128


DEFAULT_LAUNCH = Launch()


@cache
def lz4_package() -> ModuleType | None:
    """The module that codes LZ4 on the host; None: it is not installed."""
    try:
        import lz4.block
    except ImportError:
        return None
    return lz4.block


def available(codec: Codec) -> bool:
    """Whether this machine's CPU can code with it: LZ4 needs a package."""
    return codec != Codec.LZ4 or lz4_package() is not None


def chunks(nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[slice]:
    """Where the chunks of a tensor lie, in order: all of `chunk_bytes` but the last. CodecError: a chunk of that size
    exceeds the staging, or would cut rows."""
    if not 0 < chunk_bytes <= CHUNK_BYTES or chunk_bytes % CHUNK_MULTIPLE:
        message = f"a chunk cannot have {chunk_bytes:,} bytes"
        raise CodecError(message, hint=f"Choose a multiple of {CHUNK_MULTIPLE:,}, {CHUNK_BYTES:,} at most.")
    return (slice(start, min(start + chunk_bytes, nbytes)) for start in range(0, nbytes, chunk_bytes))


def word_of(word_bytes: int) -> int:
    """Bytes of the words in which elements of `word_bytes` are seen: 8, 4, 2 or 1."""
    if word_bytes < 1:
        raise CodecError(f"an element cannot have {word_bytes} bytes")
    return next(width for width in (8, 4, 2, 1) if word_bytes % width == 0)


def parts(codec: Codec, nbytes: int, word_bytes: int, values: int, runs: int) -> tuple[slice, ...]:
    """Where the parts of a chunk of `nbytes` lie that has `values` words that are not zero and `runs` runs of zeros
    (counted anew in each row); the last stop is its coded size. CodecError: LZ4 and NONE have no parts."""
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
    places, end = [], 0
    for size in (*sizes, values * word_bytes, tail):
        start = -(-end // 8) * 8
        end = start + size
        places.append(slice(start, end))
    return tuple(places)
