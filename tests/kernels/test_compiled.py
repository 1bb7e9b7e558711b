"""Kernels are compiled for GPUs that are not there: they need no local memory, and all are compiled in the warm-up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
import torch

from pg_tensile.execution.codecs import kernels
from pg_tensile.execution.codecs.cuda import CudaCoder
from pg_tensile.planning.compression.codec import (
    COUNTED,
    DEFAULT_LAUNCH,
    ROW_WORDS,
    WIDTHS,
    Codec,
    CodedChunk,
    Launch,
    parts,
)
from tests.codec_cases import LAUNCHES, pairwise
from tests.kernels.no_gpu import NoGpu, no_gpu

CPU = torch.device("cpu")
CAPABILITIES = (80, 90, 100)
SHARED_BYTES = 8 << 10
BLOCKS = sorted({launch.block for launch in LAUNCHES})


@contextmanager
def counting(values: int, runs: int) -> Iterator[None]:
    """Have the first pass of encoding count these numbers of values and runs in each tile."""

    def count(words, count, tiles, values_of_tile, runs_of_tile, *_, **__):
        values_of_tile.fill_(values)
        runs_of_tile.fill_(runs)

    kernels.count_values.pre_run_hooks.append(count)
    try:
        yield
    finally:
        kernels.count_values.pre_run_hooks.remove(count)


def code(
    coder: CudaCoder, codec: Codec, width: int, words: int, values: int = 0, runs: int = 0, offset: int = 0
) -> None:
    """Launch everything for a chunk that begins `offset` bytes behind an address that 16 divides."""
    source, target, back = (torch.zeros(words * width + offset, dtype=torch.uint8)[offset:] for _ in range(3))
    with counting(values, runs):
        chunk = coder.encode(codec, source, width, target)
    if chunk.codec != Codec.NONE:
        coder.decode(chunk, target[: chunk.coded_bytes], width, back)


def check_resources(gpu: NoGpu, folder: Path) -> None:
    """Check that the default launch spills nothing, and that no launch takes much of a block's memory.

    With fewer threads, each has more words of a tile, and ptxas may keep a few numbers that do not change in the loop
    over tiles in local memory: three for `place` with words of 2 bytes and compute capability 8.0. It reads them once a
    tile, and gains room for another block.
    """
    assert gpu.loaded
    for kernel in gpu.loaded:
        resources = kernel.resources(folder)
        most_stack = 0 if kernel.warps >= DEFAULT_LAUNCH.block // 32 else 16
        assert resources["STACK"] <= most_stack and resources["LOCAL"] == 0, (kernel.name, kernel.warps, resources)
        assert kernel.shared_bytes <= SHARED_BYTES


@pytest.mark.long
def test_kernels_are_compiled_and_nothing_spills(tmp_path):
    with no_gpu(compile_into=tmp_path) as gpu:
        CudaCoder(CPU).warm_up(widths=(4,))
    assert {kernel.name for kernel in gpu.loaded} == {
        *("count_values", "gather", "count_used", "scatter", "place", "mark")
    }
    check_resources(gpu, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("capability", "block", "width"), pairwise(CAPABILITIES, BLOCKS, WIDTHS))
def test_kernels_are_compiled_for_any_gpu(capability, block, width, tmp_path):
    """For chunks at any address. Long, because each GPU, launch and word size takes about 40 kernels."""
    coder = CudaCoder(CPU, Launch(block=block))
    with no_gpu(capability, tmp_path) as gpu:
        coder.warm_up(widths=(width,))
        for codec, words in product(COUNTED, (2048, 2049)):
            code(coder, codec, width, words, offset=8)
    assert len(gpu.loaded) == len(gpu.launched) > 30
    assert {kernel.warps for kernel in gpu.loaded} == {block // 32}
    check_resources(gpu, tmp_path)


@pytest.mark.parametrize("codec", COUNTED, ids=lambda codec: codec.name)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_chunk_needs_a_kernel_that_the_warm_up_has_not_compiled(codec, width):
    """The numbers of words, tiles, values and runs are 1, multiples of 16 and others, and so are the parts' places."""
    coder = CudaCoder(CPU)
    with no_gpu() as gpu:
        coder.warm_up((codec,), (width,))
        warm = set(gpu.launched)
        for words in (2, 16, 17, 1024, 1025, 5 * 1024, 16 * 1024, ROW_WORDS, 3 * ROW_WORDS + 5):
            for values, runs in ((0, 0), (1, 1), (2, 1), (3, 4), (16, 16), (17, 5)):
                code(coder, codec, width, words, values, runs)
        assert gpu.launched == warm
        names = [name for name, _ in warm]
        assert max(names.count(name) for name in names) == 2


@pytest.mark.parametrize("codec", COUNTED, ids=lambda codec: codec.name)
@pytest.mark.parametrize("width", WIDTHS)
def test_decoding_reads_nothing_from_the_device(codec, width):
    """On meta tensors, which have no bytes that the host could read."""
    size = (ROW_WORDS + 5) * width + width - 1
    coded_bytes = parts(codec, size, width, 1000, 77)[-1].stop
    source = torch.empty(coded_bytes, dtype=torch.uint8, device="meta")
    target = torch.empty(size, dtype=torch.uint8, device="meta")
    coder = CudaCoder(source.device)
    with no_gpu() as gpu:
        coder.decode(CodedChunk(codec, coded_bytes, 1000, 77), source, width, target)
        assert gpu.launched
        with pytest.raises(RuntimeError, match="meta"):  # encoding has to read
            coder.encode(codec, target, width, target.clone())
