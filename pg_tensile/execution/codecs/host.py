"""Coding and decoding of chunks on the host, the reference for cuda.py. codec.py describes the formats.

numpy releases the interpreter's lock in every call here that takes time. Words are found with `flatnonzero` and moved
by index, which at any sparsity is several times as fast as by a mask, whose branches cannot be predicted.
"""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType

import numpy as np
import torch

from pg_tensile.errors import CodecError
from pg_tensile.planning.compression.codec import (
    ROW_WORDS,
    Codec,
    CodedChunk,
    available,
    lz4_package,
    parts,
    word_of,
)

__all__ = ["available", "decode", "encode"]


def encode(codec: Codec, source: torch.Tensor, word_bytes: int, target: torch.Tensor) -> CodedChunk:
    """Code `source` (uint8[n], on the CPU, elements of `word_bytes`) into the first bytes of `target`.

    If the coded bytes would not be fewer than n, the result's codec is NONE, its size n, and `target` is undefined.
    Raises CodecError if the codec is not available or `target` has fewer than n bytes.
    """
    raw, coded = source.numpy(), target.numpy()
    if len(coded) < len(raw):
        raise CodecError(f"{len(raw):,} bytes need a place of as many, not of {len(coded):,}")
    plain = CodedChunk(Codec.NONE, len(raw))
    if codec == Codec.NONE:
        return plain
    if codec == Codec.LZ4:
        return _encode_lz4(raw, coded) or plain
    words, tail = _split(raw, word_of(word_bytes))
    used = words != 0
    value_ends = np.cumsum([np.count_nonzero(row) for row in _rows(used)], dtype=np.int64)
    starts, ends = _runs(used) if codec == Codec.RLE else (np.empty(0, np.int64),) * 2
    values = int(value_ends[-1]) if len(words) else 0
    places = parts(codec, len(raw), words.itemsize, values, len(starts))
    if places[-1].stop >= len(raw):
        return plain
    for part, after in pairwise(places):
        coded[part.stop : after.start] = 0
    columns = None
    if codec == Codec.ZVC:
        coded[places[0]] = np.packbits(used, bitorder="little")
    elif codec == Codec.CSR:
        coded[places[0]].view(np.uint32)[:] = value_ends
        columns = coded[places[1]].view(np.uint16)
    else:
        coded[places[0]].view(np.uint32)[:] = np.searchsorted(starts, _row_ends(len(words)))
        coded[places[1]].view(np.uint16)[:] = starts.astype(np.uint16)  # modulo ROW_WORDS: columns
        coded[places[2]].view(np.uint16)[:] = (ends - starts - 1).astype(np.uint16)
    _gather(words, used, coded[places[-2]].view(words.dtype), columns)
    coded[places[-1]] = tail
    return CodedChunk(codec, places[-1].stop, values, len(starts))


def decode(chunk: CodedChunk, source: torch.Tensor, word_bytes: int, target: torch.Tensor) -> None:
    """Decode `source` (uint8[k], all bytes that `encode` wrote) into `target` (uint8[n]).

    Raises CodecError if the bytes are not those of such a chunk of that size, or the codec is not available.
    """
    coded, raw = source.numpy(), target.numpy()
    try:
        if chunk.codec == Codec.NONE:
            raw[:] = coded
        elif chunk.codec == Codec.LZ4:
            _decode_lz4(coded, raw)
        else:
            _decode_words(chunk, coded, word_of(word_bytes), raw)
    except (ValueError, IndexError, OverflowError) as error:
        message = f"{len(coded):,} bytes are not a chunk of {len(raw):,} coded by {chunk.codec.name}"
        raise CodecError(message) from error


def _decode_words(chunk: CodedChunk, coded: np.ndarray, width: int, raw: np.ndarray) -> None:
    words, tail = _split(raw, width)
    places = parts(chunk.codec, len(raw), width, chunk.values, chunk.runs)
    if places[-1].stop != len(coded):
        raise ValueError(f"they should be {places[-1].stop:,}")
    values = coded[places[-2]].view(words.dtype)
    if chunk.codec == Codec.CSR:
        row_ends = coded[places[0]].view(np.uint32).astype(np.int64)
        numbers = _positions(row_ends, coded[places[1]].view(np.uint16))
        words.fill(0)
        words[numbers] = values
    else:
        if chunk.codec == Codec.ZVC:
            used = np.unpackbits(coded[places[0]], count=len(words), bitorder="little").view(bool)
        else:
            used = _between_runs(coded, places, len(words))
        if np.count_nonzero(used) != chunk.values:
            raise ValueError(f"{np.count_nonzero(used):,} words have a value, not {chunk.values:,}")
        _scatter(values, used, words)
    tail[:] = coded[places[-1]]


