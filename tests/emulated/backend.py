"""Backend of the emulated accelerator; the package's metadata beside it make pg_tensile find it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from pg_tensile.errors import DeviceError
from pg_tensile.execution.backends.conditions import Conditions
from pg_tensile.execution.codecs.device import Coder, HostCoder
from pg_tensile.planning.compression.codec import Codec, CodedChunk
from tests.emulated import emulated
from tests.emulated.emulated import control

CONDITIONS = Conditions(sm_clock_mhz=1500, memory_clock_mhz=2000, temperature_c=40, clocks_event_reasons=())


class EmulatedBackend:
    """A `pg_tensile.execution.backends.Backend`."""

    code_bytes = 0

    def register(self, address: int, size: int, device: torch.device) -> None:
        try:
            control.host_register(address, size)
        except RuntimeError as error:
            raise DeviceError("host memory cannot be registered", detail=str(error)) from None

    def unregister(self, address: int) -> None:
        try:
            control.host_unregister(address)
        except RuntimeError as error:
            raise DeviceError("host memory cannot be unregistered", detail=str(error)) from None

    def near(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    def create_context(self, device: torch.device) -> None:
        return None

    def process_bytes(self, device: torch.device) -> int | None:
        return control.process_bytes(device.index)

    def hard_limit(self, device: torch.device) -> None:
        return None

    def load_of_others(self, device: torch.device) -> float:
        return 0.0

    def conditions(self, device: torch.device) -> Conditions | None:
        return CONDITIONS

    def use_deterministic_libraries(self) -> None:
        return None

    def release_library_memory(self) -> None:
        return None

    def graph_pool(self) -> tuple[int, int] | None:
        return None

    def abandon_capture(self, device: torch.device, graph: Any, pool: tuple[int, int] | None) -> None:
        return None

    def coder(self, device: torch.device) -> Coder:
        return EmulatedCoder()


class EmulatedCoder:
    """Coder that has the host code what the device holds: it waits for the stream, and its result is copied later.

    The copy is asynchronous, as a kernel would be, and so is a second reading of what is coded: what must come after
    them has to wait for the stream."""

    available = staticmethod(HostCoder.available)
    clock = staticmethod(HostCoder.clock)
    warm_up = staticmethod(HostCoder.warm_up)

    def encode(self, codec: Codec, source: torch.Tensor, word_bytes: int, target: torch.Tensor) -> CodedChunk:
        raw = source.cpu()
        coded = torch.empty_like(raw, pin_memory=True)
        chunk = HostCoder.encode(codec, raw, word_bytes, coded)
        source.clone()
        if chunk.codec != Codec.NONE:
            target[: chunk.coded_bytes].copy_(coded[: chunk.coded_bytes], non_blocking=True)
        return chunk

    def decode(self, chunk: CodedChunk, source: torch.Tensor, word_bytes: int, target: torch.Tensor) -> None:
        raw = torch.empty(target.shape, dtype=target.dtype, pin_memory=True)
        HostCoder.decode(chunk, source.cpu(), word_bytes, raw)
        source.clone()
        target.copy_(raw, non_blocking=True)


BACKEND = EmulatedBackend()
__all__ = ["BACKEND", "emulated"]
