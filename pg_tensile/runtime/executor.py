"""Executes a captured training step under a plan, iteration after iteration (design.md section 5, Runtime; TENSILE's
Executor). One loop for the host device and for CUDA.

- A plan changes between two iterations only. The first iteration of a new plan starts from where the tensors are: what
  the plan expects on the host is copied out first, the rest comes in passively while that iteration runs.
- While an executor has a model, the model's parameters and buffers belong to it: `resident()` lends them out,
  `close()` gives them back.
- An iteration that fails, or is interrupted, before it has changed a persistent tensor leaves the state of the last
  one: the next step may be taken. After that the weights are a mixture, and the executor says so until
  `load_state_dict`.
- The random number generator is the device's global one. A failed iteration does not put it back.

Methods may be called from several threads; they wait for the step under way, except `change_plan`, which never waits.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from pg_tensile.capture.captured import Captured
from pg_tensile.errors import CheckpointError, ExecutorError, LinkError, OutOfDeviceMemoryError
from pg_tensile.peak import host_arena
from pg_tensile.plan import NO_EVENTS, Boundary, Plan, validate
from pg_tensile.runtime.base import Device
from pg_tensile.runtime.measure import Measurement, Meter
from pg_tensile.runtime.meters import Meters
from pg_tensile.runtime.program import Active, Code, Functions, Program, Values, compile_program, make_feed
from pg_tensile.runtime.record import Counters, IterationRecord, make_record
from pg_tensile.runtime.registry import Registry
from pg_tensile.runtime.state import State, TrainingState
from pg_tensile.runtime.swapper import Swapper
from pg_tensile.runtime.verify import Verifier
from pg_tensile.sequence import AccessSequence
from pg_tensile.trace import Trace


class StepResult(NamedTuple):
    """The loss and the outputs of a step, on the device; the caller's own."""

    loss: torch.Tensor
    outputs: tuple[torch.Tensor, ...]


