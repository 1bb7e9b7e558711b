"""Conditions of a turn: what may explain its times, recorded around the steps that count."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pg_tensile.execution.backends import backend_of
from pg_tensile.execution.backends.conditions import Conditions
from pg_tensile.planning.latency.load import LoadMeter

SHORTEST_S = 0.2  # of a turn whose load by others is known: the kernel counts in hundredths of a second


class AllocatorUse(NamedTuple):
    """Use of the accelerator's memory through PyTorch's allocator during the counted steps of a turn."""

    reserved_peak_bytes: int
    allocated_peak_bytes: int
    retries: int  # requests that the device refused, so that cached memory was given back


@dataclass(frozen=True)
class TurnConditions:
    """Conditions of one turn. Loads are the shares that other processes use, 0 … 1; None means not known.

    `start` and `end`: of the accelerator, right before and right after the counted steps. `host_load`: of the
    processors from the contender's start to the end of these steps, `device_load` of the accelerator at that end.
    """

    start: Conditions | None = None
    end: Conditions | None = None
    host_load: float | None = None
    device_load: float | None = None


class TurnWatch:
    """Observer of one turn, created before its contender. The device is idle when `start` and `stop` are called."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.monotonic) -> None:
        self._device = device
        self._backend = None if device.type == "cpu" else backend_of(device.type)
        self._clock = clock
        self._began_s = clock()
        self._load = LoadMeter()
        self._start: Conditions | None = None
        self._retries = 0
        self.allocator: AllocatorUse | None = None
        self.conditions = TurnConditions()

    def start(self) -> None:
        """Begin with the steps that count."""
        if self._backend is not None:
            self._start = self._backend.conditions(self._device)
            torch.accelerator.reset_peak_memory_stats(self._device)
            self._retries = self._statistics()["num_alloc_retries"]

    def stop(self) -> None:
        """Record `allocator` and `conditions`, after the steps that count."""
        end = device_load = None
        if self._backend is not None:
            statistics = self._statistics()
            self.allocator = AllocatorUse(
                reserved_peak_bytes=statistics["reserved_bytes.all.peak"],
                allocated_peak_bytes=statistics["allocated_bytes.all.peak"],
                retries=statistics["num_alloc_retries"] - self._retries,
            )
            end = self._backend.conditions(self._device)
            device_load = self._backend.load_of_others(self._device)
        is_known = self._clock() - self._began_s >= SHORTEST_S
        self.conditions = TurnConditions(self._start, end, self._load.read() if is_known else None, device_load)

    def _statistics(self) -> dict[str, int]:
        return torch.accelerator.memory_stats(self._device)


def release_cached_memory(device: torch.device) -> None:
    """Give back the memory that a contender before left to the allocator, so that the next one's is its own."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
        torch.accelerator.empty_cache()
