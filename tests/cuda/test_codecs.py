"""Codecs on the GPU: the bytes are those of the host, whatever the launch; each side decodes what the other coded."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pg_tensile.execution.codecs import host
from pg_tensile.execution.codecs.device import coder_of
from pg_tensile.execution.measuring.codecs import calibrate
from pg_tensile.planning.compression.codec import CHUNK_BYTES, ROW_WORDS, Codec, Launch
from tests.unit.execution.codecs.test_codecs import sparse_words

CUDA = torch.device("cuda", 0)
COUNTED = [Codec.ZVC, Codec.RLE, Codec.CSR]
GUARD = 64


def on_host(codec: Codec, source: torch.Tensor, width: int) -> torch.Tensor | None:
    coded = torch.empty_like(source)
    size = host.encode(codec, source, width, coded)
    return None if size < 0 else coded[:size]


@pytest.mark.parametrize("launch", [Launch(), Launch(grid=1, block=64), Launch(grid=7)], ids=str)
@pytest.mark.parametrize("codec", COUNTED, ids=lambda codec: codec.name)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_bytes_are_the_hosts(launch, codec, width):
    coder = coder_of(CUDA, launch)
    cases = [
        *((words, 0.7, run) for words in (1, 1023, 1025, 2 * ROW_WORDS + 77) for run in (1, 9, ROW_WORDS)),
        *((5000, share, 1) for share in (0.0, 0.1, 0.99, 1.0)),
    ]
    for seed, (words, zero_share, run_words) in enumerate(cases):
        values = sparse_words(words, width, zero_share, run_words, seed).view(np.uint8)
        source = torch.from_numpy(np.concatenate([values, np.full(seed % width, 7, np.uint8)]))
        expected = on_host(codec, source, width)
        memory = torch.full((len(source) + GUARD,), 0xA5, dtype=torch.uint8, device=CUDA)
        size = coder.encode(codec, source.to(CUDA), width, memory[: len(source)])
        assert (memory[len(source) :] == 0xA5).all()
        if expected is None:
            assert size == -1
            continue
        assert torch.equal(memory[:size].cpu(), expected)
        back = torch.full((len(source) + GUARD,), 0xA5, dtype=torch.uint8, device=CUDA)
        coder.decode(codec, expected.to(CUDA), width, back[: len(source)])
        assert torch.equal(back[: len(source)].cpu(), source)
        assert (back[len(source) :] == 0xA5).all()


@pytest.mark.parametrize("codec", [*COUNTED, Codec.LZ4], ids=lambda codec: codec.name)
def test_a_chunk_comes_back(codec):
    coder = coder_of(CUDA)
    if not coder.available(codec):
        pytest.skip("nvCOMP is not installed")
    source = torch.from_numpy(sparse_words(CHUNK_BYTES // 4, 4, 0.7, 3, seed=1).view(np.uint8)).to(CUDA)
    coded, back = torch.empty_like(source), torch.empty_like(source)
    size = coder.encode(codec, source, 4, coded)
    assert 0 < size < len(source)
    coder.decode(codec, coded[:size].clone(), 4, back)
    assert torch.equal(back, source)


def test_next_to_nothing_is_not_coded():
    coder = coder_of(CUDA)
    for size in (0, 1, 3):
        source = torch.zeros(size, dtype=torch.uint8, device=CUDA)
        assert coder.encode(Codec.ZVC, source, 4, source.clone()) == -1


def test_times_are_modelled():
    times, error = calibrate(CUDA, 0.0, sizes=(1 << 20, 1 << 24), word_bytes=(4,))
    assert set(COUNTED) <= set(times.codecs)
    assert error < 1
