"""Host memory for the swapped tensors of an executor.

All graphs of an executor share the persistent tensors, so each one that a plan swaps has memory of its own, its home,
whichever graph copies it there. All other host copies end with the iteration: they lie in one arena, which the graphs
use in turns and each plan lays out for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from mmap import PAGESIZE
from typing import NamedTuple

import numpy as np
import torch

from pg_tensile.execution.runtime.device import Device
from pg_tensile.execution.runtime.program import Program
from pg_tensile.planning.plan.following import home_bytes


class Reserved(NamedTuple):
    """All homes and the arena for future programs; `in_use` are the homes in use when the reservation was made."""

    homes: dict[int, torch.Tensor]
    arena: torch.Tensor
    in_use: dict[int, torch.Tensor]


class HostMemory:
    """The homes, by key of the tensor, and the arena; uint8[bytes] each."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.homes: dict[int, torch.Tensor] = {}
        self.arena = torch.empty(0, dtype=torch.uint8)

    def reserve(self, programs: Iterable[Program], earlier: Reserved | None = None) -> Reserved:
        """Return the homes and the arena that these programs need, allocating the missing ones.

        Memory in use and memory of the reservation `earlier` is used again. The pages of new memory are pre-faulted,
        which takes a second for some GiB. May be called from any thread. Raises DeviceError."""
        in_use, arenas = self.homes, [self.arena, *([earlier.arena] if earlier else [])]
        sizes, arena_bytes = _needs(programs)
        homes = {**(earlier.homes if earlier else {}), **in_use}
        new = self.block({tensor: size for tensor, size in sizes.items() if tensor not in homes})
        arena = next((candidate for candidate in arenas if candidate.numel() == arena_bytes), None)
        if arena is None:
            arena = self._device.host_memory(arena_bytes)
            _touch(arena)
        for home in new.values():
            _touch(home)
        homes |= new
        return Reserved({tensor: homes[tensor] for tensor in sizes}, arena, in_use)

    def provide(self, programs: Iterable[Program], reserved: Reserved | None = None) -> None:
        """Switch to the memory that these programs need (`reserved`, if it is still valid) and release all other.

        A host copy keeps the memory of its released home alive for as long as the copy is used. Raises DeviceError;
        nothing has changed then."""
        if reserved is None or reserved.in_use is not self.homes:
            reserved = self.reserve(programs, reserved)
        self.homes, self.arena = reserved.homes, reserved.arena

    def block(self, sizes: Mapping[int, int]) -> dict[int, torch.Tensor]:
        """Allocate host memory for tensors of these sizes (key → bytes) in one block. Raises DeviceError."""
        if not sizes:
            return {}
        ends = np.cumsum([home_bytes(size) for size in sizes.values()]).tolist()
        memory = self._device.host_memory(ends[-1])
        spans = zip(sizes, [0, *ends[:-1]], sizes.values(), strict=True)
        return {tensor: memory[start : start + size] for tensor, start, size in spans}

    @property
    def bytes(self) -> int:
        return self.arena.numel() + sum(home_bytes(home.numel()) for home in self.homes.values())

    @property
    def memory(self) -> list[torch.Tensor]:
        """The arena and all homes."""
        return [self.arena, *self.homes.values()]

    def clear(self) -> None:
        self.homes, self.arena = {}, torch.empty(0, dtype=torch.uint8)


def _needs(programs: Iterable[Program]) -> tuple[dict[int, int], int]:
    """Return the sizes of the homes, by key, and of the arena that these programs need."""
    homes: dict[int, int] = {}
    arena = 0
    for program in programs:
        homes |= program.homes
        arena = max(arena, program.arena.bytes)
    return homes, arena


def _touch(memory: torch.Tensor) -> None:
    """Pre-fault the pages, so that the first copy does not pay for it."""
    memory[::PAGESIZE].zero_()
