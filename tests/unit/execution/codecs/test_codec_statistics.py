"""Sparsity statistics: exact sizes for what is counted in full, close ones for samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.execution.codecs import host
from pg_tensile.planning.compression.codec import CHUNK_MULTIPLE, COUNTED, ROW_WORDS, Codec, chunks
from pg_tensile.planning.compression.sparsity import PIECE_WORDS, Statistics, coded_bytes, measure
from tests.codec_cases import sparse_words


def encoded_bytes(codec: Codec, words: np.ndarray, chunk_bytes: int | None = None) -> int:
    """Return the bytes of an array encoded chunk by chunk."""
    raw = torch.from_numpy(words.view(np.uint8).copy())
    total = 0
    for part in chunks(len(raw)) if chunk_bytes is None else chunks(len(raw), chunk_bytes):
        total += host.encode(codec, raw[part], words.itemsize, torch.empty_like(raw[part])).coded_bytes
    return total


def test_by_hand():
    assert measure(np.array([0, 0, 1, 0, 2, 3, 0, 0], np.float32))[:2] == (5 / 8, 3 / 8)
    assert measure(np.array([1, -0.0], np.float32))[:2] == (0, 0)
    assert measure(np.array([], np.float32)) == Statistics(0, 0)
    assert measure(np.zeros((4, 4), np.int64))[:2] == (1, 1 / 16)
    assert measure(np.array([0, 1j], np.complex128))[:2] == (3 / 4, 1 / 4)
    assert measure(np.array([False, True]))[:2] == (1 / 2, 1 / 2)


def test_a_run_ends_with_its_row():
    words = np.zeros(2 * ROW_WORDS + 5, np.uint16)
    assert measure(words).run_share * len(words) == pytest.approx(3)
    words[ROW_WORDS - 1] = 1
    assert measure(words).run_share * len(words) == pytest.approx(3)
    words[ROW_WORDS] = 1
    words[-1] = 1
    assert measure(words).run_share * len(words) == pytest.approx(3)
    words[2 * ROW_WORDS :] = 1
    assert measure(words).run_share * len(words) == pytest.approx(2)


@given(
    codec=st.sampled_from(COUNTED),
    width=st.sampled_from([1, 2, 4, 8]),
    words=st.one_of(st.integers(0, 3000), st.integers(ROW_WORDS - 3, 2 * ROW_WORDS + 3)),
    zero_share=st.sampled_from([0.0, 0.2, 0.6, 0.95, 1.0]),
    run_words=st.sampled_from([1, 4, 900]),
    seed=st.integers(0, 1 << 16),
)
def test_sizes_are_what_encoding_gives(codec, width, words, zero_share, run_words, seed):
    array = sparse_words(words, width, zero_share, run_words, seed)
    assert coded_bytes(codec, array.nbytes, width, measure(array)) == encoded_bytes(codec, array)


@pytest.mark.parametrize("codec", COUNTED, ids=lambda codec: codec.name)
def test_several_chunks_add_padding_only(codec):
    array = sparse_words(5 * CHUNK_MULTIPLE // 8 + 1001, 4, 0.7, 3, seed=2)
    counted = coded_bytes(codec, array.nbytes, 4, measure(array))
    assert 0 <= encoded_bytes(codec, array, CHUNK_MULTIPLE) - counted <= 3 * 4 * 7


@pytest.mark.parametrize("codec", COUNTED, ids=lambda codec: codec.name)
@pytest.mark.parametrize("run_words", [1, 50])
def test_a_sample_comes_close(codec, run_words):
    array = sparse_words(1_500_001, 4, 0.8, run_words, seed=4)
    sampled = measure(array, sample_words=1 << 18)
    assert sampled == measure(array, sample_words=1 << 18)
    assert sampled != measure(array)
    assert coded_bytes(codec, array.nbytes, 4, sampled) == pytest.approx(
        coded_bytes(codec, array.nbytes, 4, measure(array)), rel=0.02
    )


def test_a_run_that_started_before_a_piece_is_not_counted_again():
    words = np.zeros(2 * ROW_WORDS, np.float32)
    sampled = 8 * PIECE_WORDS  # from each row four pieces
    assert measure(words, sampled)[:2] == (1.0, 2 / sampled)
    words[PIECE_WORDS - 1 :: PIECE_WORDS] = 1
    assert measure(words, sampled)[:2] == (1 - 1 / PIECE_WORDS, 8 / sampled)
    words[2 * ROW_WORDS // 8 :: 2 * ROW_WORDS // 8] = 1  # the first word of each piece but the first
    assert measure(words, sampled).run_share == 8 / sampled


@pytest.mark.parametrize("words", [1, 4096, 4097, 8192, 100_000])
def test_a_sample_of_little_is_possible(words):
    array = sparse_words(words, 4, 0.5, 1, seed=6)
    statistics = measure(array, sample_words=1)
    assert statistics.zero_share == pytest.approx(0.5, abs=0.05 if words > 1 else 0.5)


@pytest.mark.parametrize("zero_share, run_words", [(0.0, 1), (0.5, 1), (0.8, 20), (1.0, 1)])
def test_lz4_is_estimated_from_a_sample(zero_share, run_words):
    array = sparse_words(600_000, 4, zero_share, run_words, seed=7)
    estimate = coded_bytes(Codec.LZ4, array.nbytes, 4, measure(array))
    assert estimate == pytest.approx(encoded_bytes(Codec.LZ4, array), rel=0.1, abs=0.005 * array.nbytes)


def test_what_does_not_shrink_moves_as_it_is():
    full = Statistics(0.0, 0.0, 1.0)
    assert [coded_bytes(codec, 1000, 4, full) for codec in Codec] == [1000] * 5
    assert coded_bytes(Codec.NONE, 1000, 4, Statistics(1.0, 0.001, 0.01)) == 1000
