"""NVML's numbers of this process: its device memory, and the time of the device that others use.

NVML knows processes by their numbers in the initial namespace, so in a container a process does not find its own, and
the one that it finds may be another's. There it is identified by what it does: for a moment it takes a random amount of
device memory, and only its own count grows by just that. Where NVML counts no memory by process (MIG, MPS), or does not
list this process, the device's memory before and after the creation of the context says what the context takes, as long
as nothing else changes meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from secrets import SystemRandom
from typing import Any, NamedTuple, TypeVar

import torch

_T = TypeVar("_T")
_INITIAL_NAMESPACE = "pid:[4026531836]"  # of processes; its number is a constant of the kernel
_SMALL = 1 << 20  # largest block that PyTorch's allocator takes pages of 2 MiB for
_AMOUNTS = range(2, 64, 2)  # of such blocks
_LEAST_CONTEXT = 32 << 20  # bytes; if the device's memory grew by less, the context had been there before

Counts = Mapping[int, int | None]  # bytes of each process, by NVML's number of it; None where it does not count them

_numbers: dict[torch.device, int] = {}  # of this process, where it has been identified
_contexts: dict[torch.device, int] = {}  # bytes of this process's context, where it was created alone


class Situation(NamedTuple):
    """Memory of a device in use, in bytes, and that of each process on it."""

    used_bytes: int
    counts: Counts


def process_bytes(device: torch.device, code_bytes: int) -> int | None:
    """Return the device memory of this process in bytes; None if it cannot be told apart from that of others.

    Where only its context is known, it is that, `code_bytes` for the code that libraries load, and what PyTorch's
    allocator has taken."""
    counts = ask(device, process_counts)
    number = None if counts is None else own_number(device, counts, lambda: ask(device, process_counts) or {})
    # Read anew: if it was just identified, it has less again.
    used = None if number is None else (ask(device, process_counts) or {}).get(number)
    if used is not None:
        return used
    context = _contexts.get(device)
    return None if context is None else context + code_bytes + torch.accelerator.memory_reserved(device)


def load_of_others(device: torch.device) -> float:
    """Return the share of the multiprocessors' time that other processes used lately, 0 … 1.

    0 as long as this process is not known by its number, since its work cannot be told from that of others."""

    def read(nvml: Any, handle: Any) -> float:
        running = process_counts(nvml, handle).keys()
        own = _own_by_number(device, running)
        if own is None:
            return 0.0
        samples = nvml.nvmlDeviceGetProcessUtilization(handle, 0)
        newest = {sample.pid: sample.smUtil for sample in sorted(samples, key=lambda sample: sample.timeStamp)}
        return min(1.0, sum(newest.get(number, 0) for number in running - {own}) / 100)

    return ask(device, read) or 0.0


def create_context(device: torch.device) -> None:
    """Create this process's context on the device, and keep what it takes, unless PyTorch has been used before."""
    if device in _contexts or torch.cuda.is_initialized():
        return

    def create() -> int:
        torch.empty(1, device=device)
        return torch.accelerator.memory_reserved(device)

    context = context_bytes(partial(ask, device, _situation), create)
    if context is not None:
        _contexts[device] = context


def context_bytes(read: Callable[[], Situation | None], create: Callable[[], int]) -> int | None:
    """Return by how many bytes the device's memory in use grows while `create` creates a context and takes memory.

    `create` returns what it takes besides the context. None if anything else has changed meanwhile, or may have."""
    situations = [read(), read()]
    taken = create()
    situations += [read(), read()]
    before, still, after, settled = situations
    if before is None or after is None or before != still or after != settled:
        return None
    if any(used is None or after.counts.get(number) != used for number, used in before.counts.items()):
        return None
    if len(after.counts.keys() - before.counts.keys()) > 1:
        return None
    grown = after.used_bytes - before.used_bytes - taken
    return grown if grown >= _LEAST_CONTEXT else None


def own_number(device: torch.device, counts: Counts, read: Callable[[], Counts]) -> int | None:
    """Return NVML's number of this process among `counts`, or None; `read` reads them again."""
    number = _own_by_number(device, counts.keys())
    if number is None and any(used is not None for used in counts.values()):
        number = identified(read, partial(_taking, device))
        if number is not None:
            _numbers[device] = number
    return number


def identified(read: Callable[[], Counts], taking: Callable[[int], AbstractContextManager[int]]) -> int | None:
    """Return the number of the only process whose memory grows when this one takes more; None if it is not only one.

    `taking(blocks)` is a context in which this process has taken that number of blocks of 1 MiB. It returns the bytes
    by which the allocator's memory has grown, and gives back to the device what is free at its end."""
    candidates: set[int] | None = None
    with taking(0):  # so that what is taken next is new
        pass
    for blocks in SystemRandom().sample(_AMOUNTS, 2):  # by chance, another process may take the first amount as well
        before = read()
        with taking(blocks) as taken:
            after = read()
        if taken <= 0:
            return None
        grown = {
            number
            for number, used in before.items()
            if used is not None and (now := after.get(number)) is not None and now - used == taken
        }
        candidates = grown if candidates is None else candidates & grown
    return candidates.pop() if candidates is not None and len(candidates) == 1 else None


@contextmanager
def _taking(device: torch.device, blocks: int) -> Iterator[int]:
    """Take small blocks; nothing, which is 0 bytes, if there is no memory for them."""
    before = torch.accelerator.memory_reserved(device)
    try:
        held = [torch.empty(_SMALL, dtype=torch.uint8, device=device) for _ in range(blocks)]
    except torch.OutOfMemoryError:
        held = []
    try:
        yield torch.accelerator.memory_reserved(device) - before if held else 0
    finally:
        del held
        torch.accelerator.empty_cache()


def _own_by_number(device: torch.device, running: Collection[int]) -> int | None:
    """Return NVML's number of this process if it is running, and known without taking memory."""
    if _in_initial_namespace() and os.getpid() in running:
        return os.getpid()
    number = _numbers.get(device)
    return number if number in running else None


def _in_initial_namespace() -> bool:
    try:
        return str(Path("/proc/self/ns/pid").readlink()) == _INITIAL_NAMESPACE
    except OSError:
        return False


def process_counts(nvml: Any, handle: Any) -> dict[int, int | None]:
    """Return the bytes of each process on a GPU, given the module of NVML and its handle of the GPU."""
    return {process.pid: process.usedGpuMemory for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}


def _situation(nvml: Any, handle: Any) -> Situation:
    return Situation(nvml.nvmlDeviceGetMemoryInfo(handle).used, process_counts(nvml, handle))


def ask(device: torch.device, read: Callable[[Any, Any], _T]) -> _T | None:
    """Return what `read` returns, given the module of NVML and its handle of the device; None after its errors.

    Its numbers of devices are not CUDA's, so the device is looked up by its UUID."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return read(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{_uuid(device)}"))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
