"""Choice of the coder for a device: numpy on the host, kernels on a GPU."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from pg_tensile.errors import CodecError
from pg_tensile.execution.codecs import host
from pg_tensile.planning.compression.codec import DEFAULT_LAUNCH, Codec, CodedChunk, Launch


class Coder(Protocol):
    """Coder for one kind of device, on which its tensors are. All coders produce the same bytes, except for LZ4."""

    def available(self, codec: Codec) -> bool: ...

    def encode(self, codec: Codec, source: torch.Tensor, word_bytes: int, target: torch.Tensor) -> CodedChunk: ...

    def decode(self, chunk: CodedChunk, source: torch.Tensor, word_bytes: int, target: torch.Tensor) -> None: ...

    def clock(self) -> float: ...  # s, after all queued coding has ended

    def warm_up(self) -> None: ...  # compiles what coding will need, so that no swap waits for a compiler


def coder_of(device: torch.device, launch: Launch = DEFAULT_LAUNCH) -> Coder:
    """Return the coder for a device's tensors, whose kernels are compiled on first use.

    Raises CodecError if the compiler of kernels is not installed.
    """
    if device.type != "cuda":
        return HostCoder()
    try:
        from pg_tensile.execution.codecs.cuda import CudaCoder
    except ImportError as error:
        hint = 'Install the package "triton", which comes with PyTorch for CUDA.'
        raise CodecError("codecs cannot be compiled for the GPU", hint) from error
    return CudaCoder(device, launch)


class HostCoder:
    """Coder for the host: the functions of host.py."""

    available = staticmethod(host.available)
    encode = staticmethod(host.encode)
    decode = staticmethod(host.decode)

    @staticmethod
    def clock() -> float:
        """Return the processor time of this thread, which excludes other work of the machine."""
        return time.thread_time()

    @staticmethod
    def warm_up() -> None:
        """Do nothing: no function of host.py is compiled."""
