"""One of the graphs that an executor runs on its model: a captured iteration, its plan, and its measurements."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from pg_tensile.execution.capture.captured import Captured
from pg_tensile.execution.runtime.compile import compile_program
from pg_tensile.execution.runtime.device import Device
from pg_tensile.execution.runtime.functions import Functions, Values
from pg_tensile.execution.runtime.measure import Measurement
from pg_tensile.execution.runtime.metering import Meters
from pg_tensile.execution.runtime.program import Program
from pg_tensile.planning.memory_flow.groups import Group
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.memory import transient_arena
from pg_tensile.planning.plan.plan import Boundary, Plan
from pg_tensile.planning.trace.trace import Mode, Trace


class Compiled(NamedTuple):
    """A compiled plan."""

    captured: Captured  # the iteration that the plan is for
    program: Program  # of the steady state
    transitions: dict[frozenset[int], Program]  # by resident tensors, see `compile_from`
    follows: bool  # the plan was derived from the first graph's plan

    @property
    def plan(self) -> Plan:
        return self.program.sequence.plan


class Graph:
    """Handle of one of the executor's graphs, returned by `Executor.add`: its plan, its trace and its measurements.

    All other attributes are for the executor. `keys` is, for each tensor of the trace, its number among all tensors of
    the executor; `lock` is the executor's."""

    def __init__(self, captured: Captured, device: Device, keys: Sequence[int], lock: threading.RLock) -> None:
        self.captured = captured
        self.functions = Functions(captured, device, keys)
        self.values: Values = [None] * self.functions.size
        self.keys = keys
        self.numbers = {key: tensor for tensor, key in enumerate(keys)}
        self.meters = Meters(device, captured.trace)
        self.compiled: Compiled  # the plan in force
        self.verified = False
        self.iterations = 0
        self._device = device
        self._lock = lock
        trace = captured.trace
        self.changed = frozenset(keys[t] for t in trace.access_tensor[trace.access_mode != Mode.READ].tolist())

    @property
    def program(self) -> Program:
        """The program of the steady state of the plan in force."""
        return self.compiled.program

    @property
    def plan(self) -> Plan:
        """The plan in force: that of the graph's last iteration, or of its first if none was executed yet."""
        return self.compiled.plan

    def forget_values(self) -> None:
        """Drop the tensors of an iteration that has not ended; the persistent ones stay."""
        persistent = self.captured.trace.persistent
        for slot, value in enumerate(self.captured.values):
            if not persistent[value.tensor]:
                self.values[slot] = None
        self.values[self.functions.feed :] = [None] * (self.functions.size - self.functions.feed)

    @property
    def trace(self) -> Trace:
        """The trace, with sizes corrected by the first execution and with the measurements so far."""
        return self.measurement().apply(self.captured.trace)

    @property
    def device_peak_bytes(self) -> int:
        """Peak device memory of an iteration of the plan, with the known workspaces."""
        return self.program.device_peak_bytes(self.meters.workspace_bytes)

    def measurement(self) -> Measurement:
        """Return the measurements so far. Waits for the device if the last iteration was measured."""
        with self._lock:
            return self.meters.result()

    def compile(self, plan: Plan, follows: bool = False, groups: Sequence[Group] = ()) -> Compiled:
        """Compile a plan, with groups if its memory flows. May be called from any thread. Raises InvalidPlanError."""
        captured = self.captured
        sequence = AccessSequence(self.meters.clocked(captured.trace, plan), plan)
        sequence.check()
        program = compile_program(self.functions, sequence, transient_arena(sequence), self._device.runs_ahead, groups)
        return Compiled(captured, program, {}, follows)

    def compile_again(self, compiled: Compiled) -> Compiled:
        """Compile a plan for the trace as it is now. Raises InvalidPlanError."""
        return self.compile(compiled.plan, compiled.follows, compiled.program.groups)

    def prepare(self, compiled: Compiled, resident: frozenset[int]) -> None:
        """Compile the first iteration of a compiled plan, if needed, after one that leaves `resident` (keys) on the
        device. May be called from any thread."""
        first = resident & compiled.program.device
        if first != compiled.program.device and first not in compiled.transitions:
            compiled.transitions[first] = self._compile_from(compiled.program, first)

    def compile_from(self, resident: frozenset[int]) -> Program:
        """Return the program of one iteration of the plan in force that starts from another state than the plan's own.

        Of the tensors that the plan expects on the device at the start, only `resident` (keys) are. The iteration ends
        in the plan's boundary state; missing tensors are swapped in passively. At no step does it take more memory than
        the plan."""
        transitions = self.compiled.transitions
        if resident not in transitions:
            transitions.clear()
            transitions[resident] = self._compile_from(self.program, resident)
        return transitions[resident]

    def _compile_from(self, steady: Program, resident: frozenset[int]) -> Program:
        absent = (steady.device | steady.away) - resident
        state = Boundary(*(frozenset(map(self.numbers.__getitem__, k)) for k in (resident, steady.host | absent)))
        sequence = AccessSequence(steady.sequence.captured_trace, steady.sequence.plan, state, passive=True)
        return compile_program(self.functions, sequence, steady.arena, self._device.runs_ahead)
