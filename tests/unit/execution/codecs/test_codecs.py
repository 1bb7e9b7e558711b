"""Codecs on the host: every bit comes back, nothing is written beyond the place, what does not shrink is refused."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.errors import CodecError
from pg_tensile.execution.codecs import host
from pg_tensile.planning.compression import codec as codecs
from pg_tensile.planning.compression.codec import (
    CHUNK_BYTES,
    CHUNK_MULTIPLE,
    COUNTED,
    ROW_WORDS,
    Codec,
    CodedChunk,
    chunks,
    named_codec,
    parts,
)
from tests.codec_cases import check_guard, guarded_memory, sparse_words

CODING = [codec for codec in Codec if codec != Codec.NONE]


def round_trip(codec: Codec, raw: np.ndarray, word_bytes: int) -> CodedChunk:
    """The coding, after all bytes have come back."""
    source = torch.from_numpy(raw.view(np.uint8).reshape(-1).copy())
    memory, target = guarded_memory(len(source))
    chunk = host.encode(codec, source, word_bytes, target)
    check_guard(memory)
    if chunk.codec == Codec.NONE:
        assert chunk == (Codec.NONE, len(source), 0, 0)
        return chunk
    assert chunk.codec == codec and chunk.coded_bytes < len(source)
    memory, back = guarded_memory(len(source))
    host.decode(chunk, target[: chunk.coded_bytes].clone(), word_bytes, back)
    assert torch.equal(back, source)
    check_guard(memory)
    return chunk


@given(
    codec=st.sampled_from(CODING),
    word_bytes=st.sampled_from([1, 2, 4, 8, 16, 3]),
    words=st.integers(0, 3000),
    tail=st.integers(0, 15),
    zero_share=st.sampled_from([0.0, 0.01, 0.3, 0.5, 0.9, 1.0]),
    run_words=st.sampled_from([1, 5, 700]),
    seed=st.integers(0, 1 << 16),
)
def test_every_bit_comes_back(codec, word_bytes, words, tail, zero_share, run_words, seed):
    values = sparse_words(words, codecs.word_of(word_bytes), zero_share, run_words, seed).view(np.uint8)
    raw = np.concatenate([values, np.random.default_rng(seed).integers(0, 256, tail, np.uint8)])
    chunk = round_trip(codec, raw, word_bytes)
    if zero_share == 1.0 and words > 200:
        assert 0 < chunk.coded_bytes < len(raw) / 3


@given(codec=st.sampled_from(CODING), word_bytes=st.sampled_from([1, 2, 4, 8]), raw=st.binary(max_size=400))
def test_every_short_string_comes_back(codec, word_bytes, raw):
    round_trip(codec, np.frombuffer(raw, np.uint8), word_bytes)


@pytest.mark.parametrize("codec", CODING, ids=lambda codec: codec.name)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("zero_share, run_words", [(0.6, 1), (0.85, 7000), (1.0, 1)])
def test_rows_end_and_runs_end_with_them(codec, width, zero_share, run_words):
    words = sparse_words(3 * ROW_WORDS + 17, width, zero_share, run_words, seed=3)
    words[2 * ROW_WORDS - 1 : 2 * ROW_WORDS + 1] = 0  # one run, cut by the row
    chunk = round_trip(codec, words, width)
    assert chunk.codec == codec or (run_words == 1 and codec != Codec.ZVC)


@pytest.mark.parametrize("codec", CODING, ids=lambda codec: codec.name)
def test_a_zero_is_all_its_bits(codec):
    values = np.zeros(4000, np.float32)
    values[::100] = -0.0
    values[1::100] = np.float32(1e-45)  # the smallest subnormal
    values[2::100] = np.array([0x7FC00001], np.uint32).view(np.float32)  # a NaN with a payload
    values[3::100] = np.array([0xFF800001], np.uint32).view(np.float32)  # one that signals
    chunk = round_trip(codec, values, 4)
    assert chunk.codec == codec and (codec == Codec.LZ4 or chunk.values == 160)


@pytest.mark.parametrize("codec", CODING, ids=lambda codec: codec.name)
@pytest.mark.parametrize("raw", [b"", b"\0", b"\1", b"\0" * 3], ids=len)
def test_next_to_nothing_is_not_coded(codec, raw):
    assert round_trip(codec, np.frombuffer(raw, np.uint8), 4).codec == Codec.NONE


@pytest.mark.parametrize("codec", CODING, ids=lambda codec: codec.name)
def test_what_does_not_shrink_is_refused(codec):
    assert round_trip(codec, sparse_words(5000, 4, 0.0, 1, seed=1), 4).codec == Codec.NONE


def test_without_a_codec_bytes_are_copied():
    source = torch.arange(10, dtype=torch.uint8)
    target = torch.zeros_like(source)
    chunk = host.encode(Codec.NONE, source, 4, target)
    assert chunk == (Codec.NONE, 10, 0, 0)
    host.decode(chunk, source, 4, target)
    assert torch.equal(source, target)


@pytest.mark.parametrize("codec", CODING, ids=lambda codec: codec.name)
def test_equal_bytes_are_coded_equally_wherever_they_are_put(codec):
    source = torch.from_numpy(sparse_words(9001, 4, 0.8, 30, seed=5).view(np.uint8))
    first, second = torch.zeros_like(source), torch.full_like(source, 0xFF)
    chunk = host.encode(codec, source, 4, first)
    assert chunk == host.encode(codec, source, 4, second)
    assert torch.equal(first[: chunk.coded_bytes], second[: chunk.coded_bytes])


@pytest.mark.parametrize("codec", CODING, ids=lambda codec: codec.name)
def test_bytes_that_are_no_chunk_of_that_size_are_refused(codec):
    source = torch.from_numpy(sparse_words(5000, 4, 0.8, 30, seed=5).view(np.uint8))
    coded = torch.empty_like(source)
    chunk = host.encode(codec, source, 4, coded)
    size = chunk.coded_bytes
    for damaged in (coded[: size - 9], coded[: size // 2], coded[:0]):
        with pytest.raises(CodecError, match="are not a chunk of 20,000"):
            host.decode(chunk, damaged, 4, torch.empty_like(source))
    with pytest.raises(CodecError):
        host.decode(chunk, coded[:size], 4, torch.empty(len(source) - 400, dtype=torch.uint8))


@pytest.mark.parametrize("codec", COUNTED, ids=lambda codec: codec.name)
def test_bytes_that_are_not_what_their_numbers_say_are_refused(codec):
    """Counts with which the parts have the same places, because of what fills them up to a multiple of 8 bytes."""
    source = torch.from_numpy(sparse_words(5000, 1, 0.95, 30, seed=5).view(np.uint8))
    coded, back = torch.empty_like(source), torch.empty_like(source)
    chunk = host.encode(codec, source, 1, coded)
    other = next(
        other
        for step in (-1, 1)
        if parts(codec, 5000, 1, chunk.values + step, chunk.runs)[-1].stop == chunk.coded_bytes
        for other in [chunk._replace(values=chunk.values + step)]
    )
    with pytest.raises(CodecError, match="are not a chunk of 5,000"):
        host.decode(other, coded[: chunk.coded_bytes], 1, back)


def test_a_place_that_is_too_small_is_refused():
    with pytest.raises(CodecError, match="need a place of as many"):
        host.encode(Codec.ZVC, torch.zeros(100, dtype=torch.uint8), 4, torch.zeros(99, dtype=torch.uint8))


def test_names():
    assert [named_codec(codec.name.lower()) for codec in Codec] == list(Codec)
    assert named_codec("Lz4") == Codec.LZ4 == 4
    with pytest.raises(CodecError, match='"zip"') as error:
        named_codec("zip")
    assert error.value.hint == "Codecs are: none, zvc, rle, csr, lz4."


def test_chunks_lie_side_by_side():
    assert list(chunks(0)) == []
    size = 2 * CHUNK_BYTES + 5
    ranges = list(chunks(size))
    assert [part.start for part in ranges] == [0, CHUNK_BYTES, 2 * CHUNK_BYTES]
    assert [part.stop for part in ranges] == [CHUNK_BYTES, 2 * CHUNK_BYTES, size]
    assert len(list(chunks(size, CHUNK_MULTIPLE))) == 2 * CHUNK_BYTES // CHUNK_MULTIPLE + 1
    for wrong in (0, -CHUNK_MULTIPLE, CHUNK_MULTIPLE + 1, 2 * CHUNK_BYTES):
        with pytest.raises(CodecError, match="a chunk cannot have"):
            chunks(size, wrong)


@given(
    codec=st.sampled_from(COUNTED),
    width=st.sampled_from([1, 2, 4, 8]),
    nbytes=st.integers(0, 1 << 20),
    values=st.integers(0, 1 << 17),
    runs=st.integers(0, 1 << 17),
)
def test_parts_follow_each_other_and_can_be_read_in_words(codec, width, nbytes, values, runs):
    ranges = parts(codec, nbytes, width, values, runs)
    assert all(part.start % 8 == 0 for part in ranges)
    assert all(0 <= after.start - before.stop < 8 for before, after in pairwise(ranges))
    assert ranges[-1].stop - ranges[-1].start == nbytes % width


def test_sizes_that_make_no_sense_are_refused():
    with pytest.raises(CodecError, match="an element cannot have 0 bytes"):
        codecs.word_of(0)
    with pytest.raises(CodecError, match="LZ4 has no parts"):
        parts(Codec.LZ4, 100, 4, 1, 1)


def test_lz4_may_be_missing():
    program = """
import sys
sys.modules["lz4"] = None
import torch
from pg_tensile.execution.codecs import host
from pg_tensile.planning.compression.codec import Codec, CodedChunk, available
from pg_tensile.errors import CodecError
print(available(Codec.LZ4), available(Codec.ZVC))
for call, what in ((host.encode, Codec.LZ4), (host.decode, CodedChunk(Codec.LZ4, 9))):
    try:
        call(what, torch.zeros(9, dtype=torch.uint8), 4, torch.zeros(9, dtype=torch.uint8))
    except CodecError as error:
        print(error.message, "|", error.hint)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    line = 'the codec lz4 is not available | Install the package "lz4", or choose another codec.\n'
    assert (done.stdout, done.stderr) == ("False True\n" + 2 * line, "")
