"""Moves between two iterations: into the state that the next one starts from, and to make room for it.

Called inside the executor's context, in the executing thread. Tensors are given by key.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pg_tensile.execution.runtime.compile import Program
from pg_tensile.execution.runtime.host_memory import HostMemory
from pg_tensile.execution.runtime.registry import Registry
from pg_tensile.execution.runtime.swapper import Swapper


def move_to(program: Program, swapper: Swapper, registry: Registry, host: HostMemory) -> None:
    """Approach the program's boundary state without swapping anything in.

    Copies out the tensors that the plan expects on the host between two iterations, and frees those that it expects off
    the device."""
    _copy_out(swapper, {tensor: host.homes[tensor] for tensor in sorted(program.host - swapper.copies.keys())})
    for tensor in sorted(registry.resident.keys() & program.away):
        swapper.empty(tensor)


def send_away(sizes: Mapping[int, int], enough: int, swapper: Swapper, host: HostMemory) -> None:
    """Swap out tensors (key → bytes) until `enough` bytes are free: first those that need no copy, then the largest."""
    going: list[int] = []
    for tensor in sorted(sizes, key=lambda tensor: (tensor not in swapper.copies, -sizes[tensor])):
        if enough <= 0:
            break
        going.append(tensor)
        enough -= sizes[tensor]
    _copy_out(swapper, host.block({tensor: sizes[tensor] for tensor in going if tensor not in swapper.copies}))
    for tensor in going:
        swapper.empty(tensor)


def _copy_out(swapper: Swapper, targets: Mapping[int, torch.Tensor]) -> None:
    for tensor, target in targets.items():
        swapper.copy_out(tensor, target)
    for tensor in targets:
        swapper.wait_out(tensor)
