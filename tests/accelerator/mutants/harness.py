"""List of the scenarios, and their parts: a device, tensors on it and in registered memory."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from unittest.mock import patch

import torch

from pg_tensile.execution.runtime.accelerator import AcceleratorDevice
from pg_tensile.execution.runtime.compressed_copies import Chunks
from pg_tensile.planning.compression.codec import CHUNK_MULTIPLE, Codec
from pg_tensile.planning.device.profile import A100_40GB
from tests.accelerator.mutants.job import Prepared

DEVICE = "emulated:0"
SIZE = 1 << 16
CHUNK = CHUNK_MULTIPLE  # the smallest; `scenarios` sets it

Scenario = Callable[[Prepared], object]
SCENARIOS: list[Scenario] = []


def scenario(function: Scenario) -> Scenario:
    SCENARIOS.append(function)
    return function


@contextmanager
def opened() -> Iterator[AcceleratorDevice]:
    device = AcceleratorDevice(DEVICE, profile=A100_40GB, strict=True)
    try:
        yield device
    finally:
        device.close()


@contextmanager
def threads_end_when_joined() -> Iterator[None]:
    """Keep threads of the runtime alive until they are joined: one that nobody waits for is left for certain."""
    run, join = threading.Thread.run, threading.Thread.join
    joined = defaultdict[threading.Thread, threading.Event](threading.Event)

    def run_until_joined(self: threading.Thread) -> None:
        run(self)
        if "pg_tensile" in self.name:
            joined[self].wait()

    def noted_join(self: threading.Thread, timeout: float | None = None) -> None:
        joined[self].set()
        join(self, timeout)

    with patch.object(threading.Thread, "run", run_until_joined), patch.object(threading.Thread, "join", noted_join):
        yield


def onboard(value: int, size: int = SIZE) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8, device=DEVICE)


def pinned(device: AcceleratorDevice, value: int, size: int = SIZE) -> torch.Tensor:
    return device.host_memory(size).fill_(value)


def all_equal(tensor: torch.Tensor, value: int) -> bool:
    return bool((tensor == value).all())


def sparse(chunks: float, seed: int = 0) -> torch.Tensor:
    """Return uint8 on the device of which the codecs leave little."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    values = torch.randn(int(chunks * CHUNK) // 4, generator=generator, device=DEVICE)
    values[torch.rand(len(values), generator=generator, device=DEVICE) < 0.8] = 0.0
    return values.view(torch.uint8)


def encoding() -> Chunks:
    return Chunks.of(Codec.ZVC, torch.empty(0, device=DEVICE))


def abandon(device: AcceleratorDevice, work: Callable[[], object]) -> None:
    """Run `work` in an iteration that is given up."""
    with suppress(ZeroDivisionError), device.iteration():
        work()
        raise ZeroDivisionError