def _split(raw: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the whole words of a chunk and the bytes after them, both as views of the chunk."""
    end = len(raw) // width * width
    return raw[:end].view(f"u{width}"), raw[end:]


def _rows(words: np.ndarray) -> list[np.ndarray]:
    return [words[start : start + ROW_WORDS] for start in range(0, len(words), ROW_WORDS)]


def _row_ends(words: int) -> np.ndarray:
    return np.minimum(np.arange(ROW_WORDS, words + ROW_WORDS, ROW_WORDS), words)


def _positions(row_ends: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the indices of the words whose columns are given, row by row up to `row_ends`."""
    first_words = np.arange(0, len(row_ends) * ROW_WORDS, ROW_WORDS)
    return np.repeat(first_words, np.diff(row_ends, prepend=0)) + columns


def _gather(words: np.ndarray, used: np.ndarray, values: np.ndarray, columns: np.ndarray | None) -> None:
    """Write the used words one after the other, and their columns if `columns` is given."""
    end = 0
    for row, row_used in zip(_rows(words), _rows(used), strict=True):
        numbers = np.flatnonzero(row_used)
        start, end = end, end + len(numbers)
        # Without a mode, `take` would buffer what it writes.
        row.take(numbers, out=values[start:end], mode="clip")
        if columns is not None:
            columns[start:end] = numbers


def _scatter(values: np.ndarray, used: np.ndarray, words: np.ndarray) -> None:
    """Write all words from the used ones and zeros, the inverse of `_gather`."""
    words.fill(0)
    end = 0
    for row, row_used in zip(_rows(words), _rows(used), strict=True):
        numbers = np.flatnonzero(row_used)
        start, end = end, end + len(numbers)
        row[numbers] = values[start:end]


def _runs(used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first word and the end of each run of zeros; runs end with their rows."""
    if not len(used):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    edges = np.flatnonzero(used[1:] != used[:-1]) + 1
    bounds = np.concatenate(([0], edges, [len(used)]))  # of alternating runs of zeros and of values
    bounds = bounds[int(used[0]) :]
    starts, ends = bounds[: len(bounds) // 2 * 2 : 2], bounds[1::2]
    cuts = np.arange(ROW_WORDS, len(used), ROW_WORDS)
    cuts = cuts[~used[cuts] & ~used[cuts - 1]]
    return _merged(starts, cuts), _merged(ends, cuts)


def _merged(positions: np.ndarray, more: np.ndarray) -> np.ndarray:
    return np.insert(positions, np.searchsorted(positions, more), more) if len(more) else positions


def _between_runs(coded: np.ndarray, places: tuple[slice, ...], words: int) -> np.ndarray:
    """Return which words of a chunk in RLE have values."""
    row_ends = coded[places[0]].view(np.uint32).astype(np.int64)
    starts = _positions(row_ends, coded[places[1]].view(np.uint16))
    ends = starts + coded[places[2]].view(np.uint16) + 1
    change = np.zeros(words + 1, np.int8)
    change[0] = 1
    change[starts] -= 1
    change[ends] += 1  # a run may start where another ends
    return np.cumsum(change[:-1], dtype=np.int8).view(bool)


def _encode_lz4(raw: np.ndarray, coded: np.ndarray) -> CodedChunk | None:
    block = _installed_lz4()
    packed = block.compress(raw, mode="default", store_size=False)
    if len(packed) >= len(raw):
        return None
    coded[: len(packed)] = np.frombuffer(packed, np.uint8)
    return CodedChunk(Codec.LZ4, len(packed))


def _decode_lz4(coded: np.ndarray, raw: np.ndarray) -> None:
    block = _installed_lz4()
    try:
        unpacked = block.decompress(coded, uncompressed_size=len(raw))
    except block.LZ4BlockError as error:
        raise ValueError(str(error)) from error
    raw[:] = np.frombuffer(unpacked, np.uint8)


def _installed_lz4() -> ModuleType:
    block = lz4_package()
    if block is None:
        raise CodecError("the codec lz4 is not available", hint='Install the package "lz4", or choose another codec.')
    return block
