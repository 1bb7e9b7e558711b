"""Executor: runs captured graphs under plans, iteration after iteration (the Executor of TENSILE, section III).

The host device and CUDA share one loop.

- The graphs of one executor (a training step, the same for the last, smaller batch, an evaluation) share their
  persistent tensors and one budget, and run one at a time; each has a plan of its own.
- Plan and graph change between two iterations only. The first iteration after a change starts from the current state:
  tensors that its plan expects on the host are copied out first, missing ones are swapped in passively while it runs.
  Persistent tensors that a graph does not use stay where they are, unless the budget needs their memory.
- While an executor has a model, it owns the model's parameters and buffers: `resident()` lends them out, `close()`
  gives them back.
- An iteration that fails or is interrupted before it has changed a persistent tensor leaves the state of the previous
  one, so the next step may be taken. A later failure leaves the weights a mixture of two steps; the executor then
  raises ExecutorError until `load_state_dict`.
- The random number generator is the device's global one. A failed iteration does not restore its state.

Methods may be called from several threads; they wait for the current step, except `change_plan`, which never does.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from pg_tensile.errors import CheckpointError, ExecutorError, OutOfDeviceMemoryError
from pg_tensile.execution.capture.captured import Captured
from pg_tensile.execution.runtime.accelerator import AcceleratorDevice
from pg_tensile.execution.runtime.device import Device, check_budget, iteration_context, quiesce
from pg_tensile.execution.runtime.functions import make_feed, takes
from pg_tensile.execution.runtime.host_memory import HostMemory
from pg_tensile.execution.runtime.inspection import Inspection
from pg_tensile.execution.runtime.loaded_graph import Graph
from pg_tensile.execution.runtime.loop import Loop
from pg_tensile.execution.runtime.measure import Measurement
from pg_tensile.execution.runtime.memory_flow import MemoryFlow, Requests
from pg_tensile.execution.runtime.metering import Meters, SparsitySamples
from pg_tensile.execution.runtime.plan_change import Changes, Transitions, follow
from pg_tensile.execution.runtime.program import Program
from pg_tensile.execution.runtime.record import Counters, IterationRecord, make_record
from pg_tensile.execution.runtime.recovery import Recovery
from pg_tensile.execution.runtime.registry import Registry
from pg_tensile.execution.runtime.replay import Replays
from pg_tensile.execution.runtime.state import State, TrainingState
from pg_tensile.execution.runtime.swapper import Swapper
from pg_tensile.execution.runtime.verify import Verifier
from pg_tensile.planning.compression.sparsity import Statistics
from pg_tensile.planning.device.profile import Direction
from pg_tensile.planning.memory_flow.groups import Group
from pg_tensile.planning.plan.plan import NO_EVENTS, Boundary, Plan
from pg_tensile.planning.trace.trace import Trace


class StepResult(NamedTuple):
    """The loss and the outputs of a step, on the device; owned by the caller."""

    loss: torch.Tensor
    outputs: tuple[torch.Tensor, ...]


class EvaluationResult(NamedTuple):
    """The loss (None if it was not captured) and the outputs, on the device; owned by the caller."""

    loss: torch.Tensor | None
    outputs: tuple[torch.Tensor, ...]


class Executor:
    """Executor of `captured` on `device` with the weights of `model`, which it holds until `close()`.

    `recording` switches the recording of the next iterations on or off; `record` is the last one recorded. `counters`
    are totals over all graphs. Every `measure_every` iterations of a graph, its latencies are measured, and its
    workspaces once; None means only after a call of `measure()`. With `device_graphs`, iterations are captured and
    replayed where plan and device allow it (replay.py). Where a method takes a graph, None means the first, that of
    `captured`; `step` and `evaluate` choose one by the inputs instead. With `groups`, the memory of the plan flows: it
    is asked for with `requests` before each group of an iteration of the first graph, and for a whole iteration else.
    Raises InvalidPlanError, OutOfDeviceMemoryError and ExecutorError; the model is then left as it was."""

    def __init__(
        self,
        captured: Captured,
        model: nn.Module,
        device: Device,
        plan: Plan = NO_EVENTS,
        measure_every: int | None = None,
        device_graphs: bool = False,
        groups: Sequence[Group] = (),
        requests: Requests | None = None,
    ) -> None:
        self.recording = False
        self.record: IterationRecord | None = None
        self.counters = Counters()
        self._lock = threading.RLock()
        self._closed = self._lending = False
        self._device = device
        self._measure_every = measure_every
        self._graphs: list[Graph] = []
        self._host = HostMemory(device)
        self._registry = Registry(device.budget_bytes, device.limit_memory)
        self._swapper = Swapper(device, self._registry)
        self._state = State(model, device, self._swapper, self._registry)
        self._flow = MemoryFlow(self._registry, requests)
        self._loop = Loop(device, self._host, self._registry, self._swapper, self._flow)
        self._replays: Replays | None = None
        if device_graphs and isinstance(device, AcceleratorDevice):
            self._replays = Replays(device, self._host, self._registry, self._swapper, self._loop)
        self._recovery = Recovery(device, self._loop, self._registry, self._swapper, self._state)
        self._changes = Changes(self._graphs, self._host, self._registry, self._state)
        self._transitions = Transitions(self._swapper, self._registry, self._host, self._state, self._recovery)
        self._sparsity = SparsitySamples(self._swapper)
        try:
            self._current = self._join(captured, plan, groups)  # the graph that is running, or ran last
        except BaseException:
            self.close()
            raise
        self._state.settled_for = self._current

    # ---- graphs ----

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The graph given to the constructor, then those added."""
        return tuple(self._graphs)

    def add(self, captured: Captured, plan: Plan | None = None) -> Graph:
        """Add another graph of the same model: a step of another batch shape, an evaluation.

        With `plan` None the graph follows the first one: its plan has the boundary state of the first graph's plan and
        changes with it. It is the same plan if both graphs have the same structure, else one that swaps in each tensor
        that is off the device when it is needed (following.py). Persistent tensors that no graph has used so far are
        put on the host. Raises InvalidPlanError, DeviceError, and ExecutorError if the graph was captured from another
        model; the executor then stays as it was."""
        with self._lock, self._changes.none_asked():
            self._check_usable()
            self._changes.take_over()
            return self._join(captured, plan)

    def _join(self, captured: Captured, plan: Plan | None, groups: Sequence[Group] = ()) -> Graph:
        if self._graphs:
            with self._recovery.guard(self._current):
                self._drop_device_graphs()
        graph = Graph(captured, self._device, self._state.number(captured), self._lock)
        if plan is None:
            self._changes.activate(graph, follow(graph, self._graphs[0].program.sequence), follows=True)
        else:
            self._changes.activate(graph, plan, groups=groups)
        persistents = {graph.keys[persistent.tensor]: persistent.tensor for persistent in captured.persistents}
        if not self._graphs:
            wanted, memory = Boundary(graph.program.device, graph.program.host), self._host.homes
        else:
            new = persistents.keys() - self._state.sizes.keys()
            sizes = {key: int(captured.trace.tensor_bytes[persistents[key]]) for key in sorted(new)}
            wanted, memory = Boundary(frozenset(), frozenset(new)), self._host.block(sizes)
        with iteration_context(self._device):
            self._state.load(graph, wanted, memory)
        self._graphs.append(graph)
        return graph

    def _choose(
        self, graph: Graph | None, trains: bool, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> Graph:
        """Return `graph` if given, else the first graph of the kind that the inputs fit, else the first of the kind."""
        candidates = [candidate for candidate in self._graphs if candidate.captured.trains == trains]
        if graph is not None and graph not in candidates:
            raise ExecutorError(f"the graph is not {'a training step' if trains else 'an evaluation'} of this executor")
        if not candidates:
            message = f"the executor has no {'training step' if trains else 'evaluation'}"
            raise ExecutorError(message, hint=f"Add what capture{'' if trains else '_evaluation'}() returns.")
        if graph is not None or len(candidates) == 1:
            return graph or candidates[0]
        fitting = (candidate for candidate in candidates if takes(candidate.captured, inputs, targets))
        return next(fitting, candidates[0])

    @property
    def plan(self) -> Plan:
        """The first graph's plan in force: that of its last step, or of its first step if none was taken yet."""
        return self._graphs[0].plan

    @property
    def host_bytes(self) -> int:
        """The host memory that the plans take (following.py, `host_bytes`), without the copies of tensors that were
        swapped out to make room for another graph."""
        return self._host.bytes

    @property
    def budget_bytes(self) -> int | None:
        """The current limit of the executor's device memory, workspaces included; None means only the hardware's."""
        return self._registry.budget_bytes

    @property
    def device_bytes(self) -> int:
        """The bytes on the device now, without workspaces. May be read from any thread."""
        return self._registry.in_use

    @property
    def trace(self) -> Trace:
        """The first graph's trace, with sizes corrected by the first execution and with the measurements so far."""
        return self._graphs[0].trace

    # ---- steps ----

    def step(
        self,
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor] = (),
        learning_rate: float | None = None,
        graph: Graph | None = None,
        share: float | None = None,
    ) -> StepResult:
        """Take one training step with `graph`, by default the first one that the inputs fit.

        `learning_rate` None means the captured one. `share`: the rank's part of the batch's rows, if the step has
        ranks; None means an equal one. All ranks take the step, and one that fails must not repeat it alone.

        Raises ExecutorError if the inputs are not as captured, OutOfDeviceMemoryError before anything is executed if
        the plan's memory exceeds the budget, and any error of an operator, with a note that names the operator."""
        graph = self._choose(graph, True, inputs, targets)
        loss, *outputs = self._execute(graph, make_feed(graph.captured, inputs, targets, learning_rate, share))
        return StepResult(loss, tuple(outputs))

    def evaluate(
        self, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor] = (), graph: Graph | None = None
    ) -> EvaluationResult:
        """Run one evaluation with `graph`, by default the first one that the inputs fit. Raises as `step` does."""
        graph = self._choose(graph, False, inputs, targets)
        returned = self._execute(graph, make_feed(graph.captured, inputs, targets, None))
        loss = None if graph.captured.loss is None else returned.pop(0)
        return EvaluationResult(loss, tuple(returned))

    def _execute(self, graph: Graph, feed: list[torch.Tensor]) -> list[torch.Tensor]:
        """Execute one iteration and return the copies that the output operator made."""
        values, functions = graph.values, graph.functions
        with self._lock:
            self._check_usable()
            started = time.perf_counter()
            self._swapper.forget_transfers()
            self._changes.take_over()
            self._current = graph
            program = self._transitions.next_program(graph)
            self._transitions.make_room(graph)
            values[functions.feed : functions.returned] = feed
            feed.clear()  # drops this reference: the placeholder consumes the tensors
            verifier = None
            if not graph.verified:
                verifier = Verifier(graph, self._device.torch_device, self._registry, self._swapper)
            samples: list[int] | None = [] if self.recording else None
            in_groups = graph is self._graphs[0] and program is graph.program and verifier is None
            try:
                with self._flow.iteration(self._graphs[0].program, in_groups):
                    self._iterate(graph, program, verifier, samples)
            except OutOfDeviceMemoryError:  # the next plan is made with the sizes that were found until then
                self._correct(graph, {} if verifier is None else verifier.sizes)
                raise
            returned = values[functions.returned :]
            values[functions.returned :] = [None] * len(returned)
            self._finish(graph, program, samples, started)
            if verifier is not None:
                graph.verified = True
                self._correct(graph, verifier.sizes)
            return returned

    def _check_usable(self) -> None:
        if self._closed:
            raise ExecutorError("the executor is closed")
        if self._lending:
            raise ExecutorError("the model is lent out", hint="Leave `with executor.resident():` first.")
        self._recovery.check()

    def _iterate(self, graph: Graph, program: Program, verifier: Verifier | None, samples: list[int] | None) -> None:
        """Run one iteration. An error is raised again once the executor has recovered from it."""
        self._sparsity.begin(graph is self._graphs[0] and verifier is None)
        meter = graph.meters.next() if verifier is None else None
        guard = self._recovery.guard(graph, program, samples is not None, graph.captured.trains)
        with guard, meter or contextlib.nullcontext():
            observed = any(watching is not None for watching in (meter, verifier, samples, self._swapper.looks))
            if self._replays is None or not self._replays.run(graph, program, observed):
                self._loop.run(graph, program, meter, verifier, samples)
            self._transitions.settle(graph, program)
        self._sparsity.end()
        if meter is not None:
            graph.meters.add(meter, program.sequence.operators)

    @property
    def captures(self) -> bool:
        """True if iterations are captured as device graphs where they can be."""
        return self._replays is not None

    @property
    def replays(self) -> int:
        """The number of iterations that were replays of a device graph."""
        return 0 if self._replays is None else self._replays.count

    @property
    def obstacle(self) -> str | None:
        """Why the current iterations are not captured as a device graph; None if they are, may be, or need not be."""
        return None if self._replays is None else self._replays.obstacle

    def _drop_device_graphs(self, stays: bool = True) -> None:
        if self._replays is not None:
            self._replays.drop(stays)

    def _finish(self, graph: Graph, program: Program, samples: list[int] | None, started: float) -> None:
        """Count the iteration, record it if the footprints of its steps are given, and schedule measurements."""
        swapper, loop, workspace = self._swapper, self._loop, graph.meters.workspace_bytes
        if samples is not None:
            self._device.synchronize()
            self._device.finish_times()
        self.counters.add(swapper.moved, swapper.waited, program.recomputes, loop.peak_bytes, loop.device_peak_bytes)
        self.counters.memory_wait_us += self._flow.waited_us
        self._registry.settle()
        if samples is not None:
            step_us = (time.perf_counter() - started) * 1e6
            transition = program is not graph.program
            self.record = make_record(
                program.sequence, transition, samples, workspace, graph.numbers, swapper.moved, swapper.waited, step_us
            )
        graph.iterations += 1
        if self._measure_every and graph.iterations % self._measure_every == 0:
            graph.meters.ask(again=True)
        graph.meters.collect(wait=False)

    def _correct(self, graph: Graph, sizes: Mapping[int, int]) -> None:
        """Correct the graph's trace by the tensor sizes found in its first execution, and compile its plan again."""
        if sizes:
            graph.captured = graph.functions.captured = graph.captured.with_tensor_bytes(sizes)
            graph.meters = Meters(self._device, graph.captured.trace)
            compiled = graph.compiled
            self._changes.activate(graph, compiled.plan, compiled.follows, compiled.program.groups)

    # ---- plans ----

    def change_plan(
        self,
        plan: Plan,
        graph: Graph | None = None,
        budget_bytes: int | None = None,
        groups: Sequence[Group] = (),
    ) -> None:
        """Change a graph's plan, and optionally the budget, from the next iteration (of any graph) on.

        `groups` are for the first graph, if the plan's memory flows, and are sized for the budget.

        The plan is compiled here, in the caller's thread. `budget_bytes` is the executor's budget after that iteration,
        during which the larger of the old and the new budget applies; None leaves it unchanged. Of several changes
        before that iteration the last wins, for each graph and for the budget. Raises InvalidPlanError, DeviceError if
        host memory does not suffice for the plan, and ExecutorError if the executor is closed; plan and budget then
        stay as they are."""
        graph = graph or self._graphs[0]
        if graph not in self._graphs:
            raise ExecutorError("the graph is not one of this executor")
        check_budget(budget_bytes)
        if not self._closed:
            self._changes.ask(graph, plan, budget_bytes, self._current, groups)
        if self._closed:  # another thread may have closed it meanwhile
            self._changes.drop()
            raise ExecutorError("the executor is closed")

    # ---- measuring ----

    def measure(self, graph: Graph | None = None, again: bool = False) -> None:
        """Measure latencies in the graph's next iteration, and workspaces in the one after it.

        With `again`, workspaces already measured are skipped, because watching the allocator takes milliseconds, and
        nothing changes while a measurement is pending."""
        (graph or self._graphs[0]).meters.ask(again)

    def measurement(self, graph: Graph | None = None) -> Measurement:
        """Return the measurements so far. Waits for the device if the last iteration was measured."""
        return (graph or self._graphs[0]).measurement()

    def measure_sparsity(self) -> None:
        """Sample every tensor that the first graph's next iteration swaps out (CSWAP, section IV-A).

        The graph's very first iteration, which is verified against the trace, takes no samples."""
        self._sparsity.pending = True

    @property
    def measures_sparsity(self) -> bool:
        """True if the iteration that takes the samples is still to come or has not ended yet."""
        return self._sparsity.pending

    def moved_bytes(self) -> dict[int, int]:
        """Return the bytes that each copy to the host moved in the last iteration, by the tensor's index in the first
        graph; empty if another graph ran."""
        if self._current is not self._graphs[0]:
            return {}
        with self._lock:
            quiesce(self._device)
            return {
                self._current.numbers[tensor]: transfer.bytes
                for _, tensor, _, transfer, _ in self._swapper.moved
                if transfer.direction == Direction.OUT and tensor in self._current.numbers
            }

    def statistics(self) -> dict[int, Statistics]:
        """Return the statistics of the latest samples, by the tensor's index in the first graph; empty before the first
        samples. Waits for the device."""
        with self._lock:
            quiesce(self._device)
            return self._sparsity.statistics(self._graphs[0].numbers)

    def inspect(self) -> Inspection:
        """Return where the tensors are, for tests; valid until the next iteration. A closed executor has none."""
        return Inspection.of(
            self._registry, self._swapper, self._host, self._state, self._changes, self._recovery, self._closed
        )

    # ---- the model and its state ----

    def state_dict(self) -> TrainingState:
        """Return the weights and optimizer state after the last step, copied to the CPU."""
        with self._lock:
            self._check_usable()
            quiesce(self._device)
            with iteration_context(self._device):
                return self._state.read()

    def load_state_dict(self, state: TrainingState) -> None:
        """Continue from `state`. Raises CheckpointError if it does not fit this job; nothing has changed then."""
        with self._lock:
            before, self._recovery.poison = self._recovery.poison, None
            try:
                self._check_usable()
                before, self._recovery.poison = self._recovery.poison, "load_state_dict() was interrupted"
                quiesce(self._device)
                with iteration_context(self._device):
                    self._state.write(state)
            except (CheckpointError, ExecutorError):
                self._recovery.poison = before
                raise
            self._recovery.poison = None

    @contextlib.contextmanager
    def resident(self) -> Iterator[None]:
        """Lend the model out: inside, it is an ordinary model on the device, for validation for example.

        Changes made to its tensors are kept. No step can be taken meanwhile. Raises OutOfDeviceMemoryError if the model
        does not fit."""
        with self._lock:
            self._check_usable()
            with self._recovery.guard(self._current):
                self._drop_device_graphs()
                self._state.lend()
            self._lending = True
            try:
                yield
            finally:
                self._lending = False
                if not self._closed:
                    with self._recovery.guard(self._current):
                        self._state.take_back()

    def close(self) -> None:
        """Give the model back with its values after the last step, on the devices where its tensors were.

        After a failure that left the weights a mixture, the mixture is given back. Optimizer state is dropped; the
        device stays open. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._recovery.complete()
            self._drop_device_graphs(stays=False)
            quiesce(self._device)
            with torch.inference_mode(False), torch.no_grad():
                self._state.give_back()
            self._closed = True
            self._changes.drop()
            for graph in self._graphs:
                graph.values[:] = [None] * len(graph.values)
            self._swapper.clear()
            self._registry.replace({})
            self._host.clear()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_state") and not sys.is_finalizing():  # PyTorch may be unloaded then
            with contextlib.suppress(Exception):
                self.close()
