"""Coded copies on an accelerator: what comes back is what went, in the order of the lanes, and the host can read it."""

from __future__ import annotations

import pytest
import torch

from pg_tensile.execution.runtime.compressed_copies import Chunks, HostCopy, Look
from pg_tensile.planning.compression.codec import Codec
from pg_tensile.planning.compression.coding import CHUNK_BYTES
from tests.accelerator.target import DEVICE, TYPE

CHUNK = CHUNK_BYTES[TYPE]
CODECS = [Codec.ZVC, Codec.RLE, Codec.CSR]


def sparse(size: int, seed: int = 0, share: float = 0.8) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    values = torch.randn(size // 4, generator=generator, device=DEVICE)
    values[torch.rand(size // 4, generator=generator, device=DEVICE) < share] = 0.0
    return values.view(torch.uint8)


@pytest.mark.parametrize("codec", CODECS)
def test_a_coded_copy_comes_back_as_it_was_and_the_host_can_read_it(device, codec):
    """Five chunks, one of which does not shrink, twice, with a raw copy between them."""
    with device.iteration():
        dense = torch.randn(CHUNK // 4, device=DEVICE).view(torch.uint8)
        source = torch.cat([sparse(3 * CHUNK), dense, sparse(CHUNK // 2)])
        other = sparse(CHUNK, seed=1)
        expected, raw = source.clone(), device.host_memory(CHUNK)
        places = [device.host_memory(source.numel()) for _ in range(2)]
        chunks = [Chunks.of(codec, torch.empty(0, device=DEVICE)) for _ in range(2)]
        look = Look(4)
        outs = [device.copy_out(source, places[0], 0, chunks[0], look), device.copy_out(other, raw)]
        outs.append(device.copy_out(source, places[1], 0, chunks[1]))
        for out in outs:
            device.wait(out)
        source.zero_()
        backs = [torch.empty_like(source) for _ in places]
        for memory, packed, back in zip(places, chunks, backs, strict=True):
            device.wait(device.copy_in(memory, back, 0, packed))
        equal = [torch.equal(back, expected) for back in backs]
    device.synchronize()
    assert equal == [True, True] and torch.equal(raw, other.cpu())
    assert [chunk.codec for chunk in chunks[0].coded] == [codec] * 3 + [Codec.NONE, codec]
    assert outs[0].bytes == chunks[0].moved_bytes < 0.8 * outs[0].raw_bytes
    assert torch.equal(HostCopy(places[0], chunks[0]).read(), expected.cpu())
    statistics = look.statistics()
    assert statistics is not None and statistics.zero_share == pytest.approx(0.8 * 3.5 / 4.5, abs=0.1)


def test_staging_goes_after_an_iteration_without_coded_copies(device):
    with device.iteration():
        source, memory = sparse(CHUNK), device.host_memory(CHUNK)
        chunks = Chunks.of(Codec.ZVC, torch.empty(0, device=DEVICE))
        device.wait(device.copy_out(source, memory, 0, chunks))
    assert device._work.coded is not None
    for _ in range(2):
        with device.iteration():
            device.wait(device.copy_out(source, memory))
    assert device._work.coded is None and torch.equal(memory, source.cpu())
