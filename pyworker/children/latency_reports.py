"""Reports of latencies while a job trains: once a second an iteration is measured, and changes are sent as LATENCY.

What was measured while others kept the device busy (load.BUSY) is not reported: another iteration is measured early
instead, and takes its place. After `MOST_EARLY` of them in a row the load is taken for lasting, and what was measured
counts, until the device has been seen quiet again. The load in a report tells whether it was.

While the device is quiet, the duration of whole steps is taken for that of the job alone. Compared with what a step
takes later, it shows what the job loses beside others, which the latencies of operators don't: they are what plans are
made with, and leave out all that happens between operators.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from pg_tensile.execution.training.steps import PlannedSteps
from pg_tensile.planning.latency.averages import LatencyAverages
from pg_tensile.planning.latency.load import BUSY, LoadMeter
from pg_tensile.planning.latency.twins import twins_of
from pg_tensile.planning.trace.trace import Floats
from pyworker.children.channel import Channel
from pyworker.wire import FrameType

MEASURE_INTERVAL_S = 1.0
EARLY_INTERVAL_S = 0.25  # the load of shorter periods is uncertain, as the kernel counts in hundredths
MOST_EARLY = 3
ALONE_WEIGHT = 0.2  # of a second alone in the moving average of the steps' duration


class LatencyReports:
    """Latencies of one job's training step; `load` reads how busy others keep the device."""

    def __init__(self, channel: Channel, load: LoadMeter) -> None:
        self._channel = channel
        self._load = load
        self._steps: PlannedSteps | None = None
        self._averages = LatencyAverages(())
        self._predicted = self._last = np.zeros(0)  # µs, of the training step's operators
        self._early = 0  # iterations measured early in a row
        self._measure_at = 0.0
        self._step_s: list[float] = []  # reported since the last tick that read the load
        self._alone_us: float | None = None  # of a step, everything included
        self.utilisation: float | None = None

    @property
    def average_load(self) -> float:
        """Load that the averages stand for; before anything was measured, that of the prediction."""
        return self._averages.load

    def begin(self, steps: PlannedSteps, predicted_us: Floats, load: float) -> None:
        """Start to measure these steps, for whose operators `predicted_us` was predicted under `load`."""
        self._steps = steps
        self._predicted = predicted_us
        twins = twins_of(steps.traces()["train"])
        self._averages = LatencyAverages(self._predicted, self._channel.spec["latency_weight"], twins, load)

    def end(self) -> None:
        self._steps = None

    def tick(self) -> None:
        """Measure and report once in MEASURE_INTERVAL_S; called between two steps."""
        now = time.monotonic()
        if now < self._measure_at:
            return
        self.utilisation = round(self._load.read(), 3) if self._measure_at else None
        is_busy = self.utilisation is not None and self.utilisation >= BUSY
        self._learn_alone(is_busy or self.utilisation is None)
        again = is_busy and self._early < MOST_EARLY
        if not is_busy:
            self._early = 0
        self._early += again
        self._measure_at = now + (EARLY_INTERVAL_S if again else MEASURE_INTERVAL_S)
        if self._steps is not None:
            if not again:
                self.report()
            self._steps.measure()

    def add_step(self, step_s: float) -> None:
        """Take note of the mean duration of the steps since the last report of progress, in seconds."""
        self._step_s.append(step_s)

    def _learn_alone(self, is_busy: bool) -> None:
        """Let the steps since the last call count as those of the job alone, unless the device was busy then."""
        if self._step_s and not is_busy:
            step_us = 1e6 * median(self._step_s)
            alone_us = step_us if self._alone_us is None else self._alone_us
            self._alone_us = alone_us + ALONE_WEIGHT * (step_us - alone_us)
        self._step_s.clear()

    def report(self) -> None:
        """Add the last iteration that was measured to the averages, unless it is in them, and send them as LATENCY."""
        if self._steps is None:
            return
        measurement = self._steps.measurement()
        if not measurement.samples or np.array_equal(measurement.readings_us[-1], self._last):
            return
        self._last, measured, averages = measurement.readings_us[-1], measurement.latency_us, self._averages
        averages.add(self._last, self.utilisation)
        header = {"samples": averages.measurements, "total_us": averages.total_us, "load": self.utilisation}
        header |= {"average_load": round(averages.load, 3), "alone_us": self._alone_us}
        columns = (self._predicted, np.where(measured > 0, measured, np.nan), averages.latency_us)
        self._channel.send(FrameType.LATENCY, header, [column.astype("<f4").tobytes() for column in columns])
