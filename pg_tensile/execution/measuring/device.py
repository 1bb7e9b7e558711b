"""Measurement of a device: `measure` makes the profile (profile.py) for which plans are made.

Rates are the best of a few short rounds, because disturbances only ever slow a measurement down. Lanes are measured
with pinned buffers on accelerators; on the host a transfer is a copy in memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import cast

import torch

from pg_tensile.errors import DeviceError
from pg_tensile.execution.backends import backend_of, module_of, outside_bytes, streams_of
from pg_tensile.execution.device_choice import choose_device
from pg_tensile.execution.measuring.allocator import allocator_rules
from pg_tensile.memory_limit import memory_bytes
from pg_tensile.planning.device.profile import DeviceKind, DeviceProfile, Direction

_ROUNDS = 3
_SEQUENCES = 10  # times the rounds
_BUFFER = 64 << 20


def measure(device: torch.device | str) -> DeviceProfile:
    """Return the profile of a device of this machine.

    It contains the memory that this process may use (bytes), the rates of the link in each direction and in both at
    once, arithmetic (float32 matmul), memory bandwidth, launch overhead, and on accelerators the memory that a process
    takes besides its tensors, and the rules of PyTorch's allocator. Takes less than 2 s on the CPU, and some 300 MiB of
    device memory meanwhile. Raises DeviceError if the device does not exist or cannot be measured, for example for lack
    of memory.
    """
    chosen = choose_device(str(device))
    try:
        with torch.inference_mode(False), torch.no_grad():  # other threads change the tensors as well
            return _measure_host() if chosen.type == "cpu" else _measure_accelerator(chosen)
    except (RuntimeError, MemoryError) as error:  # includes torch.OutOfMemoryError and failures of CUDA
        hint = "Free memory on it, or wait until other jobs have ended."
        raise DeviceError(f'the device "{chosen}" cannot be measured', hint=hint, detail=str(error)) from None


def _measure_host() -> DeviceProfile:
    host, device = torch.zeros(_BUFFER, dtype=torch.uint8), torch.zeros(_BUFFER, dtype=torch.uint8)
    back, other = torch.zeros_like(host), torch.zeros_like(device)
    alone = _best(lambda: host.copy_(device))
    with ThreadPoolExecutor(1) as lane:

        def both_ways() -> None:
            inward = lane.submit(other.copy_, back)
            host.copy_(device)
            inward.result()

        together = _best(both_ways)
    profile = DeviceProfile(
        name="host",
        kind="host",
        memory_bytes=memory_bytes(),
        out_bytes_per_s=host.nbytes / alone,
        in_bytes_per_s=host.nbytes / alone,
        duplex_factor=_duplex_factor(alone, together),
        flops_per_s=_flops_per_s(torch.device("cpu"), 512, _best),
        bytes_per_s=_bytes_per_s(torch.device("cpu"), _BUFFER, _best),
        transfer_latency_us=_best(lambda: host[:64].copy_(device[:64])) * 1e6,
        launch_us=_launch_us(torch.device("cpu"), _best),
    )
    return replace(profile, handover_us=_handover_us(profile.with_link(1e9)))


def _handover_us(profile: DeviceProfile) -> float:
    """Measure how much longer than the link it takes to swap a small tensor and wait for it on the host device, in µs.

    Each sample averages a swap-out and a swap-in. Their median counts, not the best, because every swap has to wake
    threads up.
    """
    from pg_tensile.execution.runtime.host import HostDevice  # which needs a profile

    host = HostDevice(profile)
    device, storage = torch.zeros(1 << 16, dtype=torch.uint8), torch.zeros(1 << 16, dtype=torch.uint8)
    times = []
    try:
        for _ in range(50):
            start = time.perf_counter()
            host.wait(host.copy_out(device, storage))
            device.untyped_storage().resize_(0)
            device.untyped_storage().resize_(1 << 16)
            host.wait(host.copy_in(storage, device))
            times.append((time.perf_counter() - start) * 1e6 / 2)
    finally:
        host.close()
    return max(0.0, statistics.median(times) - profile.transfer_us(1 << 16, Direction.OUT))


def _measure_accelerator(device: torch.device) -> DeviceProfile:
    backend_of(device.type).create_context(device)
    with torch.accelerator.device_index(device.index):
        profile = _measure_accelerator_rates(device)
    torch.accelerator.empty_cache()  # of the buffers, which are larger than most tensors
    return replace(profile, allocator=allocator_rules(device))


def _measure_accelerator_rates(device: torch.device) -> DeviceProfile:
    outward, inward = streams_of(device).lanes
    pinned = [torch.empty(_BUFFER, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    onboard = [torch.zeros(_BUFFER, dtype=torch.uint8, device=device) for _ in range(2)]
    torch.accelerator.synchronize(device)

    def best(work: Callable[[], object]) -> float:
        """Return the same as `_best` for queued work: each round waits for the device."""

        def finished() -> None:
            work()
            torch.accelerator.synchronize(device)

        torch.accelerator.synchronize(device)
        return _best(finished)

    def copy_out(nbytes: int = _BUFFER) -> None:
        with outward:
            pinned[0][:nbytes].copy_(onboard[0][:nbytes], non_blocking=True)

    def copy_in() -> None:
        with inward:
            onboard[1].copy_(pinned[1], non_blocking=True)

    def both_ways() -> None:
        copy_out()
        copy_in()

    module = module_of(device)
    out_s, in_s, both_s = (best(copy) for copy in (copy_out, copy_in, both_ways))
    return DeviceProfile(
        name=module.get_device_name(device),
        kind=cast(DeviceKind, device.type),
        memory_bytes=module.mem_get_info(device)[0] + torch.accelerator.memory_reserved(device),
        out_bytes_per_s=pinned[0].nbytes / out_s,
        in_bytes_per_s=pinned[0].nbytes / in_s,
        duplex_factor=_duplex_factor(max(out_s, in_s), both_s),
        flops_per_s=_flops_per_s(device, 4096, best),
        bytes_per_s=_bytes_per_s(device, _BUFFER, best),
        transfer_latency_us=best(lambda: copy_out(64)) * 1e6,
        launch_us=_launch_us(device, best),
        process_bytes=outside_bytes(device) or 0,  # with a library's code for matmul
    )


def _best(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest round; the first round warms up and is not counted."""
    times = [time.perf_counter()]
    for _ in range(_ROUNDS + 1):
        work()
        times.append(time.perf_counter())
    return max(min(after - before for before, after in list(pairwise(times))[1:]), 1e-9)


