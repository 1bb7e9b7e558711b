"""One of the graphs that an executor runs on its model: a captured iteration, its plan, and what was measured of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from pg_tensile.capture.captured import Captured
from pg_tensile.peak import host_arena
from pg_tensile.plan import Boundary, Plan
from pg_tensile.reuse import transient_events
from pg_tensile.runtime.base import Device
from pg_tensile.runtime.measure import Measurement
from pg_tensile.runtime.meters import Meters
from pg_tensile.runtime.program import Functions, Program, Values, compile_program
from pg_tensile.sequence import AccessSequence
from pg_tensile.trace import Mode, Trace


class Graph:
    """What `Executor.add` returns: names one of the executor's graphs, and tells its plan, its trace and what was
    measured of it. Everything else is the executor's.

    `keys`: of each tensor of the trace, its number among all tensors of the executor. `lock`: the executor's."""

    def __init__(self, captured: Captured, device: Device, keys: Sequence[int], lock: threading.RLock) -> None:
        self.captured = captured
        self.functions = Functions(captured, device, keys)
        self.values: Values = [None] * self.functions.size
        self.keys = keys
        self.numbers = {key: tensor for tensor, key in enumerate(keys)}
        self.meters = Meters(device, captured.trace)
        self.program: Program  # in force; of the steady state
        self.pending: Plan | None = None
        self.followed: Plan | None = None  # the first graph's plan, if this one's was made after it
        self.verified = False
        self.iterations = 0
        self._device = device
        self._lock = lock
        self._passive: tuple[Program, Boundary, Program] | None = None  # the last one, and what it was made for
        trace = captured.trace
        self.changed = frozenset(keys[t] for t in trace.access_tensor[trace.access_mode != Mode.READ].tolist())

    @property
    def plan(self) -> Plan:
        """The plan of the graph's last iteration, or of the first one to come."""
        return self.program.sequence.plan

    @property
    def trace(self) -> Trace:
        """The trace, with sizes corrected by the first execution and with what has been measured."""
        return self.measurement().apply(self.captured.trace)

    @property
    def device_peak_bytes(self) -> int:
        """What an iteration of the plan takes on the device, with the workspaces known."""
        return self.program.device_peak_bytes(self.meters.workspace_bytes)

    def measurement(self) -> Measurement:
        """What has been measured so far. Waits for the device if the last iteration was measured."""
        with self._lock:
            return self.meters.result()

    def compile(self, plan: Plan) -> Program:
        """The program of a plan's steady state. Raises InvalidPlanError."""
        sequence = AccessSequence(self.meters.clocked(self.captured.trace, plan), plan)
        sequence.check()
        arena = host_arena(sequence.trace, transient_events(sequence.trace, plan))
        return compile_program(self.functions, sequence, arena, self._device.runs_ahead)

    def compile_from(self, device: frozenset[int], host: frozenset[int]) -> Program:
        """The program of one iteration of the plan in force from another state, which ends in the plan's own: what
        comes in besides the plan does so passively. Keys of persistent tensors on the device and on the host."""
        steady = self.program
        state = Boundary(*(frozenset(self.numbers[key] for key in keys) for keys in (device, host)))
        if self._passive is None or self._passive[:2] != (steady, state):
            sequence = AccessSequence(steady.sequence.trace, self.plan, state, passive=True)
            program = compile_program(self.functions, sequence, steady.arena, self._device.runs_ahead)
            self._passive = (steady, state, program)
        return self._passive[2]
