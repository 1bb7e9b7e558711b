"""The executor's loop: executes the instructions of a program, once per iteration.

It is the same for both devices and for every plan: the program holds what happens and in which order, the swapper and
the device implement it.
"""

from __future__ import annotations

from functools import partial

import torch

from pg_tensile.execution.runtime.device import Device
from pg_tensile.execution.runtime.host_memory import HostMemory
from pg_tensile.execution.runtime.loaded_graph import Graph
from pg_tensile.execution.runtime.measure import Meter
from pg_tensile.execution.runtime.memory_flow import MemoryFlow
from pg_tensile.execution.runtime.program import BEGIN_GROUP, Program
from pg_tensile.execution.runtime.registry import Registry
from pg_tensile.execution.runtime.swapper import Swapper
from pg_tensile.execution.runtime.verify import Verifier
from pg_tensile.planning.plan.actions import ActionKind


class Loop:
    """The loop of one executor.

    After an iteration, successful or not, `step` is the last step begun, and `peak_bytes` and `device_peak_bytes` are
    the iteration's largest footprints up to there, without and with the known workspaces."""

    def __init__(
        self, device: Device, host: HostMemory, registry: Registry, swapper: Swapper, flow: MemoryFlow
    ) -> None:
        self.step = self.peak_bytes = self.device_peak_bytes = 0
        self._device = device
        self._host = host
        self._registry = registry
        self._swapper = swapper
        self._flow = flow

    def run(
        self,
        graph: Graph,
        program: Program,
        meter: Meter | None,
        verifier: Verifier | None,
        samples: list[int] | None,
    ) -> None:
        """Execute the instructions of one iteration; the footprint of each step is appended to `samples`, if given."""
        values, swapper, registry, resident = graph.values, self._swapper, self._registry, self._registry.resident
        workspace, limit = graph.meters.workspace_bytes.tolist(), self._registry.limit - program.staging_bytes
        run, free = ActionKind.RUN, ActionKind.FREE
        step = peak = device_peak = 0
        try:
            for code, step, tensor, work, keeps, event, delay_us, codec in program.instructions:
                if code is run:
                    function, operator, created, size, scratch = work  # type: ignore[misc]
                    total = registry.in_use + size
                    needed = total + workspace[operator]
                    if needed > limit:
                        requested = size + workspace[operator] + program.staging_bytes
                        registry.check(requested, partial(program.operator_label, step))
                    if meter is None:
                        function(values)
                    else:
                        meter.start()
                        function(values)
                        meter.stop()
                    resident.update(created)
                    if verifier is not None:
                        total += verifier.check(operator, created)
                    registry.in_use = total - scratch
                    if total > peak:
                        peak = total
                    if needed > device_peak:
                        device_peak = needed
                    if samples is not None:
                        samples.append(total)
                elif code is free:
                    if keeps:
                        swapper.empty(tensor)
                    else:
                        swapper.drop(tensor)
                elif code == BEGIN_GROUP:
                    self._flow.begin(tensor)
                    limit = registry.limit - program.staging_bytes
                else:
                    self._transfer(program, code, step, tensor, keeps, event, delay_us, codec)
        finally:
            self.step, self.peak_bytes = step, peak
            self.device_peak_bytes = max(peak, device_peak) + program.staging_bytes

    def _transfer(
        self, program: Program, code: int, step: int, tensor: int, keeps: bool, event: int, delay_us: int, codec: int
    ) -> None:
        swapper = self._swapper
        if code is ActionKind.COPY_OUT:
            swapper.copy_out(tensor, self._target(program, tensor, step), step, event, delay_us, codec)
        elif code is ActionKind.WAIT_OUT:
            swapper.wait_out(tensor, step)
            if keeps:
                swapper.empty(tensor)
            else:
                swapper.drop(tensor)
        elif code is ActionKind.WAIT_IN:
            swapper.wait_in(tensor, step)
        elif code is ActionKind.PASSIVE_IN:
            swapper.bring_in(tensor, partial(program.operator_label, step), step)
        else:
            if tensor not in self._registry.resident:  # unless an earlier ALLOCATE made it resident
                swapper.allocate(tensor, partial(program.operator_label, step))
            if code is ActionKind.COPY_IN:
                swapper.copy_in(tensor, step, event, delay_us)

    def _target(self, program: Program, tensor: int, step: int) -> torch.Tensor:
        """Return the memory that a host copy goes to: the tensor's home, or its range of the arena.

        New memory is allocated for a copy that only a transition makes, and for a tensor whose real size first shows in
        this iteration."""
        home = self._host.homes.get(tensor)
        if home is not None:
            return home
        size, offset = self._swapper.storage(tensor).nbytes(), program.offsets.get((tensor, step))
        if offset is None or size != program.tensor_bytes[tensor]:
            return self._device.host_memory(size)
        return self._host.arena[offset : offset + size]
