"""Inspection of an executor's memory, for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from pg_tensile.execution.runtime.compressed_copies import HostCopy
from pg_tensile.execution.runtime.host_memory import HostMemory
from pg_tensile.execution.runtime.plan_change import Changes
from pg_tensile.execution.runtime.recovery import Recovery
from pg_tensile.execution.runtime.registry import Registry
from pg_tensile.execution.runtime.state import State
from pg_tensile.execution.runtime.swapper import Shell, Swapper


class Inspection(NamedTuple):
    """Locations of an executor's tensors between two iterations; tensors are given by key (`Graph.keys`)."""

    resident: Mapping[int, int]  # bytes of the tensors on the device
    persistents: Mapping[int, torch.Tensor]  # the first value of each; its storage is empty if it is off the device
    shells: Mapping[int, Shell]  # what is kept of the tensors off the device
    copies: Mapping[int, HostCopy]  # current host copies
    homes: Mapping[int, torch.Tensor]  # host memory of the tensors that plans swap
    host_memory: Sequence[torch.Tensor]  # all homes and the arena
    read: Callable[[int], torch.Tensor]  # returns a copy of a persistent tensor on the CPU
    changes: Changes
    poison: str | None  # why the weights must not be used

    @staticmethod
    def of(
        registry: Registry,
        swapper: Swapper,
        host: HostMemory,
        state: State,
        changes: Changes,
        recovery: Recovery,
        closed: bool,
    ) -> Inspection:
        return Inspection(
            registry.resident,
            {key: swapper.value(key) for key in ({} if closed else state.sizes)},
            swapper.shells,
            swapper.copies,
            host.homes,
            host.memory,
            state.read_tensor,
            changes,
            recovery.poison,
        )
