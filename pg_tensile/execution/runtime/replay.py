"""Iterations as device graphs: what the host gives to the streams in one iteration, captured once and replayed.

The whole iteration is one graph (on CUDA, a CUDA graph): operators, copies in both directions, and the events that
order them. A replay is one call of the host instead of one for each of these.

The host decides nothing in a graph, and its addresses are fixed; `find_obstacle` says which iterations do not allow
that. Inputs are copied to fixed memory before a replay, results from fixed memory after it. The learning rate is part
of a graph, so another one needs another graph. A persistent tensor that is swapped between two uses in one iteration
may end it at another address than it began it; before a replay it is moved back (relocation.py).

Operators allocate from a pool of the graph's own, which is given back before anything else runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pg_tensile.errors import DeviceFaultError, ExecutorError
from pg_tensile.execution.capture.captured import empty_like_value
from pg_tensile.execution.runtime.compressed_copies import HostCopy
from pg_tensile.execution.runtime.device import quiesce
from pg_tensile.execution.runtime.host_memory import HostMemory
from pg_tensile.execution.runtime.loaded_graph import Graph
from pg_tensile.execution.runtime.loop import Loop
from pg_tensile.execution.runtime.program import Program
from pg_tensile.execution.runtime.registry import Registry
from pg_tensile.execution.runtime.relocation import Relocation
from pg_tensile.execution.runtime.swapper import Moved, Swapper, Waited
from pg_tensile.planning.plan.actions import ActionKind

if TYPE_CHECKING:
    from pg_tensile.execution.runtime.accelerator import AcceleratorDevice

PLAIN_ITERATIONS = 2  # of a program and learning rate before they are captured; plans often change again at once

Key = tuple[Program, float | None]  # a program of the steady state, and the learning rate


class CapturedIteration(NamedTuple):
    """A captured iteration, and what has to stay as it was when it was captured."""

    key: Key
    device_graph: torch.accelerator.Graph | torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]  # fixed memory for what the placeholder receives, in the order of `Captured.given`
    outputs: list[torch.Tensor]  # fixed memory for what the output operator returns
    homes: dict[int, torch.Tensor]  # host memory of each persistent tensor, by key, that is not always on the device
    relocation: Relocation  # of those tensors, back to their addresses at the start
    host_memory: list[torch.Tensor]
    moved: tuple[Moved, ...]
    waited: tuple[Waited, ...]
    step: int  # the loop's results
    peak_bytes: int
    device_peak_bytes: int


class Replays:
    """Device graph of one executor, of one program at a time.

    `obstacle` is why the current program is not captured, None if it is or may be; `count` the number of replays."""

    def __init__(
        self, device: AcceleratorDevice, host: HostMemory, registry: Registry, swapper: Swapper, loop: Loop
    ) -> None:
        self.obstacle: str | None = None
        self.count = 0
        self._device = device
        self._host = host
        self._registry = registry
        self._swapper = swapper
        self._loop = loop
        self._captured: CapturedIteration | None = None
        self._key: Key | None = None  # of the last iteration that was not observed
        self._plain = 0  # iterations with that key

    def run(self, graph: Graph, program: Program, observed: bool) -> bool:
        """Replay an iteration, capturing it first if it is time; return False if the loop has to run it.

        `observed`: the iteration is measured, recorded or verified, which only the loop can do."""
        key = (program, _learning_rate(graph))
        if observed or self._captured is None or self._captured.key != key:
            self.drop()
            if observed or program is not graph.program or not self._is_due(key):
                return False
            self.obstacle = find_obstacle(graph, program, self._swapper.copies, self._registry.limit)
            if self.obstacle is None:
                self._capture(graph, key)
        if self._captured is None:
            return False
        self._replay(graph, self._captured)
        return True

    def _is_due(self, key: Key) -> bool:
        if key != self._key:
            self._key, self._plain, self.obstacle = key, 0, None
        self._plain += 1
        return self._plain > PLAIN_ITERATIONS and self.obstacle is None

    # ---- capturing ----

    def _capture(self, graph: Graph, key: Key) -> None:
        """Capture the iteration, or set `obstacle`: some operators wait for the device, which a graph cannot.

        The graph's pool may be used by this iteration only, so tensors that leave it or enter it begin it there."""
        values, functions, registry, swapper = graph.values, graph.functions, self._registry, self._swapper
        given = values[functions.feed : functions.returned]
        homes = {tensor: self._host.homes[tensor] for tensor in moved_within(key[0])}
        self._send_away(homes)
        before = dict(swapper.copies), dict(swapper.shells), dict(registry.resident)
        error: BaseException | None = None
        try:
            self._captured = self._captured_iteration(graph, key, homes)
            for tensor, home in homes.items():
                swapper.refill(tensor, home)
        except BaseException as raised:
            error = raised.with_traceback(None)  # the traceback's frames keep tensors alive
            graph.forget_values()
            swapper.restore(*before[:2])
            registry.replace(before[2])
        values[functions.feed :] = [*given, *[None] * len(graph.captured.returned)]
        self._loop.step = 0  # nothing was executed
        if error is not None:
            torch.accelerator.empty_cache()
            self._bring_back(homes)
            if isinstance(error, DeviceFaultError) or not isinstance(error, Exception):
                raise error
            self.obstacle = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"

    def _captured_iteration(self, graph: Graph, key: Key, homes: dict[int, torch.Tensor]) -> CapturedIteration:
        captured, values, functions, swapper, loop = (
            graph.captured, graph.values, graph.functions, self._swapper, self._loop,
        )  # fmt: skip
        inputs = [
            values[index] if slot == captured.learning_rate else empty_like_value(captured.values[slot])
            for index, slot in enumerate(captured.given, functions.feed)
        ]
        outputs = [empty_like_value(captured.values[slot]) for slot in captured.returned]
        values[functions.feed : functions.returned] = inputs
        swapper.forget_transfers()
        with self._device.capturing() as device_graph:
            for tensor in homes:
                swapper.allocate(tensor, partial(key[0].operator_label, 0))
                swapper.fill(tensor)
            starts = [swapper.storage(tensor).data_ptr() for tensor in homes]
            loop.run(graph, key[0], None, None, None)
            for index, output in enumerate(outputs, functions.returned):
                output.copy_(values[index])
                values[index] = None
        relocation = Relocation([swapper.storage(tensor) for tensor in homes], starts)
        needed = loop.device_peak_bytes + relocation.scratch_bytes + _fixed_bytes(graph)
        if needed > self._registry.limit:
            raise ExecutorError(_too_large(needed, self._registry.limit))
        return CapturedIteration(
            key, device_graph, inputs, outputs, homes, relocation, self._host.memory, tuple(swapper.moved),
            tuple(swapper.waited), loop.step, loop.peak_bytes, loop.device_peak_bytes,
        )  # fmt: skip

    # ---- replaying ----

    def _replay(self, graph: Graph, captured: CapturedIteration) -> None:
        values, functions, loop = graph.values, graph.functions, self._loop
        for index, target in enumerate(captured.inputs, functions.feed):
            functions.fill(target, values[index])
            values[index] = None
        self._swapper.moved[:], self._swapper.waited[:] = captured.moved, captured.waited
        loop.peak_bytes, loop.device_peak_bytes = captured.peak_bytes, captured.device_peak_bytes
        loop.step = captured.step  # from here on the weights may have changed
        captured.relocation.run()
        captured.device_graph.replay()
        values[functions.returned :] = [output.clone() for output in captured.outputs]
        self.count += 1

    # ---- the end ----

    def drop(self, stays: bool = True) -> None:
        """Give the graph and its memory back. If the executor `stays`, tensors in its pool leave it first."""
        captured, self._captured = self._captured, None
        if captured is None:
            return
        with contextlib.suppress(RuntimeError):  # after a fault of the device every call raises
            quiesce(self._device)
        inside = {tensor: home for tensor, home in captured.homes.items() if tensor in self._registry.resident}
        if stays:
            self._send_away(inside)
        captured.inputs.clear()
        captured.outputs.clear()
        with contextlib.suppress(RuntimeError):
            captured.device_graph.reset()
            torch.accelerator.empty_cache()
        if stays:
            self._bring_back(inside)

    def _send_away(self, homes: Mapping[int, torch.Tensor]) -> None:
        """Swap persistent tensors out, with a copy in their homes (by key)."""
        for tensor, home in homes.items():
            copy = self._swapper.copies.get(tensor)
            if copy is None or copy.memory is not home:
                self._swapper.copy_out(tensor, home)
                self._swapper.wait_out(tensor)
            self._swapper.empty(tensor)

    def _bring_back(self, tensors: Mapping[int, torch.Tensor]) -> None:
        for tensor in tensors:
            self._swapper.bring_in(tensor, lambda: "leaving a device graph")


