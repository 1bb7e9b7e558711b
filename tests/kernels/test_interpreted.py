"""Kernels under Triton's interpreter, on the CPU: their bytes are the host's, whatever the launch, and nothing else.

The interpreter runs one program after the other and compiles nothing: it shows no races.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.planning.compression.codec import COUNTED, WIDTHS, Codec, Launch, word_of
from tests.codec_cases import (
    CASES,
    LAUNCHES,
    SHORT_CASES,
    Case,
    check_against_host,
    check_cases,
    pairwise,
    sparse_words,
)
from tests.examples import examples
from tests.kernels.interpreter import interpreting

CPU = torch.device("cpu")
all_widths = pytest.mark.parametrize("width", WIDTHS)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., object]]:
    with interpreting() as call:
        yield call


def check_launch(launch: Launch, codec: Codec, width: int, cases: Sequence[Case]) -> None:
    """Check the cases. Runs where kernels are interpreted, as all functions that import the coder."""
    from pg_tensile.execution.codecs.cuda import CudaCoder

    check_cases(CudaCoder(CPU, launch), CPU, codec, width, cases)


def check_bytes(codec: Codec, width: int, raw: bytes) -> None:
    from pg_tensile.execution.codecs.cuda import CudaCoder

    source = torch.from_numpy(np.frombuffer(raw, np.uint8).copy())
    check_against_host(CudaCoder(CPU, LAUNCHES[-1]), CPU, codec, width, source)


# The interpreter takes long: these widths are those of the strings below and of the long tests only.
LEFT_OUT = {(1, Codec.RLE), (2, Codec.RLE), (8, Codec.RLE), (2, Codec.CSR), (4, Codec.CSR)}


@pytest.mark.parametrize(
    ("width", "codec"),
    [pair for pair in product(WIDTHS, COUNTED) if pair not in LEFT_OUT],
    ids=lambda value: getattr(value, "name", value),
)
def test_bytes_of_short_chunks_are_the_hosts(interpreted, codec, width):
    interpreted(check_launch, LAUNCHES[-1], codec, width, SHORT_CASES)


def test_any_two_values_occur_together():
    found = pairwise("abc", "de", "1234")
    assert len(found) == 12
    assert {(a, b) for a, b, _ in found} == {*product("abc", "de")}
    assert {(a, c) for a, _, c in found} == {*product("abc", "1234")}
    assert {(b, c) for _, b, c in found} == {*product("de", "1234")}


@pytest.mark.long
@pytest.mark.parametrize(("launch", "codec", "width"), pairwise(LAUNCHES, COUNTED, WIDTHS), ids=str)
def test_bytes_are_the_hosts(interpreted, launch, codec, width):
    """What tests/cuda/test_codecs.py has a GPU code. Long, because a chunk of several rows takes seconds."""
    interpreted(check_launch, launch, codec, width, CASES)


any_codec = {"codec": st.sampled_from(COUNTED), "word_bytes": st.sampled_from([*WIDTHS, 16, 3])}


@given(**any_codec, raw=st.binary(max_size=400))
def test_any_short_string_is_coded_as_by_the_host(interpreted, codec, word_bytes, raw):
    interpreted(check_bytes, codec, word_bytes, raw)


@examples(10, long=30)
@given(
    **any_codec,
    words=st.integers(0, 5000),
    tail=st.binary(max_size=15),
    zero_share=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    run_words=st.sampled_from([1, 5, 700, 3000]),
    seed=st.integers(0, 1 << 16),
)
def test_any_zeros_are_coded_as_by_the_host(interpreted, codec, word_bytes, words, tail, zero_share, run_words, seed):
    values = sparse_words(words, word_of(word_bytes), zero_share, run_words, seed)
    interpreted(check_bytes, codec, word_bytes, values.tobytes() + tail)
