"""Control of the emulator: schedules, faults, limits, and what the race detector has found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.emulated.emulated.native import native
from tests.emulated.emulated.threads import watch_threads

__all__ = [
    "HostAccesses", "allocation_trace", "blocks_alive", "checked", "clear", "expandable_segments", "fail_allocation",
    "fail_kernel", "host_access", "host_register", "host_unregister", "is_registered", "pending",
    "process_bytes", "races", "registered_bytes", "reset", "schedule", "set_memory", "stacks",
    "streams_used", "trace_allocations", "waiting_operators", "watch_threads",
]  # fmt: skip

DEFAULT_MEMORY = 8 << 30

# ---- time ------------------------------------------------------------------------------------------------------------


def schedule(kind: str = "random", seed: int = 0) -> None:
    """Choose when streams execute what they were given; waits for all of them first.

    "eager": at once. "random": after delays drawn from `seed`. "late_copies": copies over the link only when the host
    waits for them, by itself or through events, or asks for them by a query; "late_compute": the same for
    kernels. Raises ValueError for another kind."""
    native.schedule(kind, seed)


def pending(device: int = 0) -> int:
    """Return the number of kernels and copies that were given and have not ended."""
    return native.pending(device)


def streams_used(device: int = 0) -> list[int]:
    """Return the ids of the streams that were ever given work."""
    return native.streams_used(device)


# ---- races -----------------------------------------------------------------------------------------------------------


def races() -> list[str]:
    """Return what the detector has found since `clear`, in order, one text for each pair of accesses."""
    return native.races()


def clear() -> None:
    """Wait for all streams, then forget all races and accesses."""
    _drain()
    native.clear()


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Raise AssertionError at the end of the block if it had races; host threads are told apart in it."""
    clear()
    with watch_threads(), HostAccesses():
        yield
        _drain()
    found = races()
    assert not found, "\n".join([f"{len(found)} races:", *found])


def stacks(on: bool) -> None:
    """Let reports name the innermost Python frames (default) or not; costs about 2 µs for each piece of work."""
    native.set_stacks(on)


class HostAccesses(TorchDispatchMode):
    """Reporter to the detector of what CPU operators read and write in registered memory, while it is entered."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors((*args, *kwargs.values())))
        device = kwargs.get("device")
        # Work given to a device is checked there: its operators, and copies to and from it.
        if not func.is_view and all(t.is_cpu for t in given) and (device is None or torch.device(device).type == "cpu"):
            for number, argument in enumerate(func._schema.arguments if given else ()):
                value = args[number] if number < len(args) else kwargs.get(argument.name)
                written = argument.alias_info is not None and argument.alias_info.is_write
                for tensor in _tensors((value,)):
                    host_access(tensor, written, str(func))
        return func(*args, **kwargs)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operator's arguments, which may be in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def host_access(tensor: torch.Tensor, write: bool, name: str = "host") -> None:
    """Tell the detector that this thread reads or writes a CPU tensor; memory that is not registered is ignored."""
    if tensor.is_cpu and tensor.numel() > 0 and tensor.layout == torch.strided:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        native.host_access(tensor.data_ptr(), (last + 1) * tensor.itemsize, write, name)


# ---- host memory -----------------------------------------------------------------------------------------------------


def host_register(address: int, size: int) -> None:
    """Pin host memory. Raises RuntimeError for memory that is not mapped or overlaps what is registered."""
    native.host_register(address, size)


def host_unregister(address: int) -> None:
    """Unpin host memory. Raises RuntimeError for memory that is not registered, not mapped any more or in use."""
    native.host_unregister(address)


def is_registered(address: int, size: int = 1) -> bool:
    return native.is_registered(address, size)


def registered_bytes() -> int:
    """Return the bytes of `host_register` that are not unregistered."""
    return native.registered_bytes()


# ---- device memory ---------------------------------------------------------------------------------------------------


def set_memory(total_bytes: int, device: int = 0) -> None:
    """Set the memory of a device; what is reserved stays."""
    native.set_memory(total_bytes, device)


def expandable_segments(on: bool) -> None:
    """Let segments allocated from now on be expandable, as PYTORCH_ALLOC_CONF=expandable_segments:True does."""
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{on}")


def process_bytes(device: int = 0) -> int:
    """Return the device memory of this process as a driver counts it: what is reserved, and the context."""
    return torch.get_device_module("emulated").process_bytes(device)


def blocks_alive(device: int = 0) -> list[tuple[int, int, int]]:
    """Return (address, bytes requested, stream's id) of each allocated block."""
    return native.blocks_alive(device)


def trace_allocations(on: bool) -> None:
    """Begin an empty trace of the allocator, or end it."""
    native.trace_allocations(on)


def allocation_trace() -> list[tuple[str, int, int, int]]:
    """Return (action, address, bytes, stream's id); actions: alloc, free, segment_alloc, segment_free."""
    return native.allocation_trace()


# ---- faults and the end ----------------------------------------------------------------------------------------------


def fail_allocation(number: int) -> None:
    """Let the allocation of that number from now on (1: the next) raise torch.OutOfMemoryError; 0: none."""
    native.fail_allocation(number)


def fail_kernel(number: int) -> None:
    """Let the kernel or copy of that number from now on fail on the device; 0: none.

    Everything after it raises torch.AcceleratorError, until `reset`."""
    native.fail_kernel(number)


def waiting_operators() -> set[str]:
    """Return the operators that made the host wait since the last call: those whose results the host needs."""
    return native.take_waiting_operators()


def reset() -> None:
    """Wait for all streams and undo everything that this module can set; races are forgotten."""
    _drain()
    native.clear_failure()
    fail_kernel(0)
    fail_allocation(0)
    for device in range(native.DEVICES):
        native.set_memory_fraction(1.0, device)
        native.set_memory(DEFAULT_MEMORY, device)
    expandable_segments(False)
    torch._C._accelerator_setAllocatorSettings("")  # as if nothing had been said about them
    schedule("eager")
    trace_allocations(False)
    waiting_operators()
    torch.accelerator.empty_cache()
    clear()


def _drain() -> None:
    for device in range(native.DEVICES):
        native.drain(device)
