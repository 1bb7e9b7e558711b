"""Where the host copies of an executor lie.

Persistent tensors are what all graphs of an executor share, so each one that a plan swaps has a place of its own, its
home, whichever graph copies it there. All other copies end with the iteration: they lie in one arena, which the graphs
use in turns, laid out by each plan for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from mmap import PAGESIZE
from typing import NamedTuple

import numpy as np
import torch

from pg_tensile.execution.runtime.compile import Program
from pg_tensile.execution.runtime.device import Device
from pg_tensile.planning.plan.following import home_bytes


class Reserved(NamedTuple):
    """All homes and the arena of programs to come; `here`: the homes in use when it was made."""

    homes: dict[int, torch.Tensor]
    arena: torch.Tensor
    here: dict[int, torch.Tensor]


class HostMemory:
    """The homes, by number of the tensor, and the arena; uint8[bytes] each."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.homes: dict[int, torch.Tensor] = {}
        self.arena = torch.empty(0, dtype=torch.uint8)

    def reserve(self, programs: Iterable[Program], earlier: Reserved | None = None) -> Reserved:
        """What these programs need: what is here, what an earlier call has reserved, and what is new, the pages of
        which have been touched: that takes a second for some GiB. From any thread. Raises DeviceError."""
        here, arenas = self.homes, [self.arena, *([earlier.arena] if earlier else [])]
        wanted, size = _needs(programs)
        homes = {**(earlier.homes if earlier else {}), **here}
        new = self.block({tensor: size for tensor, size in wanted.items() if tensor not in homes})
        arena = next((each for each in arenas if each.numel() == size), None)
        if arena is None:
            arena = self._device.host_memory(size)
            _touch(arena)
        for home in new.values():
            _touch(home)
        homes |= new
        return Reserved({tensor: homes[tensor] for tensor in wanted}, arena, here)

    def provide(self, programs: Iterable[Program], reserved: Reserved | None = None) -> None:
        """Takes what these programs need, `reserved` for them if it is, and lets the rest go; a copy in a home that
        goes stays as long as it is used. Raises DeviceError, nothing changed then."""
        if reserved is None or reserved.here is not self.homes:
            reserved = self.reserve(programs, reserved)
        self.homes, self.arena = reserved.homes, reserved.arena

    def block(self, sizes: Mapping[int, int]) -> dict[int, torch.Tensor]:
        """Memory for tensors of these sizes, in one piece. Raises DeviceError."""
        if not sizes:
            return {}
        ends = np.cumsum([home_bytes(size) for size in sizes.values()]).tolist()
        memory = self._device.host_memory(ends[-1])
        starts = [0, *ends[:-1]]
        return {tensor: memory[at : at + size] for (tensor, size), at in zip(sizes.items(), starts, strict=True)}

    @property
    def bytes(self) -> int:
        return self.arena.numel() + sum(home_bytes(home.numel()) for home in self.homes.values())

    @property
    def memory(self) -> list[torch.Tensor]:
        """All of it."""
        return [self.arena, *self.homes.values()]

    def clear(self) -> None:
        self.homes, self.arena = {}, torch.empty(0, dtype=torch.uint8)


def _needs(programs: Iterable[Program]) -> tuple[dict[int, int], int]:
    """The sizes of the homes and of the arena that these programs need."""
    homes: dict[int, int] = {}
    arena = 0
    for program in programs:
        homes |= program.homes
        arena = max(arena, program.arena.bytes)
    return homes, arena


def _touch(memory: torch.Tensor) -> None:
    """Has the kernel give the pages now, which else happens under the first copy."""
    memory[::PAGESIZE].zero_()
