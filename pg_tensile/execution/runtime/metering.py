"""Schedule of an executor's measurements, and their results (measure.py implements the meters)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import numpy as np

from pg_tensile.execution.runtime.compressed_copies import Look
from pg_tensile.execution.runtime.device import Device
from pg_tensile.execution.runtime.measure import Measurement, Measurements, Meter
from pg_tensile.execution.runtime.swapper import Swapper
from pg_tensile.planning.compression.sparsity import Statistics
from pg_tensile.planning.latency.roofline import estimate
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.trace.trace import Int32s, Int64s, Trace


class Meters:
    """Meters that are due, one per iteration: latencies, then workspaces, as watching the allocator takes time."""

    def __init__(self, device: Device, trace: Trace) -> None:
        self.workspace_bytes: Int64s = trace.workspace_bytes  # int64[operators]: the largest known
        self._device = device
        self._watched = False
        self._measurements = Measurements(trace)
        self._due: deque[Callable[[], Meter]] = deque()
        self._readings: deque[tuple[Meter, Int32s]] = deque()  # of meters not read yet, with the operator of each step

    def ask(self, again: bool = False) -> None:
        """Measure latencies in the next iteration, and workspaces in the one after it.

        With `again`, the regular repetition, nothing is added to a pending measurement, and workspaces already measured
        are skipped, because they do not change."""
        if again and self._due:
            return
        clock, allocator = self._device.clock, self._device.allocator
        self._due = deque((clock,) if again and self._watched else (clock, allocator))

    def next(self) -> Meter | None:
        """Return the meter for the iteration that begins, or None if none is due."""
        return self._due.popleft()() if self._due else None

    def add(self, meter: Meter, steps: Int32s) -> None:
        """Add an iteration that `meter` has measured; `steps` is the operator of each step, by captured index."""
        self._readings.append((meter, steps))

    def collect(self, wait: bool) -> None:
        """Read the meters of past iterations: all of them with `wait`, else those that are ready."""
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
        """Return `trace` for compiling `plan`, with measured or estimated latencies if the device needs them.

        A device that runs ahead needs them to turn delays into positions in the program."""
        if not (self._device.runs_ahead and plan.rows["delay_us"].any()):
            return trace
        trace = self._measurements.result().apply(trace)
        return trace if trace.latency_us.any() else trace.with_latencies(estimate(trace, self._device.profile))


class SparsitySamples:
    """Samples of the tensors that iterations of one graph swap out (CSWAP, section IV-A).

    `pending` is set by a request until the iteration that takes the samples has ended."""

    def __init__(self, swapper: Swapper) -> None:
        self.pending = False
        self._swapper = swapper
        self._looks: dict[int, Look] = {}  # by key, from the last iteration that took samples

    def begin(self, allowed: bool) -> None:
        """Begin an iteration, which takes the samples if they are pending and `allowed`."""
        self._swapper.looks = {} if allowed and self.pending else None

    def end(self) -> None:
        """End an iteration that has not failed."""
        if self._swapper.looks is not None:
            self._looks, self.pending, self._swapper.looks = self._swapper.looks, False, None

    def statistics(self, numbers: Mapping[int, int]) -> dict[int, Statistics]:
        """Return the statistics of the latest samples by the tensor's number; `numbers` maps keys to numbers.

        The device must have completed the iteration."""
        statistics = {numbers[key]: look.statistics() for key, look in self._looks.items() if key in numbers}
        return {tensor: sampled for tensor, sampled in statistics.items() if sampled is not None}
