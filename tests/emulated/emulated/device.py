"""The device module of PyTorch, `torch.get_device_module("emulated")`: the names of torch.cuda that a runtime needs."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from tests.emulated.emulated.native import native

# What a driver counts for a process besides its tensors.
CONTEXT_BYTES = 256 << 20

Place = torch.device | int | str | None
_initialized = True  # torch.utils.checkpoint asks, and keeps the state of random numbers if so


class Properties(NamedTuple):
    """Properties of a device, as torch.cuda names them."""

    name: str
    total_memory: int  # bytes
    uuid: str
    major: int
    minor: int
    multi_processor_count: int
    pci_domain_id: int
    pci_bus_id: int
    pci_device_id: int


def _index(chosen: Place) -> int:
    """Return the index of a device; None is the current one. Raises ValueError for another type of device."""
    if isinstance(chosen, str):
        chosen = torch.device(chosen)
    if isinstance(chosen, torch.device):
        if chosen.type != "emulated":
            raise ValueError(f"expected an emulated device, got {chosen}")
        chosen = chosen.index
    if chosen is None:
        return native.current_device()
    if not 0 <= chosen < native.DEVICES:
        raise RuntimeError(f"there is no device emulated:{chosen}")
    return chosen


# ---- devices ---------------------------------------------------------------------------------------------------------


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return native.DEVICES


def current_device() -> int:
    return native.current_device()


def set_device(device: Place) -> None:
    native.set_device(_index(device))


@contextlib.contextmanager
def device(device: Place) -> Iterator[None]:
    """Make `device` current; unlike torch.cuda's this one can be entered once."""
    before = native.current_device()
    native.set_device(_index(device))
    try:
        yield
    finally:
        native.set_device(before)


def get_device_name(device: Place = None) -> str:
    return get_device_properties(device).name


def get_device_properties(device: Place = None) -> Properties:
    index = _index(device)
    uuid = f"00000000-0000-0000-0000-{index:012d}"
    return Properties("Emulated accelerator", native.total_memory(index), uuid, 0, 0, 1, 0, index, 0)


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


# ---- streams ---------------------------------------------------------------------------------------------------------


def Stream(device: Place = None, priority: int = 0) -> torch.Stream:
    return torch.Stream(torch.device("emulated", _index(device)), priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False) -> torch.Event:
    return torch.Event("emulated", enable_timing=enable_timing, blocking=blocking)


def synchronize(device: Place = None) -> None:
    torch.accelerator.synchronize(_index(device))


def current_stream(device: Place = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Place = None) -> torch.Stream:
    chosen = torch.device("emulated", _index(device))
    return torch.Stream(stream_id=0, device_index=chosen.index, device_type=_device_type())


def _device_type() -> int:
    return int(torch.accelerator.current_stream(0).device_type)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    with stream if stream is not None else contextlib.nullcontext():
        yield


def _sleep(cycles: int) -> None:
    """Keep the current stream busy for cycles / 2 GHz."""
    native.sleep(cycles)


# ---- memory ----------------------------------------------------------------------------------------------------------


def mem_get_info(device: Place = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_index(device))


def memory_stats(device: Place = None) -> dict[str, Any]:
    return torch.accelerator.memory_stats(_index(device))


def memory_stats_as_nested_dict(device: Place = None) -> dict[str, Any]:
    return torch._C._accelerator_getDeviceStats(_index(device))


def memory_allocated(device: Place = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: Place = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: Place = None) -> int:
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device: Place = None) -> int:
    return torch.accelerator.max_memory_reserved(_index(device))


def reset_peak_memory_stats(device: Place = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def reset_accumulated_memory_stats(device: Place = None) -> None:
    torch.accelerator.reset_accumulated_memory_stats(_index(device))


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def set_per_process_memory_fraction(fraction: float, device: Place = None) -> None:
    native.set_memory_fraction(float(fraction), _index(device))


def get_per_process_memory_fraction(device: Place = None) -> float:
    return native.memory_fraction(_index(device))


def get_allocator_backend() -> str:
    return "native"


def process_bytes(device: Place = None) -> int:
    """Return the device memory of this process as a driver counts it: what is reserved, and the context."""
    return native.reserved_memory(_index(device)) + CONTEXT_BYTES


def host_register(address: int, size: int) -> None:
    """Pin host memory. Raises RuntimeError for memory that is not mapped or overlaps what is registered."""
    native.host_register(address, size)


def host_unregister(address: int) -> None:
    """Unpin host memory. Raises RuntimeError for memory that is not registered, not mapped any more or in use."""
    native.host_unregister(address)


# ---- random numbers --------------------------------------------------------------------------------------------------


def get_rng_state(device: Place = "emulated") -> torch.Tensor:
    """Return the state of the device's generator, uint8[16] on the CPU: seed and offset."""
    return torch.frombuffer(bytearray(struct.pack("QQ", *native.random_state(_index(device)))), dtype=torch.uint8)


def set_rng_state(new_state: torch.Tensor, device: Place = "emulated") -> None:
    native.set_random_state(_index(device), *struct.unpack("QQ", bytes(new_state.tolist())))


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    native.set_random_state(native.current_device(), int(seed) % 2**64, 0)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        native.set_random_state(index, int(seed) % 2**64, 0)


def seed() -> None:
    manual_seed(int.from_bytes(os.urandom(8), "little"))


def initial_seed() -> int:
    return native.random_state(native.current_device())[0]
