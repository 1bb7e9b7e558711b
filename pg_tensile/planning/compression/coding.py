"""Effect of compressing the swaps of each tensor of a trace (CSWAP, section IV).

A coding is made by policies/compression/advisor.py and travels with a trace (`Trace.with_coding`): link.copy_us, and
through it the simulator and the policies, take a tensor's coded bytes and times from it. In a plan, the swap-out
specifies the codec of its host copy (plan/codecs.py). Each chunk of a tensor is coded by itself, so that one chunk is
on the link while the next is coded.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pg_tensile.errors import TraceError
from pg_tensile.planning.compression import codec
from pg_tensile.planning.device_types import ACCELERATORS

# Raw bytes of a chunk: on the host device small enough for a cache, on accelerators large enough to keep a kernel busy.
CHUNK_BYTES = {"cpu": codec.CHUNK_MULTIPLE} | dict.fromkeys(ACCELERATORS, codec.CHUNK_BYTES)
_BLOCK_BYTES = 512  # PyTorch's allocator of an accelerator rounds sizes up to it


def workspace_bytes(nbytes: int, word_bytes: int) -> int:
    """Return the bytes on a GPU that its coder allocates to encode one chunk while it decodes another.

    This is the most that any codec takes for chunks of `nbytes` in words of `word_bytes`, except LZ4: nvCOMP's
    allocations are its own. PyTorch's operators, which sum up counts, have temporary memory besides, a small share.
    """
    words = nbytes // word_bytes
    tiles, rows = -(-words // codec.TILE_WORDS), -(-words // codec.ROW_WORDS)
    encoding = (8 * tiles, 8 * tiles, 8 * rows, 4 * rows, 8)  # counts, their sums, the last tiles of rows, their sums
    decoding = (words + 1, 4 * tiles)  # which words are in a run, counts
    return sum(-(-size // _BLOCK_BYTES) * _BLOCK_BYTES for size in (*encoding, *decoding))


# The most for any words, with room for what PyTorch's operators take. On the host device, codecs take host memory.
WORKSPACE_BYTES = {"cpu": 0} | dict.fromkeys(ACCELERATORS, -(-workspace_bytes(codec.CHUNK_BYTES, 1) // (1 << 20)) << 20)
# Device memory reserved while a plan has codecs: two chunks for each lane, one being coded and one on the link, and
# what coding takes besides.
STAGING_BYTES = {device: 4 * size + WORKSPACE_BYTES[device] for device, size in CHUNK_BYTES.items()}


class Coding(NamedTuple):
    """Codec and times for swapping each of m tensors; a tensor whose `codec` is 0 is swapped uncompressed."""

    codec: NDArray[np.uint8]  # [m]: compression.codec.Codec
    moved_bytes: NDArray[np.int64]  # [m]: over the link when coded
    encode_us: NDArray[np.float64]  # [m]: of the whole tensor
    decode_us: NDArray[np.float64]  # [m]
    waking_us: NDArray[np.float64]  # [m]: before the first chunk, in either direction

    @classmethod
    def none(cls, tensor_bytes: NDArray[np.int64]) -> Coding:
        """Return the coding that compresses none of the tensors of these sizes."""
        zero = np.zeros(len(tensor_bytes))
        return cls(zero.astype(np.uint8), tensor_bytes.copy(), zero, zero.copy(), zero.copy())

    def take(self, tensor: int, other: Coding) -> None:
        """Code a tensor as another coding of the same trace does."""
        self.codec[tensor], self.moved_bytes[tensor] = other.codec[tensor], other.moved_bytes[tensor]
        self.encode_us[tensor], self.decode_us[tensor] = other.encode_us[tensor], other.decode_us[tensor]
        self.waking_us[tensor] = other.waking_us[tensor]

    @property
    def compresses(self) -> bool:
        return bool(self.codec.any())

    def check(self, tensors: int) -> None:
        """Raise TraceError unless the coding is valid for a trace of `tensors` tensors."""
        if any(column.shape != (tensors,) for column in self):
            raise TraceError(f"a coding has one entry for each of the {tensors} tensors of its trace")
        if np.any(self.codec > max(codec.Codec)):
            raise TraceError(f"a coding has the unknown codec {int(self.codec.max())}")
        if any(not np.all((column >= 0) & np.isfinite(column)) for column in self[1:]):
            raise TraceError("a coding has bytes or times below zero, or none at all")
