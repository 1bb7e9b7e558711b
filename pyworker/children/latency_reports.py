"""Reports of latencies while a job trains: once a second an iteration is measured, and changes are sent as LATENCY."""

from __future__ import annotations

import time

import numpy as np

from pg_tensile.execution.training.steps import PlannedSteps
from pg_tensile.planning.latency.averages import LatencyAverages
from pg_tensile.planning.latency.load import LoadMeter
from pg_tensile.planning.trace.trace import Floats
from pyworker.children.channel import Channel
from pyworker.wire import FrameType

MEASURE_INTERVAL_S = 1.0


class LatencyReports:
    """Latencies of one job's training step; `load` reads how busy others keep the device."""

    def __init__(self, channel: Channel, load: LoadMeter) -> None:
        self._channel = channel
        self._load = load
        self._steps: PlannedSteps | None = None
        self._averages = LatencyAverages(())
        self._predicted = self._measured = np.zeros(0)  # µs, of the training step's operators
        self._measure_at = 0.0
        self.utilisation: float | None = None

    def begin(self, steps: PlannedSteps, predicted_us: Floats) -> None:
        """Start to measure these steps, for whose operators `predicted_us` was predicted."""
        self._steps = steps
        self._predicted = predicted_us
        self._averages = LatencyAverages(self._predicted, self._channel.spec["latency_weight"])

    def end(self) -> None:
        self._steps = None

    def tick(self) -> None:
        """Measure and report once in MEASURE_INTERVAL_S; called between two steps."""
        now = time.monotonic()
        if now < self._measure_at:
            return
        self.utilisation = round(self._load.read(), 3) if self._measure_at else None
        self._measure_at = now + MEASURE_INTERVAL_S
        if self._steps is not None:
            self.report()
            self._steps.measure()

    def report(self) -> None:
        """Add what was measured since the last report to the averages, and send them as LATENCY."""
        if self._steps is None:
            return
        measured = self._steps.measurement().latency_us
        if not measured.any() or np.array_equal(measured, self._measured):
            return
        self._measured = measured
        averages = self._averages
        averages.add(measured)
        header = {"samples": averages.measurements, "total_us": averages.total_us, "load": self.utilisation}
        columns = (self._predicted, np.where(measured > 0, measured, np.nan), averages.latency_us)
        self._channel.send(FrameType.LATENCY, header, [column.astype("<f4").tobytes() for column in columns])
