"""Backends: for each type of accelerators, what PyTorch's device-neutral interface lacks.

The runtime uses torch.Stream, torch.Event, torch.accelerator and the module of the device's type
(`torch.get_device_module`: random numbers, statistics of memory, fractions of it, names). A `Backend` adds the few
things that these lack. CUDA's is part of this package. Another distribution adds that of its type with an entry point
of the group `pg_tensile.backends`: its name is the type, its value a `Backend`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from pg_tensile.errors import DeviceError
from pg_tensile.execution.backends.conditions import Conditions

if TYPE_CHECKING:
    from pg_tensile.execution.backends.memory_limits import HardLimit
    from pg_tensile.execution.codecs.device import Coder

GROUP = "pg_tensile.backends"


def added_types() -> list[str]:
    """Return the types of accelerators that other distributions add."""
    return [entry_point.name for entry_point in entry_points(group=GROUP)]


class Backend(Protocol):
    """Functions of one type of accelerators. Sizes are in bytes.

    `code_bytes`: device memory for the libraries' code that a process loads at the first call of each kernel."""

    code_bytes: int

    def register(self, address: int, size: int, device: torch.device) -> None:
        """Register host memory, so that copies between it and the device need no staging. Raises DeviceError."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register`; no copy may be under way. Raises DeviceError."""
        ...

    def near(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a context in which pages that this thread touches first lie next to the device, if possible."""
        ...

    def create_context(self, device: torch.device) -> None:
        """Create this process's context on the device, if that is not done yet, in a way that shows its memory."""
        ...

    def process_bytes(self, device: torch.device) -> int | None:
        """Return the device memory of this process by the driver's count; None if it does not tell."""
        ...

    def hard_limit(self, device: torch.device) -> HardLimit | None:
        """Return the limit of this process's device memory that the driver or the kernel enforces; None without one."""
        ...

    def load_of_others(self, device: torch.device) -> float:
        """Return the share of the device's time that other processes use, 0 … 1; 0 if that is unknown."""
        ...

    def conditions(self, device: torch.device) -> Conditions | None:
        """Return the conditions under which the device works now; None if the driver does not tell them."""
        ...

    def use_deterministic_libraries(self) -> None:
        """Make the libraries behind operators deterministic; called before they start."""
        ...

    def release_library_memory(self) -> None:
        """Make the libraries give back the device memory that they keep from call to call."""
        ...

    def graph_pool(self) -> tuple[int, int] | None:
        """Return a new pool for the memory of one device graph; None to leave that to PyTorch."""
        ...

    def abandon_capture(self, device: torch.device, graph: Any, pool: tuple[int, int] | None) -> None:
        """Mend what PyTorch leaves undone when a capture of `graph` with this pool fails; raises nothing.

        Called after `capture_end` and `reset` on the stream of the capture, whether or not the former raised."""
        ...

    def coder(self, device: torch.device) -> Coder:
        """Return the coder of compressed copies, whose work goes to the current stream. Raises CodecError."""
        ...


@cache
def backend_of(type: str) -> Backend:
    """Return the backend of a type of accelerators. Raises DeviceError if no distribution has one."""
    if type == "cuda":
        from pg_tensile.execution.backends.cuda import CudaBackend

        return CudaBackend()
    for entry_point in entry_points(group=GROUP, name=type):
        return cast(Backend, entry_point.load())
    raise DeviceError(f'devices of type "{type}" are not supported', hint="Use auto, cpu, cuda or cuda:N.")


def module_of(device: torch.device) -> Any:
    """Return the module of the device's type, as torch.cuda."""
    return torch.get_device_module(device)


def use_deterministic_algorithms() -> None:
    """Make equal runs give equal bits, as far as CUDA can; the CPU's operators always do."""
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def device_load(device: torch.device) -> Callable[[], float] | None:
    """Return the function that reads the load of an accelerator by others; None for the CPU."""
    return None if device.type == "cpu" else partial(backend_of(device.type).load_of_others, device)


def outside_bytes(device: torch.device) -> int | None:
    """Return the bytes that this process takes of an accelerator besides those of PyTorch's allocator; None if unknown.

    That is the context, and code that libraries have loaded. None for the CPU."""
    used = None if device.type == "cpu" else backend_of(device.type).process_bytes(device)
    return None if used is None else max(0, used - torch.accelerator.memory_reserved(device))


@dataclass(frozen=True)
class Streams:
    """Streams of a device; lanes and coding streams are indexed by `Direction`."""

    compute: torch.Stream
    lanes: tuple[torch.Stream, torch.Stream]
    coding: tuple[torch.Stream, torch.Stream]

    @property
    def all(self) -> tuple[torch.Stream, ...]:
        return (self.compute, *self.lanes, *self.coding)

    def synchronize(self) -> None:
        for stream in self.all:
            stream.synchronize()


@cache
def streams_of(device: torch.device) -> Streams:
    """Return the streams of a device (with its index), the same for the life of the process.

    PyTorch hands out the streams of a pool in turn, and libraries keep memory for each stream that they have seen: new
    ones from time to time would be no new ones after a while, and hold ever more memory."""
    compute, out, into, coding_out, coding_in = (torch.Stream(device) for _ in range(5))
    return Streams(compute, (out, into), (coding_out, coding_in))
