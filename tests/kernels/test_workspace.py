"""Device memory that coding takes is no more than what plans leave free for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pg_tensile.execution.codecs.cuda import CudaCoder
from pg_tensile.planning.compression.codec import CHUNK_BYTES, COUNTED, ROW_WORDS, WIDTHS, Codec, CodedChunk, parts
from pg_tensile.planning.compression.coding import WORKSPACE_BYTES, workspace_bytes
from tests.kernels.no_gpu import no_gpu

BLOCK_BYTES = 512  # of PyTorch's allocator on CUDA


class Peak(TorchDispatchMode):
    """The most bytes, in blocks, of storages that were made by the operators so far and were alive at once."""

    def __init__(self, *before: torch.Tensor) -> None:
        super().__init__()
        self.bytes = 0
        self._before = {tensor.untyped_storage()._cdata for tensor in before}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self._before:
                    blocks = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
                    self._made[storage._cdata] = StorageWeakRef(storage), blocks
        self.bytes = max(self.bytes, sum(size for _, size in self._made.values()))
        return result


def peak_bytes(call: Callable[..., object], *tensors: torch.Tensor) -> int:
    with Peak(*tensors) as peak:
        call(*tensors)
    return peak.bytes


def measured_bytes(codec: Codec, nbytes: int, width: int) -> int:
    """Return the bytes that encoding and decoding a chunk take together."""
    coder = CudaCoder(torch.device("cpu"))
    source, target = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    words = nbytes // width
    size = parts(codec, nbytes, width, words // 8, words // 16)[-1].stop
    chunk = CodedChunk(codec, size, words // 8, words // 16)
    with no_gpu():
        encoding = peak_bytes(lambda source, target: coder.encode(codec, source, width, target), source, target)
        decoding = peak_bytes(lambda source, target: coder.decode(chunk, source[:size], width, target), source, target)
    return encoding + decoding


@pytest.mark.parametrize("codec", COUNTED, ids=lambda codec: codec.name)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("nbytes", [100, ROW_WORDS + 3, CHUNK_BYTES])
def test_coding_takes_no_more_than_is_said(codec, width, nbytes):
    measured, most = measured_bytes(codec, nbytes, width), workspace_bytes(nbytes, width)
    assert measured <= most <= WORKSPACE_BYTES["cuda"]
    if codec == Codec.RLE:
        assert measured == most - BLOCK_BYTES  # without the counts that a GPU sends to the host


def test_plans_leave_room_for_the_temporary_memory_of_operators():
    assert WORKSPACE_BYTES["cuda"] - workspace_bytes(CHUNK_BYTES, 1) > 1 << 19
