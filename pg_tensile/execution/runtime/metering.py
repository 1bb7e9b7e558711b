"""When an executor measures its operators, and what it knows from that (measure.py says how)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from pg_tensile.execution.runtime.device import Device
from pg_tensile.execution.runtime.measure import Measurement, Measurements, Meter
from pg_tensile.planning.latency.roofline import estimate
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.trace.trace import Int32s, Int64s, Trace


class Meters:
    """The meters due, one an iteration: latencies first, then workspaces, because watching the allocator takes time."""

    def __init__(self, device: Device, trace: Trace) -> None:
        self.workspace_bytes: Int64s = trace.workspace_bytes  # the largest known of each operator
        self._device = device
        self._watched = False
        self._measurements = Measurements(trace)
        self._due: deque[Callable[[], Meter]] = deque()
        self._readings: deque[tuple[Meter, Int32s]] = deque()  # not read yet

    def ask(self, again: bool = False) -> None:
        """`again`: in the rhythm. Workspaces that have been measured are not measured once more: they do not change."""
        if again and self._due:
            return
        clock, allocator = self._device.clock, self._device.allocator
        self._due = deque((clock,) if again and self._watched else (clock, allocator))

    def next(self) -> Meter | None:
        """The meter for the iteration that begins, if one is due."""
        return self._due.popleft()() if self._due else None

    def add(self, meter: Meter, steps: Int32s) -> None:
        """After an iteration of these operators, by step, that `meter` has measured."""
        self._readings.append((meter, steps))

    def collect(self, wait: bool) -> None:
        """Reads meters: all of them, or those that have their numbers."""
        while self._readings and (wait or self._readings[0][0].ready()):
            meter, steps = self._readings.popleft()
            reading = meter.read()
            if reading.dtype == np.float64:
                self._measurements.add_latencies(steps, reading)
            else:
                self._watched = True
                self._measurements.add_workspaces(steps, reading)
                self.workspace_bytes = np.maximum(self.workspace_bytes, self._measurements.result().workspace_bytes)

    def result(self) -> Measurement:
        self.collect(wait=True)
        return self._measurements.result()

    def clocked(self, trace: Trace, plan: Plan) -> Trace:
        """`trace` for compiling `plan`: with latencies, as far as they are known, where a device that runs ahead needs
        them to turn delays into places in the program."""
        if not (self._device.runs_ahead and plan.rows["delay_us"].any()):
            return trace
        trace = self._measurements.result().apply(trace)
        return trace if trace.latency_us.any() else trace.with_latencies(estimate(trace, self._device.profile))
