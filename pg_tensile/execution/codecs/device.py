"""What codes on which device: numpy on the host, kernels on a GPU."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from pg_tensile.errors import CodecError
from pg_tensile.execution.codecs import host
from pg_tensile.planning.compression.codec import DEFAULT_LAUNCH, Codec, Launch


class Coder(Protocol):
    """One for each kind of device. Tensors are of that device; the same bytes come out of each."""

    def available(self, codec: Codec) -> bool: ...

    def encode(self, codec: Codec, source: torch.Tensor, word_bytes: int, target: torch.Tensor) -> int: ...

    def decode(self, codec: Codec, source: torch.Tensor, word_bytes: int, target: torch.Tensor) -> None: ...

    def clock(self) -> float: ...  # s; once all that was coded has ended


def coder_of(device: torch.device, launch: Launch = DEFAULT_LAUNCH) -> Coder:
    """The coder of a device's tensors; kernels are compiled when they are first used. CodecError: the compiler of
    kernels is not installed."""
    if device.type != "cuda":
        return HostCoder()
    try:
        from pg_tensile.execution.codecs.cuda import CudaCoder
    except ImportError as error:
        hint = 'Install the package "triton", which comes with PyTorch for CUDA.'
        raise CodecError("codecs cannot be compiled for the GPU", hint) from error
    return CudaCoder(device, launch)


class HostCoder:
    """host.py."""

    available = staticmethod(host.available)
    encode = staticmethod(host.encode)
    decode = staticmethod(host.decode)

    @staticmethod
    def clock() -> float:
        """Time of this thread on the processor, so that whatever else the machine does is not measured."""
        return time.thread_time()
