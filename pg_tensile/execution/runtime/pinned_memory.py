"""Pinned host memory near a CUDA device.

It consists of registered pages of our own, because PyTorch's pinned allocator rounds up to a power of two.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch

from pg_tensile.errors import DeviceError

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context


def pinned_memory(size: int, device: torch.device) -> torch.Tensor:
    """Return uint8[size] of pinned memory near the device, rounded to pages only. Raises DeviceError."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    hint = "Use a plan that keeps less on the host, a machine with more memory, or a higher limit of locked memory."
    message = f"{size:,} bytes of pinned host memory for swapped tensors are not to be had"
    try:
        pages = mmap.mmap(-1, size)
    except (OSError, OverflowError, ValueError) as error:
        raise DeviceError(message, hint=hint, detail=str(error)) from None
    with contextlib.suppress(OSError):  # fewer and larger pages, where the kernel supports them
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    address = memory.data_ptr()
    with torch.cuda.device(device), _near(device):
        status = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))
    if status != 0:
        with contextlib.suppress(RuntimeError):  # consumes the error that CUDA keeps for the next launch
            torch.zeros(1, device=device)
        raise DeviceError(message, hint=hint, detail=f"cudaHostRegister answers {status}")
    # Runs before the pages are unmapped. Not at exit, when CUDA may be shut down and all memory is freed anyway.
    weakref.finalize(pages, _unpin, address, device).atexit = False
    return memory


def _unpin(address: int, device: torch.device) -> None:
    """Unpin memory. It may wait for copies still in flight, because it runs only about once per plan."""
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)


@contextlib.contextmanager
def _near(device: torch.device) -> Iterator[None]:
    """Keep this thread on the CPUs next to the device, if these can be determined.

    The pages that it touches first are then allocated there."""
    before = os.sched_getaffinity(0)
    near = _cpus_near(device) & before
    if near:
        os.sched_setaffinity(0, near)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _cpus_near(device: torch.device) -> set[int]:
    properties = torch.cuda.get_device_properties(device)
    try:
        domain, bus, number = (getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))
        address = f"{domain:04x}:{bus:02x}:{number:02x}.0"
        return parse_cpus(Path("/sys/bus/pci/devices", address, "local_cpulist").read_text())
    except (AttributeError, OSError, ValueError):
        return set()


def parse_cpus(text: str) -> set[int]:
    """Parse the kernel's list of CPUs, "0-3,8" for example."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return {cpu for bounds in ranges for cpu in range(int(bounds[0]), int(bounds[-1]) + 1)}