def _duplex_factor(alone_s: float, together_s: float) -> float:
    """Return the share of its rate that each lane keeps while both are busy: 1.0 … 0.5 (one after the other)."""
    return min(1.0, max(0.5, alone_s / together_s))


def _flops_per_s(device: torch.device, size: int, best: Callable[[Callable[[], object]], float]) -> float:
    left = torch.full((size, size), 0.5, device=device)
    product = torch.empty_like(left)
    return 2.0 * size**3 / best(lambda: torch.matmul(left, left, out=product))


def _bytes_per_s(device: torch.device, nbytes: int, best: Callable[[Callable[[], object]], float]) -> float:
    """Measure reading one buffer and writing another, as most operators without arithmetic do."""
    source = torch.zeros(nbytes // 4, device=device)
    target = torch.empty_like(source)
    return 2.0 * nbytes / best(lambda: torch.add(source, 1.0, out=target))


def _launch_us(device: torch.device, best: Callable[[Callable[[], object]], float]) -> float:
    """Return the µs of one operator with negligible work, in a sequence of a hundred.

    The least of many sequences, because each operator waits for the interpreter while another thread has it."""
    value = torch.zeros(16, device=device)

    def row() -> None:
        for _ in range(100):
            value.add_(1.0)

    return min(best(row) for _ in range(_SEQUENCES)) * 1e6 / 100
