"""Compressed host copies, and samples of swapped tensors (CSWAP, sections IV-A and V-C).

A compressed copy is stored chunk by chunk, each chunk beginning where its raw bytes would, so its host memory is as
large as the tensor. A chunk that does not shrink is stored raw. The codec and size of each chunk are known when the
copy has been made, and stay with it, so that the copy can be decoded whatever plan is in force by then.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from pg_tensile.execution.codecs.host import decode, encode
from pg_tensile.planning.compression.codec import Codec, CodedChunk, chunks, word_of
from pg_tensile.planning.compression.coding import CHUNK_BYTES
from pg_tensile.planning.compression.sparsity import Statistics, measure

SAMPLES = 512  # of a tensor, at equal distances: matrices have whole rows of zeros, so few samples would say little
SAMPLE_BYTES = 1 << 10
_STEP_BYTES = 64  # the distance is an odd multiple; most rows are even ones, so the sampled offsets vary


@dataclass(slots=True)
class Chunks:
    """Encoding of a tensor; `coded` is filled in while it is copied out, `moved_bytes` is the sum of the sizes."""

    codec: Codec
    word_bytes: int  # of the tensor's elements
    chunk_bytes: int  # raw
    coded: list[CodedChunk] = field(default_factory=list)

    @classmethod
    def of(cls, codec: int, value: torch.Tensor) -> Chunks:
        """Return an empty encoding for a tensor with the element size and device of `value`."""
        return cls(Codec(codec), value.element_size(), CHUNK_BYTES[value.device.type])

    @property
    def moved_bytes(self) -> int:
        return sum(chunk.coded_bytes for chunk in self.coded)

    def ranges(self, nbytes: int) -> Iterator[slice]:
        """Return the ranges of the raw chunks of a tensor of `nbytes` bytes."""
        return chunks(nbytes, self.chunk_bytes)

    def encode(self, source: torch.Tensor, target: torch.Tensor) -> CodedChunk:
        """Encode one chunk (uint8[n], on the CPU) into `target` (uint8[n]) and append it to `coded`.

        If the chunk does not shrink, its codec is NONE, `target` is undefined, and the caller has to copy the chunk."""
        chunk = encode(self.codec, _seen(source), self.word_bytes, _seen(target))
        self.coded.append(chunk)
        return chunk

    def decode(self, chunk: CodedChunk, source: torch.Tensor, target: torch.Tensor) -> None:
        """Decode one chunk into `target`, on the CPU; `source` begins with the encoded or, for NONE, raw bytes."""
        decode(chunk, _seen(source[: chunk.coded_bytes]), self.word_bytes, _seen(target))


def _seen(memory: torch.Tensor) -> torch.Tensor:
    """Return the same bytes (uint8[n], on the CPU) viewed through a foreign storage, because PyTorch refuses to resize
    a storage that numpy has exported."""
    if memory.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_ubyte * memory.numel()).from_address(memory.data_ptr()), dtype=torch.uint8)


class HostCopy(NamedTuple):
    """A host copy: `memory` is uint8[bytes of the tensor]; `chunks` is None if the copy is not compressed."""

    memory: torch.Tensor
    chunks: Chunks | None = None

    def read(self) -> torch.Tensor:
        """Return the tensor's decoded bytes, uint8[bytes], in new memory."""
        if self.chunks is None:
            return self.memory.clone()
        raw = torch.empty_like(self.memory)
        for part, chunk in zip(self.chunks.ranges(raw.numel()), self.chunks.coded, strict=True):
            self.chunks.decode(chunk, self.memory[part], raw[part])
        return raw


@dataclass(slots=True)
class Look:
    """A sample of a tensor that is swapped out, from which its statistics are computed."""

    word_bytes: int  # of the tensor's elements
    sample: torch.Tensor | None = None  # on the CPU; None until the device has taken it

    def take(self, source: torch.Tensor) -> None:
        """Sample uint8[n]: all of it, or SAMPLES pieces. Called by the thread that copies the tensor out."""
        if source.numel() > SAMPLES * SAMPLE_BYTES:
            distance = (source.numel() // SAMPLES // _STEP_BYTES - 1 | 1) * _STEP_BYTES
            source = source.as_strided((SAMPLES, SAMPLE_BYTES), (distance, 1))
        sample = torch.empty(source.shape, dtype=torch.uint8, pin_memory=not source.is_cpu)
        self.sample = sample.copy_(source, non_blocking=True)

    def statistics(self) -> Statistics | None:
        """Return the statistics of the sample, or None if none was taken. The device has to have completed its work."""
        if self.sample is None:
            return None
        width = word_of(self.word_bytes)
        raw = self.sample.reshape(-1).numpy()
        return measure(raw[: len(raw) // width * width].view(f"u{width}"))