class Executor:
    """Runs `captured` on `device` with the weights of `model`, which it holds until `close()`.

    `recording`: whether the next iterations are recorded; `record`: the last one that was. `counters`: totals.
    `measure_every`: latencies and workspaces are measured in that rhythm, None: when `measure()` is called.
    Raises InvalidPlanError, OutOfDeviceMemoryError, ExecutorError; the model is left as it was."""

    def __init__(
        self,
        captured: Captured,
        model: nn.Module,
        device: Device,
        plan: Plan = NO_EVENTS,
        measure_every: int | None = None,
    ) -> None:
        self.recording = False
        self.record: IterationRecord | None = None
        self.counters = Counters()
        self._lock = threading.RLock()
        self._captured = captured
        self._device = device
        self._measure_every = measure_every
        self._meters = Meters(device, captured.trace)
        self._functions = Functions(captured, device)
        self._values: Values = [None] * self._functions.size
        self._registry = Registry(device.budget_bytes)
        self._swapper = Swapper(device, self._registry, self._values, self._functions.slots)
        self._closed = self._lending = self._iterating = self._displaced = self._failed = self._verified = False
        self._poison: str | None = None  # why the weights are not to be used
        self._pending: Plan | None = None
        self._samples: list[int] | None = None
        self._at = self._peak = 0
        self._fits: Program | None = None  # the program last held against the budget
        self._active = self._activate(plan)
        self._state = State(captured, model, device, self._swapper, self._registry, self._values)
        try:
            with self._context():
                boundary = self._active.program.sequence.boundary
                self._state.load(self._functions, boundary, self._active.boundary_places())
        except BaseException:
            self.close()
            raise

    @property
    def plan(self) -> Plan:
        """The plan of the last step, or of the first one to come."""
        return self._active.plan

    @property
    def trace(self) -> Trace:
        """The trace, with sizes corrected by the first execution and with what has been measured."""
        return self.measurement().apply(self._captured.trace)

    # ---- steps ----

    def step(
        self,
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor] = (),
        learning_rate: float | None = None,
    ) -> StepResult:
        """One training step. `learning_rate`: None is the captured one. Raises ExecutorError on inputs that are not as
        captured, OutOfDeviceMemoryError before anything is executed if the plan's memory exceeds the budget, and what
        an operator raises, with a note that names it."""
        feed = make_feed(self._captured, inputs, targets, learning_rate)
        with self._lock:
            self._check_usable()
            started = time.perf_counter()
            self._swapper.forget_transfers()
            program, transition = self._next_program()
            self._check_budget(program)
            self._values[self._functions.feed : self._functions.taken] = feed
            del feed  # the placeholder takes it
            verifier = None if self._verified else self._make_verifier()
            self._iterate(program, verifier)
            loss, *outputs = self._values[self._functions.taken :]
            self._values[self._functions.taken :] = [None] * (1 + len(outputs))
            self._finish(program, transition, started)
            if verifier is not None:
                self._verified = True
                self._correct(verifier.sizes)
            return StepResult(loss, tuple(outputs))

    def _check_usable(self) -> None:
        if self._closed:
            raise ExecutorError("the executor is closed")
        if self._lending:
            raise ExecutorError("the model is lent out", hint="Leave `with executor.resident():` first.")
        if self._iterating:  # an interrupt came while another failure was dealt with
            self._recover()
        if self._poison is not None:
            hint = "Restore the last checkpoint with load_state_dict()."
            raise ExecutorError(f"the weights are a mixture of two steps: {self._poison}", hint)

    def _check_budget(self, program: Program) -> None:
        budget = self._registry.budget_bytes
        if budget is not None and program is not self._fits:
            program.check_budget(budget, self._meters.workspace_bytes)
            self._fits = program

    def _make_verifier(self) -> Verifier:
        device, slots = self._device.torch_device, self._functions.slots
        return Verifier(self._captured, device, slots, self._values, self._registry, self._swapper)

    @contextlib.contextmanager
    def _context(self, timed: bool = False) -> Iterator[None]:
        """Below autograd, but with gradients enabled: recurrent layers return no workspace otherwise. Whatever modes
        the caller is in do not count."""
        with (
            torch.inference_mode(False),
            self._device.iteration(timed),
            torch._C._AutoDispatchBelowAutograd(),
            torch._C._DisableAutocast(),
            torch.enable_grad(),
        ):
            yield

    def _iterate(self, program: Program, verifier: Verifier | None) -> None:
        """One iteration. Raises what goes wrong in it, after everything has been put in order."""
        self._samples = [] if self.recording else None
        meter = self._meters.next() if verifier is None else None
        with self._guarded(program), self._context(self.recording), meter or contextlib.nullcontext():
            self._run(program, meter, verifier)
        if meter is not None:
            self._meters.add(meter, program.sequence.steps)

    def _run(self, program: Program, meter: Meter | None, verifier: Verifier | None) -> None:
        """The loop: executes the instructions of one iteration."""
        values, swapper, registry, resident = self._values, self._swapper, self._registry, self._registry.resident
        workspace, limit, samples = self._meters.workspace_bytes.tolist(), self._registry.limit, self._samples
        run, free = Code.RUN, Code.FREE
        step = peak = 0
        try:
            for code, step, tensor, work, keeps, event, delay_us in program.instructions:
                if code is run:
                    function, operator, created, size, scratch = work  # type: ignore[misc]
                    total = registry.in_use + size
                    if total + workspace[operator] > limit:
                        registry.check(size + workspace[operator], partial(program.operator_label, step))
                    if meter is None:
                        function(values)
                    else:
                        meter.start()
                        function(values)
                        meter.stop()
                    resident.update(created)
                    if verifier is not None:
                        total += verifier.check(operator, created)  # type: ignore[arg-type]
                    registry.in_use = total - scratch
                    if total > peak:
                        peak = total
                    if samples is not None:
                        samples.append(total)
                elif code is free:
                    if keeps:
                        swapper.empty(tensor)
                    else:
                        swapper.drop(tensor)
                else:
                    self._transfer(program, code, step, tensor, keeps, event, delay_us)
        finally:
            self._at, self._peak = step, peak

    def _transfer(
        self, program: Program, code: Code, step: int, tensor: int, keeps: bool, event: int, delay_us: int
    ) -> None:
        swapper = self._swapper
        if code is Code.COPY_OUT:
            swapper.copy_out(tensor, self._target(program, tensor, step), step, event, delay_us)
        elif code is Code.WAIT_OUT:
            swapper.wait_out(tensor, step)
            if keeps:
                swapper.empty(tensor)
            else:
                swapper.drop(tensor)
        elif code is Code.WAIT_IN:
            swapper.wait_in(tensor, step)
        elif code is Code.PASSIVE_IN:
            swapper.bring_in(tensor, partial(program.operator_label, step), step)
        else:
            if tensor not in self._registry.resident:  # not by an ALLOCATE before
                swapper.allocate(tensor, partial(program.operator_label, step))
            if code is Code.COPY_IN:
                swapper.copy_in(tensor, step, event, delay_us)

    def _target(self, program: Program, tensor: int, step: int) -> torch.Tensor:
        """Where a host copy goes: its place in the arena. A copy that only a transition makes has none, nor has a
        tensor whose size shows in this very iteration."""
        size = self._swapper.storage(tensor).nbytes()
        offset = program.places.get((tensor, step))
        if offset is None or size != self._captured.trace.tensor_bytes[tensor]:
            return self._device.host_memory(size)
        return self._active.place(tensor, offset)

    def _finish(self, program: Program, transition: bool, started: float) -> None:
        swapper, persistent = self._swapper, self._captured.trace.persistent
        swapper.shells = {tensor: shell for tensor, shell in swapper.shells.items() if persistent[tensor]}
        if transition:
            self._arrange_copies()
        else:
            swapper.copies = {t: swapper.copies[t] for t in program.sequence.boundary.host}
        if self._samples is not None:
            self._device.synchronize()
            self._device.finish_times()
        self.counters.add(swapper.moved, swapper.waited, program.recomputes, self._peak)
        if self._samples is not None:
            step_us = (time.perf_counter() - started) * 1e6
            workspace = self._meters.workspace_bytes
            self.record = make_record(
                program.sequence, transition, self._samples, workspace, swapper.moved, swapper.waited, step_us
            )
        if self._measure_every and self.counters.iterations % self._measure_every == 0:
            self._meters.ask(again=True)
        self._collect()

    def _correct(self, sizes: Mapping[int, int]) -> None:
        """The trace gets the sizes that its first execution showed."""
        if sizes:
            self._captured = self._functions.captured = self._captured.with_tensor_bytes(sizes)
            self._meters = Meters(self._device, self._captured.trace)
            self._active = self._activate(self.plan)
            self._displaced = True  # the host copies lie where the old arena had them

    # ---- failures ----

    @contextlib.contextmanager
    def _guarded(self, program: Program) -> Iterator[None]:
        """Around what moves tensors: whatever is raised inside leaves every tensor in a known place, and nothing held
        by the frames of the exception."""
        self._at, self._iterating = 0, True
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            traceback.clear_frames(raised.__traceback__)
            error = self._explain(raised, program)
        if error is not None:
            self._recover()
            raise error
        self._iterating = False

    def _explain(self, raised: BaseException, program: Program) -> BaseException:
        label = program.operator_label(self._at)
        if self._device.is_out_of_memory(raised) and not isinstance(raised, OutOfDeviceMemoryError):
            error = OutOfDeviceMemoryError(label, program.work(self._at).bytes, self._registry.in_use, None)
            error.__cause__ = raised
            return error
        if not isinstance(raised, OutOfDeviceMemoryError):
            raised.add_note(f"in {label} of an iteration under plan {self.plan.generation}")
        return raised

    def _recover(self) -> None:
        """After a failed iteration: its tensors go, the persistent ones are on the device or on the host, whole."""
        self._quiesce()
        with self._context():
            self._swapper.settle()
        persistent, swapper, functions = self._captured.trace.persistent, self._swapper, self._functions
        for slot, value in enumerate(self._captured.values):
            if not persistent[value.tensor]:
                self._values[slot] = None
        self._values[functions.feed :] = [None] * (functions.size - functions.feed)
        swapper.shells = {tensor: shell for tensor, shell in swapper.shells.items() if persistent[tensor]}
        swapper.copies = {tensor: copy for tensor, copy in swapper.copies.items() if tensor in swapper.shells}
        sizes = self._captured.trace.tensor_bytes
        here = [each.tensor for each in self._captured.persistents if each.tensor not in swapper.shells]
        self._registry.replace({tensor: int(sizes[tensor]) for tensor in here})
        program = self._active.program
        if self._at >= program.first_change:
            self._poison = f"an iteration stopped at {program.operator_label(self._at)}"
        if swapper.shells.keys() - swapper.copies.keys():
            self._poison = "the plan has lost a tensor"
        self._displaced = self._failed = True
        self._iterating = False

    def _quiesce(self) -> None:
        """Nothing is under way afterwards. A link that is broken or closed moves nothing, so that is no error here."""
        with contextlib.suppress(LinkError):
            self._device.synchronize()

    # ---- plans ----

    def change_plan(self, plan: Plan) -> None:
        """From the next step on. Raises InvalidPlanError at once, and the plan stays. If there is no host memory for
        it, the next step raises DeviceError, and the plan stays as well."""
        validate(self._captured.trace, plan)
        self._pending = plan

    def _activate(self, plan: Plan) -> Active:
        """Compiles a plan and takes its host memory. Raises InvalidPlanError, DeviceError."""
        sequence = AccessSequence(self._meters.clocked(self._captured.trace, plan), plan)
        arena = host_arena(sequence.trace, plan)
        program = compile_program(self._functions, sequence, arena, self._device.runs_ahead)
        return Active(plan, program, self._device.host_memory(arena.bytes))

    def _next_program(self) -> tuple[Program, bool]:
        """The program of the next iteration, and whether it is a transition."""
        plan = self._pending
        if plan is not None or self._failed:
            self._displaced = True  # until the transition is done
            try:
                # After a failure too: the copies of the middle of an iteration lie where its end puts others.
                self._active = self._activate(self.plan if plan is None else plan)
                self._failed = False
            finally:
                if self._pending is plan:  # else there is a newer one already: the next time
                    self._pending = None
        if not self._displaced:
            return self._active.program, False
        steady = self._active.program
        with self._guarded(steady), self._context():
            self._move_to_boundary()
        state = Boundary(frozenset(self._registry.resident), frozenset(self._swapper.copies))
        if state == steady.sequence.boundary:
            self._arrange_copies()
            return steady, False
        sequence = AccessSequence(steady.sequence.trace, self.plan, state, passive=True)
        return compile_program(self._functions, sequence, steady.arena, self._device.runs_ahead), True

    def _move_to_boundary(self) -> None:
        """Copies out what the plan expects on the host, and frees what it expects to be away."""
        wanted, swapper, places = self._active.program.sequence.boundary, self._swapper, self._active.boundary_places()
        missing = sorted(wanted.host - swapper.copies.keys())
        for tensor in missing:
            swapper.copy_out(tensor, places[tensor])
        for tensor in missing:
            swapper.wait_out(tensor)
        for tensor in sorted(self._registry.resident.keys() - wanted.device):
            swapper.empty(tensor)

    def _arrange_copies(self) -> None:
        """After the first iteration of a plan: host copies that come from before move to their places, those that the
        plan does not want go, and with the last of them the old arena."""
        places, copies = self._active.boundary_places(), self._swapper.copies
        moving = [tensor for tensor, place in places.items() if copies[tensor].data_ptr() != place.data_ptr()]
        if moving:
            self._device.synchronize()  # the host itself reads what the link has written, and writes what it has read
        for tensor in moving:
            places[tensor].copy_(copies[tensor])
        self._swapper.copies = places
        self._displaced = False

    # ---- measuring ----

    def measure(self) -> None:
        """The next iteration measures latencies, the one after it workspaces."""
        self._meters.ask()

    def measurement(self) -> Measurement:
        """What has been measured so far. Waits for the device if the last iteration was measured."""
        with self._lock:
            self._collect(wait=True)
            return self._meters.result()

    def _collect(self, wait: bool = False) -> None:
        known = self._meters.workspace_bytes
        self._meters.collect(wait)
        if self._meters.workspace_bytes is not known:
            self._fits = None

    # ---- the model and its state ----

    def state_dict(self) -> TrainingState:
        """Weights and optimizer state after the last step, in memory of their own on the CPU."""
        with self._lock:
            self._check_usable()
            self._quiesce()
            with self._context():
                return self._state.read()

    def load_state_dict(self, state: TrainingState) -> None:
        """Goes on from `state`. Raises CheckpointError if it is not this job's; nothing has changed then."""
        with self._lock:
            before, self._poison = self._poison, None
            try:
                self._check_usable()
                before, self._poison = self._poison, "load_state_dict() was interrupted"
                self._quiesce()
                with self._context():
                    self._state.write(state)
            except (CheckpointError, ExecutorError):
                self._poison = before
                raise
            self._poison = None

    @contextlib.contextmanager
    def resident(self) -> Iterator[None]:
        """Inside, the model is an ordinary one on the device, for validation for example; what is changed in its
        tensors counts. No step can be taken meanwhile. Raises OutOfDeviceMemoryError if the model does not fit."""
        with self._lock:
            self._check_usable()
            steady = self._active.program
            with self._guarded(steady), self._context():
                self._state.lend()
            self._lending = True
            try:
                yield
            finally:
                self._lending = False
                if not self._closed:
                    with self._guarded(steady), self._context():
                        self._state.take_back()

    def close(self) -> None:
        """Gives the model back as it is after the last step, on the device where it was. (After a failure that left it
        half changed: as it is.) Optimizer state goes. The device stays open. Idempotent."""
        with self._lock:
            if self._closed:
                return
            if self._iterating:
                self._recover()
            self._quiesce()
            with torch.inference_mode(False), torch.no_grad():
                self._state.give_back()
            self._closed = True
            self._values[:] = [None] * len(self._values)
            self._swapper.shells.clear()
            self._swapper.copies = {}
            self._registry.replace({})
            self._active = self._active._replace(memory=torch.empty(0, dtype=torch.uint8))

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_state") and not sys.is_finalizing():  # PyTorch is gone by then
            with contextlib.suppress(Exception):
                self.close()
