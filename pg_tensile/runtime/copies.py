"""Where the host copies of an executor lie (design.md section 5, Runtime: "pinned host buffers from an arena").

Persistent tensors are what all graphs of an executor share, so each one that a plan swaps has a place of its own, its
home, whichever graph copies it there. All other copies end with the iteration: they lie in one arena, which the graphs
use in turns, laid out by each plan for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from pg_tensile.reuse import home_bytes
from pg_tensile.runtime.base import Device
from pg_tensile.runtime.program import Program


class HostMemory:
    """The homes, by number of the tensor, and the arena; uint8[bytes] each."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.homes: dict[int, torch.Tensor] = {}
        self.arena = torch.empty(0, dtype=torch.uint8)

    def provide(self, programs: Iterable[Program]) -> None:
        """Takes what these programs need and lets the rest go; a copy in a home that goes stays as long as it is used.
        Raises DeviceError, nothing changed then."""
        programs = tuple(programs)
        wanted: dict[int, int] = {}
        for program in programs:
            wanted |= program.homes
        homes = self.homes | self.block({t: size for t, size in wanted.items() if t not in self.homes})
        size = max(program.arena.bytes for program in programs)
        arena = self.arena if self.arena.numel() == size else self._device.host_memory(size)
        self.homes, self.arena = {tensor: homes[tensor] for tensor in wanted}, arena

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
