"""What codes on which device: numpy on the host, kernels on a GPU."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from pg_tensile.compression import formats
from pg_tensile.compression.codec import Codec


class Coder(Protocol):
    """One for each kind of device. Tensors are of that device; the same bytes come out of each."""

    def available(self, codec: Codec) -> bool: ...

    def encode(self, codec: Codec, source: torch.Tensor, word_bytes: int, target: torch.Tensor) -> int: ...

    def decode(self, codec: Codec, source: torch.Tensor, word_bytes: int, target: torch.Tensor) -> None: ...

    def clock(self) -> float: ...  # s; once all that was coded has ended


def coder_of(device: torch.device) -> Coder:
    """The coder of a device's tensors; the kernels are compiled when they are first used."""
    if device.type == "cuda":
        from pg_tensile.compression import cuda_kernels

        return cuda_kernels.CudaCoder(device)
    return HostCoder()


class HostCoder:
    """formats.py."""

    available = staticmethod(formats.available)
    encode = staticmethod(formats.encode)
    decode = staticmethod(formats.decode)

    @staticmethod
    def clock() -> float:
        """Time of this thread on the processor, so that whatever else the machine does is not measured."""
        return time.thread_time()
