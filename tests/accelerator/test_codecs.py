"""Codecs on the GPU: the bytes are those of the host, whatever the launch; each side decodes what the other coded."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pg_tensile.execution.codecs.device import coder_of
from pg_tensile.execution.measuring.codecs import calibrate
from pg_tensile.planning.compression.codec import CHUNK_BYTES, COUNTED, WIDTHS, Codec
from tests.codec_cases import LAUNCHES, check_cases, sparse_words

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize("codec", COUNTED, ids=lambda codec: codec.name)
@pytest.mark.parametrize("width", WIDTHS)
def test_bytes_are_the_hosts(launch, codec, width):
    check_cases(coder_of(CUDA, launch), CUDA, codec, width)


@pytest.mark.parametrize("codec", [*COUNTED, Codec.LZ4], ids=lambda codec: codec.name)
def test_a_chunk_comes_back(codec):
    coder = coder_of(CUDA)
    if not coder.available(codec):
        pytest.skip("nvCOMP is not installed")
    source = torch.from_numpy(sparse_words(CHUNK_BYTES // 4, 4, 0.7, 3, seed=1).view(np.uint8)).to(CUDA)
    coded, back = torch.empty_like(source), torch.empty_like(source)
    chunk = coder.encode(codec, source, 4, coded)
    assert chunk.codec == codec and 0 < chunk.coded_bytes < len(source)
    coder.decode(chunk, coded[: chunk.coded_bytes].clone(), 4, back)
    assert torch.equal(back, source)


def test_next_to_nothing_is_not_coded():
    coder = coder_of(CUDA)
    for size in (0, 1, 3):
        source = torch.zeros(size, dtype=torch.uint8, device=CUDA)
        assert coder.encode(Codec.ZVC, source, 4, source.clone()) == (Codec.NONE, size, 0, 0)


def test_times_are_modelled():
    times, error = calibrate(CUDA, 0.0, sizes=(1 << 20, 1 << 24), word_bytes=(4,))
    assert set(COUNTED) <= set(times.codecs)
    assert error < 1
