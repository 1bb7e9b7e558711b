"""Host memory that is registered with an accelerator, so that copies need no staging (pinned memory).

It consists of pages of our own, because PyTorch's pinned allocator rounds up to a power of two.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref

import numpy as np
import torch

from pg_tensile.errors import DeviceError
from pg_tensile.execution.backends import Backend, Streams, backend_of

_kept: list[mmap.mmap] = []  # pages that could not be unregistered


class _Pages:
    """Owner of registered pages, to which every array and tensor in them refers."""

    def __init__(self, pages: mmap.mmap, address: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (len(pages),), "typestr": "|u1", "version": 3}


def registered_memory(size: int, device: torch.device, streams: Streams) -> torch.Tensor:
    """Return uint8[size] of registered memory near the device, rounded to pages only. Raises DeviceError.

    It is copied on the lanes of `streams`."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    backend = backend_of(device.type)
    hint = "Use a plan that keeps less on the host, a machine with more memory, or a higher limit of locked memory."
    message = f"{size:,} bytes of pinned host memory for swapped tensors are not to be had"
    try:
        # Of shared pages the kernel makes large ones only where it is configured to. Private ones must not be forked:
        # the next write would move them, and the device would still have the ones before.
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # a kernel without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        with backend.near(device):
            backend.register(address, size, device)
    except (OSError, OverflowError, ValueError) as error:
        raise DeviceError(message, hint=hint, detail=str(error)) from None
    except DeviceError as error:
        raise DeviceError(message, hint=hint, detail=error.detail) from None
    owner = _Pages(pages, address)
    # The arguments keep the pages mapped until the function has returned; a finalizer of the pages themselves would run
    # after they are unmapped. Not at exit, when the device may be shut down and all memory is freed anyway.
    weakref.finalize(owner, _release, pages, address, backend, streams).atexit = False
    return torch.from_numpy(np.asarray(owner))


def _release(pages: mmap.mmap, address: int, backend: Backend, streams: Streams) -> None:
    """Wait for copies still in flight, and unregister the pages, which are unmapped afterwards.

    Pages that stay registered stay mapped, too: the next mapping at their address would not be what the device has."""
    try:
        for lane in streams.lanes:
            lane.synchronize()
        backend.unregister(address)
    except (DeviceError, RuntimeError):  # the device has failed, which its next use reports
        _kept.append(pages)