def moved_within(program: Program) -> list[int]:
    """Return the persistent tensors, by key, that are on the device between two iterations, but not all the time."""
    freed = (ActionKind.FREE, ActionKind.WAIT_OUT)
    return sorted({i.tensor for i in program.instructions if i.code in freed and i.tensor in program.device})


def find_obstacle(graph: Graph, program: Program, copies: Mapping[int, HostCopy], limit: float) -> str | None:
    """Return why an iteration cannot be a device graph, or None.

    `copies` are the host copies at its start by key, `limit` the device memory in bytes that it may take."""
    captured, sequence = graph.captured, program.sequence
    trace = captured.trace
    if any(instruction.codec for instruction in program.instructions) or any(copy.chunks for copy in copies.values()):
        return "the host decides how many bytes of a compressed copy move"
    random = np.array([operator.random for operator in trace.operators])
    if random[sequence.operators[sequence.step_event >= 0]].any():
        return "the host sets the state of the random number generator for operators that are recomputed"
    for slot, value in enumerate(captured.values):
        if value.device.type == "cpu" and slot != captured.learning_rate:
            return f"the host computes with {trace.tensor_label(value.tensor)}"
    needed = program.device_peak_bytes(graph.meters.workspace_bytes) + _fixed_bytes(graph)
    return _too_large(needed, limit) if needed > limit else None


def _fixed_bytes(graph: Graph) -> int:
    """Return the bytes of the fixed memory for inputs and results."""
    captured = graph.captured
    return sum(
        int(captured.trace.tensor_bytes[captured.values[s].tensor]) for s in (*captured.given, *captured.returned)
    )


def _too_large(needed: int, limit: float) -> str:
    return f"with fixed memory for inputs and results it takes {needed:,} bytes, more than the {int(limit):,} granted"


def _learning_rate(graph: Graph) -> float | None:
    """Return the learning rate that the placeholder is about to receive; None for an evaluation."""
    if graph.captured.learning_rate is None:
        return None
    rate: torch.Tensor = graph.values[graph.functions.returned - 1]
    return rate.item()
