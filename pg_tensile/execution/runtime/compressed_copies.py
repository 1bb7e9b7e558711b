"""Host copies that are coded, and samples of what is swapped (CSWAP, sections IV-A and V-C).

A coded copy lies in its place on the host chunk by chunk, each chunk's bytes where its raw bytes would begin, so places
keep their sizes. A chunk that does not shrink is there as it is. What became of each chunk is known when the copy has
been made, and stays with it: whoever reads the copy decodes it, whatever plan is in force by then.
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

SAMPLES = 512  # of a tensor, at equal distances: of a matrix whole rows are zero, so that few would say little
SAMPLE_BYTES = 1 << 10
_STEP_BYTES = 64  # an odd number of these is from sample to sample: most rows have even ones, and are seen elsewhere


@dataclass(slots=True)
class Chunks:
    """How a tensor is coded; `coded` is filled in while it is copied out, `moved_bytes` is their sum."""

    codec: Codec
    word_bytes: int  # of the tensor's elements
    chunk_bytes: int  # raw
    coded: list[CodedChunk] = field(default_factory=list)

    @classmethod
    def of(cls, codec: int, value: torch.Tensor) -> Chunks:
        """For a tensor whose values look like `value`."""
        return cls(Codec(codec), value.element_size(), CHUNK_BYTES[value.device.type])

    @property
    def moved_bytes(self) -> int:
        return sum(chunk.coded_bytes for chunk in self.coded)

    def places(self, nbytes: int) -> Iterator[slice]:
        """Where the chunks of a tensor of that size lie, raw."""
        return chunks(nbytes, self.chunk_bytes)

    def encode(self, source: torch.Tensor, target: torch.Tensor) -> CodedChunk:
        """Codes one chunk (uint8[n], on the CPU) into `target` (uint8[n]). Of a chunk that does not shrink nothing is
        to be found there: it is to be copied."""
        size = encode(self.codec, _seen(source), self.word_bytes, _seen(target))
        chunk = CodedChunk(Codec.NONE, source.numel()) if size < 0 else CodedChunk(self.codec, size)
        self.coded.append(chunk)
        return chunk

    def decode(self, chunk: CodedChunk, source: torch.Tensor, target: torch.Tensor) -> None:
        """One chunk back, on the CPU: `source` begins with what `encode` has written or, raw, with all of it."""
        decode(chunk.codec, _seen(source[: chunk.coded_bytes]), self.word_bytes, _seen(target))


def _seen(memory: torch.Tensor) -> torch.Tensor:
    """The same bytes (uint8[n], on the CPU) on a storage that is none of ours: a storage that numpy has once looked at
    can never be emptied again."""
    if memory.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_ubyte * memory.numel()).from_address(memory.data_ptr()), dtype=torch.uint8)


class HostCopy(NamedTuple):
    """A copy on the host: `memory` is uint8[bytes of the tensor]; `chunks`: None where it is as on the device."""

    memory: torch.Tensor
    chunks: Chunks | None = None

    def read(self) -> torch.Tensor:
        """The tensor's bytes, uint8[bytes], in memory of its own."""
        if self.chunks is None:
            return self.memory.clone()
        raw = torch.empty_like(self.memory)
        for place, chunk in zip(self.chunks.places(raw.numel()), self.chunks.coded, strict=True):
            self.chunks.decode(chunk, self.memory[place], raw[place])
        return raw


@dataclass(slots=True)
class Look:
    """A sample of a tensor that is swapped out, for its statistics."""

    word_bytes: int  # of the tensor's elements
    sample: torch.Tensor | None = None  # on the CPU, once the device has taken it

    def take(self, source: torch.Tensor) -> None:
        """Samples uint8[n], by whoever copies it out: all of it, or pieces of it."""
        if source.numel() > SAMPLES * SAMPLE_BYTES:
            distance = (source.numel() // SAMPLES // _STEP_BYTES - 1 | 1) * _STEP_BYTES
            source = source.as_strided((SAMPLES, SAMPLE_BYTES), (distance, 1))
        sample = torch.empty(source.shape, dtype=torch.uint8, pin_memory=source.is_cuda)
        self.sample = sample.copy_(source, non_blocking=True)

    def statistics(self) -> Statistics | None:
        """Of the sample, when what was given to the device has ended; None: none was taken."""
        if self.sample is None:
            return None
        width = word_of(self.word_bytes)
        raw = self.sample.reshape(-1).numpy()
        return measure(raw[: len(raw) // width * width].view(f"u{width}"))
