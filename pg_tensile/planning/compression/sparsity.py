"""Statistics of a tensor's values that determine its coded size.

They are the sparsity that the profiler collects (CSWAP, section IV-A).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pg_tensile.planning.compression.codec import ROW_WORDS, Codec, lz4_package, parts, word_of

PIECE_WORDS = 1 << 12  # contiguous words of a sample; a row has a whole number of pieces
_LZ4_PIECES, _LZ4_PIECE_BYTES = 8, 1 << 16


class Statistics(NamedTuple):
    """Sparsity of a tensor's words.

    `zero_share` is the share of words that are zero, `run_share` the number of runs of zeros for each word; a run ends
    with its row, as in RLE. `lz4_share` is the size in LZ4 as a share of the raw size, 1.0 where the package is
    missing.
    """

    zero_share: float
    run_share: float
    lz4_share: float = 1.0


def measure(words: np.ndarray, sample_words: int | None = None) -> Statistics:
    """Return the statistics of an array's bits, where each number is a word (one of 16 bytes is two).

    `sample_words` limits the words examined to about that number, in evenly spaced pieces, the same for every array of
    that size; None means all words. LZ4 is always measured on a sample.
    """
    words = np.ascontiguousarray(words).reshape(-1).view(f"u{word_of(words.itemsize)}")
    if not len(words):
        return Statistics(0.0, 0.0)
    if sample_words is None or len(words) <= max(sample_words, PIECE_WORDS):
        zero = words == 0
        runs = int(zero[0]) + int(np.count_nonzero(zero[1:] & ~zero[:-1]))
        runs += int(np.count_nonzero(zero[ROW_WORDS::ROW_WORDS] & zero[ROW_WORDS - 1 : -1 : ROW_WORDS]))
    else:
        zero, runs = _sampled(words, sample_words)
    zeros = int(np.count_nonzero(zero))
    return Statistics(zeros / zero.size, runs / zero.size, _lz4_share(words.view(np.uint8)))


def _sampled(words: np.ndarray, sample_words: int) -> tuple[np.ndarray, int]:
    """Return which words of the pieces are zero, and how many runs start in them."""
    pieces = min(max(sample_words // PIECE_WORDS, 1), len(words) // PIECE_WORDS)
    distance = len(words) // pieces // PIECE_WORDS * PIECE_WORDS
    zero = words[: pieces * distance].reshape(pieces, distance)[:, :PIECE_WORDS] == 0
    first = np.arange(pieces) * distance
    begins = (first % ROW_WORDS == 0) | (words[first - 1] != 0)
    runs = np.count_nonzero(zero[:, 1:] & ~zero[:, :-1]) + np.count_nonzero(zero[:, 0] & begins)
    return zero, int(runs)


def _lz4_share(raw: np.ndarray) -> float:
    block = lz4_package()
    if block is None:
        return 1.0
    pieces = min(_LZ4_PIECES, -(-len(raw) // _LZ4_PIECE_BYTES))
    distance = len(raw) // pieces
    samples = [raw[start : start + _LZ4_PIECE_BYTES] for start in range(0, pieces * distance, distance)]
    coded = sum(len(block.compress(sample, store_size=False)) for sample in samples)
    return min(coded / sum(len(sample) for sample in samples), 1.0)


def coded_bytes(codec: Codec, nbytes: int, word_bytes: int, statistics: Statistics) -> int:
    """Return the bytes that cross the link for a tensor of `nbytes`, which is `nbytes` if coding does not reduce them.

    Exact for one chunk whose statistics were not sampled; with several chunks each part may have up to 7 bytes of
    padding. For LZ4 it is an estimate.
    """
    if codec == Codec.NONE:
        return nbytes
    if codec == Codec.LZ4:
        return min(nbytes, round(nbytes * statistics.lz4_share))
    width = word_of(word_bytes)
    words = nbytes // width
    values, runs = words - round(words * statistics.zero_share), round(words * statistics.run_share)
    return min(nbytes, parts(codec, nbytes, width, values, runs)[-1].stop)
