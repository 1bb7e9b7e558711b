"""Recovery of an executor's tensors after a failed or interrupted move; weights that it has spoilt are refused."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

from pg_tensile.errors import ExecutorError, OutOfDeviceMemoryError
from pg_tensile.execution.runtime.device import Device, iteration_context, quiesce
from pg_tensile.execution.runtime.loaded_graph import Graph
from pg_tensile.execution.runtime.loop import Loop
from pg_tensile.execution.runtime.program import Program
from pg_tensile.execution.runtime.registry import Registry
from pg_tensile.execution.runtime.state import State
from pg_tensile.execution.runtime.swapper import Swapper


class Recovery:
    """Guard of the code that moves one executor's tensors.

    `poison` is why the weights must not be used; None if they may."""

    def __init__(self, device: Device, loop: Loop, registry: Registry, swapper: Swapper, state: State) -> None:
        self.poison: str | None = None
        self._device = device
        self._loop = loop
        self._registry = registry
        self._swapper = swapper
        self._state = state
        self._graph: Graph | None = None  # inside the guard; kept if recovering from a failure was interrupted

    @contextlib.contextmanager
    def guard(
        self, graph: Graph, program: Program | None = None, timed: bool = False, gradients: bool = True
    ) -> Iterator[None]:
        """Enter `iteration_context` for code that moves tensors of a graph, in a program other than the steady one if
        given.

        After an exception every tensor is in a known state, and no frame of the exception keeps one alive."""
        self._loop.step, self._graph = 0, graph
        error: BaseException | None = None
        try:
            with iteration_context(self._device, timed, gradients):
                yield
        except BaseException as raised:
            traceback.clear_frames(raised.__traceback__)
            error = self._explain(raised, program or graph.program)
        if error is not None:
            self.complete()
            raise error
        self._graph = None

    def _explain(self, raised: BaseException, program: Program) -> BaseException:
        step = self._loop.step
        label = program.operator_label(step)
        if self._device.is_out_of_memory(raised) and not isinstance(raised, OutOfDeviceMemoryError):
            error = OutOfDeviceMemoryError(label, program.work(step).bytes, self._registry.in_use, None)
            error.__cause__ = raised
            return error
        if not isinstance(raised, OutOfDeviceMemoryError):
            raised.add_note(f"in {label} of an iteration under plan {program.sequence.plan.generation}")
        return raised

    def complete(self) -> None:
        """Drop the tensors of a failed iteration and leave each persistent tensor whole, on the device or the host.

        Does nothing unless there was a failure, whose recovery may have been interrupted."""
        graph, swapper = self._graph, self._swapper
        if graph is None:
            return
        quiesce(self._device)
        with iteration_context(self._device):
            swapper.settle()
        graph.forget_values()
        sizes = self._state.sizes
        swapper.shells = {tensor: shell for tensor, shell in swapper.shells.items() if tensor in sizes}
        swapper.copies = {tensor: copy for tensor, copy in swapper.copies.items() if tensor in swapper.shells}
        self._registry.replace({tensor: sizes[tensor] for tensor in sizes if tensor not in swapper.shells})
        if self._loop.step >= graph.program.first_change:
            self.poison = f"an iteration stopped at {graph.program.operator_label(self._loop.step)}"
        if swapper.shells.keys() - swapper.copies.keys():
            self.poison = "the plan has lost a tensor"
        self._state.settled_for = self._graph = None

    def check(self) -> None:
        """Complete an interrupted recovery. Raises ExecutorError if the weights must not be used."""
        self.complete()
        if self.poison is not None:
            hint = "Restore the last checkpoint with load_state_dict()."
            raise ExecutorError(f"the weights are a mixture of two steps: {self.poison}", hint)
